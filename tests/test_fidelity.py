"""bench/fidelity: the sparse model, and each benchmark end to end on small models."""

import numpy as np
import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("transformers")

import pandas as pd

from bench.fidelity import lengths, retrieval, smollm
from bench.fidelity.settings import Setting
from bench.fidelity.sparse_model import SparseModel

WINDOW = Setting("streaming_llm", {"sink_blocks": 1, "window_blocks": 1})
IDS = torch.randint(97, (600,), generator=torch.Generator().manual_seed(1))


def tiny_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, **shape)).eval()


@pytest.fixture
def model():
    return SparseModel(tiny_model())


def test_the_model_attends_to_what_the_method_keeps(model):
    ids = IDS[:512]
    dense = model.log_probs(ids)
    with model.attending(Setting("causal", {})):
        torch.testing.assert_close(model.log_probs(ids), dense, atol=1e-4, rtol=0)
    assert model.density() == 1
    with model.attending(WINDOW):
        near = model.log_probs(ids)
    # its own block and the first
    assert (model.density(), model.density(2, 3), model.density(2)) == pytest.approx((0.7, 2 / 3, 4 / 7))
    torch.testing.assert_close(near[:255], dense[:255], atol=1e-4, rtol=0)
    assert (near[256:] - dense[256:]).abs().max() > 1e-3
    with model.attending(Setting("streaming_llm", {**WINDOW.options, "block_size": 64, "layers": {"1": {"window_blocks": 8}}})):
        model.log_probs(ids)
    assert model.density() == pytest.approx((15 / 36 + 1) / 2)  # the second layer sees everything


@pytest.fixture
def texts_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "of_arguments", lambda options: tiny_model())
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(2):
        np.save(folder / f"book-{number}.npy", (np.arange(512 + number) * (number + 3) % 97).astype(np.uint16))
    return folder


def test_lengths_are_measured_by_position_and_go_on_where_they_stopped(texts_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lengths, "POSITIONS", (0, 256, 512))
    out = tmp_path / "out.csv"
    command = ["--texts", str(texts_folder), "--out", str(out), "--lengths", "384,512", "--methods", "streaming_llm", "--options"]
    lengths.main([*command, '{"sink_blocks": 1, "window_blocks": 1}', "--minutes", "-1"])
    assert "out of time" in capsys.readouterr().out and not out.exists()
    lengths.main([*command, '{"sink_blocks": 1, "window_blocks": 1}'])
    lengths.main([*command, '{"sink_blocks": 1, "window_blocks": 9}'])
    before = out.read_text()
    lengths.main([*command, '{"sink_blocks": 1, "window_blocks": 9}'])
    assert out.read_text() == before
    rows = pd.read_csv(out)
    assert (
        list(zip(rows["length"], rows["text"], strict=True))
        == [(384, "book-0"), (384, "book-1"), (512, "book-0"), (512, "book-1")] * 2
    )
    narrow, wide = rows[:4], rows[4:]
    assert (wide["density"] == 1).all() and (wide["abs_d"] < 1e-4).all()
    assert narrow["density"].tolist() == pytest.approx([5 / 6] * 2 + [0.7] * 2, abs=1e-5)
    assert narrow["density 0.25-0.5k"].tolist() == pytest.approx([2 / 3] * 2 + [4 / 7] * 2, abs=1e-5)
    assert (narrow["abs_d 0-0.25k"] < 1e-4).all() and (narrow["abs_d 0.25-0.5k"] > 1e-4).all()
    assert (narrow["abs_d"] < narrow["abs_d 0.25-0.5k"]).all() and (narrow["d_loss"].abs() <= narrow["abs_d"]).all()
    assert set(rows["yarn"]) == {8} and set(rows["model"]) == {smollm.NAME}


def test_needles_are_asked_of_the_retriever(tmp_path):
    out = tmp_path / "out.csv"
    command = ["needles", "--out", str(out), "--tasks", "needle-1", "--lengths", "1024", "--prompts", "2", "--methods"]
    retrieval.main([*command, "hybrid", "--options", '{"gamma": 0.9}'])
    retrieval.main([*command, "streaming_llm", "--options", '{"sink_blocks": 1, "window_blocks": 1}'])
    rows = pd.read_csv(out)
    assert list(zip(rows["method"], rows["right"], rows["n"], strict=True)) == [
        ("dense", 2, 2),
        ("hybrid", 2, 2),
        ("streaming_llm", 0, 2),
    ]
    assert rows["density"].tolist()[2] == pytest.approx(15 / 36, abs=1e-5) and rows["density"][0] == 1


def test_tasks_are_asked_of_a_model_and_the_answers_kept(tmp_path):
    command = ["tasks", "--out", str(tmp_path / "out.csv"), "--lengths", "512", "--tasks", "tracking,common"]
    for first in ("0", "3", "0"):
        retrieval.main([*command, "--prompts", "3", "--first", first, "--methods", "tri_shape", "--options", "{}"])
    rows = pd.read_csv(tmp_path / "out.csv", dtype={"each": str})
    assert list(zip(rows["task"], rows["method"], rows["first"], strict=True)) == [
        (task, method, first) for first in (0, 3) for task in ("tracking", "common") for method in ("dense", "tri_shape")
    ]
    for row in rows.itertuples():
        digits = [int(digit) for digit in row.each]
        assert (len(digits), row.n) == (3, 3)
        assert (sum(digits) / (3 * row.answer_tokens), digits.count(row.answer_tokens)) == (pytest.approx(row.parts), row.right)
