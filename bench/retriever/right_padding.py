"""Accuracy of batches padded on the right without a mask: ``python -m bench.retriever.right_padding``.

As lm-evaluation-harness pads: prompts of several lengths in one batch, no attention_mask. The same prompts and options four ways:
dense; one by one; in a block, where the adapter sees the token ids and leaves the padding out of the selection; and by the
registered name alone, where it does not.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.retriever.task import ANSWER_TOKENS, Prompt, make_prompt
from flexmask.integrations.huggingface import configure, flexprefill, register

WAYS = ("dense", "one by one", "batch in a block", "batch by name alone")


def padded_batch(rows: list[Tensor]) -> Tensor:
    """Rows of tokens as one tensor, zeros after the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def are_right(logits: Tensor, prompts: list[Prompt]) -> list[bool]:
    """Judge the answer of each prompt's row of (batch, length, vocab_size) logits."""
    found = []
    for row, prompt in zip(logits, prompts, strict=True):
        first = len(prompt.token_ids) - 1  # from the last token of the question on
        found.append(torch.equal(row[first : first + ANSWER_TOKENS].argmax(-1).cpu(), prompt.answers[0]))
    return found


@torch.no_grad()
def judge(model: PreTrainedModel, prompts: list[Prompt], options: dict[str, Any]) -> dict[str, list[bool]]:
    """Tell which prompts are answered right, by the way of running them."""
    rows = [prompt.with_answers().to(model.device) for prompt in prompts]
    batch = padded_batch(rows)
    right = {"dense": are_right(model(batch).logits, prompts)}
    with flexprefill(model, **options):
        right["one by one"] = [are_right(model(row[None]).logits, [prompt])[0] for row, prompt in zip(rows, prompts, strict=True)]
        right["batch in a block"] = are_right(model(batch).logits, prompts)
    register()
    configure(model, **options)
    model.set_attn_implementation("flexprefill")
    right["batch by name alone"] = are_right(model(batch).logits, prompts)
    model.set_attn_implementation("sdpa")
    return right


def interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95% interval of a binomial share."""
    share, spread = successes / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return middle - half, middle + half


def main() -> None:
    """Print a table, and how often two ways differ on a prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model", help="folder of the model")
    parser.add_argument("--lengths", default="1500,900,800,700,600,500,400,300", help="tokens of a batch's prompts")
    parser.add_argument("--needles", type=int, default=4)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--gamma", type=float, default=0.9)
    parser.add_argument("--block-size", type=int, default=64, help="also the least budget")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device).eval()
    block = arguments.block_size
    options: dict[str, Any] = {"gamma": arguments.gamma, "block_size": block, "min_budget": block, "dense_below": 0}
    lengths = [int(length) for length in arguments.lengths.split(",")]
    right: dict[str, list[bool]] = {way: [] for way in WAYS}
    for batch in tqdm(range(arguments.batches)):
        seeds = range(batch * len(lengths), (batch + 1) * len(lengths))
        prompts = [make_prompt(length, arguments.needles, 1, seed) for length, seed in zip(lengths, seeds, strict=True)]
        for way, found in judge(model, prompts, options).items():
            right[way] += found

    print("| way | right | 95% interval |\n| --- | --- | --- |")
    for way, found in right.items():
        low, high = interval(sum(found), len(found))
        print(f"| {way} | {sum(found)} of {len(found)} | {low:.3f} to {high:.3f} |")
    for one, other in (("one by one", "batch in a block"), ("batch in a block", "batch by name alone")):
        pairs = list(zip(right[one], right[other], strict=True))
        print(f"right {one} and wrong {other}: {pairs.count((True, False))}; the reverse: {pairs.count((False, True))}")


if __name__ == "__main__":
    main()
