"""The plug-in in vLLM on a GPU, in bfloat16, compiled and with CUDA graphs, against the stock backends and the adapter.

`tests/vllm/bounds.py` has the bounds, which `tests/serving/test_agreement.py` applies to the committed rows.
"""

import pytest
import torch

from bench.rows import read_rows
from tests.repository import ROOT
from tests.serving.engine_tests import assert_a_mixture_s
from tests.vllm.agreement import differences, rows, summary
from tests.vllm.bounds import VLLM, beyond
from tests.vllm.engines import MIXTURES

pytest.importorskip("vllm", reason="needs vLLM for CUDA")
pytestmark = [pytest.mark.gpu, pytest.mark.slow]
over_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def run(written):
    return lambda name: written("engine_run", name, "cuda")


@pytest.mark.parametrize(
    ("names", "adapter"),
    [
        (("stock", "keep_all", "graphs", "triton_stock", "triton"), ()),  # and planted faults
        (("stock", "sparse", "graphs_sparse", "flexprefill", "by_head"), ("cuda",)),
        *(((f"{name}_stock", name), ()) for name in ("windows", "both", "latent", "latent_triton")),
        (("stock", "fp8_stock", "fp8"), ()),
        *((("latent_stock", name), ("cuda", "latent")) for name in ("latent_sparse", "latent_half", "latent_triton_half")),
        pytest.param(("stock", "stock_on_two", "keep_all_on_two", "by_head", "two_ranks"), (), marks=over_two),
    ],
)
def test_answers_are_those_of_the_stock_backend_or_the_adapter(names, adapter, run, written):
    found = rows({name: run(name) for name in names} | ({"adapter": written("adapter_run", *adapter)} if adapter else {}))
    masks = read_rows(ROOT / "bench/results/agreement-adapter-cpu.jsonl")
    reasons = {(row["compared"], row["asked"]): beyond(row, found, VLLM, masks) for row in found}
    assert {name: why for name, why in reasons.items() if why is not None} == {}


@pytest.mark.parametrize(
    ("name", "backend", "sparse"),
    [
        ("stock", "FlashAttentionBackend", 0),
        ("keep_all", "SparseFlashAttention", None),
        ("triton", "SparseTritonAttention", None),
        # all of 1,500 and 700 tokens, and of 1,500 in chunks of 333
        ("windows", "SparseFlashAttention", 3700),
        ("both", "SparseFlashAttention", 3700),
        ("fp8", "SparseFlashAttention", None),
        # FLASH_ATTN_MLA decodes what has up to 512 rows: of the chunks of 605 two are longer
        ("latent", "SparseFlashLatentAttention", 1500 + 700 + 800 + 2 * 605),
        ("latent_triton", "SparseTritonLatentAttention", 2 * (1500 + 700) + 800),
    ],
)
def test_every_layer_and_long_prompt_is_served(name, backend, sparse, run):
    found = run(name)
    assert found["backends"] == [backend]
    counted = found["counters"]["sparse"]
    assert counted > 0 if sparse is None else counted == sparse
    assert sparse == 0 or not any(isinstance(role, str) for role in found["roles"].values())


# of the layers with a window, and of the others: soft cap, sinks. gpt-oss ("sinks") wants kernels for experts too
@pytest.mark.parametrize(("name", "kinds"), [("windows", [(5.0, False)] * 2), ("both", [(None, True), (None, False)])])
def test_windows_soft_caps_and_sinks_are_served(name, kinds, run):
    found = run(name)
    assert [role["window"] for role in found["roles"].values()] == [200, None] * 2
    assert [(role["softcap"], role["sinks"]) for role in found["roles"].values()] == kinds * 2
    # the last chunk has 168 rows; vLLM's own short warm-up requests are dense
    assert found["counters"]["dense"] < 168


@pytest.mark.parametrize("name", ["stock", "keep_all", "sparse", "flexprefill", "graphs", "graphs_sparse", "triton"])
def test_requests_compile_nothing(name, run):
    assert run(name)["compiled_by_requests"] == 0


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_s_attention_is_the_stock_backend_s_or_the_adapter_s(name, run, written):
    """By a command: ``python -m tests.vllm.engine_run qwen3_next cuda OUT``."""
    stock, ours, half = (run(f"{name}{kind}") for kind in ("_stock", "", "_half"))

    def mean(asked, answers):
        return summary(differences(stock[asked], answers))["mean"]

    for asked in ("chunks", "longer"):
        assert mean(asked, ours[asked]) < mean(asked, half[asked]) / 3
    assert 1.5 * mean("chunks", ours["chunks"]) < mean("chunks", ours["faults"]["second_page_twice"])
    assert ours["counters"]["sparse"] > 1700
    # in bfloat16 the programs of vLLM and transformers differ by more in the others: Gemma 4 by 0.15, Granite by 0.55, both dense
    if name in ("qwen3_next", "qwen3_5"):
        theirs = written("adapter_run", name, "cuda", str(half["page_sizes"][0]))
        assert_a_mixture_s(
            stock["chunks"][0], half["chunks"][0], *(theirs[f"{name}{kind}"]["chunks"] for kind in ("_stock", "_half"))
        )


@over_two
def test_a_stock_server_decodes_from_pages_that_nixl_moves(written):
    """By a command: ``python -m tests.vllm.nixl_run cuda OUT``. In bfloat16 the planted fault is no larger than rounding."""
    pytest.importorskip("nixl")
    found = written("nixl_run", "cuda")

    def mean(one, other):
        return summary(differences(found[one], found[other]))["mean"]

    assert mean("handed", "prefills") < mean("stock", "prefills") / 3
    assert mean("handed_at_one", "stock") < mean("handed", "stock") / 3
