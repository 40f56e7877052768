"""bench.serving without an engine: engines of several processes take turns, rows of greedy answers."""

import argparse
import sys
import threading
import time
from types import SimpleNamespace

from bench.serving import greedy
from bench.serving.first_token import turn, wait_for_engines


def test_engines_start_together_and_run_one_at_a_time(tmp_path):
    turns, running, most = tmp_path / "turns", [], []

    def engine():
        wait_for_engines(turns, 3)
        with turn(turns):
            running.append(1)
            time.sleep(0.05)
            most.append(len(running))
            running.pop()

    engines = [threading.Thread(target=engine) for _ in range(3)]
    for each in engines[:2]:
        each.start()
    time.sleep(0.2)
    assert most == []
    engines[2].start()
    for each in engines:
        each.join()
    assert most == [1, 1, 1]


def test_a_greedy_answer_scores_the_parts_that_it_names(monkeypatch):
    asked = []

    class Engine:
        def generate(self, prompts, how, use_tqdm):
            asked.append([(len(each["prompt_token_ids"]), one.max_tokens) for each, one in zip(prompts, how, strict=True)])
            return [SimpleNamespace(outputs=[SimpleNamespace(text="They are RED and blue.")]) for _ in prompts]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    tokenizer = lambda text, add_special_tokens: SimpleNamespace(input_ids=text.split())  # noqa: E731
    prompts = [
        {
            "task": "colours",
            "index": index,
            "prompt": "a b c"[: 2 * index + 1],
            "answers": ["red", "green"],
            "new_tokens": 30 * index,
        }
        for index in range(3)
    ]
    rows = list(greedy.answers(Engine(), tokenizer, prompts, argparse.Namespace(at_once=2, new_tokens=40)))
    assert asked == [[(1, 0), (2, 30)], [(3, 40)]]
    assert [(row["index"], row["score"]) for row in rows] == [(0, 0.5), (1, 0.5), (2, 0.5)]
