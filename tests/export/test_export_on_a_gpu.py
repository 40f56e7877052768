"""Exported masks in FlashInfer's and flash-attn-4's own kernels, against dense attention in float64."""

import pytest
import torch

from bench.speed import export_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def outcomes(kernel, head_dim):
    return {row["what"]: str(row["value"]) for row in export_kernels.checks([kernel], [head_dim])}


def assert_right_and_caught(found, kernel):
    assert found[kernel].startswith("right"), found
    planted = {name: outcome for name, outcome in found.items() if name != kernel}
    assert len(planted) == 2 and all(outcome.startswith("caught") for outcome in planted.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fa3", "fa2"])
def test_flashinfer_computes_the_kept_pairs(backend):
    pytest.importorskip("flashinfer")
    assert_right_and_caught(outcomes(f"flashinfer-{backend}", 128), f"flashinfer-{backend}")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_flash_attn_computes_the_kept_pairs(head_dim):
    pytest.importorskip("flash_attn.cute")
    assert_right_and_caught(outcomes("flash-attn-4", head_dim), "flash-attn-4")
