"""bench.serving without an engine: engines of several processes take turns, rows of greedy answers."""

import argparse
import json
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from bench.serving import greedy, sglang_first_token
from bench.serving.first_token import turn, wait_for_engines
from bench.speed import replay


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

    def tokenizer(text, add_special_tokens):
        return SimpleNamespace(input_ids=text.split())

    same = {"task": "colours", "answers": ["red", "green"]}
    prompts = [{**same, "index": i, "prompt": "a b c"[: 2 * i + 1], "new_tokens": 30 * i} for i in range(3)]
    rows = list(greedy.answers(Engine(), tokenizer, prompts, argparse.Namespace(at_once=2, new_tokens=40)))
    assert asked == [[(1, 0), (2, 30)], [(3, 40)]]
    assert [(row["index"], row["score"]) for row in rows] == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_sglang_engines_answer_in_turns_under_the_settings_of_the_command_line(tmp_path, monkeypatch):
    calls = []

    class Engine:
        tokenizer_manager = SimpleNamespace(server_args=SimpleNamespace(chunked_prefill_size=8192))

        def __init__(self, **given):
            self.given = {**given, "settings": json.loads(os.environ["FLEXMASK_SGLANG"])}
            calls.append(self.given)
            # past sys.stdout, as processes of the engine
            os.write(1, b"flexmask served 8192 prefill tokens sparse in 1 steps, 0 dense; mean density 12.5%\n")

        def generate(self, input_ids, sampling_params):
            calls.append((self.given["prefill_attention_backend"], *map(len, input_ids)))

        def shutdown(self):
            calls.append("shut down")

    monkeypatch.setenv("FLEXMASK_SGLANG", "{}")
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=Engine, __version__="0"))
    out, own = tmp_path / "rows.csv", {"gamma": 0.5, "dense_below": 4096}
    arguments = ["--shape", "llama-3.1-8b", "--layers", "1", "--prompt-tokens", "300", "--rounds", "2", "--csv", str(out)]
    arguments += ["--settings", json.dumps(own), "--override", '{"a": 1}', "--device", "cpu"]
    turns = tmp_path / "turns"
    sglang_first_token.main([*arguments, "--turns", str(turns)])
    assert turns.read_text(encoding="utf-8") == "ready\n"
    stock, sparse, *rest = calls
    assert "dense_below" in stock["settings"] and stock["json_model_override_args"] == '{"a": 1}'
    assert sparse["settings"] == {**own, "log_every": 5.0}
    assert rest == [("fa3", 300), ("flexmask", 300)] * 3 + ["shut down"] * 2
    rows = out.read_text(encoding="utf-8").splitlines()
    assert len(rows) == 3 and ",stock,1,300,1," in rows[1] and ",hybrid,1,300,1," in rows[2] and ",0.125," in rows[2]


def test_replayed_launches_are_timed_in_turns():
    few = "--rows 64 --keys 128 --nearest 128 --head-dim 16 --layers 4 --rounds 2 --device cpu"
    options = replay.parse(few.split())
    found = replay.measure(options)
    assert list(found) == ["replay", "no replay"]
    assert all(len(each) == 2 and 0 < host <= whole for each in found.values() for host, whole in each)
    with pytest.raises(SystemExit):
        replay.parse(["--layers", "3"])
