"""The one dispatcher: which search runs for some inputs, and how.

On CUDA with Triton the kernels (`flexmask.kernels.search`), elsewhere the plain steps (`flexmask.plain.search`), which alone know
``selection="reference"``. Both are compiled on accelerators and run as they are on CPUs, where compiling takes a minute and gains
little. Inside somebody else's ``torch.compile`` the plain search is traced and the kernels are one operator.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from flexmask._torch import HAS_TRITON, in_dispatch_mode, keep_static, widest_float, with_dynamic, without_autocast, without_tf32
from flexmask.base.inputs import AttentionInputs
from flexmask.base.search_result import BlockLists, SearchResult
from flexmask.base.visibility import num_blocks
from flexmask.compilation import compiled
from flexmask.config import COMPILE_TIME, FlexPrefillConfig, compile_time
from flexmask.plain.search import search as plain_search

if HAS_TRITON:
    from flexmask.kernels.search import search as kernel_search


def search(inputs: AttentionInputs, config: FlexPrefillConfig, with_stats: bool = False, with_keep: bool = False) -> SearchResult:
    """Choose the blocks of every head, outside of autograd and of autocast.

    Parameters
    ----------
    inputs
        A placed problem (`AttentionInputs.placed`); value and sinks are not looked at.
    config
        The options.
    with_stats
        Whether statistics are wanted. They need the map of kept blocks, which is then returned too.
    with_keep
        Whether the map of kept blocks is wanted as well as the lists.
    """
    with torch.no_grad(), without_autocast(inputs.query.device):
        problem = inputs.with_gamma(config.gamma)
        gamma, tau = _shares(problem, config)
        # What the search has no use for must not tell one compilation from another. Which rows decide does not matter where all
        # blocks are kept anyway, and the published code knows no padding
        all_decide = (config.gamma == 1 and config.max_budget is None) or config.selection == "reference"
        deciding = None if all_decide else inputs.deciding
        inputs = inputs.detached().with_fields(value=None, sinks=None, deciding=deciding, gamma=None)
        return _run(inputs, compile_time(config), gamma, tau, with_stats, with_keep or with_stats)


def runs_kernels(inputs: AttentionInputs, config: FlexPrefillConfig) -> bool:
    """True if the Triton kernels serve these inputs."""
    return HAS_TRITON and inputs.query.is_cuda and config.selection != "reference"


def _run(
    inputs: AttentionInputs, config: FlexPrefillConfig, gamma: Tensor, tau: Tensor, with_stats: bool, with_keep: bool
) -> SearchResult:
    query, key = inputs.query, inputs.key
    by_kernels = runs_kernels(inputs, config)
    if by_kernels and torch.compiler.is_compiling():
        return _as_one_operator(inputs, config, gamma, tau, with_stats, with_keep)
    if query.device.type == "cpu" or torch.compiler.is_compiling():
        return plain_search(inputs, config, gamma, tau, with_stats, with_keep)
    batch, num_heads, q_len, head_dim = query.shape
    where = (query.device.type, query.device.index, query.dtype)
    shape = (batch == 1, num_heads, key.shape[1], q_len == key.shape[2], head_dim)
    scores = (inputs.scale, inputs.softcap, inputs.window)
    given = (*scores, *(x is None for x in (inputs.offset, inputs.attention_mask, inputs.deciding)), with_stats, with_keep)
    run = compiled(kernel_search if by_kernels else plain_search, config, *where, *shape, *given, launched=by_kernels)
    mask = None if inputs.attention_mask is None else with_dynamic(inputs.attention_mask, 1)
    dynamic = inputs.with_fields(query=with_dynamic(query, 2), key=with_dynamic(key, 2), attention_mask=mask)
    # Triton launches on the current device where nothing compiles around it; our kernels have no products that TF32 changes
    surroundings: Any = torch.cuda.device(query.device) if by_kernels else without_tf32()
    keep_static(gamma)
    with surroundings:
        result: SearchResult = run(dynamic, config, gamma, tau, with_stats, with_keep)
        return result


def _shares(inputs: AttentionInputs, config: FlexPrefillConfig) -> tuple[Tensor, Tensor]:
    """Gamma by head, (num_heads,), and tau, 0-d, both of `widest_float`; on CUDA those of earlier calls, to save the launches."""
    device, gamma = inputs.query.device, inputs.gamma
    known = config.gamma if gamma is None else gamma
    numbers: Any = 1.0 if isinstance(known, Tensor) else known  # a tensor's shares are there already
    values = (numbers, inputs.query.shape[1], config.tau, device)
    kept = device.type == "cuda" and not torch.compiler.is_compiling()
    # what a mode made must not outlive it
    if not kept or in_dispatch_mode() or torch.cuda.is_current_stream_capturing():
        by_head, tau = _on_device(*values)
    else:
        stream, inference = torch.cuda.current_stream(device).cuda_stream, torch.is_inference_mode_enabled()
        by_head, tau = _kept_shares(*values, stream, inference)
    return known if isinstance(known, Tensor) else by_head, tau


@functools.lru_cache(maxsize=256)
def _kept_shares(
    gamma: float | tuple[float, ...], num_heads: int, tau: float, device: torch.device, stream: int, inference: bool
) -> tuple[Tensor, Tensor]:
    # of one stream, so that none reads it before it is written, and of one mode, which compiled code tells apart
    return _on_device(gamma, num_heads, tau, device)


def _on_device(gamma: float | tuple[float, ...], num_heads: int, tau: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers, written on the device: a copy of a list from the host would wait for it."""
    dtype = widest_float(device)
    if isinstance(gamma, tuple):
        by_head = torch.stack([torch.full((), share, dtype=dtype, device=device) for share in gamma])
    else:
        by_head = torch.full((num_heads,), gamma, dtype=dtype, device=device)
    return by_head, torch.full((), tau, dtype=dtype, device=device)


def _as_one_operator(
    inputs: AttentionInputs, config: FlexPrefillConfig, gamma: Tensor, tau: Tensor, with_stats: bool, with_keep: bool
) -> SearchResult:
    """`_run` as an operator that a surrounding compilation does not look into.

    Traced into, our kernels and flex_attention's in one graph gave wrong results (torch 2.11, which as far as we can tell does
    not order what flex_attention's template reads after the kernels that write it).
    """
    tensors = (inputs.query, inputs.key, gamma, tau, inputs.offset, inputs.attention_mask, inputs.deciding)
    scores = (inputs.scale, inputs.softcap, inputs.window)
    found = search_operator(*tensors, *scores, with_stats, with_keep, *[getattr(config, name) for name in COMPILE_TIME])
    return SearchResult(BlockLists(*found[:4]), found[4] if with_keep else None, tuple(found[5:]) if with_stats else None)


# the operator takes the options one by one, as the types that they have in FlexPrefillConfig; gamma is a tensor
_TYPES = {"int": "int", "int | None": "int?", "float": "float", "str": "str"}
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor gamma, Tensor tau_, Tensor? offset, Tensor? attention_mask, "
    "Tensor? deciding, float scale, "
    "float? softcap, int? window, bool with_stats, bool with_keep, "
    + ", ".join(f"{_TYPES[str(field.type)]} {field.name}" for field in fields(FlexPrefillConfig) if field.name in COMPILE_TIME)
    + ") -> Tensor[]"
)


@torch.library.custom_op("flexmask::search", mutates_args=(), schema=_SCHEMA)
def search_operator(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    tau: Tensor,
    offset: Tensor | None,
    attention_mask: Tensor | None,
    deciding: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    with_stats: bool,
    with_keep: bool,
    *options: Any,
) -> list[Tensor]:
    """`_run` with everything by itself, as the schema has it: an operator takes tensors and numbers only."""
    inputs = AttentionInputs(query, key, None, scale, softcap, window, attention_mask, offset, deciding=deciding)
    config = FlexPrefillConfig(**dict(zip(COMPILE_TIME, options, strict=True)))
    result = _run(inputs, config, gamma, tau, with_stats, with_keep)
    keep = query.new_empty(0, dtype=torch.bool) if result.keep is None else result.keep
    return [*result.lists, keep, *(result.stats or ())]


@search_operator.register_fake
def _(query: Tensor, key: Tensor, *rest: Any) -> list[Tensor]:
    with_stats, with_keep = rest[8:10]
    block_size = rest[10:][COMPILE_TIME.index("block_size")]
    heads = query.shape[:2]
    rows = (*heads, num_blocks(query.shape[2], block_size))
    blocks = (*rows, num_blocks(key.shape[2], block_size))
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [(rows, torch.int32), (blocks, torch.int32)] * 2
    shapes.append((blocks if with_keep else (0,), torch.bool))
    if with_stats:
        dtypes = (torch.bool, torch.float32, torch.float32, torch.int64, torch.int64, torch.float32, torch.float32)
        shapes += [(tuple(heads), dtype) for dtype in dtypes]
    return [query.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
