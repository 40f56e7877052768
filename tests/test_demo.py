"""The demo's table and picture; `make demo` itself runs it whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from transformers import LlamaConfig, LlamaForCausalLM

from bench.demo import Measured, Way, draw_two_heads, main, parse, table, verdict
from bench.retriever.vocabulary import TOKENS
from flexmask import flexprefill_mask
from flexmask.integrations.huggingface import configure

DENSE = Measured(torch.tensor([1.0, -4.0]), right=8, asked=8, first=3.0, later=2.0)
SPARSE = Measured(torch.tensor([1.25, -4.0]), right=7, asked=8, first=9.0, later=1.0)


def chosen(tau):
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 512, 16), torch.randn(1, 2, 512, 16)
    query[:, :2] *= 4
    query[:, 2:] *= 0.2
    return flexprefill_mask(query, key, gamma=0.8, tau=tau, min_budget=0, block_size=32, return_stats=True)


def test_table_holds_what_was_measured():
    stats = chosen(0.1)[1]
    lines = table(DENSE, {"FlexPrefill": Way(SPARSE, [stats, replace(stats, dense=True)])}).splitlines()
    assert "8 of 8" in lines[1]
    assert "7 of 8" in lines[1]
    assert "0.25" in lines[2]
    assert "9.00 s" in lines[3]
    query_aware = int(stats.is_query_aware.sum())
    assert f"{stats.density.mean():.1%}" in lines[5]
    assert f"{query_aware} query-aware, {4 - query_aware} vertical-slash" in lines[5]
    assert "ran dense" in lines[6]
    is_dense = torch.zeros_like(stats.is_dense)
    is_dense[:, 2:] = True
    assert "run dense" not in lines[5]
    with_dense = replace(stats, is_dense=is_dense)
    assert ", 2 heads run dense, which is faster" in table(DENSE, {"FlexPrefill": Way(SPARSE, [with_dense])}).splitlines()[5]
    # hybrid selection has no kinds of head
    tuned = Way(replace(SPARSE, right=5), [replace(with_dense, row_coverage=torch.ones(1, 4), density=torch.full((1, 4), 0.123))])
    lines = table(DENSE, {"FlexPrefill": Way(SPARSE, [stats]), "tuned": tuned}).splitlines()
    assert lines[0].split()[-2:] == ["FlexPrefill", "tuned"]
    assert "5 of 8" in lines[1]
    assert "12.3%" in lines[5]
    assert lines[5].endswith("; tuned: 2 heads run dense, which is faster")
    assert "FlexPrefill: " in lines[5]


@pytest.mark.parametrize(
    ("seconds", "sentence"), [(1.0, "FlexPrefill was 2.00 times"), (5.0, "dense attention was 2.50 times"), (2.01, "same time")]
)
def test_verdict_names_the_faster_one(seconds, sentence):
    assert sentence in verdict(DENSE, {"FlexPrefill": Way(replace(SPARSE, later=seconds), [])})


def test_verdict_speaks_of_each_sparse_prefill():
    ways = {"FlexPrefill": Way(replace(SPARSE, later=4.0), []), "tuned": Way(SPARSE, [])}
    first, second = verdict(DENSE, ways).split(". ")
    assert "dense attention was 2.00 times faster than that with FlexPrefill" in first
    assert "tuned was 2.00 times faster" in second


@pytest.mark.parametrize("tau", [0.0, 0.1, 1.0])
def test_picture_is_of_both_kinds_where_they_occur(tmp_path, tau):
    pytest.importorskip("matplotlib")
    mask, stats = chosen(tau)
    kinds = {bool(kind) for kind in stats.is_query_aware.flatten()}
    assert kinds == {0.0: {False}, 0.1: {False, True}, 1.0: {True}}[tau]
    said = draw_two_heads([stats, stats], [mask, mask], tmp_path / "masks.png")
    assert ("query-aware" in said) == (True in kinds)
    assert ("vertical-slash" in said) == (False in kinds)
    assert (tmp_path / "masks.png").exists()
    # a layer that ran dense has no mask
    assert draw_two_heads([stats, stats], [None, mask], tmp_path / "masks.png").count("layer 1") == 2


def test_prompt_is_longer_on_a_gpu():
    assert parse(["--device", "cpu"]).prompt_tokens == 16384
    assert parse(["--device", "cuda"]).prompt_tokens == 65536
    assert parse(["--device", "cuda", "--prompt-tokens", "100"]).prompt_tokens == 100


def test_missing_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"bench\.retriever\.train"):
        main(["--model", str(tmp_path)])


def test_short_prompt_says_that_it_ran_dense(tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    picture = tmp_path / "masks.png"
    main(["--model", str(tmp_path), "--device", "cpu", "--prompt-tokens", "100", "--needles", "3", "--picture", str(picture)])
    printed = capsys.readouterr().out
    assert "A prompt of 100 tokens with 3 needles" in printed
    assert printed.count("ran dense: a short prompt") == 2
    assert "Shorter than dense_below, 16,384 tokens: FlexPrefill runs this prompt dense." in printed
    assert "of 3" in printed
    assert "tuned" not in printed
    assert not picture.exists()


def test_settings_in_the_config_are_a_column(tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    configure(model, gamma=[0.5, 1.0], selection="hybrid")
    model.save_pretrained(tmp_path)
    main(["--model", str(tmp_path), "--device", "cpu", "--prompt-tokens", "100", "--needles", "3"])
    printed = capsys.readouterr().out
    assert printed.count("FlexPrefill: ran dense: a short prompt; tuned gammas: ran dense: a short prompt") == 2
