"""The plug-in in vLLM on a GPU, in bfloat16, compiled and with CUDA graphs, against FLASH_ATTN and the adapter.

The bound is what the stock engine's own answers differ by when the same prompt comes in other chunks. TRITON_ATTN's do not: there
it is what the two stock engines differ by.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.vllm.agreement import SAME, differences, same_tokens, summary

pytest.importorskip("vllm", reason="needs vLLM for CUDA")
# answers of engines that ran before need no GPU here
_THERE = bool(os.environ.get("FLEXMASK_VLLM_ANSWERS"))
pytestmark = [pytest.mark.slow] if _THERE else [pytest.mark.gpu, pytest.mark.slow]
_FOLDER = Path(os.environ.get("FLEXMASK_VLLM_ANSWERS", "."))
_OVER_TWO = (_FOLDER / "two_ranks.json").exists() if _THERE else torch.cuda.device_count() > 1
over_two = pytest.mark.skipif(not _OVER_TWO, reason="needs two GPUs")
# engines that keep everything, and the stock one of the same kernel
EVERYTHING = [("keep_all", "stock"), ("graphs", "stock"), ("triton", "triton_stock")]


@pytest.fixture
def run(written):
    return lambda name: written("engine_run", name, "cuda")


@pytest.fixture
def stock(written):
    return written("engine_run", "stock", "cuda")


@pytest.fixture
def keep_all(written):
    return written("engine_run", "keep_all", "cuda")


@pytest.fixture
def adapter(written):
    return written("adapter_run", "cuda")


@pytest.fixture
def rounding(stock):
    """Differences of the stock engine's log-probabilities between two ways to cut one prompt."""
    return summary(differences(stock["chunks"], stock["rechunked"]))


def test_the_plug_in_serves(keep_all, stock):
    assert keep_all["backends"] == ["SparseFlashAttention"]
    assert stock["backends"] == ["FlashAttentionBackend"]
    assert keep_all["counters"]["sparse"] > 3001 + 1700 + 5000 + 3000


def same_but_for_rounding(stock, ours, rounding):
    agree, total = same_tokens(stock, ours)
    assert agree == total
    found = summary(differences(stock, ours))
    assert found["mean"] <= 2 * rounding["mean"]
    assert found["most"] <= 2 * rounding["most"]


def same_as_a_stock_engine(stock, other, ours, rounding):
    """Ours may side with either stock engine where two tokens are equally likely."""
    found = summary(differences(stock, other))
    rounding = {name: max(bound, found[name]) for name, bound in rounding.items()}
    sided = [
        theirs if theirs.get("tokens") == mine.get("tokens") else each
        for each, theirs, mine in zip(stock, other, ours, strict=True)
    ]
    same_but_for_rounding(sided, ours, rounding)


@pytest.mark.parametrize("asked", SAME)
@pytest.mark.parametrize(("ours", "stock_name"), EVERYTHING)
def test_gamma_one_gives_the_stock_backend_s_answers(ours, stock_name, asked, run, rounding):
    same_as_a_stock_engine(run(stock_name)[asked], run("stock")[asked], run(ours)[asked], rounding)


def test_the_option_names_the_kernel(run):
    assert run("triton")["backends"] == ["SparseTritonAttention"]
    assert run("triton")["counters"]["sparse"] == run("keep_all")["counters"]["sparse"]


# of the layers with a window, and of the others: soft cap, sinks. gpt-oss ("sinks") wants kernels for experts too
KINDS = {"windows": [(5.0, False)] * 2, "both": [(None, True), (None, False)]}


@pytest.mark.parametrize("name", KINDS)
def test_windows_soft_caps_and_sinks_are_served(name, run):
    stock, ours = run(f"{name}_stock"), run(name)
    rounding = summary(differences(stock["whole"][:1], stock["odd_chunks"]))
    for asked in ("whole", "odd_chunks"):
        same_but_for_rounding(stock[asked], ours[asked], rounding)
    roles = list(ours["roles"].values())
    assert [role["window"] for role in roles] == [200, None] * 2
    assert [(role["softcap"], role["sinks"]) for role in roles] == KINDS[name] * 2
    # all of 1,500 and 700 tokens, and of 1,500 in chunks of 333, the last of 168; vLLM's own short warm-up requests are dense
    assert ours["counters"]["sparse"] == 3700
    assert ours["counters"]["dense"] < 168


def test_a_cache_of_fp8_is_read_as_the_stock_backend_does(run):
    """Not run yet on a GPU, where the stock kernel also rounds queries and attention to FP8."""
    stock, exact, ours = (run(name)["odd_chunks"] for name in ("fp8_stock", "stock", "fp8_later"))
    rounding = summary(differences(stock, exact))
    assert summary(differences(stock, ours))["mean"] <= rounding["mean"]
    assert all(not isinstance(role, str) for role in run("fp8_later")["roles"].values())
    assert run("fp8_later")["counters"]["sparse"] > 0


@pytest.mark.parametrize("asked", ["whole", "odd_chunks"])
@pytest.mark.parametrize(("name", "backend", "sparse"), [
    # FLASH_ATTN_MLA decodes what has up to 512 rows: of the chunks of 605 two are longer
    ("latent", "SparseFlashLatentAttention", 1500 + 700 + 800 + 2 * 605),
    ("latent_triton", "SparseTritonLatentAttention", 2 * (1500 + 700) + 800),
])  # fmt: skip
def test_latent_attention_is_the_stock_backend_s(name, backend, sparse, asked, run):
    """Not run yet on a GPU."""
    stock, ours = run(f"{name}_stock"), run(name)
    same_but_for_rounding(stock[asked], ours[asked], summary(differences(stock["whole"][:3], stock["odd_chunks"])))
    assert ours["backends"] == [backend]
    assert all(not isinstance(role, str) for role in ours["roles"].values())
    assert ours["counters"]["sparse"] == sparse


@over_two
@pytest.mark.parametrize("asked", ["odd_chunks", "mixed"])
def test_two_gpus_give_the_answers_of_two_stock_ones(asked, run, rounding):
    same_as_a_stock_engine(run("stock_on_two")[asked], run("stock")[asked], run("keep_all_on_two")[asked], rounding)


@over_two
def test_two_gpus_share_heads_and_gammas(run, rounding):
    one, two = run("by_head")["whole"], run("two_ranks")["whole"]
    assert summary(differences(one, two))["mean"] <= 5 * rounding["mean"]
    assert summary(differences(one, run("sparse")["whole"]))["mean"] > 2 * summary(differences(one, two))["mean"]


@pytest.mark.parametrize("fault", ["another_page", "offset_off_by_one"])
def test_a_planted_fault_is_caught(fault, stock, keep_all, rounding):
    assert summary(differences(stock["odd_chunks"], keep_all["faults"][fault]))["mean"] > 4 * rounding["mean"]


@pytest.mark.parametrize("asked", ["whole", "chunks", "odd_chunks"])
@pytest.mark.parametrize("name", ["sparse", "graphs_sparse", "flexprefill"])
def test_sparse_prefill_is_the_adapter_s_with_the_same_chunks(name, asked, adapter, run, stock, rounding):
    ours, theirs = run(name)[asked], adapter[name.removeprefix("graphs_")][asked]
    found = summary([abs(a - b) for a, b in zip(ours[0]["prompt_logprobs"], theirs["prompt_logprobs"], strict=True)])
    # rounding changes which blocks are kept
    assert found["mean"] <= 5 * rounding["mean"]
    assert ours[0]["tokens"][0] == theirs["token"]
    # hybrid keeps more of so short a prompt
    assert summary(differences(stock[asked], ours))["mean"] > (2 if name == "flexprefill" else 1) * found["mean"]


@pytest.mark.parametrize("name", ["stock", "keep_all", "sparse", "flexprefill", "graphs", "graphs_sparse", "triton"])
def test_requests_compile_nothing(name, run):
    assert run(name)["compiled_by_requests"] == 0
