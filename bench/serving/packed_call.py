"""Several prompts of a step in one attention call, or in a call each: ``python -m bench.serving.packed_call --csv FILE``.

Prompts of whole blocks, one after the other, are one causal call whose lists hold each prompt's own blocks: any number of prompts
is served by what is compiled for one. Each still selects by itself. A row gives milliseconds for one layer of the 8B shape:
``select``, attention in ``separate`` calls and in one ``packed`` call with the joining of its lists; the sums of the GPU's
kernels in each, which leave out the launches; and the number of kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench import ON_GPU
from bench.rows import Sheet
from bench.serving.prefill_profile import HYBRID, settings_of
from bench.speed.clock import device_name, in_turns, kernels_of
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.base.selection import BlockLists, Selected
from flexmask.flex.backend import chosen_backend
from flexmask.flex.block_mask import block_mask
from flexmask.flex.run import run_flex_attention
from flexmask.select import select_blocks
from flexmask.selector import Selector
from flexmask.settings import PrefillSettings

IDENTITY = ("prompts", "prompt_tokens", "device", "torch")
PARTS = ("select", "separate", "packed")
COLUMNS = (*IDENTITY, "density", *PARTS, *(f"{part}_kernels" for part in PARTS), *(f"{part}_launches" for part in PARTS))


def selected(selector: Selector, prompts: Sequence[AttentionInputs]) -> list[Selected]:
    """The blocks of each prompt."""
    return [select_blocks(selector.for_inputs(each), each) for each in prompts]


def separate(prompts: Sequence[AttentionInputs], kept: Sequence[Selected], kernel: str) -> list[Tensor]:
    """Attention of each prompt by a separate call, (1, num_heads, tokens, head_dim)."""
    return [run_flex_attention(each, block_mask(each, blocks), kernel)[0] for each, blocks in zip(prompts, kept, strict=True)]


def packed(pack: AttentionInputs, kept: Sequence[Selected], kernel: str) -> Tensor:
    """Attention of all prompts in one call; `pack` holds them one after the other, each of whole blocks."""
    return run_flex_attention(pack, block_mask(pack, kept[0]._replace(lists=joined(kept))), kernel)[0]


def joined(kept: Sequence[Selected]) -> BlockLists:
    """The lists of all prompts as those of one call, in which each prompt's key blocks stand after those before it."""
    total = sum(each.lists.kv_indices.shape[3] for each in kept)
    tensors: list[Tensor] = []
    for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        numbers = torch.cat([getattr(each.lists, counts) for each in kept], 2)
        wide = numbers.new_zeros((*numbers.shape, total))
        first = 0
        for each in kept:
            own = getattr(each.lists, indices)
            blocks = own.shape[3]
            entry = torch.arange(blocks, device=own.device)
            listed = entry < getattr(each.lists, counts).unsqueeze(-1)
            wide[:, :, first : first + blocks, :blocks] = torch.where(listed, own + first, 0)
            first += blocks
        tensors += [numbers, wide]
    return BlockLists(*tensors)


def in_one(prompts: Sequence[AttentionInputs]) -> AttentionInputs:
    """The prompts as one call's inputs, one after the other."""
    query, key, value = (torch.cat([getattr(each, name) for each in prompts], 2) for name in ("query", "key", "value"))
    return prompts[0].with_fields(query=query, key=key, value=value)


def measured(prompts: int, tokens: int, device: str, dtype: torch.dtype) -> dict[str, float | int]:
    """One row."""
    random = torch.Generator(device).manual_seed(0)
    given = []
    for _ in range(prompts):
        query, key, value = (
            torch.randn(1, heads, tokens, 128, dtype=dtype, device=device, generator=random) for heads in (32, 8, 8)
        )
        given.append(attention_inputs(query, key, value).prepared())
    own = PrefillSettings.from_dict({**settings_of(HYBRID, tokens, 0.2), "dense_below": 0})
    kernel, selector = chosen_backend("auto", given[0], own.block_size).name, own.selector()
    pack, kept = in_one(given), selected(selector, given)
    calls = {
        "select": lambda: selected(selector, given),
        "separate": lambda: separate(given, kept, kernel),
        "packed": lambda: packed(pack, kept, kernel),
    }
    blocks = sum(int((each.lists.kv_num_blocks + each.lists.full_kv_num_blocks).sum()) for each in kept)
    visible = prompts * 32 * (side := -(-tokens // own.block_size)) * (side + 1) / 2
    row: dict[str, float | int] = {"prompts": prompts, "prompt_tokens": tokens, "density": blocks / visible}
    for name, found in in_turns(calls).items():
        if isinstance(found, str):
            raise SystemExit(found)
        row[name] = found
        if ON_GPU:
            kernels = kernels_of(calls[name])
            row |= {f"{name}_kernels": sum(microseconds for _, microseconds in kernels) / 1e3, f"{name}_launches": len(kernels)}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["8x8192", "4x16384", "2x32768", "16x4096"] if ON_GPU else ["2x512"]
    parser.add_argument("--cases", nargs="+", default=default, help="prompts x tokens")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args(arguments)
    sheet = Sheet(options.csv, COLUMNS, IDENTITY)
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    for case in options.cases:
        prompts, tokens = map(int, case.split("x"))
        with torch.inference_mode():
            row = measured(prompts, tokens, device, dtype)
        sheet.add(**row, device=device_name(), torch=torch.__version__)
        print(row, flush=True)


if __name__ == "__main__":
    main()
