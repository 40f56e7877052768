"""Exported masks in other kernels: ``python -m bench.speed.export_kernels``, on a Hopper GPU.

``checks`` compares FlashInfer's variable block-sparse prefill and flash-attn-4, called directly, with dense attention under the
expanded mask in float64, and plants faults. ``times`` runs them in turns with FlexAttention and dense attention on the same
masks. A kernel that fails leaves its error and the others' rows.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask

from bench import ON_GPU
from bench.prompts.structured import Tensors
from bench.rows import Sheet
from bench.speed import calls, clock
from flexmask.base.inputs import attention_inputs
from flexmask.export import FlashBlocks, FlashInferBlocks, from_block_map, to_block_map, to_flash_attn, to_flashinfer
from flexmask.flex.block_mask import block_mask, parts_of
from flexmask.flex.run import run_flex_attention

COLUMNS = ("device", "torch", "flashinfer", "flash_attn_4", "part", "head_dim", "q_len", "kv_len", "density", "what", "value")
KERNELS = ("flashinfer-fa3", "flashinfer-fa2", "flash-attn-4", "flex-flash", "flex-triton", "dense-cudnn", "dense-fa2")
_BLOCK = 128
_LARGEST_ERROR = 0.03  # of bfloat16 outputs near 1; faults are off by tenths
_CHECKED = {"whole": (1000, 1000), "chunk": (384, 1000)}
_DEVICE = "cuda" if ON_GPU else "cpu"


def problem(q_len: int, kv_len: int, heads: tuple[int, int], head_dim: int) -> Tensors:
    random = torch.Generator(_DEVICE).manual_seed(0)
    sizes = ((heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len))
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    query, key, value = (
        torch.randn(1, number, length, head_dim, device=_DEVICE, dtype=dtype, generator=random) for number, length in sizes
    )
    return 3 * query, key, value


def random_mask(q_len: int, kv_len: int, heads: tuple[int, int], density: float) -> BlockMask:
    """A mask with one pattern per KV head, as FlashInfer demands, for all query heads."""
    random = torch.Generator(_DEVICE).manual_seed(1)
    rows, columns = -(-q_len // _BLOCK), -(-kv_len // _BLOCK)
    first = kv_len - q_len + torch.arange(rows, device=_DEVICE) * _BLOCK
    last = (first + _BLOCK).clamp(max=kv_len) - 1
    column = torch.arange(columns, device=_DEVICE)
    own = (column >= (first // _BLOCK)[:, None]) & (column <= (last // _BLOCK)[:, None])
    kept = torch.rand(1, heads[1], rows, columns, device=_DEVICE, generator=random) < density
    kept = (kept & (column <= (last // _BLOCK)[:, None])) | own
    return from_block_map(kept.repeat_interleave(heads[0] // heads[1], 1), q_len, kv_len, block_size=_BLOCK)


def density_of(mask: BlockMask) -> float:
    kept = to_block_map(mask)
    seen = kept.shape[-1] - kept.shape[-2] + torch.arange(1, kept.shape[-2] + 1)
    return float(kept.sum()) / (kept.shape[1] * float(seen.sum()))


def dense_float64(tensors: Tensors, mask: BlockMask) -> Tensor:
    """Attention under the expanded mask, head by head."""
    query, key, value = (x.double() for x in tensors)
    heads, q_len, kv_len = query.shape[1], query.shape[2], key.shape[2]
    kept = to_block_map(mask).repeat_interleave(_BLOCK, -2).repeat_interleave(_BLOCK, -1)[..., :q_len, :kv_len]
    position = kv_len - q_len + torch.arange(q_len, device=_DEVICE)
    kept = kept & (torch.arange(kv_len, device=_DEVICE) <= position[:, None])
    key, value = (x.repeat_interleave(heads // key.shape[1], 1) for x in (key, value))
    weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~kept, float("-inf")).softmax(-1)
    return weights @ value


def by_flashinfer(tensors: Tensors, blocks: FlashInferBlocks, backend: str) -> clock.Call:
    """FlashInfer's kernel, planned."""
    import flashinfer

    query, key, value = (x[0].contiguous() for x in tensors)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(_workspace(256), backend=backend)
    # its own 8 MB do not hold the plan of a long prompt
    wrapper.reset_workspace_buffer(_workspace(256), _workspace(128))
    wrapper.plan(
        *blocks[:3], query.shape[0], key.shape[0], query.shape[-1], causal=blocks.causal, q_data_type=query.dtype,
        kv_data_type=key.dtype, non_blocking=False,
    )  # fmt: skip
    return lambda: wrapper.run(query, key, value)[None]


def _workspace(megabytes: int) -> Tensor:
    return torch.empty(megabytes << 20, dtype=torch.uint8, device=_DEVICE)


def by_flash_attn(tensors: Tensors, blocks: FlashBlocks) -> clock.Call:
    """flash-attn-4's kernel, without FlexAttention."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    from bench.speed.cute_causal import causal

    query, key, value = (x.transpose(1, 2).contiguous() for x in tensors)
    lists = BlockSparseTensorsTorch(**blocks._asdict())
    run = functools.partial(
        _flash_attn_fwd, query, key, value, mask_mod=causal, block_sparse_tensors=lists, tile_mn=blocks.block_size, pack_gqa=False
    )
    return lambda: run()[0].transpose(1, 2)


def flash_blocks(mask: BlockMask, head_dim: int) -> FlashBlocks:
    # the kernel's shared memory holds 64 keys of 256 numbers
    return to_flash_attn(mask, kv_tile=64 if head_dim > 128 else None)


def by_flex(tensors: Tensors, mask: BlockMask, backend: str) -> clock.Call:
    inputs = attention_inputs(*tensors).for_attention()
    parts = parts_of(mask)
    assert parts is not None
    # as attention calls do: the lists alone say what is kept
    made = block_mask(inputs, parts.selection.with_fields(keep=None))
    return lambda: run_flex_attention(inputs, made, backend)[0]


def makers(tensors: Tensors, mask: BlockMask, only: Sequence[str]) -> dict[str, Callable[[], clock.Call]]:
    """A function that makes the call, by kernel."""
    kv_heads, head_dim = tensors[1].shape[1], tensors[0].shape[-1]

    def flashinfer(backend: str) -> clock.Call:
        return by_flashinfer(tensors, to_flashinfer(mask, kv_heads, merge_heads=True), backend)

    every: dict[str, Callable[[], clock.Call]] = {
        "flashinfer-fa3": lambda: flashinfer("fa3"),
        "flashinfer-fa2": lambda: flashinfer("fa2"),
        "flash-attn-4": lambda: by_flash_attn(tensors, flash_blocks(mask, head_dim)),
        "flex-flash": lambda: by_flex(tensors, mask, "flash"),
        "flex-triton": lambda: by_flex(tensors, mask, "triton" if ON_GPU else "auto"),
        "dense-cudnn": lambda: calls.sdpa(tensors, SDPBackend.CUDNN_ATTENTION if ON_GPU else SDPBackend.MATH),
        "dense-fa2": lambda: calls.sdpa(tensors, SDPBackend.FLASH_ATTENTION),
    }
    return {name: every[name] for name in only}


def faults(tensors: Tensors, mask: BlockMask, only: Sequence[str]) -> dict[str, Callable[[], clock.Call]]:
    """Wrong exports: an index off by one, and the diagonal taken for a full block."""
    kv_heads, head_dim = tensors[1].shape[1], tensors[0].shape[-1]
    found: dict[str, Callable[[], clock.Call]] = {}
    for backend in ("fa3", "fa2"):
        if f"flashinfer-{backend}" in only:
            blocks = to_flashinfer(mask, kv_heads, merge_heads=True)
            moved = blocks.block_mask_map.clone()
            moved[:, -1, :-2] = moved[:, -1, :-2].roll(1, -1)
            found[f"flashinfer-{backend}, index off by one"] = functools.partial(
                by_flashinfer, tensors, blocks._replace(block_mask_map=moved), backend
            )
            full = blocks._replace(causal=False)
            found[f"flashinfer-{backend}, diagonal full"] = functools.partial(by_flashinfer, tensors, full, backend)
    if "flash-attn-4" in only:
        lists = flash_blocks(mask, head_dim)
        indices, counts, full_counts = lists.mask_block_idx, lists.mask_block_cnt.clone(), lists.full_block_cnt.clone()
        shifted = lists._replace(full_block_idx=lists.full_block_idx + 1)
        found["flash-attn-4, index off by one"] = functools.partial(by_flash_attn, tensors, shifted)
        # query block 1's diagonal, all of its blocks are computed whole
        full_indices = lists.full_block_idx.clone()
        number = int(counts[0, 0, 1])
        before = int(full_counts[:, :, 1].max())
        for head in range(counts.shape[1]):
            place = int(full_counts[0, head, 1])
            full_indices[0, head, 1, place : place + number] = indices[0, head, 1, :number]
        assert before + number <= full_indices.shape[-1]
        full_counts[:, :, 1] += number
        counts[:, :, 1] = 0
        diagonal = lists._replace(mask_block_cnt=counts, full_block_cnt=full_counts, full_block_idx=full_indices)
        found["flash-attn-4, diagonal full"] = functools.partial(by_flash_attn, tensors, diagonal)
    return found


def tried(make: Callable[[], clock.Call]) -> clock.Call | str:
    """The call, warm, or its error."""
    try:
        call = make()
        call()
        clock.synchronize()
        return call
    except Exception as error:
        return clock.text_of(error)


def checks(only: Sequence[str], head_dims: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row per kernel, shape and fault: the largest error."""
    sparse = [name for name in only if not name.startswith("dense")]
    for head_dim in head_dims:
        for q_len, kv_len in _CHECKED.values():
            tensors, mask = problem(q_len, kv_len, (8, 2), head_dim), random_mask(q_len, kv_len, (8, 2), 0.3)
            expected = dense_float64(tensors, mask)
            row = {"part": "checks", "head_dim": head_dim, "q_len": q_len, "kv_len": kv_len, "density": f"{density_of(mask):.4f}"}
            for name, make in {**makers(tensors, mask, sparse), **faults(tensors, mask, sparse)}.items():
                call = tried(make)
                if not isinstance(call, str):
                    error = float((call().double() - expected).nan_to_num(1e9).abs().max())
                    is_right, planted = error <= _LARGEST_ERROR, "," in name
                    call = f"{'caught' if planted else 'right'} ({error:.2e})" if is_right != planted else f"WRONG ({error:.2e})"
                yield {**row, "what": name, "value": call}
            clock.free()


def times(
    only: Sequence[str], head_dims: Sequence[int], tokens: Sequence[int], densities: Sequence[float], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row per kernel, shape and density: milliseconds or an error."""
    for length, head_dim, density in itertools.product(tokens, head_dims, densities):
        heads = {64: (64, 8), 128: (32, 8), 256: (16, 4)}.get(head_dim, (8, 2)) if ON_GPU else (4, 2)
        tensors, mask = problem(length, length, heads, head_dim), random_mask(length, length, heads, density)
        row = {"part": "times", "head_dim": head_dim, "q_len": length, "kv_len": length, "density": f"{density_of(mask):.4f}"}
        found = {name: tried(make) for name, make in makers(tensors, mask, only).items()}
        timed = clock.in_turns({name: call for name, call in found.items() if not isinstance(call, str)}, rounds)
        for name, call in found.items():
            yield {**row, "what": name, "value": call if isinstance(call, str) else timed[name]}
        del found, tensors, mask
        clock.free()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows, and append them to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["checks", "times"], help="checks, times; default: both")
    parser.add_argument("--only", nargs="+", choices=KERNELS, help="kernels; default: all but flashinfer-fa2")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256] if ON_GPU else [16])
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768, 131072] if ON_GPU else [512])
    parser.add_argument("--densities", nargs="+", type=float, default=[0.08, 0.17])
    parser.add_argument("--rounds", type=int, default=3 if ON_GPU else 1)
    parser.add_argument("--out", type=Path, help="CSV file to append rows to")
    options = parser.parse_args(arguments)
    only = options.only or [name for name in KERNELS if name != "flashinfer-fa2"]
    versions = {"flashinfer": clock.version("flashinfer-python"), "flash_attn_4": clock.version("flash-attn-4")}
    identity = {"device": clock.device_name(), "torch": torch.__version__, **versions}
    sheet = Sheet(options.out, COLUMNS, COLUMNS) if options.out is not None else None
    print(", ".join(identity.values()), flush=True)
    measured = {
        "checks": lambda: checks(only, options.head_dims),
        "times": lambda: times(only, options.head_dims, options.tokens, options.densities, options.rounds),
    }
    with torch.no_grad():
        for row in (row for part in options.parts for row in measured[part]()):
            print(*row.values(), flush=True)
            if sheet is not None:
                sheet.add(**identity, **row)


if __name__ == "__main__":
    main()
