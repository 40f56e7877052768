"""sparse_attention against dense attention under its mask, through the compiled kernel; every method."""

import sys

import pytest
import torch

from flexmask import METHODS, sparse_attention
from flexmask.attention import RECOMMENDED
from flexmask.flex.backend import has_flash_package
from tests.attention_calls import CPP_ERROR, SINKS, VARIANTS, call, check


@pytest.mark.attention
@pytest.mark.parametrize("name", [pytest.param(name, marks=CPP_ERROR if "padded chunk" in name else ()) for name in VARIANTS])
def test_is_dense_attention_under_the_mask(name):
    check(call(**VARIANTS[name]))


@pytest.mark.attention
def test_nan_in_one_head_stays_there():
    clean, spoiled = call(), call()
    before = clean.attend()
    spoiled.query[0, 1, 290] = float("nan")
    after = spoiled.attend()
    others = [0, 2, 3]
    assert torch.equal(after[:, others], before[:, others])
    spoiled = call()
    spoiled.key[0, 1, 200] = float("inf")
    assert torch.equal(spoiled.attend()[:, :2], before[:, :2])


def test_log_sum_exp_is_refused_on_cpus():
    with pytest.raises(NotImplementedError, match="return_lse is not there on CPUs"):
        call().attend(return_lse=True)


@pytest.mark.attention
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_gradients_are_refused_on_cpus(which):
    it = call()
    tensors = [it.query, it.key, it.value, SINKS]
    tensors[which] = tensors[which].clone().requires_grad_()
    *inputs, sinks = tensors
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        sparse_attention(*inputs, **it.config.call, dense_below=0, sinks=sinks)
    with torch.no_grad():
        out = sparse_attention(*inputs, **it.config.call, dense_below=0, sinks=sinks)
    assert torch.equal(out, it.attend(sinks=SINKS))


@pytest.mark.parametrize("name", ["block_sparsity.py", "interface.py"])
def test_flash_attention_2_is_not_taken_for_4(tmp_path, monkeypatch, name):
    """Both have a package ``flash_attn.cute``; neither is imported."""
    folder = tmp_path / "flash_attn"
    (folder / "cute").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('this package was imported')")
    (folder / "cute" / name).touch()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.syspath_prepend(tmp_path)
    assert has_flash_package() == (name == "block_sparsity.py")


QUERY, KEY, VALUE = (torch.randn(2, heads, 100, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))


def test_the_recommended_method_is_the_default(without_kernel):
    options = {"block_size": 16, "dense_below": 0, "return_stats": True}
    _, default = sparse_attention(QUERY, KEY, VALUE, **options)
    _, named = sparse_attention(QUERY, KEY, VALUE, RECOMMENDED, **options)
    assert RECOMMENDED == "hybrid" in METHODS and torch.equal(default.density, named.density)
    assert not default.row_coverage.isnan().any()
