"""The plug-in in SGLang on a CPU, in float32, against the stock backend and the adapter. `make test-sglang` runs it."""

import pytest

from tests.serving.engine_tests import NEAR, EngineTests, assert_same_answers
from tests.vllm.agreement import differences, distance, summary

pytest.importorskip("sglang", reason="`make test-sglang` has it in an environment of its own")


@pytest.fixture
def run(written):
    return lambda name: written("sglang.engine_run", name)


@pytest.fixture
def adapter(written):
    return written("vllm.adapter_run")


class TestEngine(EngineTests):
    same, stock, source = ("odd_chunks", "mixed", "short", "prefix_hits"), "torch_native", "FLEXMASK_SGLANG"


def test_what_was_asked_did_happen(run):
    ours = run("keep_all")
    assert [each["cached"] for each in ours["prefix_hits"]] == [each["cached"] for each in run("stock")["prefix_hits"]]
    assert ours["prefix_hits"][1]["cached"] > 2900 and ours["prefix_hits"][2]["cached"] == 2000
    assert any("#new-seq: 1" in line and "#running-req: 2" in line for line in ours["log"].splitlines())
    # sparse are all of odd_chunks, the prompts of mixed that fill a block, and the tokens of prefix_hits that were not cached
    assert ours["metrics"]["sparse"] > 3000 + 2500 + 1300 + 2990 + 1300
    assert ours["metrics"]["dense"] >= 40 + 40


def test_two_stages_change_no_answer(run):
    assert_same_answers(run("stock")["mixed"], run("two_stages")["mixed_at_one"])
    assert_same_answers(run("sparse")["odd_chunks"], run("two_stages")["odd_chunks"])


def log_of(results):
    """The plug-in's lines."""
    return [line for line in results["log"].splitlines() if "flexmask" in line and "server_args=" not in line]


def test_the_log_says_what_ran(run):
    lines = log_of(run("sparse"))
    assert any("flexmask served 3000 prefill tokens sparse in 4 steps, 0 dense; mean density" in line for line in lines)
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
    # a short prompt gets the stock backend's answer
    assert distance(run("stock")["odd_chunks"], ours["odd_chunks"]) == 0


def test_an_unknown_option_ends_the_start(run):
    wrong = run("wrong")
    assert wrong["status"] != 0
    assert "ValueError: FLEXMASK_SGLANG: method 'hybrid' takes the options" in wrong["log"] and "got 'gama'" in wrong["log"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "nemotron", "granite"])
def test_a_mixture_s_attention_is_the_stock_backend_s(name, written):
    """By a command: ``python -m tests.sglang.engine_run qwen3_next triton OUT``."""
    stock, ours, half = (written("sglang.engine_run", f"{name}{kind}", "triton") for kind in ("_stock", "", "_half"))
    assert "2 of 2 attention layers prefill sparse" in ours["log"]
    rounding = summary(differences(stock["text"], ours["text"]))["mean"]
    assert rounding < 0.05 < summary(differences(stock["text"], half["text"]))["mean"]
