"""MInference's offline search: ``python -m bench.fidelity.minference_plan --text FILE --out plan.json``.

One dense prefill of one prompt. Of each head's attention it measures what the patterns of `PATTERNS` keep, and gives the head the
plan (V, S) of the best. As in the published code (``search_pattern``), heads that A-shape or block-sparse suits best run
vertical-slash too, with a plan for each of the two.

Differs from the published code: patterns are the block masks that run here, of blocks of 128, and every row counts (there rows
from 2,500 on). `bench.fidelity.lengths` takes the file: ``--methods minference --options "$(cat plan.json)"``.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.fidelity import smollm
from bench.fidelity.sparse_model import SparseModel
from flexmask.base.inputs import attention_inputs
from flexmask.block_masks import minference_mask, streaming_llm_mask
from flexmask.export import to_block_map
from flexmask.integrations.inspect.coverage_probe import block_attention

BLOCK = 128
VERTICAL_SLASH = ((30, 800), (100, 750), (500, 700), (3500, 100))
# published: the plan of heads that a pattern suits best; A-shape has 100 sinks and a window of 800 tokens
PATTERNS = {"A-shape": (100, 800), "block-sparse": (1000, 6096), **{f"vertical-slash {pair}": pair for pair in VERTICAL_SLASH}}
TOP = 8  # block-sparse keeps an eighth of the blocks


def kept_blocks(query: Tensor, key: Tensor, scale: float | None) -> dict[str, Tensor]:
    """By pattern the kept blocks of one layer, (num_heads, num_q_blocks, num_kv_blocks) bool."""
    at: Any = {"block_size": BLOCK, "scale": scale}
    masks = {"A-shape": streaming_llm_mask(query, key, sink_blocks=1, window_blocks=-(-800 // BLOCK), **at)}
    masks |= {f"vertical-slash {pair}": minference_mask(query, key, plan=pair, **at) for pair in VERTICAL_SLASH}
    num_heads, number = query.shape[1], -(-query.shape[2] // BLOCK)
    kept = {name: to_block_map(mask)[0].bool().expand(num_heads, -1, -1) for name, mask in masks.items()}
    means = [torch.stack([part.float().mean(2) for part in x.split(BLOCK, 2)], 2)[0] for x in (query, key)]
    scores = means[0] @ means[1].repeat_interleave(num_heads // key.shape[1], 0).mT
    causal = torch.ones(number, number, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~causal, -torch.inf)
    top = torch.zeros_like(scores, dtype=torch.bool).scatter(2, scores.topk(max(1, number // TOP), 2).indices, True)
    return {**kept, "block-sparse": top & causal}


def patterns_of(query: Tensor, key: Tensor, scale: float | None = None) -> list[str]:
    """The best pattern of each head, of one prompt's (1, heads, tokens, head_dim): that which keeps most of the attention."""
    kept, best = kept_blocks(query, key, scale), []
    for head in range(query.shape[1]):
        of_key = head // (query.shape[1] // key.shape[1])
        mass = block_attention(attention_inputs(query[:, head, None], key[:, of_key, None], scale=scale), BLOCK)
        best.append(max(PATTERNS, key=lambda name: float((mass * kept[name][head].cpu()).sum())))
    return best


class Search(SparseModel):
    """Attends densely, and notes the best pattern of every head."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.found: dict[int, list[str]] = {}

    def _attend(self, module: Any, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, None]:
        self.found[module.layer_idx] = patterns_of(query, key, named.get("scaling"))
        return super()._attend(module, query, key, *rest, **named)

    def options(self) -> dict[str, Any]:
        """Those of `minference`, by layer."""
        layers = {str(layer): {"plan": [PATTERNS[name] for name in names]} for layer, names in sorted(self.found.items())}
        return {"layers": layers}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the prompt, UTF-8")
    parser.add_argument("--tokens", type=int, default=32768, help="most tokens of it (32768)")
    parser.add_argument("--out", type=Path, required=True, help="JSON of minference's options")
    smollm.add_arguments(parser, yarn=8.0)
    options = parser.parse_args(arguments)
    search, tokenizer = Search(smollm.of_arguments(options)), smollm.tokenizer(options.model)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0, : options.tokens]
    search.log_probs(ids.to(search.model.device))
    options.out.write_text(json.dumps(search.options()) + "\n", encoding="utf-8")
    counts = Counter(name for names in search.found.values() for name in names)
    print(f"{len(ids):,} tokens; heads by pattern: {', '.join(f'{name} {number}' for name, number in counts.most_common())}")


if __name__ == "__main__":
    main()
