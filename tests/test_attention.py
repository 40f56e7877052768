"""sparse_attention is dense attention under its mask; sinks, and keys that no row sees, on every path, with gradients."""

import sys

import pytest
import torch

from flexmask import sparse_attention
from flexmask.base.inputs import attention_inputs
from flexmask.base.selection import block_lists
from flexmask.block_masks import causal_mask
from flexmask.flex.backend import has_flash_package
from flexmask.flex.block_mask import block_mask_from_lists
from flexmask.flex.run import with_sinks
from tests.attention_calls import CPP_ERROR, SINKS, VARIANTS, assert_same_gradients, call, check, flexprefill_attention, padding
from tests.comparisons import assert_same_attention
from tests.expected import expanded, visible_pairs


@pytest.mark.attention
@pytest.mark.parametrize("name", [pytest.param(name, marks=CPP_ERROR if "padded chunk" in name else ()) for name in VARIANTS])
def test_is_dense_attention_under_the_mask(name):
    check(call(**VARIANTS[name]))


def test_log_sum_exp_is_refused_on_cpus():
    with pytest.raises(NotImplementedError, match="return_lse is not supported on CPUs"):
        call().attend(return_lse=True)


@pytest.mark.attention
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_gradients_are_refused_on_cpus(which):
    case = call()
    tensors = [case.query, case.key, case.value, SINKS]
    tensors[which] = tensors[which].clone().requires_grad_()
    *inputs, sinks = tensors
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        sparse_attention(*inputs, **case.config.call, dense_below=0, sinks=sinks)
    with torch.no_grad():
        out = sparse_attention(*inputs, **case.config.call, dense_below=0, sinks=sinks)
    assert torch.equal(out, case.attend(sinks=SINKS))
    assert torch.equal(out, case.attend(sinks=torch.stack([SINKS, -SINKS], 1)[:, 0]))


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


def test_the_recommended_method_is_the_default(without_kernel):
    tensors = [torch.randn(2, heads, 100, 32) for heads in (4, 2, 2)]
    options = {"block_size": 16, "dense_below": 0, "return_stats": True}
    (_, default), (_, named) = (sparse_attention(*tensors, *method, **options) for method in ((), ("hybrid",)))
    # a statistic of hybrid's alone
    assert torch.equal(default.row_coverage, named.row_coverage) and not default.row_coverage.isnan().any()


@pytest.mark.parametrize("gradients", [False, True])
def test_sinks_round_a_half_precision_output_once(gradients):
    out = torch.randn(1, 4, 63, 32).bfloat16()
    lse = torch.randn(1, 4, 63)
    exact = out.double() * torch.sigmoid(lse.double() - SINKS.double()[:, None])[..., None]
    with torch.set_grad_enabled(gradients):
        scaled = with_sinks(out.clone(), lse, SINKS)
    assert scaled.dtype == torch.bfloat16
    # half a unit in the last place
    torch.testing.assert_close(scaled.double(), exact, rtol=2**-8, atol=0)


WITH_SINKS = ["groups", "chunk inside a block"]
WITH_SINKS_AND_PADDING = ["everything", "bfloat16, padded chunk"]
SINKS_BY_DEVICE = [
    *(pytest.param(name, "cpu", marks=[] if name == "groups" else pytest.mark.slow) for name in WITH_SINKS),
    *(pytest.param(name, "cpu", marks=CPP_ERROR) for name in WITH_SINKS_AND_PADDING),
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in WITH_SINKS + WITH_SINKS_AND_PADDING),
]


@pytest.mark.attention
@pytest.mark.parametrize(("name", "device"), SINKS_BY_DEVICE)
def test_sinks_are_one_more_logit(name, device):
    case = call(**VARIANTS[name])
    keep = case.to(device).select().keep
    out, stats = case.attend(device, sinks=SINKS.to(device), return_stats=True)
    assert (stats.density < 1).any()
    assert_same_attention(out, case.under(keep, SINKS)[0])
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, case.under(keep)[0])


INPUTS = ("query", "key", "value")
wanted = pytest.mark.parametrize("wanted", [(*INPUTS, "sinks"), ("sinks",), INPUTS], ids=["of all", "of sinks", "without sinks"])


@wanted
@pytest.mark.parametrize("name", ["groups", "everything"])
def test_gradients_of_the_dense_path_and_of_sinks(name, wanted):
    case, sinks = call(**VARIANTS[name]), SINKS if "sinks" in wanted else None
    assert_same_gradients(case, torch.ones_like(case.select().keep), wanted, sinks=sinks, dense_below=1000)


@pytest.mark.attention
@pytest.mark.gpu
@wanted
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_gradients_of_the_sparse_kernel_and_of_sinks(cuda, wanted, padded):
    mask, sinks = padding(600, ("left", 90)) if padded else None, SINKS if "sinks" in wanted else None
    case = call(q_len=600, block_size=64, head_dims=(64, 64), attention_mask=mask)
    assert_same_gradients(case, case.to(cuda).select().keep, wanted, cuda, sinks, dense_below=0, backend="triton")


NAN = float("nan")
PROBLEMS = {
    "behind a chunk": {"q_len": 100, "kv_len": 200, "q_offset": torch.tensor([70, 3]), "batch": 2},
    "behind a chunk, one row": {"q_len": 100, "kv_len": 200, "q_offset": torch.tensor(70)},
    "behind a chunk, an int": {"q_len": 100, "kv_len": 200, "q_offset": 41},
    "padding": {"q_len": 200, "attention_mask": padding(200, ("left", 70), ("holes", 7)), "batch": 2},
    "one row": {"q_len": 1, "kv_len": 200, "q_offset": torch.tensor(70)},
    "one row, padding": {"q_len": 1, "kv_len": 200, "attention_mask": padding(200, ("left", 70))},
}
SCORES = {
    "SDPA": {}, "window": {"window": 50}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": SINKS},
    "log-sum-exp": {"return_lse": True},
}  # fmt: skip
SPARSE = [*((name, {}) for name in ("behind a chunk", "behind a chunk, one row", "padding")), ("padding", {"sinks": SINKS})]


def spoiled(case):
    """Key and value with NaN wherever no row can see."""
    absent = ~visible_pairs(case).any(1)[:, None, :, None]
    assert absent.any()
    return case.key.masked_fill(absent, NAN), case.value.masked_fill(absent, NAN)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_dense_attention_does_not_see_absent_keys(problem, scores):
    case = call(**problem)
    key, value = spoiled(case)
    arguments = {**case.keywords(), **scores}
    clean = flexprefill_attention(case.query, case.key, case.value, **arguments)
    found = flexprefill_attention(case.query, key, value, **arguments)
    torch.testing.assert_close(found, clean, atol=1e-6, rtol=1e-6)


@pytest.mark.attention
@CPP_ERROR
@pytest.mark.parametrize(("name", "scores"), SPARSE)
def test_sparse_attention_does_not_see_absent_keys(name, scores):
    case = call(**PROBLEMS[name])
    clean = case.attend(**scores)
    case.key, case.value = spoiled(case)
    assert torch.equal(case.attend(**scores), clean)


def without_rows(case):
    """Queries with NaN wherever a row sees nothing."""
    padded = ~visible_pairs(case).any(-1)[:, None, :, None]
    assert padded.any()
    return case.query.masked_fill(padded, NAN)


def assert_gradients_do_not_see_absent_tokens(case, device="cpu", **keywords):
    gradients = []
    for inputs in ((case.query, case.key, case.value), (without_rows(case), *spoiled(case))):
        tensors = [x.to(device, copy=True).requires_grad_() for x in inputs]
        sparse_attention(*tensors, **case.config.call, **case.to(device).keywords(), **keywords).square().sum().backward()
        gradients.append([x.grad for x in tensors])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scores", list(SCORES.values())[:-1], ids=list(SCORES)[:-1])
def test_gradients_of_dense_attention_do_not_see_absent_tokens(scores):
    assert_gradients_do_not_see_absent_tokens(call(**PROBLEMS["padding"]), **scores)


def test_prepared_inputs_with_gradients_hold_no_nan_of_absent_tokens():
    case = call(**PROBLEMS["padding"])
    tensors = [x.requires_grad_() for x in (without_rows(case), *spoiled(case))]
    ready = attention_inputs(*tensors, attention_mask=case.attention_mask).for_attention()
    assert not any(x.isnan().any() for x in (ready.query, ready.key, ready.value))
    valid = case.attention_mask.bool()[:, None, :, None].expand_as(case.query)
    assert torch.equal(ready.query[valid], case.query[valid])


@pytest.mark.attention
@pytest.mark.gpu
def test_gradients_of_the_sparse_kernel_do_not_see_absent_tokens(cuda):
    case = call(q_len=600, block_size=64, head_dims=(64, 64), attention_mask=padding(600, ("left", 90)))
    assert_gradients_do_not_see_absent_tokens(case, cuda, dense_below=0, backend="triton")


# each score, of a row and a key, that is NaN or infinite: a row, its first element, a KV head, a single key, the last key
FAULTS = {
    "row": ("query", (0, 1, 70), NAN), "first row": ("query", (0, 1, 0), NAN), "KV head": ("key", (0, 1), NAN),
    "key": ("key", (0, 1, 75), NAN), "last key": ("key", (0, 0, -1), NAN), "number": ("key", (0, 0, 40, 3), NAN),
    "infinity": ("key", (0, 0, 40, 3), torch.inf),
}  # fmt: skip


@pytest.mark.attention
@pytest.mark.parametrize("scores", [{}, pytest.param({"sinks": SINKS}, marks=pytest.mark.slow)], ids=["plain", "sinks"])
@pytest.mark.parametrize("length", [128, 140])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_exactly_the_rows_that_see_a_nan_score_are_nan(fault, length, scores):
    name, place, number = fault
    case = call(length, block_size=32, gamma=0.5)
    clean, keep = case.attend(**scores), case.select().keep
    getattr(case, name)[place] = number
    kernel = {"method": keeping(keep), "block_size": 32, "dense_below": 0}
    with torch.no_grad():
        out = sparse_attention(case.query, case.key, case.value, **kernel, **scores)
    key = case.key.repeat_interleave(2, 1)
    pairs = case.query.double() @ key.double().mT
    spoiled_rows = ((pairs.isnan() | (pairs == torch.inf)) & expanded(keep, case)).any(-1)
    assert spoiled_rows.any() and not spoiled_rows.all()
    assert torch.equal(out.isnan().all(-1), spoiled_rows) and torch.equal(out.isnan().any(-1), spoiled_rows)
    if number != torch.inf:
        torch.testing.assert_close(out[~spoiled_rows], clean[~spoiled_rows], atol=1e-6, rtol=1e-6)


def keeping(keep):
    """A function of query and key that keeps these blocks."""

    def kept(query, key, *, block_size, **given):
        lists = block_lists(keep, torch.zeros_like(keep[:, 0]))
        lengths = (query.shape[2], key.shape[2])
        return block_mask_from_lists(lists, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, block_size, lengths)

    return kept


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_offset_of_any_integer_dtype_is_clamped(dtype, shape):
    query, key = torch.randn(1, 4, 40, 32), torch.randn(1, 2, 400, 32)
    for place in (7, 100):
        offsets = (place, torch.full(shape, place, dtype=dtype))
        assert torch.equal(*(causal_mask(query, key, q_offset=offset, block_size=16).to_dense() for offset in offsets))
    assert attention_inputs(query, key, q_offset=torch.tensor(250).to(torch.uint8)).offset.tolist() == [250]
    assert attention_inputs(query, key[:, :, :50], q_offset=torch.full(shape, 120, dtype=dtype)).offset.tolist() == [10]
