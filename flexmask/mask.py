"""flexprefill_mask: from query and key to a BlockMask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.config import UNSET, FlexPrefillConfig, config_from, takes_options
from flexmask.flex.block_mask import block_mask
from flexmask.flex.head_groups import head_bytes
from flexmask.plain.published import check_published
from flexmask.search import search
from flexmask.stats import FlexPrefillStats, stats_of

MOST_BYTES = 16 * 2**30


@takes_options
def flexprefill_mask(
    query: Tensor,
    key: Tensor,
    gamma: float | Sequence[float] | Tensor = UNSET,
    tau: float = UNSET,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    config: FlexPrefillConfig | None = None,
    return_stats: bool = False,
    **options: Any,
) -> BlockMask | tuple[BlockMask, FlexPrefillStats]:
    """FlexPrefill's block mask: which blocks of keys each block of queries attends to, by head and by input.

    The last block of queries decides, per head, whether block means predict its attention (Jensen-Shannon distance under
    `tau`); if so the head keeps the fewest blocks of its pooled map, else the fewest key blocks (verticals) and the fewest block
    diagonals (slashes), whose estimated attention reaches `gamma`. Every query block also keeps its first visible key block, its
    diagonal and the `min_budget` heaviest lines.

    Source: FlexPrefill (https://arxiv.org/abs/2502.20766), section 3, algorithms "Sparse Attention", "Sparse Pattern Search",
    "Vertical Slash Index Search" and "Query Aware Index Search".

    That is ``selection="coverage"``. ``"hybrid"``, which is not in the paper, also asks rows of every query block, and keeps by
    thresholds (`FlexPrefillConfig`, docs/algorithm.md).

    Differs from the paper: selection is by block (a slash counts for the two block diagonals it crosses), short and padded
    blocks weigh by the number of their keys, prompts may be padded, chunked, windowed or soft-capped.

    Parameters
    ----------
    query
        (batch, num_heads, q_len, head_dim), float32, float16 or bfloat16, head_dim 16 to 256, any device.
    key
        (batch, num_kv_heads, kv_len, head_dim), the same dtype and device; num_kv_heads divides num_heads (GQA, MQA) and
        q_len <= kv_len. Lengths need not be multiples of the block.
    gamma, tau, block_size, min_budget, max_budget, selection, query_aware, pattern_queries, index_queries, row_stride
        As in `FlexPrefillConfig`, which holds their units, ranges and defaults. `gamma` may also be a (num_heads,) floating
        tensor on query's device: its values are never read but clamped to (0, 1] there, NaN to 1.
    scale
        Factor of the scores, > 0. Default None: 1 / sqrt(head_dim).
    softcap
        Soft cap of the scaled scores, > 0: ``softcap * tanh(score / softcap)``. Default None: none.
    window
        Tokens, >= 1: a row sees itself and the ``window - 1`` positions before it. Default None: all before it.
    attention_mask
        (batch, kv_len), bool or integer, nonzero = token; left, right or any padding. Padding takes no part in the estimate,
        and padded rows attend to nothing. Default None: all tokens.
    q_offset
        Position of query row 0, in [0, kv_len - q_len]: an int (checked) or an integer tensor, 0-d or (batch,), on the same
        device (clamped there). Keys at ``q_offset + q_len`` and after count as absent. Default None: kv_len - q_len, so that the
        last row stands at the last key.
    config
        A FlexPrefillConfig instead of its keywords.
    return_stats
        Also return `FlexPrefillStats`; takes time of its own, with ``selection="hybrid"`` a second pass over the evidence.

    Returns
    -------
    BlockMask
        Of shape (batch, num_heads, q_len, kv_len) with blocks of `block_size` both ways. Its mask_mod holds the block choice too,
        so that ``to_dense()``, ``sparsity()`` and flex_attention without compilation agree with the compiled kernel. It has no
        lists by key block, which only the backward pass needs: use `flexprefill_attention` for gradients. Memory: two int32 lists
        and a bool map of batch * num_heads * num_q_blocks * num_kv_blocks entries, 9 bytes an entry (0.3 GB for 32 heads at 128k
        tokens in blocks of 128). While it is made, up to 14 bytes an entry by the kernels on CUDA; elsewhere up to 80, and 12
        for each representative row and key (18 with a soft cap), since their attention is written out. torch 2.5's BlockMask
        knows whole blocks only: its shape and sparsity round the lengths up to them. ``torch.save``, pickle and ``copy.deepcopy``
        take the mask with its mask_mod (``torch.load`` needs ``weights_only=False``), and ``to`` moves both; not so
        for a mask made inside ``torch.compile``.
    FlexPrefillStats
        Only with `return_stats`.

    Raises
    ------
    TypeError, ValueError
        For wrong types, shapes, dtypes, devices or ranges, before anything is computed. The values of tensors are not read:
        there is no host synchronisation, and NaN or infinity spoil their own head only.
        Also for a mask that would take more than 16 GiB while it is made (32 heads at a million tokens on CUDA, at 200 thousand
        on a CPU): `flexprefill_attention` goes through the heads in groups. DTensors, tensors inside ``torch.vmap`` and those of
        the meta device are refused.

    Notes
    -----
    On accelerators it compiles itself on first use, once per head count, head_dim, dtype and set of options, on CUDA for each of
    three ranges of map size; on CPUs it runs as it is, since there a compilation takes a minute and gains little. Inside
    ``torch.compile(fullgraph=True)`` it is traced with the rest; on CUDA it is one operator there. Gradients do not flow through
    a mask. It is made in float32, whatever autocast, TF32 or the default dtype say.

    CPU, compiled code and kernels sum in different orders, so that a decision which hangs on the last bit may fall either way. It
    does where blocks tie: in a query-aware head that attends evenly, with gamma times the number of query blocks an integer, the
    masks of two of them can differ by one block, and each holds gamma up to rounding.

    The mask hides padding and keys behind the last row, whatever key holds there. flex_attention multiplies values by a weight of
    0 within partial blocks, so that NaN in hidden values comes through: `flexprefill_attention` replaces them.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.randn(1, 4, 512, 64), torch.randn(1, 2, 512, 64)
    >>> mask = flexprefill_mask(query, key, gamma=0.9, block_size=64, min_budget=128)
    >>> mask.shape
    (1, 4, 512, 512)
    """
    config = config_from(config, gamma, tau, options)
    inputs = attention_inputs(
        query,
        key,
        scale=scale,
        softcap=softcap,
        window=window,
        attention_mask=attention_mask,
        q_offset=q_offset,
        gamma=gamma if isinstance(gamma, Tensor) else config.gamma,
    )
    check_published(config, inputs)
    needed = query.shape[0] * query.shape[1] * head_bytes(inputs, config)
    if needed > MOST_BYTES:
        raise ValueError(
            f"query and key need a mask of at most {MOST_BYTES / 2**30:.1f} GiB while it is made; got {needed / 2**30:.1f} GiB. "
            "Make it for fewer heads at a time, or call flexprefill_attention, which does"
        )
    inputs = inputs.placed()
    result = search(inputs, config, return_stats, with_keep=True)
    # inside a surrounding compilation gamma may be symbolic, which no string can be made of
    name = "flexprefill" if torch.compiler.is_compiling() else _name(inputs, config)
    mask = block_mask(inputs, result.lists, result.keep, config.block_size, name)
    if not return_stats:
        return mask
    assert result.stats is not None
    return mask, stats_of(result.stats)


def _name(inputs: AttentionInputs, config: FlexPrefillConfig) -> str:
    gamma = config.gamma if inputs.gamma is None else "by head"
    rule = f"tau={config.tau}" if config.selection == "coverage" else f"selection={config.selection}"
    return f"flexprefill(gamma={gamma}, {rule}, block_size={config.block_size})"
