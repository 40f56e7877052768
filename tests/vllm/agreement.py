"""How far apart the answers of engines are: ``python -m tests.vllm.agreement FOLDER OUT.jsonl``.

FOLDER holds what `engine_run` and `adapter_run` wrote, under the names of the engines: ``stock.json``, ``adapter.json``, ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SAME = ("whole", "chunks", "odd_chunks", "mixed", "short", "prefix_hits", "preempted", "aborted")


def answers(results):
    return [each for each in results if "tokens" in each]


def differences(left, right):
    """Absolute differences of log-probabilities: of all prompt tokens, and of the likely ones after them.

    After a token that the two chose differently nothing is comparable.
    """
    found = []
    for one, other in zip(answers(left), answers(right), strict=True):
        found += [abs(a - b) for a, b in zip(one["prompt_logprobs"], other["prompt_logprobs"], strict=True)]
        for place, (step, same) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            if one["tokens"][:place] != other["tokens"][:place]:
                break
            found += [abs(step[token] - same[token]) for token in step.keys() & same.keys()]
    return found


def distance(left, right):
    """The largest of the `differences`."""
    return max(differences(left, right), default=0.0)


def same_tokens(left, right):
    """How many generated tokens agree up to the first that does not, and how many there are."""
    agree = total = 0
    for one, other in zip(answers(left), answers(right), strict=True):
        pairs = list(zip(one["tokens"], other["tokens"], strict=True))
        agree += next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
        total += len(pairs)
    return agree, total


def summary(found):
    """Mean, 99th percentile and largest of some differences."""
    ordered = sorted(found)
    if not ordered:
        return {"mean": 0.0, "p99": 0.0, "most": 0.0}
    return {"mean": sum(ordered) / len(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "most": ordered[-1]}


def rows(runs):
    """One row a comparison, of the engines that are there."""
    made = []

    def add(name, asked, alike, found):
        made.append({"compared": name, "asked": asked, "tokens_alike": alike[0], "tokens": alike[1], **summary(found)})

    def compare(name, left, right, asked):
        agree, total = same_tokens(left, right)
        made.append(
            {"compared": name, "asked": asked, "tokens_alike": agree, "tokens": total, **summary(differences(left, right))}
        )

    stock = runs.get("stock")
    if stock:
        compare("stock in other chunks", stock["chunks"], stock["rechunked"], "chunks")
    for name in ("keep_all", "compiled"):
        if stock and name in runs:
            for asked in SAME:
                compare(f"{name} and stock", runs[name][asked], stock[asked], asked)
            for fault, results in runs[name].get("faults", {}).items():
                compare(f"planted fault {fault} and stock", results, stock["odd_chunks"], "odd_chunks")
    if stock and "sparse" in runs:
        for asked in ("whole", "chunks", "odd_chunks"):
            compare("sparse and stock", runs["sparse"][asked], stock[asked], asked)
    if "two_ranks" in runs and "by_head" in runs:
        compare("two ranks and one", runs["two_ranks"]["whole"], runs["by_head"]["whole"], "whole")
    if "keep_all_on_two" in runs and "stock_on_two" in runs:
        for asked in ("odd_chunks", "mixed"):
            compare("two GPUs, keep_all and stock", runs["keep_all_on_two"][asked], runs["stock_on_two"][asked], asked)
    if "stock_on_two" in runs and stock:
        compare("stock on two GPUs and on one", runs["stock_on_two"]["odd_chunks"], stock["odd_chunks"], "odd_chunks")
    for name, engine in (("whole", "sparse"), ("chunks", "sparse"), ("odd_chunks", "sparse"), ("by_head", "by_head")):
        if "adapter" in runs and engine in runs:
            ours = runs[engine]["whole" if name == "by_head" else name][0]
            theirs = runs["adapter"][name]
            found = [abs(a - b) for a, b in zip(ours["prompt_logprobs"], theirs["prompt_logprobs"], strict=True)]
            add(f"{engine} and adapter", name, (int(ours["tokens"][0] == theirs["token"]), 1), found)
    return made


def main(folder, out):
    runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))}
    with Path(out).open("w", encoding="utf-8") as file:
        for row in rows(runs):
            file.write(json.dumps(row) + "\n")
            numbers = f"mean {row['mean']:.2e}  p99 {row['p99']:.2e}  most {row['most']:.2e}"
            print(f"{row['compared']:45} {row['asked']:12} tokens {row['tokens_alike']}/{row['tokens']}  {numbers}")
    for name, run in runs.items():
        print(name, run.get("backends"), run.get("counters"), "compiled by requests:", run.get("compiled_by_requests"))


if __name__ == "__main__":
    main(*sys.argv[1:])
