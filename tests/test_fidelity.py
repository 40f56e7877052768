"""bench/fidelity: the sparse model, and each benchmark end to end on small models."""

import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("transformers")

import pandas as pd

from bench.fidelity import retrieval
from bench.fidelity.settings import Setting
from bench.fidelity.sparse_model import SparseModel

WINDOW = Setting("streaming_llm", {"sink_blocks": 1, "window_blocks": 1})
IDS = torch.randint(97, (600,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return SparseModel(LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, **shape)).eval())


def test_the_model_attends_to_what_the_method_keeps(model):
    ids = IDS[:512]
    dense = model.log_probs(ids)
    with model.attending(Setting("causal", {})):
        torch.testing.assert_close(model.log_probs(ids), dense, atol=1e-4, rtol=0)
    assert model.density() == 1
    with model.attending(WINDOW):
        near = model.log_probs(ids)
    # its own block and the first
    assert (model.density(), model.density(2, 3), model.density(2)) == pytest.approx((0.7, 2 / 3, 4 / 7))
    torch.testing.assert_close(near[:255], dense[:255], atol=1e-4, rtol=0)
    assert (near[256:] - dense[256:]).abs().max() > 1e-3
    with model.attending(Setting("streaming_llm", {**WINDOW.options, "block_size": 64, "layers": {"1": {"window_blocks": 8}}})):
        model.log_probs(ids)
    assert model.density() == pytest.approx((15 / 36 + 1) / 2)  # the second layer sees everything


def test_needles_are_asked_of_the_retriever(tmp_path):
    out = tmp_path / "out.csv"
    command = ["needles", "--out", str(out), "--tasks", "needle-1", "--lengths", "1024", "--prompts", "2", "--methods"]
    retrieval.main([*command, "hybrid", "--options", '{"gamma": 0.9}'])
    retrieval.main([*command, "streaming_llm", "--options", '{"sink_blocks": 1, "window_blocks": 1}'])
    rows = pd.read_csv(out)
    found = [tuple(row) for row in rows[["method", "right", "n"]].values.tolist()]
    assert found == [("dense", 2, 2), ("hybrid", 2, 2), ("streaming_llm", 0, 2)]
    assert rows["density"].tolist()[2] == pytest.approx(15 / 36, abs=1e-5) and rows["density"][0] == 1
