"""The plug-in in SGLang on a CPU, in float32, against the stock backend and the adapter. `make test-sglang` runs it."""

import re

import pytest

from tests.serving.programs import assert_prefixes_shared, assert_refused
from tests.vllm.agreement import apart, differences, distance, summary

pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")

NEAR = 1e-3
ALL = ("odd_chunks", "mixed", "short", "prefix_hits")


@pytest.fixture
def run(written):
    return lambda name: written("sglang.engine_run", name)


def log_of(results):
    """The plug-in's lines."""
    lines = results["log"].splitlines()
    return [line for line in lines if "flexmask" in line and "server_args=" not in line]


@pytest.mark.parametrize("asked", ALL)
def test_gamma_one_gives_the_stock_backend_s_answers(asked, run):
    stock, ours = run("stock")[asked], run("keep_all")[asked]
    assert [each["tokens"] for each in stock] == [each["tokens"] for each in ours]
    assert distance(stock, ours) < NEAR


def test_what_was_asked_did_happen(run):
    ours = run("keep_all")
    assert [each["cached"] for each in ours["prefix_hits"]] == [each["cached"] for each in run("stock")["prefix_hits"]]
    assert ours["prefix_hits"][1]["cached"] > 2900 and ours["prefix_hits"][2]["cached"] == 2000
    assert any("#new-seq: 1" in line and "#running-req: 2" in line for line in ours["log"].splitlines())
    # all of odd_chunks, of mixed what fills a block, and of prefix_hits what was not cached
    assert ours["metrics"]["sparse"] > 3000 + 2500 + 1300 + 2990 + 1300
    assert ours["metrics"]["dense"] >= 40 + 40


def test_sparse_prefill_is_the_adapter_s_with_the_same_chunks(run, written):
    ours, theirs = run("sparse")["odd_chunks"], written("vllm.adapter_run")["sparse"]["odd_chunks"]
    found = summary(apart(ours[0], theirs))
    assert found["mean"] < 1e-4 and found["most"] < 5e-3
    assert ours[0]["tokens"][0] == theirs["token"]
    assert distance(run("stock")["odd_chunks"], ours) > 1


def test_requests_choose_gamma_or_dense_attention(run):
    """By index: the server's gamma, 1, dense and 0.5."""
    stock, ours = (run(name)["beside_each_other"] for name in ("chosen_stock", "chosen"))
    # in the same chunks, by a server with that gamma
    half = run("chosen_half")["beside_each_other_plainly"]
    for number, wanted in ((1, stock), (2, stock), (3, half)):
        assert ours[number]["tokens"] == wanted[number]["tokens"]
        assert distance([ours[number]], [wanted[number]]) < NEAR, number
    assert all(distance([stock[each]], [ours[each]]) > 1 for each in (0, 3))
    assert distance([ours[0]], [ours[3]]) > 1


def test_requests_share_prefixes_where_their_options_are_equal(run):
    assert_prefixes_shared(*(run(name)["behind_one_prefix"] for name in ("chosen", "chosen_stock")))


def test_wrong_options_of_a_request_are_refused_and_the_server_goes_on(run):
    assert_refused(run("chosen")["wrongly"], run("chosen_stock")["wrongly"])


def test_two_ranks_share_heads_and_gammas(run):
    one, two = (run(name)["odd_chunks"] for name in ("by_head", "two_ranks"))
    assert [each["tokens"] for each in one] == [each["tokens"] for each in two]
    assert distance(one, two) < NEAR
    assert distance(one, run("stock")["odd_chunks"]) > 1


def test_the_log_says_what_runs_and_what_ran(run):
    ours = run("sparse")
    lines = log_of(ours)
    assert any(
        "4 of 4 attention layers prefill sparse (hybrid, gamma 0.9, min_budget 128) from 0 tokens on" in line
        and "torch_native serves all else. Settings: FLEXMASK_SGLANG." in line
        for line in lines
    )
    assert re.search(r"flexmask served 3000 prefill tokens sparse in 4 steps, 0 dense; mean density \d\d\.\d%", lines[-1])
    # kernels are compiled before the first request
    ready = next(place for place, line in enumerate(lines) if "kernels compiled in" in line)
    assert not any("compiling" in line for line in lines[ready:])


@pytest.mark.parametrize("asked", ["odd_chunks", "mixed"])
def test_an_fp8_cache_is_closer_to_an_unquantized_one_than_stock(asked, run):
    exact, fp8 = run("stock")[asked], run("fp8")
    if "CPU FP8 KV cache requires Intel AMX" in fp8["log"]:  # SGLang 0.5.23
        pytest.skip("SGLang has no FP8 cache on this CPU")
    ours, stock = (summary(differences(exact, answers[asked]))["mean"] for answers in (fp8, run("fp8_stock")))
    assert 0 < ours < stock


@pytest.mark.parametrize("fault", ["slots", "rows"])
def test_planted_faults_are_found(fault, run):
    assert distance(run("stock")["odd_chunks"], run(f"fault_{fault}")["odd_chunks"]) > 100 * NEAR


def test_the_model_s_own_config_is_read(run):
    ours = run("its_config")
    assert any(
        "(the largest call: 8192 tokens < dense_below 16384)" in line and "Settings: the model's config.json." in line
        for line in log_of(ours)
    )
    # a short prompt is the stock backend's
    assert distance(run("stock")["odd_chunks"], ours["odd_chunks"]) == 0


def test_an_unknown_option_ends_the_start(run):
    wrong = run("wrong")
    assert wrong["status"] != 0
    assert "ValueError: FLEXMASK_SGLANG: method 'hybrid' takes the options" in wrong["log"] and "got 'gama'" in wrong["log"]
