"""The plug-in in vLLM on a GPU, in bfloat16, compiled and with CUDA graphs, against the stock backends and the adapter.

`tests/vllm/bounds.py` has the bounds, which `tests/serving/test_agreement.py` applies to the committed rows.
"""

import os
from pathlib import Path

import pytest
import torch

from bench.rows import read_rows
from tests.repository import ROOT
from tests.vllm.agreement import rows
from tests.vllm.bounds import VLLM, beyond

pytest.importorskip("vllm", reason="needs vLLM for CUDA")
# answers of engines that ran before need no GPU here
_THERE = bool(os.environ.get("FLEXMASK_VLLM_ANSWERS"))
pytestmark = [pytest.mark.slow] if _THERE else [pytest.mark.gpu, pytest.mark.slow]
_FOLDER = Path(os.environ.get("FLEXMASK_VLLM_ANSWERS", "."))
_OVER_TWO = (_FOLDER / "two_ranks.json").exists() if _THERE else torch.cuda.device_count() > 1
over_two = pytest.mark.skipif(not _OVER_TWO, reason="needs two GPUs")


@pytest.fixture
def run(written):
    return lambda name: written("engine_run", name, "cuda")


def engines(run, *names):
    return {name: run(name) for name in names}


def assert_within_bounds(runs):
    found, masks = rows(runs), read_rows(ROOT / "bench/results/agreement-adapter-cpu.jsonl")
    reasons = {(row["compared"], row["asked"]): beyond(row, found, VLLM, masks) for row in found}
    assert {name: why for name, why in reasons.items() if why is not None} == {}


def test_gamma_one_gives_the_stock_backend_s_answers_and_faults_are_caught(run):
    runs = engines(run, "stock", "keep_all", "graphs", "triton_stock", "triton")
    assert_within_bounds(runs)
    assert runs["stock"]["backends"] == ["FlashAttentionBackend"]
    assert runs["keep_all"]["backends"] == ["SparseFlashAttention"]
    assert runs["triton"]["backends"] == ["SparseTritonAttention"]
    assert runs["triton"]["counters"]["sparse"] == runs["keep_all"]["counters"]["sparse"] > 3001 + 1700 + 5000 + 3000


def test_sparse_prefill_is_the_adapter_s_with_the_same_chunks(run, written):
    runs = engines(run, "stock", "sparse", "graphs_sparse", "flexprefill", "by_head")
    assert_within_bounds({**runs, "adapter": written("adapter_run", "cuda")})


# of the layers with a window, and of the others: soft cap, sinks. gpt-oss ("sinks") wants kernels for experts too
KINDS = {"windows": [(5.0, False)] * 2, "both": [(None, True), (None, False)]}


@pytest.mark.parametrize("name", KINDS)
def test_windows_soft_caps_and_sinks_are_served(name, run):
    runs = engines(run, f"{name}_stock", name)
    assert_within_bounds(runs)
    roles = list(runs[name]["roles"].values())
    assert [role["window"] for role in roles] == [200, None] * 2
    assert [(role["softcap"], role["sinks"]) for role in roles] == KINDS[name] * 2
    # all of 1,500 and 700 tokens, and of 1,500 in chunks of 333, the last of 168; vLLM's own short warm-up requests are dense
    assert runs[name]["counters"]["sparse"] == 3700
    assert runs[name]["counters"]["dense"] < 168


def test_a_cache_of_fp8_rounds_less_than_in_the_stock_backend(run):
    """The stock kernel also rounds queries and attention to FP8."""
    runs = engines(run, "stock", "fp8_stock", "fp8")
    assert_within_bounds(runs)
    assert all(not isinstance(role, str) for role in runs["fp8"]["roles"].values())
    assert runs["fp8"]["counters"]["sparse"] > 0


@pytest.mark.parametrize(("name", "backend", "sparse"), [
    # FLASH_ATTN_MLA decodes what has up to 512 rows: of the chunks of 605 two are longer
    ("latent", "SparseFlashLatentAttention", 1500 + 700 + 800 + 2 * 605),
    ("latent_triton", "SparseTritonLatentAttention", 2 * (1500 + 700) + 800),
])  # fmt: skip
def test_latent_attention_is_the_stock_backend_s(name, backend, sparse, run):
    runs = engines(run, f"{name}_stock", name)
    assert_within_bounds(runs)
    assert runs[name]["backends"] == [backend]
    assert all(not isinstance(role, str) for role in runs[name]["roles"].values())
    assert runs[name]["counters"]["sparse"] == sparse


@pytest.mark.parametrize("name", ["latent_sparse", "latent_half", "latent_triton_half"])
def test_latent_attention_at_gamma_below_one_is_the_adapter_s(name, run, written):
    runs = engines(run, "latent_stock", name)
    assert_within_bounds({**runs, "adapter_latent": written("adapter_run", "cuda", "latent")})
    assert runs[name]["counters"]["density"] < 0.99


@over_two
def test_two_gpus_give_the_answers_of_two_stock_ones_and_share_heads_and_gammas(run):
    assert_within_bounds(engines(run, "stock", "stock_on_two", "keep_all_on_two", "by_head", "two_ranks"))


@pytest.mark.parametrize("name", ["stock", "keep_all", "sparse", "flexprefill", "graphs", "graphs_sparse", "triton"])
def test_requests_compile_nothing(name, run):
    assert run(name)["compiled_by_requests"] == 0
