"""Accuracy of the retriever: ``python -m bench.retriever.evaluate --model bench/retriever/model``.

An answer is right if each of its four tokens is the most likely one after the right tokens before it, which one pass decides.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.retriever.task import ANSWER_TOKENS, QUESTION_TOKENS, RECORD_TOKENS, Prompt, make_prompt


@torch.no_grad()
def answers_are_right(model: PreTrainedModel, prompts: list[Prompt]) -> Tensor:
    """Right answers of prompts of one length and number of questions, (len(prompts), num_queries) bool, on the CPU."""
    token_ids = torch.stack([prompt.with_answers() for prompt in prompts]).to(model.device)
    answers = torch.stack([prompt.answers for prompt in prompts])
    tail_tokens = RECORD_TOKENS * answers.shape[1] - QUESTION_TOKENS + 1
    output = model(input_ids=token_ids, use_cache=False, logits_to_keep=tail_tokens)
    predicted = output.logits.argmax(dim=-1).cpu()  # from the last token of the first question on
    starts = RECORD_TOKENS * torch.arange(answers.shape[1])
    steps = starts[:, None] + torch.arange(ANSWER_TOKENS)
    return (predicted[:, steps] == answers).all(dim=-1)


def measure(model: PreTrainedModel, num_tokens: int, num_needles: int, num_queries: int, count: int) -> float:
    """Share of right answers over ``count`` prompts, of seeds from 0 on."""
    rows = max(1, 131072 // num_tokens)
    right = []
    for start in range(0, count, rows):
        seeds = range(start, min(start + rows, count))
        prompts = [make_prompt(num_tokens, num_needles, num_queries, seed) for seed in seeds]
        right.append(answers_are_right(model, prompts))
    return torch.cat(right).float().mean().item()


def main() -> None:
    """Print accuracy by length and number of needles; ``--out`` writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model", help="folder of the model")
    parser.add_argument("--lengths", default="4096,8192,16384,32768,65536,131072", help="prompt lengths in tokens")
    parser.add_argument("--needles", default="1,16,64", help="numbers of needles")
    parser.add_argument("--queries", type=int, default=1, help="questions per prompt, at most one per needle")
    parser.add_argument("--prompts", type=int, default=128, help="prompts per length and number of needles")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    # float32 is several times faster on processors without bfloat16 matrix units
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    lengths = [int(length) for length in options.lengths.split(",")]
    needles = [int(number) for number in options.needles.split(",")]
    results = []
    for num_tokens, num_needles in tqdm([(length, number) for length in lengths for number in needles]):
        num_queries = min(options.queries, num_needles)
        share = measure(model, num_tokens, num_needles, num_queries, options.prompts)
        results.append({"tokens": num_tokens, "needles": num_needles, "queries": num_queries, "right": share})
        results[-1]["answers"] = options.prompts * num_queries
    print("| prompt tokens | " + " | ".join(f"1 of {number}" for number in needles) + " |")
    print("| --- " * (len(needles) + 1) + "|")
    for num_tokens in lengths:
        row = [f"{result['right']:.1%}" for result in results if result["tokens"] == num_tokens]
        print(f"| {num_tokens:,} | " + " | ".join(row) + " |")
    if options.out:
        report = {"torch": torch.__version__, "device": options.device, "results": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
