"""flexprefill_attention against dense attention under the expanded mask, always through the compiled kernel."""

import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from flexmask import FlexPrefillConfig, FlexPrefillStats, dense, flexprefill_attention, flexprefill_mask
from flexmask._torch import CPU_TAKES_UNBACKED_SIZES
from flexmask.backends import flash_available, flash_installed
from tests.helpers import (
    Case,
    assert_same_attention,
    expanded,
    masked_attention,
    structured_inputs,
    visible_pairs,
)


@dataclass
class Call:
    """A case with a value."""

    case: Case
    value: torch.Tensor

    def attend(self, device="cpu", **keywords):
        """Output (and what else is asked for) of the sparse path."""
        case, value = self.case.to(device), self.value.to(device)
        keywords = {"config": case.config, "dense_below": 0, **case.keywords(), **keywords}
        with torch.no_grad():
            return flexprefill_attention(case.query, case.key, value, **keywords)

    def under(self, keep):
        """Dense attention under a block map, and its log-sum-exp."""
        case, scores = self.case, self.case.scores
        mask = expanded(keep, case)
        return masked_attention(case.query, case.key, self.value, mask, scores.get("scale"), scores.get("softcap"))


def call(
    q_len=300,
    kv_len=None,
    heads=(4, 2),
    head_dims=(32, 32),
    block_size=16,
    dtype=torch.float32,
    batch=1,
    attention_mask=None,
    q_offset=None,
    scores=None,
    seed=0,
    **options,
):
    generator = torch.Generator().manual_seed(seed)
    kv_len = kv_len or q_len
    query, key = structured_inputs(generator, batch, *heads, q_len, kv_len, head_dims[0])
    value = torch.randn(batch, heads[1], kv_len, head_dims[1], generator=generator)
    config = FlexPrefillConfig(**{"gamma": 0.5, "tau": 0.1, "min_budget": 0, "block_size": block_size, **options})
    case = Case(query.to(dtype), key.to(dtype), config, scores or {}, attention_mask, q_offset)
    return Call(case, value.to(dtype))


def padding(kv_len, *kinds):
    """One row per kind: ("left", 30), ("right", 30), ("holes", 7) or ("all", 0)."""
    slot = torch.arange(kv_len)
    rows = {
        "left": lambda n: slot >= n,
        "right": lambda n: slot < kv_len - n,
        "holes": lambda n: slot % n != 3,
        "all": lambda n: slot < 0,
    }
    return torch.stack([rows[kind](n) for kind, n in kinds]).long()


VARIANTS = {
    "groups": {},
    "one head each": {"heads": (2, 2), "head_dims": (16, 16), "q_len": 129},
    "multi-query, left padding": {"heads": (3, 1), "batch": 2, "attention_mask": padding(300, ("left", 70), ("left", 5))},
    "chunk inside a block": {"q_len": 150, "kv_len": 333, "block_size": 32},
    "ragged 1000": {"q_len": 1000, "block_size": 64, "head_dims": (64, 64)},
    "value wider": {"head_dims": (16, 80), "block_size": 48},
    "value narrower": {"head_dims": (256, 16), "q_len": 600, "block_size": 128},
    "window": {"scores": {"window": 90}},
    "shared by union": {"heads": (4, 1), "q_len": 129, "share_kv_heads": "union"},
    "shared by mean, window": {"heads": (6, 2), "q_len": 200, "scores": {"window": 90}, "share_kv_heads": "mean"},
    "softcap": {"scores": {"softcap": 3.0}},
    "scale": {"scores": {"scale": 0.4}, "query_aware": "per_query", "tau": 0.5},
    "everything": {
        "q_len": 170,
        "kv_len": 280,
        "batch": 3,
        "attention_mask": padding(280, ("holes", 7), ("all", 0), ("right", 100)),
        "q_offset": torch.tensor([100, 7, 0]),
        "scores": {"window": 120, "softcap": 5.0, "scale": 0.3},
        "min_budget": 16,
    },
    "bfloat16": {"dtype": torch.bfloat16, "q_len": 640, "head_dims": (128, 128), "block_size": 64},
    "bfloat16, padded chunk": {
        "dtype": torch.bfloat16,
        "q_len": 200,
        "kv_len": 520,
        "block_size": 32,
        "attention_mask": padding(520, ("left", 90)),
    },
    "float16": {"dtype": torch.float16, "q_len": 2000, "gamma": 0.3, "block_size": 256, "heads": (2, 1), "head_dims": (80, 80)},
}


def check(call, device="cpu", **keywords):
    """The compiled kernel against dense attention under the mask; a mask that keeps more must not pass."""
    out, stats = call.attend(device, return_stats=True, **keywords)
    keep = call.case.to(device).search().keep
    query, value = call.case.query, call.value
    assert out.dtype == query.dtype
    assert out.shape == (*query.shape[:3], value.shape[3])
    assert stats.dense is False
    assert_same_attention(out, call.under(keep)[0])
    assert (stats.density < 1).any()
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, call.under(torch.ones_like(keep))[0])
    padded = ~visible_pairs(call.case).any(-1)
    assert not out.cpu().transpose(1, 2)[padded].any()
    return out, keep


# not strict: it fails after other variants only, when torch has seen other lengths
CPP_ERROR = pytest.mark.xfail(not CPU_TAKES_UNBACKED_SIZES, reason="this torch writes C++ that does not compile", strict=False)


@pytest.mark.attention
@pytest.mark.parametrize("name", [pytest.param(x, marks=CPP_ERROR) if "padded chunk" in x else x for x in VARIANTS])
def test_is_dense_attention_under_the_mask(name):
    check(call(**VARIANTS[name]))


@pytest.mark.attention
def test_is_dense_attention_at_gamma_one():
    whole = call()
    query, key, value = whole.case.query, whole.case.key, whole.value
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out = whole.attend(config=FlexPrefillConfig(gamma=1.0, block_size=16, min_budget=0))
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.attention
def test_published_selection_runs_too():
    check(call(q_len=304, selection="reference", tau=0.3, min_budget=16))


@pytest.mark.attention
def test_other_lengths_and_masks_of_a_variant_are_right_as_well():
    for length in (300, 129, 63, 257):
        for seed in (1, 2):
            other = call(q_len=length, seed=seed)
            assert_same_attention(other.attend(), other.under(other.case.search().keep)[0])


@pytest.mark.attention
def test_nan_in_one_head_stays_there():
    clean, spoiled = call(), call()
    before = clean.attend()
    spoiled.case.query[0, 1, 290] = float("nan")
    after = spoiled.attend()
    others = [0, 2, 3]
    assert torch.equal(after[:, others], before[:, others])
    spoiled = call()
    spoiled.case.key[0, 1, 200] = float("inf")
    assert torch.equal(spoiled.attend()[:, :2], before[:, :2])


def own_flex_attention(query, key, value, block_mask):
    return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)


@pytest.mark.attention
@pytest.mark.parametrize("name", ["groups", "bfloat16, padded chunk"])
def test_the_mask_gives_users_the_same_with_and_without_compilation(name):
    it = call(**VARIANTS[name])
    mask = flexprefill_mask(it.case.query, it.case.key, config=it.case.config, **it.case.keywords())
    compiled = torch.compile(own_flex_attention, fullgraph=True)
    with torch.no_grad():
        out = compiled(it.case.query, it.case.key, it.value, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it was called without compilation
        plain = own_flex_attention(it.case.query, it.case.key, it.value, mask)
    expected, _ = it.under(it.case.search().keep)
    assert_same_attention(out, expected)
    assert_same_attention(plain, expected)


# Sinks


def under_with_sinks(it, keep, sinks):
    """Dense attention under a block map with one more logit per head, as a last key of no value, in float64."""
    case, scores = it.case, it.case.scores
    groups = case.query.shape[1] // case.key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (case.key, it.value))
    logits = case.query.double() @ key.mT * scores.get("scale", case.query.shape[-1] ** -0.5)
    if "softcap" in scores:
        logits = scores["softcap"] * torch.tanh(logits / scores["softcap"])
    logits = logits.masked_fill(~expanded(keep, case), float("-inf"))
    sink = sinks.double()[:, None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ value


SINKS = torch.tensor([-2.0, 0.5, 3.0, 6.0])
WITH_SINKS = ["groups", "chunk inside a block", "window", "softcap"]
WITH_SINKS_AND_PADDING = ["everything", "bfloat16, padded chunk"]
SINKS_BY_DEVICE = [
    *((name, "cpu") for name in WITH_SINKS),
    *(pytest.param(name, "cpu", marks=CPP_ERROR) for name in WITH_SINKS_AND_PADDING),
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in WITH_SINKS + WITH_SINKS_AND_PADDING),
]


@pytest.mark.attention
@pytest.mark.parametrize(("name", "device"), SINKS_BY_DEVICE)
def test_sinks_are_one_more_logit(name, device):
    it = call(**VARIANTS[name])
    keep = it.case.to(device).search().keep
    out, stats = it.attend(device, sinks=SINKS.to(device), return_stats=True)
    assert (stats.density < 1).any()
    assert_same_attention(out, under_with_sinks(it, keep, SINKS))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, it.under(keep)[0])


@pytest.mark.attention
@CPP_ERROR
def test_sinks_go_with_their_heads_through_head_groups():
    it = call(**VARIANTS["everything"])
    expected = it.attend(sinks=SINKS)
    torch.testing.assert_close(it.attend(sinks=SINKS, max_mask_bytes=1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 170])
def test_dense_path_has_sinks(rows):
    it = call(**VARIANTS["everything"])
    it.case.query = it.case.query[:, :, :rows]
    keep = torch.ones(3, 4, -(-rows // 16), 18, dtype=torch.bool)
    assert_same_attention(it.attend(sinks=SINKS, dense_below=1000), under_with_sinks(it, keep, SINKS))


@pytest.mark.parametrize(
    ("sinks", "error"),
    [
        (torch.zeros(3), ValueError),
        (torch.zeros(2, 4), ValueError),
        (torch.zeros(4, dtype=torch.int64), TypeError),
        (torch.zeros(4, device="meta"), ValueError),
        ([0.0] * 4, TypeError),
    ],
)
def test_refuses_sinks_that_are_not_one_a_head(sinks, error):
    with pytest.raises(error, match="sinks must be"):
        call().attend(sinks=sinks)


# The dense path


@pytest.mark.parametrize(
    "keywords",
    [
        {"q_len": 100},
        {"q_len": 60, "kv_len": 100},
        {"q_len": 60, "kv_len": 100, "q_offset": 13},
        {"q_len": 100, "attention_mask": padding(100, ("left", 30), ("all", 0)), "batch": 2},
        {"q_len": 100, "scores": {"window": 17, "scale": 0.4}},
        {"q_len": 100, "scores": {"softcap": 2.0}},
        {"q_len": 60, "kv_len": 100, "scores": {"softcap": 2.0, "window": 9}, "attention_mask": padding(100, ("holes", 5))},
        {"q_len": 100, "heads": (3, 1), "head_dims": (32, 80), "dtype": torch.bfloat16},
        {"q_len": 1, "kv_len": 100},
        {"q_len": 1, "kv_len": 100, "scores": {"softcap": 2.0}, "q_offset": torch.tensor(40)},
        {"q_len": 1, "kv_len": 100, "attention_mask": padding(100, ("left", 30), ("right", 3)), "batch": 2},
    ],
)
def test_short_prompts_and_single_rows_run_dense(keywords):
    it = call(**keywords)
    decodes = keywords["q_len"] == 1
    below = {} if decodes else {"dense_below": 101}
    expected, lse = it.under(torch.ones_like(it.case.search().keep))
    out, stats = it.attend(return_stats=True, **below)
    assert stats.dense is True
    assert (stats.density == 1).all()
    assert (stats.coverage == 1).all()
    assert stats.js_distance.isnan().all()
    assert not stats.is_query_aware.any()
    assert out.dtype == it.case.query.dtype
    assert_same_attention(out, expected)
    # the log-sum-exp is there on every device
    again, got, more = it.attend(return_lse=True, return_stats=True, **below)
    assert isinstance(more, FlexPrefillStats)
    assert_same_attention(again, expected)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keywords", [{"return_lse": True}, {"return_stats": True}], ids=["written out", "SDPA"])
def test_dense_in_parts_is_dense_in_one(monkeypatch, keywords):
    scores = {"window": 40} if "return_stats" in keywords else {"softcap": 2.0, "window": 40}
    it = call(q_len=70, kv_len=100, scores=scores, attention_mask=padding(100, ("left", 50)))
    whole = it.attend(dense_below=101, **keywords)
    calls = []
    monkeypatch.setattr(dense, "_MOST_SCORES", it.case.query.shape[1] * 100 * 13)  # 13 rows at a time
    monkeypatch.setattr(dense, "_MOST_VISIBLE", 100 * 13)
    monkeypatch.setattr(
        dense, "attention_to_visible", lambda *args, run=dense.attention_to_visible: calls.append(1) or run(*args)
    )
    parts = it.attend(dense_below=101, **keywords)
    assert len(calls) == 6
    torch.testing.assert_close(parts[0], whole[0], atol=1e-6, rtol=0)
    if "return_lse" in keywords:
        torch.testing.assert_close(parts[1], whole[1], atol=1e-6, rtol=0)


@pytest.mark.attention
def test_dense_below_is_a_length_in_tokens():
    it = call(q_len=129, heads=(2, 2), head_dims=(16, 16))
    for dense_below, ran_dense in ((130, True), (129, False), (0, False)):
        assert it.attend(dense_below=dense_below, return_stats=True)[1].dense is ran_dense
    # a measured break-even by default, far above this length
    assert it.attend(dense_below=None, return_stats=True)[1].dense is True


@pytest.mark.parametrize("dense_below", [-1, 0.5, True])
def test_refuses_a_dense_below_that_is_no_length(dense_below):
    with pytest.raises((TypeError, ValueError), match="dense_below"):
        call().attend(dense_below=dense_below)


def test_gradients_flow_through_the_dense_path():
    it = call(q_len=50, scores={"softcap": 2.0}, attention_mask=padding(50, ("left", 10)))
    tensors = [x.clone().requires_grad_() for x in (it.case.query, it.case.key, it.value)]
    out = flexprefill_attention(*tensors, config=it.case.config, dense_below=64, **it.case.keywords())
    out.square().sum().backward()
    exact = [x.detach().clone().double().requires_grad_() for x in tensors]
    masked_attention(*exact, visible_pairs(it.case)[:, None], softcap=2.0)[0].square().sum().backward()
    for got, wanted in zip(tensors, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, atol=1e-4, rtol=1e-4)


# What a CPU does not have


def test_log_sum_exp_is_refused_on_cpus():
    with pytest.raises(NotImplementedError, match="return_lse"):
        call().attend(return_lse=True)


@pytest.mark.attention
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_gradients_are_refused_on_cpus(which):
    it = call()
    tensors = [it.case.query, it.case.key, it.value, SINKS]
    tensors[which] = tensors[which].clone().requires_grad_()
    *inputs, sinks = tensors
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        flexprefill_attention(*inputs, config=it.case.config, dense_below=0, sinks=sinks)
    with torch.no_grad():
        out = flexprefill_attention(*inputs, config=it.case.config, dense_below=0, sinks=sinks)
    assert torch.equal(out, it.attend(sinks=SINKS))


@pytest.mark.parametrize("dense_below", [0, 16384])
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_gpu_backends_are_refused_on_cpus(backend, dense_below):
    with pytest.raises(ValueError, match=backend):
        call().attend(backend=backend, dense_below=dense_below)


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
    assert flash_installed() == (name == "block_sparsity.py")


# On a GPU

GPU_VARIANTS = {
    "float32": {"q_len": 700, "block_size": 64, "head_dims": (64, 64)},
    "float32, small blocks": {"q_len": 333, "block_size": 16},
    "odd blocks, chunk": {"q_len": 300, "kv_len": 500, "block_size": 48, "scores": {"softcap": 5.0}},
    "bfloat16": {"q_len": 2048, "block_size": 128, "head_dims": (128, 128), "dtype": torch.bfloat16, "heads": (8, 2)},
    "bfloat16, ragged chunk": {
        "q_len": 900,
        "kv_len": 2500,
        "block_size": 128,
        "head_dims": (64, 64),
        "dtype": torch.bfloat16,
        "heads": (8, 2),
    },
    "float16, padded, window": {
        "q_len": 1500,
        "block_size": 128,
        "head_dims": (64, 64),
        "dtype": torch.float16,
        "batch": 2,
        "attention_mask": padding(1500, ("left", 300), ("right", 100)),
        "scores": {"window": 800},
    },
}
FLASH = pytest.param("flash", marks=pytest.mark.skipif(not flash_available(), reason="flash-attn-4 is not installed"))


@pytest.mark.attention
@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_VARIANTS)
def test_is_dense_attention_under_the_mask_on_cuda(cuda, name):
    check(call(**GPU_VARIANTS[name]), cuda, backend="triton")


@pytest.mark.attention
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, ragged chunk", "float16, padded, window"])
@pytest.mark.parametrize("backend", [FLASH])
def test_flash_is_dense_attention_under_the_mask(cuda, name, backend):
    check(call(**GPU_VARIANTS[name]), cuda, backend=backend)


@pytest.mark.attention
@pytest.mark.gpu
def test_log_sum_exp_is_that_of_kept_scores(cuda):
    it = call(q_len=700, block_size=64, head_dims=(64, 64), batch=2, attention_mask=padding(700, ("left", 100), ("left", 0)))
    out, lse = it.attend(cuda, return_lse=True, backend="triton")
    expected, wanted = it.under(it.case.to(cuda).search().keep)
    assert_same_attention(out, expected)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.cpu().double(), wanted, atol=1e-4, rtol=1e-4)
    assert (lse[0, :, :100] == float("-inf")).all()


@pytest.mark.attention
@pytest.mark.gpu
def test_gradients_reach_sinks(cuda):
    it = call(q_len=600, block_size=64, head_dims=(64, 64))
    keep = it.case.to(cuda).search().keep
    weights = torch.randn(1, 4, 600, 64, generator=torch.Generator().manual_seed(4))
    exact = SINKS.double().requires_grad_()
    (under_with_sinks(it, keep, exact) * weights).sum().backward()
    for others_too in (True, False):
        tensors = [x.to(cuda).requires_grad_(others_too) for x in (it.case.query, it.case.key, it.value)]
        sinks = SINKS.to(cuda).requires_grad_()
        out = flexprefill_attention(*tensors, config=it.case.config, dense_below=0, sinks=sinks, backend="triton")
        (out * weights.to(cuda)).sum().backward()
        torch.testing.assert_close(sinks.grad.cpu().double(), exact.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.attention
@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_gradients_are_those_of_dense_attention_under_the_mask(cuda, padded):
    attention_mask = padding(600, ("left", 90)) if padded else None
    it = call(q_len=600, block_size=64, head_dims=(64, 64), attention_mask=attention_mask)
    keep = it.case.to(cuda).search().keep
    tensors = [x.to(cuda).requires_grad_() for x in (it.case.query, it.case.key, it.value)]
    moved = None if attention_mask is None else attention_mask.to(cuda)
    out = flexprefill_attention(*tensors, config=it.case.config, dense_below=0, attention_mask=moved, backend="triton")
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    (out * weights.to(cuda)).sum().backward()
    exact = [x.double().requires_grad_() for x in (it.case.query, it.case.key, it.value)]
    expected, _ = masked_attention(*exact, expanded(keep, it.case))
    (expected * weights).sum().backward()
    assert_same_attention(out.detach(), expected.detach())
    for got, wanted in zip(tensors, exact, strict=True):
        torch.testing.assert_close(got.grad.cpu().double(), wanted.grad, atol=1e-4, rtol=1e-3)
