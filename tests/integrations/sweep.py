"""Try every causal-LM type of the installed transformers, and write integrations/huggingface/MODELS.md; run by hand.

A tiny random model of each type runs a prompt dense, at gamma 1, which must give the same logits, and at a lower gamma, which
must not::

    python -m tests.integrations.sweep run --results sweep-5.23.jsonl      # resumes; some minutes
    python -m tests.integrations.sweep table sweep-*.jsonl                 # one file per release, the newest first

Nothing is compiled: attention is written out under the block lists and the mask_mod (sweep_attention.py).
"""

import argparse
import json
import logging
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers

import flexmask.integrations.huggingface as flexmask_hf
from tests.integrations.sweep_attention import write_out
from tests.integrations.sweep_configs import attempts, causal_types
from tests.integrations.sweep_table import PATH, table

BATCH, LENGTH = 2, 160
SECONDS_EACH = 90
KEEP_ALL: dict[str, Any] = {"method": "flexprefill", "gamma": 1.0, "block_size": 16, "min_budget": 0, "dense_below": 0}
SPARSE: dict[str, Any] = {**KEEP_ALL, "gamma": 0.5, "tau": 0.12}
# of the largest logit
TOLERANCE, SENSITIVE = 1e-4, 1e-3


def try_type(name: str) -> dict[str, str]:
    """The verdict on one type."""
    model, tokens, dense, errors = None, torch.randint(3, 96, (BATCH, LENGTH)), torch.empty(0), []
    for make in attempts(name):
        try:
            torch.manual_seed(0)
            model = make()
            dense = model(tokens).logits
            break
        except TimeoutError:
            raise
        except Exception as error:
            model = None
            errors.append(one_line(error))
    if model is None:
        return {"verdict": "cannot be built here", "note": errors[0] if errors else "no configuration"}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with flexmask_hf.sparse_prefill(model, **KEEP_ALL) as run:
                whole = model(tokens).logits
            if any("did not reach" in str(each.message) for each in caught):
                return {"verdict": "untouched", "note": ""}
            with flexmask_hf.sparse_prefill(model, **SPARSE) as sparse_run:
                sparse = model(tokens).logits
    except TimeoutError:
        raise
    except Exception as error:
        ours = "flexmask" in str(error) or str(error).startswith("model must go through")
        return {"verdict": "refused" if ours else "fails", "note": one_line(error), "trace": traceback.format_exc()[-1500:]}
    return judged(run, sparse_run, dense, whole, sparse)


def judged(
    run: flexmask_hf.PrefillRun,
    sparse_run: flexmask_hf.PrefillRun,
    dense: torch.Tensor,
    whole: torch.Tensor,
    sparse: torch.Tensor,
) -> dict[str, str]:
    """The verdict on three complete runs of a model."""
    largest = max(1.0, float(dense.abs().max()))
    off, moved = (float((each - dense).abs().max()) / largest for each in (whole, sparse))
    if not off < TOLERANCE:
        return {"verdict": "wrong", "note": f"logits at gamma 1 are off by {off:.1e} of the largest"}
    reasons = {reason for layer in run.reasons.values() for reason in layer if reason is not None}
    stats = [each for calls in sparse_run.stats.values() for each in calls]
    if all(each.dense for each in stats):
        return {"verdict": "dense", "note": "; ".join(sorted(reasons))}
    if not moved > SENSITIVE or min(float(each.density.min()) for each in stats) == 1:
        return {"verdict": "served", "note": f"shown less well: the sparse logits move by {moved:.0e} of the largest"}
    return {"verdict": "served", "note": "; ".join(sorted(f"dense: {reason}" for reason in reasons))}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def work(results: Path, names: list[str]) -> None:
    """Try `names` in this process; the beginning of each is written first."""
    torch.set_num_threads(1)
    write_out()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    for name in names:
        keep(results, {"type": name, "verdict": "started"})
        started = time.monotonic()
        try:
            with within(SECONDS_EACH), torch.no_grad():
                found = try_type(name)
        except TimeoutError:
            found = {"verdict": "cannot be built here", "note": f"took over {SECONDS_EACH} s"}
        except Exception as error:
            found = {"verdict": "fails", "note": one_line(error), "trace": traceback.format_exc()[-1500:]}
        keep(results, {"type": name, **found, "seconds": round(time.monotonic() - started, 1)})


def keep(results: Path, found: dict[str, Any]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def read(results: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The heading of a file of results, and the last of each type."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return lines[0], {line["type"]: line for line in lines[1:]}


def run_all(results: Path, only: list[str]) -> None:
    """Try the types that have no result yet, 25 per process; a type that ends the process is noted."""
    if not results.exists():
        date = time.strftime("%Y-%m-%d", time.gmtime())
        keep(results, {"transformers": transformers.__version__, "torch": torch.__version__, "date": date})
    while True:
        done = read(results)[1]
        for name, found in done.items():
            if found["verdict"] == "started":
                keep(results, {"type": name, "verdict": "cannot be built here", "note": "ended the process (memory)"})
        left = [name for name in only or causal_types() if name not in done]
        if not left:
            return
        # fresh processes: what models import adds up
        subprocess.run([sys.executable, "-m", "tests.integrations.sweep", "work", str(results), *left[:25]], check=False)
        print(f"{results}: {len(left)} left before the last {min(25, len(left))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--results", type=Path, required=True)
    command.add_argument("--types", nargs="*", default=[])
    command = commands.add_parser("work")
    command.add_argument("results", type=Path)
    command.add_argument("types", nargs="+")
    command = commands.add_parser("table")
    command.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_all(arguments.results, arguments.types)
    elif arguments.command == "work":
        work(arguments.results, arguments.types)
    else:
        PATH.write_text(table([read(path) for path in arguments.results]), encoding="utf-8")


if __name__ == "__main__":
    main()
