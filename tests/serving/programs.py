"""Programs that run an engine, each once in a session, and what they wrote."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.repository import ROOT

FAULT = "FLEXMASK_TESTS_FAULT"  # in the environment of an engine's processes that shall be wrong
ENGINE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def written_by(folder: Path, environment: Mapping[str, str]) -> Callable[..., dict[str, Any]]:
    """Run a module of tests with words and a file to write, if it was not run before; gives its JSON, log and exit status."""
    # an engine may stand on the path too
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    surroundings = {**os.environ, "PYTHONPATH": path, **environment}

    @functools.cache
    def run(program: str, *words: str) -> dict[str, Any]:
        out = folder / f"{'-'.join((program, *words))}.json"
        command = [sys.executable, "-W", "ignore", "-m", f"tests.{program}", *words, str(out)]
        with out.with_suffix(".log").open("wb") as log:
            done = subprocess.run(command, cwd=ROOT, env=surroundings, stdout=log, stderr=subprocess.STDOUT, check=False)
        answers = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
        text = out.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        return {**answers, "log": text, "status": done.returncode}

    return run


# what refuses wrong options of a request
WRONG_OPTIONS: tuple[dict[str, Any], ...] = ({"flexmask_gamma": 2}, {"flexmask_gama": 0.5}, {"flexmask_read": [0.5, False]})
# requests with options of their own, which the stock backend ignores
CHOSEN = ("beside_each_other", "behind_one_prefix", "wrongly", "by_a_grammar")
# most rows of a step where they can be set, lengths and seeds of prompts, new tokens
QUESTIONS: dict[str, tuple[int, list[tuple[int, int]], int]] = {
    # two whole prompts in one step
    "whole": (8192, [(3001, 0), (1700, 1)], 4),
    "chunks": (2048, [(5000, 2)], 4),
    # in other chunks, to measure rounding
    "rechunked": (1024, [(5000, 2)], 4),
    "odd_chunks": (777, [(3000, 3)], 4),
    # short prompts decode while several long ones are prefilled in one step
    "mixed": (1000, [(length, length) for length in (40, 90, 2500, 1300, 200)], 12),
    # chunks that do not fill a block
    "short": (50, [(230, 4)], 4),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    from bench.retriever.task import make_prompt

    return make_prompt(length, num_needles=max(1, min(8, length // 40)), seed=seed).token_ids.tolist()


class Asked:
    """An engine, and questions with their answers in types that JSON has.

    ``generate(prompts, tokens, chosen, scored)`` gives greedy answers to requests with `chosen` options, with the
    log-probabilities of the prompts' tokens if they are `scored`; a `regex` bounds their texts.
    """

    generate: Callable[..., Any]
    empty_cache: Callable[[], None]
    refusal: type[Exception] = ValueError
    # as `QUESTIONS` and `prompt`
    questions: Mapping[str, Any] = QUESTIONS
    prompt = staticmethod(prompt)

    def budget(self, rows: int) -> None:
        """Set the most rows of a step, where the engine lets it be set."""

    def ask(self, name: str) -> Any:
        if hasattr(self, name):
            return getattr(self, name)()
        rows, prompts, tokens = self.questions[name]
        self.budget(rows)
        return self.generate([self.prompt(*each) for each in prompts], tokens)

    def mixed_at_one(self) -> Any:
        """As ``mixed``, whatever the server's gamma."""
        rows, prompts, tokens = self.questions["mixed"]
        self.budget(rows)
        return self.generate([self.prompt(*each) for each in prompts], tokens, [{"flexmask_gamma": 1}] * len(prompts))

    def by_a_grammar(self) -> Any:
        """Three words, at the server's gamma and at gamma 1."""
        self.empty_cache()
        return self.generate([prompt(1700)] * 2, chosen=[None, {"flexmask_gamma": 1}], regex="(birds|boat|bread)*")

    def prefix_hits(self) -> Any:
        """The same prompt again, and one with the same beginning."""
        self.empty_cache()
        long, other = prompt(3000, seed=5), prompt(3300, seed=6)
        return [self.generate([each], scored=False)[0] for each in (long, long, long[:2000] + other[2000:])]

    def behind_one_prefix(self) -> Any:
        """Options of two kinds, and none, all twice; prefixes are shared where options are equal."""
        self.empty_cache()
        options = [{"flexmask_gamma": 0.5}, {"flexmask_dense": True}, None] * 2
        return [self.generate([prompt(2500, seed=5)], chosen=[each], scored=False)[0] for each in options]

    def beside_each_other(self) -> Any:
        """Four prompts, whose chunks share steps."""
        return self.beside_each_other_plainly([None, {"flexmask_gamma": 1}, {"flexmask_dense": True}, {"flexmask_gamma": 0.5}])

    def beside_each_other_plainly(self, chosen: Any = None) -> Any:
        self.empty_cache()
        self.budget(777)
        return self.generate([prompt(1700, seed=each) for each in range(4)], chosen=chosen)

    def wrongly(self) -> list[Any]:
        """Replies to each of `WRONG_OPTIONS`, and an answer after them."""
        told: list[Any] = []
        for options in WRONG_OPTIONS:
            try:
                told += [{"refused": "nothing", **self.generate([prompt(300)], chosen=[options])[0]}]
            except self.refusal as raised:
                told += [{"refused": str(raised)}]
        return [*told, *self.generate([prompt(300)])]


def split_one_token_off(requests: Any, policy: Any) -> Any:
    """A fault to plant: a later chunk misses the last cached token."""
    from flexmask.integrations.serving.split import split_step

    chunks = zip(requests.starts, requests.starts[1:], requests.seq_lens, strict=False)
    off = [tokens - (tokens > stop - start) for start, stop, tokens in chunks]
    return split_step(requests._replace(seq_lens=off), policy)
