"""bench/fidelity: the prototype of hybrid selection against the core's, the beds end to end, and the report's statistics."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from bench.fidelity import curves, methods, results, smollm, texts, tuned
from bench.fidelity.rules import B, row_evidence
from bench.fidelity.run import Log, log_probs
from bench.fidelity.run import main as run
from bench.fidelity.sparse_model import attending, prepare
from bench.prompts.captured import retriever_prompt

FOLDER = results.PATH.parents[1] / "fidelity"


def inputs(kind):
    if kind == "random":
        generator = torch.Generator().manual_seed(3)
        # a part for each block, so that rows of one block attend alike, to few key blocks
        made = (
            torch.randn(1, heads, 32, 128, 64, generator=generator) + 1.5 * torch.randn(1, heads, 32, 1, 64, generator=generator)
            for heads in (8, 2)
        )
        query, key = (each.flatten(2, 3) for each in made)
        return query, key
    return retriever_prompt(2048, layers=(1, 2), num_heads=16, num_kv_heads=4, device="cpu", dtype=torch.float32)[:2]


@pytest.mark.parametrize(("kind", "gamma"), [("random", 0.7), ("random", 0.8), ("captured", 0.7), ("captured", 0.9)])
def test_prototype_keeps_what_the_core_keeps(kind, gamma):
    query, key = inputs(kind)
    name = curves.prototype(gamma)
    kept = methods.parse(f"hybrid:gamma={gamma}")(query, key, 0.125)
    assert torch.equal(methods.parse(f"{name},slot=0,last_near=16")(query, key, 0.125), kept)
    assert kept.sum() < 0.9 * methods.parse("causal")(query, key, 0.125).sum()
    # and the rows asked do matter
    assert not torch.equal(methods.parse(f"{name},last_near=16")(query, key, 0.125), kept)


@pytest.mark.parametrize(
    "name",
    [
        "hybrid:gamma=0.9",
        "coverage:gamma=0.8",
        "published",
        "xattention",
        "flash_prefill",
        "hip:topk_blocks=4",
        "streaming_llm:sink_blocks=1,window_blocks=8",
        "minference:plan=100/400",
        "normalised_flash_prefill",
    ],
)
def test_method_keeps_causal_blocks_and_the_diagonal(name):
    query, key = inputs("random")
    keep = methods.parse(name)(query, key, 0.125)
    assert keep.shape == (1, 8, 32, 32)
    assert keep.dtype == torch.bool
    assert not keep.triu(1).any()
    assert keep.diagonal(dim1=-2, dim2=-1).all()
    assert keep[:, :, :28].sum() < 0.9 * keep.shape[1] * sum(range(29))


def test_flash_prefill_with_rows_normalised_is_another_rule():
    for kind, least, most in (("random", 0.02, 0.04), ("captured", 0.005, 0.02)):
        query, key = inputs(kind)
        for alpha in (0.05, 0.1):
            one, other = (
                methods.parse(f"{name}:alpha={alpha}")(query, key, 0.125)
                for name in ("flash_prefill", "normalised_flash_prefill")
            )
            assert least < (one != other).float().mean() < most


def test_blocks_of_another_size():
    model = prepare(tiny_model())
    ids = torch.randint(97, (512,), generator=torch.Generator().manual_seed(1))
    with attending(None):
        dense = log_probs(model, ids)
    with attending(methods.parse("streaming_llm:sink_blocks=1,window_blocks=8,block_size=64")) as layers:
        assert torch.allclose(log_probs(model, ids), dense, atol=1e-4)
        assert all((each == 1).all() for each in layers)
    with attending(methods.parse("streaming_llm:sink_blocks=1,window_blocks=2,block_size=64")) as layers:
        near = log_probs(model, ids)
        assert all(torch.allclose(each, torch.tensor(21 / 36)) for each in layers)
    # the first 192 tokens see everything
    assert torch.allclose(near[:191], dense[:191], atol=1e-4)
    assert (near[192:] - dense[192:]).abs().max() > 1e-3


def test_rows_by_top_p_hold_their_share():
    query, key = inputs("random")
    mass = row_evidence(query, key, 0.125)["mean"]
    keep = methods.parse("rule:rows=0.8,vert=0,window=1")(query, key, 0.125)
    assert (torch.where(keep, mass, 0).sum(-1) >= 0.8 - 1e-5).all()
    assert torch.allclose(mass.sum(-1), torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("name", ["streaming_llm:sink_blocks=1,window_blocks=2", "hybrid:gamma=0.7,min_budget=128"])
def test_last_rows_may_see_everything(name):
    query, key = inputs("random")
    plain, full = (methods.parse(name + more)(query, key, 0.125) for more in ("", ",full_rows=2"))
    causal = torch.ones_like(plain).tril()
    assert torch.equal(full[:, :, :-2], plain[:, :, :-2])
    assert torch.equal(full[:, :, -2:], causal[:, :, -2:])
    assert not torch.equal(full, plain)
    near = methods.parse(name + ",last_near=5")(query, key, 0.125)
    assert torch.equal(near[:, :, :-1], plain[:, :, :-1])
    assert torch.equal(near[:, :, -1, :-5], plain[:, :, -1, :-5])
    assert near[:, :, -1, -5:].all()
    assert torch.equal(methods.parse(name + ",last_near=999")(query, key, 0.125)[:, :, -1], causal[:, :, -1])


def test_thresholds_that_go_by_an_even_share():
    query, key = inputs("random")  # spread out evenly over most blocks
    kept = {
        options: methods.parse(f"rule:rho=0.1,vert=0,window=1{options}")(query, key, 0.125).float().mean((0, 1))
        for options in ("", ",least_even=1.5", ",most_even=0.5")
    }
    plain, dropped, more = kept.values()
    rows = plain.shape[-1]
    short, long = slice(3, 8), slice(12, rows)  # even shares over, and below, the threshold of .1
    assert dropped[short].sum() < 0.8 * plain[short].sum()
    assert torch.equal(dropped[15:], plain[15:])
    assert more[long].sum() > 1.2 * plain[long].sum()
    assert torch.equal(more[:5], plain[:5])


def test_missing_file_of_methods_is_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(["texts", "--methods", str(tmp_path / "none.txt"), "--out", str(tmp_path / "rows.jsonl")])
    assert "--methods: no file" in capsys.readouterr().err


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"a method must be one of causal, .*hybrid"):
        methods.parse("hybird:gamma=0.9")


def tiny_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, **shape)).eval()


def test_model_attends_to_what_the_method_keeps():
    model = prepare(tiny_model())
    ids = torch.randint(97, (512,), generator=torch.Generator().manual_seed(1))
    with attending(None):
        dense = log_probs(model, ids)
    with attending(methods.parse("causal")) as layers:
        same = log_probs(model, ids)
        assert len(layers) == 2
        assert all((each == 1).all() for each in layers)
    assert torch.allclose(same, dense, atol=1e-4)
    with attending(lambda query, key, scale: torch.eye(4, dtype=torch.bool).expand(1, 4, -1, -1)) as layers:
        own_block = log_probs(model, ids)
        assert all(torch.allclose(each, torch.tensor(0.4)) for each in layers)
    assert torch.allclose(own_block[:127], dense[:127], atol=1e-4)
    assert (own_block[128:] - dense[128:]).abs().max() > 1e-2


def test_chunks_choose_by_their_own_rows_and_dense_layers_keep_everything():
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(1, 4, 1024, 64, generator=generator), torch.randn(1, 2, 1024, 64, generator=generator)
    options = "gamma=0.6,min_budget=128"
    found = methods.parse(f"coverage:{options},chunk=384")(query, key, 0.125)
    assert found.shape == (1, 4, 8, 8)
    for start, end in ((0, 384), (384, 768), (768, 1024)):
        part = methods.parse(f"coverage:{options}")(query[:, :, start:end], key[:, :, :end], 0.125)
        assert (found[:, :, start // 128 : end // 128, : end // 128] == part).all()
    assert not found.triu(1).any()
    assert (found != methods.parse(f"coverage:{options}")(query, key, 0.125)).any()

    ids = torch.randint(97, (512,), generator=generator)
    with attending(methods.parse("streaming_llm:sink_blocks=1,window_blocks=1,dense_layers=1")) as layers:
        log_probs(prepare(tiny_model()), ids)
        assert [round(each.mean().item(), 2) for each in layers] == [0.7, 1.0]


def test_a_mask_that_fails_as_compiled_code_is_made_by_plain_operations(monkeypatch, capsys):
    calls = []

    def keep(query, key, scale):
        calls.append(torch.compiler.is_compiling())
        if len(calls) == 1:
            raise RuntimeError("Inductor gave up")
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)

    monkeypatch.setitem(methods.METHODS, "oracle", keep)
    method = methods.parse("oracle:")
    query = torch.randn(1, 1, 128, 16)
    assert method(query, query, 1.0).all()
    assert not method.compiled
    assert "oracle goes on uncompiled: RuntimeError('Inductor gave up')" in capsys.readouterr().out
    method(query, query, 1.0)
    assert len(calls) == 3


def test_texts_bed_measures_against_dense_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "load", lambda path, yarn, dtype: tiny_model())
    ids = {f"test/prose/book-{i}": np.arange(512) * (i + 3) % 97 for i in range(2)}
    monkeypatch.setattr(texts, "load", lambda use: ids)
    (tmp_path / "methods.txt").write_text("causal  # noise\nrule:vert=0,window=1\n")
    command = ["texts", "--gguf", "none", "--methods", str(tmp_path / "methods.txt"), "--out", str(tmp_path / "out.jsonl")]
    run(command)
    found = results.read(tmp_path / "out.jsonl").texts
    assert set(found) == {"causal", "rule:vert=0,window=1"}
    assert all(figures == pytest.approx((1, 0, 0), abs=1e-5) for figures in found["causal"].values())
    assert all(density < 1 and change > 1e-4 for density, _, change in found["rule:vert=0,window=1"].values())
    before = len((tmp_path / "out.jsonl").read_text().splitlines())
    run(command)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == before + 1  # the second run's machine


@pytest.mark.attention
def test_tuned_settings_are_measured_at_equal_density(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm, "load", lambda path, yarn, dtype: tiny_model())
    generator = np.random.default_rng(0)
    named = {
        use: {f"{use}/{kind}/a-0": generator.integers(0, 64, 512) for kind in ("prose", "python")} for use in ("tune", "test")
    }
    monkeypatch.setattr(texts, "load", lambda use: named[use])
    out = tmp_path / "out.jsonl"
    arguments = ["--out", str(out), "--tokens", "384", "--block-size", "32", "--gammas", "0.7", "--gguf", "none"]
    tuned.main(arguments)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ways = ["gamma 0.7", "tuned to gamma 0.7", "tuned by loss to gamma 0.7"]
    assert [(row["text"], row["method"]) for row in rows] == [(text, way) for way in ways for text in named["test"]]
    assert all(0 < row["density"] <= 1 and row["absd"] > 0 for row in rows)
    assert "2 texts" in capsys.readouterr().out
    tuned.main(arguments)
    assert len(out.read_text().splitlines()) == len(rows)


def test_needles_bed_scores_the_answers(tmp_path, monkeypatch):
    def own_block(query, key, scale):
        blocks = query.shape[2] // B
        return torch.eye(blocks, dtype=torch.bool).expand(*query.shape[:2], -1, -1)

    monkeypatch.setitem(methods.METHODS, "own_block", own_block)
    (tmp_path / "methods.txt").write_text("hybrid:gamma=0.9\nown_block\n")
    command = ["needles", "--methods", str(tmp_path / "methods.txt"), "--tasks", "1024/1", "--prompts", "2"]
    run([*command, "--out", str(tmp_path / "out.jsonl")])
    found = results.read(tmp_path / "out.jsonl").needles
    assert [found[name]["1024/1"][1:] for name in ("dense", "hybrid:gamma=0.9", "own_block")] == [(2, 2), (2, 2), (0, 2)]
    assert found["own_block"]["1024/1"][0] == pytest.approx(8 / 36)


def test_failed_method_is_named_and_measured_again(tmp_path):
    (tmp_path / "out.jsonl").write_text('{"bed": "texts", "method": "a", "text": "t", "error": "E"}\n')
    log = Log(tmp_path / "out.jsonl")
    assert not log.has("a", "t")
    assert not results.read(tmp_path / "out.jsonl").texts
