"""bench.fidelity.attention: mass and error against attention written out, and the command on a small model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from bench.fidelity import attention, attention_report, patterns, smollm, texts
from bench.fidelity.attention import kept_attention
from tests.test_fidelity import tiny_model


def test_mass_and_error_are_those_of_attention_written_out():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 256, 16, generator=generator)
    key, value = torch.randn(2, 2, 256, 16, generator=generator)
    keep = (torch.rand(3, 4, 8, 8, generator=generator) < 0.3) | torch.eye(8, dtype=torch.bool)
    keep[2] = True
    keep = keep.tril()
    found = kept_attention(query, key, value, 0.5, keep)

    keys, values = (x.double().repeat_interleave(2, 0) for x in (key, value))
    p = (query.double() @ keys.mT * 0.5).masked_fill(~torch.ones(256, 256, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    allowed = keep.repeat_interleave(32, -2).repeat_interleave(32, -1)
    mass = (p * allowed).sum(-1)
    sparse, dense = (p * allowed / mass.unsqueeze(-1)) @ values, p @ values
    error = (sparse - dense).square().sum((-2, -1)).sqrt() / dense.square().sum((-2, -1)).sqrt()
    torch.testing.assert_close(found.error.double(), error, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.mass.double(), mass.unflatten(-1, (4, 64)).mean(-1), atol=1e-5, rtol=1e-4)
    assert (error[:2] > 0.1).all()
    torch.testing.assert_close(found.density, keep.sum((2, 3)) / 36)


def test_the_command_measures_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "load", lambda path, yarn, dtype: tiny_model())
    ids = {f"test/prose/book-{i}": np.arange(600) * (i + 3) % 97 for i in range(2)}
    monkeypatch.setattr(texts, "load", lambda use: ids)
    (tmp_path / "methods.txt").write_text("causal\nstreaming_llm:sink_blocks=1,window_blocks=1\noracle:gamma=0.5,block_size=64\n")
    out = tmp_path / "out.jsonl"
    command = ["--gguf", "none", "--methods", str(tmp_path / "methods.txt"), "--out", str(out)]
    attention.main(command)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["text"], row["method"].partition(":")[0]) for row in rows] == [
        (text, name) for text in ids for name in ("causal", "streaming_llm", "oracle")
    ]
    for row in rows:
        assert row["tokens"] == 512
        assert row["mass"] == pytest.approx(np.mean(row["mass_quarters"]))
        assert row["worst_mass"] <= row["mass"]
        for name in ("density", "mass", "output_error"):
            assert np.shape(row[f"{name}_by_head"]) == (2, 4)
            assert row[name] == pytest.approx(np.mean(row[f"{name}_by_head"]), abs=1e-4)
    causal, window, oracle = rows[:3]
    assert (causal["density"], causal["mass"], causal["output_error"]) == pytest.approx((1, 1, 0), abs=1e-5)
    assert window["density"] == pytest.approx(0.7)
    assert window["mass_quarters"][:2] == pytest.approx([1, 1], abs=1e-5)  # they see first block and own block alone
    assert window["mass_quarters"][3] < 0.9
    assert oracle["mass"] > 0.5
    attention.main(command)
    assert len(out.read_text().splitlines()) == len(rows)
    attention.main([*command, "--tokens", "256"])  # another length is another measurement
    assert [json.loads(line)["tokens"] for line in out.read_text().splitlines()[len(rows) :]] == [256] * len(rows)


def test_a_method_that_raises_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm, "load", lambda path, yarn, dtype: tiny_model())
    monkeypatch.setattr(texts, "load", lambda use: {"test/prose/book-0": np.arange(600) % 97})
    (tmp_path / "methods.txt").write_text("oracle:gamma=7\ncausal\n")
    out = tmp_path / "out.jsonl"
    attention.main(["--gguf", "none", "--methods", str(tmp_path / "methods.txt"), "--out", str(out)])
    assert [json.loads(line)["method"] for line in out.read_text().splitlines()] == ["causal"]
    assert "FAILED oracle:gamma=7" in capsys.readouterr().out


def test_patterns_are_those_of_the_statistics(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "load", lambda path, yarn, dtype: tiny_model())
    monkeypatch.setattr(texts, "load", lambda use: {"test/prose/book-0": np.arange(2600) * 7 % 97})
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        patterns.main(["--gguf", "none", "--out", str(out)])
    coverage, hybrid = (json.loads(line) for line in out.read_text().splitlines())
    assert coverage["tokens"] == 2560
    assert np.shape(coverage["js_distance"]) == np.shape(coverage["density"]) == np.shape(hybrid["density"]) == (2, 4)
    assert "js_distance" not in hybrid
    assert (np.array(coverage["is_query_aware"]) == (np.array(coverage["js_distance"]) < 0.1)).all()
    assert 0 < np.mean(coverage["density"]) < 1


def test_a_model_needs_a_text(capsys):
    with pytest.raises(SystemExit):
        attention.options_of(["--methods", "a", "--out", "b", "--model", "c"])
    assert "--model and --text go together" in capsys.readouterr().err


def test_the_report_has_means_areas_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    made = []
    for share, density, error in ((0.8, 0.1, 0.4), (0.9, 0.3, 0.2), (0.95, 0.4, 0.1)):
        for number, text in enumerate(("test/prose/a-0", "test/python/b-0")):
            figures = {"density": density, "mass": 0.9, "worst_mass": 0.5, "mass_quarters": [1.0, 0.9, 0.9, 0.8]}
            named = {"bed": "attention", "method": f"xattention:threshold={share}", "text": text}
            made.append({**named, **figures, "output_error": error + 0.02 * (number - 0.5)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"bed": "machine"}, *made]))
    attention_report.main([str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "report")])
    report = (tmp_path / "report" / "attention.md").read_text()
    assert (
        "| XAttention, threshold 0.9 | .300 [.300, .300] | .900 [.900, .900] | .500 [.500, .500] | .200 [.190, .210] |" in report
    )
    # from .4 * .5 ** .4 = .303 at a density of .18 to .2 at .3, straight in the logarithm
    assert "| XAttention | .248 |" in report
    sheet = (tmp_path / "report" / "attention.csv").read_text().splitlines()
    assert sheet[2].split(",")[:5] == ["xattention:threshold=0.9", "0.3", "0.9", "0.5", "0.2"]
    assert (tmp_path / "report" / "attention.png").stat().st_size > 10_000


def test_no_area_where_the_settings_do_not_reach():
    assert attention_report.area(np.array([0.2, 0.5]), np.array([0.3, 0.1])) is None
    # straight in the logarithm: the mean of .3 * 3 ** -((d - .1) / .4)
    at = np.linspace(0.18, 0.3, 21)
    expected = (0.3 * 3 ** ((0.1 - at) / 0.4)).mean()
    assert attention_report.area(np.array([0.5, 0.1]), np.array([0.1, 0.3])) == pytest.approx(expected)
