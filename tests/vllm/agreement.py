"""Differences between the answers of engines: ``python -m tests.vllm.agreement FOLDER OUT.jsonl``.

FOLDER holds what `engine_run` and `adapter_run` wrote: ``stock.json``, ``adapter.json``, ...
"""

import json
import sys
from pathlib import Path

SAME = ("whole", "chunks", "odd_chunks", "mixed", "short", "prefix_hits", "preempted", "aborted")


def answers(results):
    return [each for each in results if "tokens" in each]


def differences(left, right):
    """Absolute differences of log-probabilities, up to the first token chosen differently."""
    found = []
    for one, other in zip(answers(left), answers(right), strict=True):
        found += apart(one, other)
        for place, (step, same) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
            if one["tokens"][:place] != other["tokens"][:place]:
                break
            found += [abs(step[token] - same[token]) for token in step.keys() & same.keys()]
    return found


def apart(ours, theirs):
    """Absolute differences of the log-probabilities of a prompt."""
    return [abs(a - b) for a, b in zip(ours["prompt_logprobs"], theirs["prompt_logprobs"], strict=True)]


def distance(left, right):
    return max(differences(left, right), default=0.0)


def same_tokens(left, right):
    """Generated tokens before the first that differs, and all."""
    agree = total = 0
    for one, other in zip(answers(left), answers(right), strict=True):
        pairs = list(zip(one["tokens"], other["tokens"], strict=True))
        agree += next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
        total += len(pairs)
    return agree, total


def summary(found):
    ordered = sorted(found)
    if not ordered:
        return {"mean": 0.0, "p99": 0.0, "most": 0.0}
    return {"mean": sum(ordered) / len(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "most": ordered[-1]}


# engines that keep everything, and their stock ones
_EVERYTHING = {"keep_all": "stock", "compiled": "stock", "graphs": "stock", "triton": "triton_stock"}
_OTHERS = dict.fromkeys(("windows", "sinks", "both", "latent", "latent_triton"), ("whole", "odd_chunks"))
_OTHERS |= {"fp8": ("odd_chunks", "mixed")}
_SPARSE = ("sparse", "graphs_sparse", "flexprefill")
_LATENT = ("latent_sparse", "latent_half", "latent_triton_half")
# two engines and the questions by which they are compared
_COMPARED = (
    *((name, stock, SAME) for name, stock in _EVERYTHING.items()),
    *((name, "stock", SAME) for name in ("triton_stock", "triton")),
    *((name, f"{name}_stock", questions) for name, questions in _OTHERS.items()),
    *((name, "stock", ("odd_chunks", "mixed")) for name in ("fp8_stock", "fp8", "stock_on_two")),
    *((name, "stock", ("whole", "chunks", "odd_chunks")) for name in _SPARSE),
    *((name, "latent_stock", ("whole", "odd_chunks")) for name in _LATENT),
    ("keep_all_on_two", "stock_on_two", ("odd_chunks", "mixed")),
    ("keep_all_on_two", "stock", ("mixed",)),
    ("two_ranks", "by_head", ("odd_chunks",)),
    ("graphs_sparse", "sparse", ("whole", "chunks", "odd_chunks", "mixed")),
)


def _pairs():
    """Names of comparisons, their questions, and by engine and question the answers on both sides."""
    for ours, theirs, questions in _COMPARED:
        yield from ((f"{ours} and {theirs}", each, (ours, each), (theirs, each)) for each in questions)
    for name in ("stock", "triton_stock"):
        yield f"{name} in other chunks", "chunks", (name, "chunks"), (name, "rechunked")
    for name in ("fault_slots", "fault_rows"):  # SGLang's
        yield f"planted {name} and stock", "odd_chunks", (name, "odd_chunks"), ("stock", "odd_chunks")
    for name in _OTHERS:
        yield f"{name}_stock in other chunks", "whole", (f"{name}_stock", "whole"), (f"{name}_stock", "odd_chunks")


def rows(runs):
    """One row per comparison of engines that are there."""
    found = {(name, asked): told for name, run in runs.items() for asked, told in run.items()}
    pairs = [(*names, found[one], found[other]) for *names, one, other in _pairs() if one in found and other in found]
    for name, stock in _EVERYTHING.items():
        for fault, results in runs.get(name, {}).get("faults", {}).items():
            pairs.append((f"planted fault {fault} and stock", "odd_chunks", results, runs[stock]["odd_chunks"]))
    made = []
    for name, asked, left, right in pairs:
        left, right = left[: len(right)], right[: len(left)]
        agree, total = same_tokens(left, right)
        told = {"compared": name, "asked": asked, "tokens_alike": agree, "tokens": total}
        made.append({**told, **summary(differences(left, right))})
    return made + _adapter_rows(runs)


def _adapter_rows(runs):
    made = []

    def compare(name, asked, token, ours, theirs):
        told = {"compared": name, "asked": asked, "tokens_alike": int(token == theirs["token"]), "tokens": 1}
        made.append({**told, **summary(apart(ours, theirs))})

    adapter, rounded = ({**runs.get(name, {}), **runs.get(f"{name}_latent", {})} for name in ("adapter", "adapter_bfloat16"))
    for engine in (*_SPARSE, "by_head", *_LATENT):
        theirs = adapter.get(engine.removeprefix("graphs_").replace("_triton", ""), {})
        for asked in [each for each in theirs if each in runs.get(engine, {})]:
            # except where FLASH_ATTN_MLA decodes a short last chunk
            if (engine, asked) != ("latent_triton_half", "odd_chunks"):
                ours = runs[engine][asked][0]
                compare(f"{engine} and adapter", asked, ours["tokens"][0], ours, theirs[asked])
    for engine, answers_of in rounded.items():
        for asked, ours in answers_of.items():
            compare(f"adapter in bfloat16 and float32, {engine}", asked, ours["token"], ours, adapter[engine][asked])
    return made


def main(folder, out):
    runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))}
    with Path(out).open("w", encoding="utf-8") as file:
        for each in rows(runs):
            file.write(json.dumps(each) + "\n")
            numbers = f"mean {each['mean']:.2e}  p99 {each['p99']:.2e}  most {each['most']:.2e}"
            print(f"{each['compared']:45} {each['asked']:12} tokens {each['tokens_alike']}/{each['tokens']}  {numbers}")


if __name__ == "__main__":
    main(*sys.argv[1:])
