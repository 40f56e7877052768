"""sparse_attention: the methods of the gallery behind one call and one kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.attention import MAX_MASK_BYTES, check_dense_below, check_max_mask_bytes, flexprefill_attention
from flexmask.base.checks import check_shape, check_word
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.base.visibility import num_blocks
from flexmask.block_masks import MASKS
from flexmask.config import FlexPrefillConfig
from flexmask.flex.backend import BACKENDS, chosen_backend
from flexmask.flex.dense import dense_attention, runs_dense
from flexmask.flex.sparse import HeadPlan, attention_by_groups
from flexmask.gallery_method import PAIR_BYTES, Method


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: str | Callable[..., BlockMask] = "flexprefill",
    *,
    block_size: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    dense_below: int | None = None,
    return_lse: bool = False,
    max_mask_bytes: int = MAX_MASK_BYTES,
    **options: Any,
) -> Tensor | tuple[Any, ...]:
    """Causal attention over the blocks that a method of the gallery keeps.

    All methods run on the same compiled kernel with the same checks, so that a comparison of two shows their selections.

    Source: the method's own, in its docstring in `flexmask.block_masks`.

    Parameters
    ----------
    query, key, value
        As in `flexprefill_attention`.
    method
        A name in `flexmask.block_masks.MASKS`, or a function of query and key with the keywords of that registry that gives a
        BlockMask in blocks of `block_size`. Default ``"flexprefill"``, which is `flexprefill_attention`.
    block_size
        Tokens in a block, of queries and of keys alike: a multiple of 16 from 16 to 256, default 128 (FlexAttention's own).
    scale, softcap, window, attention_mask, q_offset, sinks, backend, dense_below, return_lse, max_mask_bytes
        As in `flexprefill_attention`. A plan by head, of the methods that take one, is applied to whole batch rows, which then
        are the smallest group of heads.
    options
        The method's own.

    Returns
    -------
    Tensor
        (batch, num_heads, q_len, v_head_dim), as `flexprefill_attention`; with the log-sum-exp after it if `return_lse` is set.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As `flexprefill_attention`; and for a method that is not there, an option that it does not have, and a function that
        gives other blocks.

    Examples
    --------
    >>> import torch
    >>> query, key, value = (torch.randn(1, 4, 512, 32) for _ in range(3))
    >>> out = sparse_attention(query, key, value, "streaming_llm", block_size=64, window_blocks=2, dense_below=0)
    >>> out.shape
    torch.Size([1, 4, 512, 32])
    """
    if not callable(method):
        check_word("method", method, tuple(MASKS))
    shared = {"scale": scale, "softcap": softcap, "window": window, "attention_mask": attention_mask, "q_offset": q_offset}
    run = {"backend": backend, "dense_below": dense_below, "return_lse": return_lse, "max_mask_bytes": max_mask_bytes}
    if method == "flexprefill":
        own = options if "config" in options else {"block_size": block_size, **options}
        return flexprefill_attention(query, key, value, sinks=sinks, **shared, **run, **own)  # type: ignore[arg-type]  # keywords of several types
    check_shape("value", value, "(batch, num_kv_heads, kv_len, v_head_dim)")
    inputs = attention_inputs(query, key, value, sinks=sinks, **shared)  # type: ignore[arg-type]  # keywords of several types
    generate = MASKS[method] if isinstance(method, str) else method
    FlexPrefillConfig(block_size=block_size)  # for its range
    check_options(generate, block_size, options, query.shape[1])
    check_word("backend", backend, BACKENDS)
    dense_below = check_dense_below(dense_below)
    check_max_mask_bytes(max_mask_bytes)

    if runs_dense(query.shape[2], key.shape[2], dense_below):
        if backend != "auto":  # one that cannot run is refused at every length
            chosen_backend(backend, inputs, block_size, return_lse)
        out, lse = dense_attention(inputs, return_lse)
    else:
        at_once = heads_at_once(generate, inputs, block_size, max_mask_bytes, options)
        out, lse, _ = attention_by_groups(
            inputs, lambda part: HeadPlan(mask_of(generate, part, block_size, options)), block_size, at_once, backend, return_lse
        )
    return out if lse is None else (out, lse)


def check_options(
    generate: Callable[..., BlockMask], block_size: int, options: Mapping[str, Any], num_heads: int | None = None
) -> None:
    """Raise for options that a method of the gallery does not take; plans only where the number of heads is given."""
    found, options = _method_of(generate, options)
    if found is None:
        return
    if num_heads is None:
        found.check_options(block_size, options)
    else:
        found.checked(num_heads, block_size, options)


def mask_of(
    generate: Callable[..., BlockMask],
    part: AttentionInputs,
    block_size: int,
    options: Mapping[str, Any],
    with_keep: bool = False,
) -> BlockMask:
    """The mask of a placed problem, with its options checked before.

    Without `with_keep` the mask_mod of the gallery's own methods holds visibility alone, since the lists do the selection; with
    it the mask has every head.
    """
    found, own = _method_of(generate, options)
    if found is not None:
        # without a title the kernel is compiled once for all methods
        checked = found.checked(part.query.shape[1], block_size, own)
        return found.mask(part, block_size, checked, found.name if with_keep else None, with_keep, by_head=with_keep)
    given = {"scale": part.scale, "softcap": part.softcap}
    taken = inspect.signature(generate).parameters
    scores = {name: value for name, value in given.items() if name in taken}
    where = {"window": part.window, "attention_mask": part.attention_mask, "q_offset": part.offset}
    made = generate(part.query, part.key, block_size=block_size, **scores, **where, **options)
    if made.BLOCK_SIZE != (block_size, block_size):
        raise ValueError(f"method must give a mask in blocks of {block_size} tokens, as it is told to; got {made.BLOCK_SIZE}")
    return made


def heads_at_once(
    generate: Callable[..., BlockMask], inputs: AttentionInputs, block_size: int, most_bytes: int, options: Mapping[str, Any]
) -> int:
    """Heads whose masks may be made at a time; never less than a batch row's where a plan tells its heads apart."""
    pairs = num_blocks(inputs.query.shape[2], block_size) * num_blocks(inputs.key.shape[2], block_size)
    at_once = most_bytes // (pairs * PAIR_BYTES)
    found, _ = _method_of(generate, options)
    return max(at_once, inputs.query.shape[1]) if found is not None and found.of_all_heads else at_once


def _method_of(generate: Callable[..., BlockMask], options: Mapping[str, Any]) -> tuple[Method | None, Mapping[str, Any]]:
    """The method behind a generator of the gallery, None for any other function; and its options, those of a partial too."""
    inner: Any = generate
    while isinstance(inner, functools.partial) and not inner.args:
        inner, options = inner.func, {**inner.keywords, **options}
    found = getattr(inner, "method", None)
    return (found, options) if isinstance(found, Method) else (None, options)
