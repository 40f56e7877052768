"""Answers of hybrid whose skipped blocks count by their means: ``python -m bench.answers.mean_correction``, arguments as `run`.

A skipped block is one more key, the mean of its keys, with the mean of its values and the weight of its keys. The log-sum-exp of
the kept blocks' attention joins both. Each prompt gives rows of the settings "hybrid 0.9" and "hybrid 0.9, mean correction",
measured by this program alone. It needs a GPU; prompts are whole.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

from bench.answers import evaluate
from bench.decoding import prefill
from bench.rows import append_row
from flexmask import hybrid_mask
from flexmask.base.selection import kept_and_full

BLOCK_SIZE, GAMMA = 128, 0.9
SETTINGS = {"hybrid 0.9": False, "hybrid 0.9, mean correction": True}


def mean_corrected(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, scale: float, out: Tensor, lse: Tensor) -> Tensor:
    """Join `out` and `lse`, attention of a whole prompt to the blocks of `keep`, with that to the means of the blocks before."""
    tokens, whole = query.shape[2], key.shape[2] // BLOCK_SIZE
    queries_per_kv, number = query.shape[1] // key.shape[1], torch.arange(whole, device=query.device)
    means = [x[:, :, : whole * BLOCK_SIZE].float().unflatten(2, (whole, BLOCK_SIZE)).mean(3) for x in (key, value)]
    joined = out.to(torch.float32, copy=True)
    # a head at a time: scores of all would take 12 times as much
    for head in range(query.shape[1]):
        keys, values = (x[0, head // queries_per_kv] for x in means)
        q_block = torch.arange(keep.shape[2], device=query.device)[:, None]
        skipped = (~keep[0, head, :, :whole] & (number < q_block)).repeat_interleave(BLOCK_SIZE, 0)[:tokens]
        scores = (query[0, head].float() @ keys.T * scale + math.log(BLOCK_SIZE)).masked_fill(~skipped, -math.inf)
        of_means = scores.logsumexp(-1)
        has_some = of_means.isfinite()[:, None]
        there = torch.where(has_some, (scores - of_means[:, None]).exp(), 0.0) @ values
        share = torch.where(has_some, torch.sigmoid(of_means - lse[0, head].float())[:, None], 0.0)
        joined[0, head] = joined[0, head] * (1 - share) + there * share
    return joined.to(query.dtype)


class Attention:
    """The attention function of transformers that this program registers; `densities` are those of its sparse calls."""

    def __init__(self) -> None:
        self.corrects, self.densities = False, list[float]()
        self._flex: Any = torch.compile(flex_attention, dynamic=True)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        rows, tokens = query.shape[2], key.shape[2]
        if rows < tokens or rows < BLOCK_SIZE:
            sees = torch.arange(tokens - rows, tokens, device=query.device)[:, None] >= torch.arange(tokens, device=query.device)
            given: Any = {"attn_mask": sees, "scale": scaling, "enable_gqa": True}
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **given)
            return out.transpose(1, 2).contiguous(), None
        mask = hybrid_mask(query, key, gamma=GAMMA, scale=scaling)
        out, lse = self._flex(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True, return_lse=True)
        keep = kept_and_full(mask, -(-tokens // BLOCK_SIZE))[0]
        self.densities.append(float(keep.sum() / (torch.ones_like(keep[0, 0]).tril().sum() * keep.shape[1])))
        if self.corrects:
            out = mean_corrected(query, key, value, keep, scaling, out, lse)
        return out.transpose(1, 2).contiguous(), None


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluate.add_arguments(parser)
    options, attention = parser.parse_args(), Attention()
    AttentionInterface.register("mean_corrected", attention)
    AttentionMaskInterface.register("mean_corrected", lambda *_, **__: None)
    given: Any = {"dtype": torch.bfloat16, "attn_implementation": "mean_corrected"}
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, **given)
    model = evaluate.with_float_logits(model.to("cuda").eval())
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    same = {"chunk": None, "model": options.name or options.model.name, "device": torch.cuda.get_device_name()}
    for row in evaluate.chosen(options):
        texts = (row["prompt"], row["answer"])
        ids, answer = (tokenizer(x, add_special_tokens=False, return_tensors="pt").input_ids.to("cuda") for x in texts)
        for name, attention.corrects in SETTINGS.items():
            attention.densities.clear()
            log_probs, right = evaluate.read_answer(model, *prefill(model, ids), answer)
            found = {"logp": float(log_probs.sum()), "exact": bool(right.all()), "density": sum(attention.densities)}
            found["density"] /= max(1, len(attention.densities))
            found["parts"] = evaluate.parts_right(tokenizer, row, right.cpu())
            place = {each: row[each] for each in evaluate.PLACE}
            append_row(options.out, {**place, "setting": name, **found, **same, "torch": torch.__version__})


if __name__ == "__main__":
    main()
