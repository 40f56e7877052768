"""An interrupted training resumes, and transformers reads the model."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.retriever import train
from bench.retriever.vocabulary import TOKENS


def test_training_resumes_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "LOG_EVERY", 1)
    monkeypatch.setattr(train, "is_stage_done", lambda *_: True)
    # each look at the clock takes a second
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    command = ["--out", str(tmp_path), "--stages", "128:1,256:9", "--batch-tokens", "256", "--device", "cpu", "--minutes"]

    def log():
        return [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]

    train.main([*command, str(2 / 60)])
    assert [(line["step"], line["length"]) for line in log()] == [(1, 128), (2, 256)]
    assert all(line["loss"] > 0 and 0 <= line["answers"] <= 1 for line in log())
    train.main([*command, str(4 / 60)])
    assert [(line["step"], line["length"]) for line in log()[2:]] == [(3, 256), (4, 256)]
    masters = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["masters"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert all(torch.equal(parameter, master.bfloat16()) for parameter, master in zip(model.parameters(), masters, strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "model").convert_ids_to_tokens(range(len(TOKENS))) == list(TOKENS)
