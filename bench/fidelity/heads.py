"""Error of heads' outputs, ``||o - o_dense|| / ||o_dense||``: ``python -m bench.fidelity.heads --out FILE.csv``.

Reads the structured workload at every length or, with ``--texts``, dense queries, keys and values of every layer of SmolLM2. A
row is the mean over heads. The same command resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.fidelity import settings, smollm, texts
from bench.fidelity.settings import Setting
from bench.fidelity.sparse_model import SparseModel, sparse_attention
from bench.prompts.structured import SHAPE, named_density, structured_prompt
from bench.rows import Sheet
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.flex.dense import dense_attention

IDENTITY = ("input", "length", "method", "options")
COLUMNS = (*IDENTITY, "density", "error", "worst", "device")


def errors(inputs: AttentionInputs, setting: Setting, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Density and output error of every head, (num_heads,) each."""
    out, selected = sparse_attention(inputs, setting, layer)
    dense = dense_attention(inputs)[0].float()
    kept = (selected.lists.kv_num_blocks + selected.lists.full_kv_num_blocks)[0]
    share = kept.sum(-1) / (kept.shape[-1] * (kept.shape[-1] + 1) / 2)
    error = (out.float() - dense)[0].flatten(1).norm(dim=1) / dense[0].flatten(1).norm(dim=1)
    return share.expand_as(error), error


@torch.no_grad()
def on_structure(length: int, setting: Setting) -> list[tuple[Tensor, Tensor]]:
    return [errors(attention_inputs(*structured_prompt(length, named_density(length), **SHAPE)), setting)]


@torch.no_grad()
def on_model(model: SparseModel, ids: Tensor, setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """Errors in every layer of a dense prefill, so errors do not accumulate."""
    found: list[tuple[Tensor, Tensor]] = []
    with model.attending(None, lambda inputs, layer: found.append(errors(inputs, setting, layer))):
        model.model.base_model(input_ids=ids[None], use_cache=False)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file that rows are added to")
    parser.add_argument("--lengths", default="8192,32768,131072", help="tokens")
    parser.add_argument("--texts", type=Path, help="texts as in bench.fidelity.lengths; none: the structured workload")
    settings.add_arguments(parser)
    smollm.add_arguments(parser, yarn=2.0)
    options = parser.parse_args(arguments)
    chosen, sheet = settings.chosen(options), Sheet(options.out, COLUMNS, IDENTITY)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    prompts: dict[str, Tensor | None] = {"structured": None}
    if options.texts is not None:
        model = SparseModel(smollm.of_arguments(options))
        prompts = {name: ids.to(model.model.device) for name, ids in texts.read(options.texts, options.model).items()}
    for length in (int(length) for length in options.lengths.split(",")):
        for name, ids in prompts.items():
            for setting in chosen:
                row = {"input": name, "length": length, "method": setting.method, "options": setting.options}
                if sheet.has(**row) or (ids is not None and len(ids) < length):
                    continue
                found = on_structure(length, setting) if ids is None else on_model(model, ids[:length], setting)
                density, error = (torch.cat([each[part] for each in found]) for part in (0, 1))
                figures = {"density": density.mean().item(), "error": error.mean().item(), "worst": error.max().item()}
                sheet.add(**row, **figures, device=where)
                print(
                    f"{name}, {length:,}, {setting}: error {figures['error']:.3f} at {figures['density']:.1%} of the blocks",
                    flush=True,
                )


if __name__ == "__main__":
    main()
