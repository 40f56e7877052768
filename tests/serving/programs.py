"""Programs that run an engine, each once in a session, and what they wrote."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.repository import ROOT

# what refuses wrong options of a request
WRONG_OPTIONS: tuple[dict[str, Any], ...] = ({"flexmask_gamma": 2}, {"flexmask_gama": 0.5}, {"flexmask_read": [0.5, False]})


def written_by(folder: Path, environment: Mapping[str, str]) -> Callable[..., dict[str, Any]]:
    """Run a module of tests with words and a file to write, if it was not run before; gives its JSON, log and exit status."""
    # an engine may stand on the path too
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    made: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(program: str, *words: str) -> dict[str, Any]:
        named = (program, *words)
        if named not in made:
            out = folder / f"{'-'.join(named)}.json"
            log = out.with_suffix(".log")
            with log.open("wb") as stream:
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", "-m", f"tests.{program}", *words, str(out)],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": path, **environment},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            answers = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
            text = log.read_text(encoding="utf-8", errors="replace")
            made[named] = {**answers, "log": text, "status": done.returncode}
        return made[named]

    return run


def refusals(generate: Callable[..., Any], prompt: list[int], error: type[Exception]) -> list[Any]:
    """Replies to each of `WRONG_OPTIONS`, and an answer after them."""
    told: list[Any] = []
    for options in WRONG_OPTIONS:
        try:
            told += [{"refused": "nothing", **generate([prompt], chosen=[options])[0]}]
        except error as raised:
            told += [{"refused": str(raised)}]
    return [*told, *generate([prompt])]


def plan_one_token_off(starts: Sequence[int], lengths: Sequence[int], *rest: Any) -> Any:
    """A fault to plant: a later chunk misses the last cached token."""
    from flexmask.integrations.serving.plan import plan_step

    chunks = zip(starts, starts[1:], lengths, strict=False)
    return plan_step(starts, [tokens - (tokens > stop - start) for start, stop, tokens in chunks], *rest)


def assert_prefixes_shared(told: list[Any], stock: list[Any]) -> None:
    """Among requests with equal options, of three kinds; without the plug-in the first request serves all."""
    cached = [each["cached"] for each in told]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 2400
    assert min(each["cached"] for each in stock[1:]) > 2400


def assert_refused(told: list[Any], stock: list[Any]) -> None:
    """The engine refused by name, and answered on; a stock one takes anything."""
    assert [each["refused"] for each in told[:-1]] == [
        "flexmask_gamma must be in (0, 1]; got 2",
        "a request takes flexmask_gamma and flexmask_dense; got 'flexmask_gama'",
        "a request takes flexmask_gamma and flexmask_dense; got 'flexmask_read'",
    ]
    assert told[-1]["tokens"]
    assert {each.get("refused", "nothing") for each in stock} == {"nothing"}
