"""The plug-in in vLLM on a CPU, in float32, against the stock backend and the adapter. `make test-vllm` runs it."""

import pytest
import torch

from tests.serving.engine_tests import NEAR, EngineTests, assert_a_mixture_s, assert_same_answers, assert_the_adapter_s
from tests.vllm.agreement import SAME, answers, apart, differences, distance, summary

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")


@pytest.fixture
def adapter(written):
    return written("adapter_run")


class TestEngine(EngineTests):
    same, stock, source = SAME, "CPU_ATTN", "additional_config"


@pytest.mark.slow
def test_a_model_that_vllm_compiles_gives_the_same_answers(run):
    stock, compiled = run("stock"), run("compiled")
    for asked in SAME:
        assert_same_answers(stock[asked], compiled[asked])
    assert compiled["compiled_by_requests"] == stock["compiled_by_requests"]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["whole", "odd_chunks"])
@pytest.mark.parametrize("name", ["windows", "sinks"])
def test_windows_soft_caps_and_sinks_are_the_stock_backend_s(name, asked, run):
    stock, ours = run(f"{name}_stock"), run(name)
    assert_same_answers(stock[asked], ours[asked])
    assert [role["window"] for role in ours["roles"].values()] == [200, None] * 2
    kinds = {(role["softcap"], role["sinks"]) for role in ours["roles"].values()}
    assert kinds == {(5.0, False) if name == "windows" else (None, True)}
    assert "4 of 4 attention layers prefill sparse" in ours["log"]


def test_what_was_asked_did_happen(run):
    stock, keep_all = run("stock"), run("keep_all")
    for told in (stock, keep_all):
        assert told["prefix_hits"][0]["cached"] == 0
        assert all(each["cached"] > 1900 for each in told["prefix_hits"][1:])
        assert told["preempted"][-1]["preemptions"] > 0
        assert len(answers(told["aborted"])) == 1
    assert (stock["counters"]["sparse"], stock["counters"]["density"]) == (0, None)
    # all of whole, chunks and odd_chunks; short is dense throughout
    assert keep_all["counters"]["sparse"] > 3001 + 1700 + 5000 + 3000
    assert keep_all["counters"]["dense"] >= 230
    assert keep_all["counters"]["density"] == pytest.approx(1)


@pytest.mark.parametrize("fault", ["another_page", "offset_off_by_one"])
def test_a_planted_fault_is_caught(fault, run):
    assert distance(run("stock")["odd_chunks"], run("keep_all")["faults"][fault]) > 100 * NEAR


@pytest.mark.parametrize("name", ["by_head", pytest.param("flexprefill", marks=pytest.mark.slow)])
def test_other_settings_are_the_adapter_s(name, adapter, run):
    assert_the_adapter_s(run("stock"), run(name), adapter[name])


@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM's kernels for CPUs read FP8 by AVX-512")
def test_a_cache_of_fp8_rounds_less_than_in_the_stock_backend(run):
    stock, ours, theirs = (run(name)["odd_chunks"] for name in ("stock", "fp8", "fp8_stock"))
    rounding = summary(differences(stock, theirs))
    assert summary(differences(ours, theirs))["mean"] < rounding["mean"]
    assert summary(differences(stock, ours))["mean"] < rounding["mean"]


@pytest.mark.parametrize("asked", ["whole", "odd_chunks"])
def test_latent_attention_is_the_stock_backend_s(asked, run):
    """Long and short prompts, and decoding rows beside chunks."""
    stock, ours = run("latent_stock"), run("latent")
    assert_same_answers(stock[asked], ours[asked])
    assert ours["backends"] == ["SparseCPULatentAttention"]
    # 1,500, 700 and 800 tokens, two again in chunks; 40 and 30 tokens, and 40 again
    assert (ours["counters"]["sparse"], ours["counters"]["dense"]) == (5200, 110)


@pytest.mark.parametrize("asked", ["whole", "odd_chunks"])
@pytest.mark.parametrize(("name", "least"), [("latent_sparse", 10 * NEAR), ("latent_half", 1000 * NEAR)])
def test_latent_attention_at_gamma_below_one_is_the_adapter_s(name, least, asked, run, written):
    stock, ours = run("latent_stock"), run(name)
    theirs = written("adapter_run", "latent")[name][asked]
    assert ours["counters"]["density"] < 0.99
    assert max(apart(ours[asked][0], theirs)) < NEAR
    assert ours[asked][0]["tokens"][0] == theirs["token"]
    assert distance(stock[asked], ours[asked]) > least


# difference of log-probabilities from rounding, tokens in a page (no block or chunk divides 544 or 288), attention layers
MIXTURES = {
    "nemotron": (NEAR, [[544]], 2),
    "granite": (2 * NEAR, [[544]], 2),
    "gemma4": (NEAR, [[32, 128]], 4),
    # bfloat16; on CPUs that multiply it by AVX-512 or AMX, vLLM keeps states in float32
    "qwen3_next": (0.5, [[288], [544]], 2),
    "qwen3_5": (0.5, [[288], [544]], 2),
}
TIE = 2**-5  # logits from 4 to 8 that are neighbours in bfloat16


def choose_alike(one, other, tie):
    """True if two greedy answers part, if they do, where the first holds both tokens for as likely."""
    for step, mine, wanted in zip(one["logprobs"], one["tokens"], other["tokens"], strict=True):
        if mine != wanted:
            return str(wanted) in step and step[str(mine)] - step[str(wanted)] <= tie
    return True


each_mixture = pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow) for each in MIXTURES])


@each_mixture
def test_a_mixture_s_attention_is_the_stock_backend_s(name, run):
    near, pages, layers = MIXTURES[name]
    stock, ours = run(f"{name}_stock"), run(name)
    assert ours["page_sizes"] in pages
    for asked in ("chunks", "longer"):
        for one, other in zip(stock[asked], ours[asked], strict=True):
            assert choose_alike(one, other, TIE if "qwen3" in name else 0)
        assert distance(stock[asked], ours[asked]) < near
    page = ours["page_sizes"][0]
    assert [ours[asked][0]["cached"] for asked in ("chunks", "longer")] == [0, 1700 // page * page if "qwen3" in name else 0]
    assert f"{layers} of {layers} attention layers prefill sparse" in ours["log"]
    assert ours["counters"]["sparse"] > 1700 and ours["counters"]["density"] == pytest.approx(1)
    assert distance(stock["chunks"], ours["faults"]["second_page_twice"]) > 3 * near


@each_mixture
def test_a_mixture_at_gamma_below_one_is_the_adapter_s(name, run, written):
    stock, ours = run(f"{name}_stock"), run(f"{name}_half")
    theirs = written("adapter_run", name, str(ours["page_sizes"][0]))
    dense, half = (theirs[f"{name}{kind}"]["chunks"] for kind in ("_stock", "_half"))
    assert_a_mixture_s(stock["chunks"][0], ours["chunks"][0], dense, half)


def test_requests_compile_no_more_than_the_stock_backend_s(run):
    assert len({run(name)["compiled_by_requests"] for name in ("stock", "keep_all", "sparse", "half")}) == 1


def test_the_log_says_what_ran(run):
    sparse = run("sparse")
    served = [line for line in sparse["log"].splitlines() if "flexmask served" in line]
    told = sparse["counters"]
    # at the end, and every minute before
    assert f"{told['sparse']} prefill tokens sparse in {told['steps']} steps, {told['dense']} dense" in served[-1]
