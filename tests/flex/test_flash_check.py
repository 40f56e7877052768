"""The check of the FLASH kernel, on kernels of this file with planted faults; its verdicts, one per kind of call and device."""

import itertools
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.flex import flash_check
from flexmask.flex.flash_case import FlashKind
from flexmask.flex.flash_check import Verdict, check_flash, flash_verdict
from tests.compile_support import fresh_compiler as fresh_compiler
from tests.expected import masked_attention
from tests.held_open import HELD, held_open

CPU = torch.device("cpu")
# blocks of 16, so that attention in float64 is fast
PLAIN = FlashKind(torch.bfloat16, 32, 32, block_size=16)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "float16": {"dtype": torch.float16}, "unequal head dims": {"head_dim": 48}, "soft cap": {"has_softcap": True},
    "window and offset": {"has_window_or_offset": True}, "padding": {"has_padding": True},
    "padding, window and offset": {"has_window_or_offset": True, "has_padding": True},
    "one list for all heads": {"shares_lists": True}, "gradients": {"needs_grad": True},
    "gradients and everything": {"needs_grad": True, "has_window_or_offset": True, "has_padding": True, "has_softcap": True},
}  # fmt: skip
every_kind = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)


def kernel(
    inputs, mask, return_lse, lse_factor=1.0, empty_lse=-math.inf, lists=True, mask_mod=True, softcap=True, empty=0.0, scale=1.0,
    last_rows=True,
):  # fmt: skip
    """Attention under a BlockMask in float64, with faults."""
    query, key, size = inputs.query, inputs.key, mask.BLOCK_SIZE[0]
    shape = (*query.shape[:3], key.shape[2])
    place = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in shape), indexing="ij")
    seen = mask.mask_mod(*place) if mask_mod else torch.ones(shape, dtype=torch.bool)
    if lists:
        blocks = mask.to_dense().bool().repeat_interleave(size, 2).repeat_interleave(size, 3)
        seen = seen & blocks[:, :, : shape[2], : shape[3]]
    out, lse = masked_attention(query, key, inputs.value, seen, scale * inputs.scale, inputs.softcap if softcap else None)
    sees = seen.any(-1, keepdim=True)
    out, lse = torch.where(sees, out, empty), torch.where(sees[..., 0], lse * lse_factor, empty_lse)
    if not last_rows:
        out[:, :, -3:] = 0
    assert return_lse != inputs.needs_grad
    return out.to(query.dtype), lse.float() if return_lse else None


@every_kind
def test_finds_a_right_kernel_right_and_the_factor_of_its_log_sum_exp(changes):
    kind = PLAIN._replace(**changes)
    for factor in (1.0, 1 / math.log(2)):
        found = check_flash(kind, CPU, partial(kernel, lse_factor=1 / factor))
        assert (found.reason, found.lse_factor) == ("", 1.0 if kind.needs_grad else factor) and found.seconds > 0
        assert found.error is not None and found.error < 0.02
        assert found.lse_error is None if kind.needs_grad else found.lse_error < 1e-5
        assert found.lse_reason == ("FlexAttention does not differentiate its log-sum-exp" if kind.needs_grad else "")


LSE_FAULTS: Any = [({"lse_factor": factor}, {}, "found the log-sum-exp off by") for factor in (0.99, 0.7, 1.4427, math.nan)]
LSE_FAULTS += [({"empty_lse": 0.0}, {"has_padding": True}, "other than -inf in rows that see nothing")]


@pytest.mark.parametrize(("faults", "changes", "said"), LSE_FAULTS)
def test_finds_a_wrong_log_sum_exp(faults, changes, said):
    found = check_flash(PLAIN._replace(**changes), CPU, partial(kernel, **faults))
    assert found.reason == "" and said in found.lse_reason


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask_mod ignored": ({"mask_mod": False}, {}),
    "mask_mod ignored, padded": ({"mask_mod": False}, {"has_padding": True}),
    "no soft cap": ({"softcap": False}, {"has_softcap": True}),
    "another scale": ({"scale": 1.1}, {}),
    "NaN": ({"scale": math.nan}, {}),
    "NaN in empty rows": ({"empty": math.nan}, {"has_padding": True}),
    "something in empty rows": ({"empty": 1e-3}, {"has_padding": True}),
    "last rows missing": ({"last_rows": False}, {}),
}


@pytest.mark.parametrize(("faults", "changes"), FAULTS.values(), ids=FAULTS)
def test_finds_wrong_outputs(faults, changes):
    found = check_flash(PLAIN._replace(**changes), CPU, partial(kernel, **faults))
    assert found.reason.startswith("its check here found outputs off by")
    assert "0.02 is allowed" in found.reason


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_finds_wrong_gradients(name):
    def attend(inputs, mask, return_lse):
        tensor = getattr(inputs, name)
        halved = tensor.detach() + (tensor - tensor.detach()) / 2
        return kernel(inputs.with_fields(**{name: halved}), mask, return_lse)

    found = check_flash(PLAIN._replace(needs_grad=True), CPU, attend)
    assert found.reason == f"its check here found {name}'s gradient off by 50.0% (2% is allowed)"


def test_a_kernel_that_raises_gives_its_own_words():
    def attend(inputs, mask, return_lse):
        try:
            raise ValueError("\nBlock sparsity requires sparse_block_size[1]=80 to match tile_n.\nsecond line")
        except ValueError as error:
            raise RuntimeError("backend='inductor' raised:") from error

    found = check_flash(PLAIN, CPU, attend)
    words = "ValueError: Block sparsity requires sparse_block_size[1]=80 to match tile_n."
    assert found.reason == f"its check here raised {words}"


@every_kind
def test_finds_lists_of_full_or_partial_blocks_or_both_ignored(changes):
    kind = PLAIN._replace(**changes)
    for name in ("full_kv_num_blocks", "kv_num_blocks"):

        def attend(inputs, mask, return_lse, name=name):
            setattr(mask, name, torch.zeros_like(getattr(mask, name)))
            return kernel(inputs, mask, return_lse)

        assert "outputs off by" in check_flash(kind, CPU, attend).reason
    found = check_flash(kind, CPU, partial(kernel, lists=False))
    assert "found block lists ignored: outputs off by" in found.reason


@pytest.mark.parametrize("queries_per_kv", [1, 2, 8, 24])
def test_the_problem_has_the_calls_query_heads_per_kv_head(queries_per_kv):
    query, key = (torch.zeros(1, heads, 64, 32, dtype=torch.bfloat16) for heads in (2 * queries_per_kv, 2))
    kind = FlashKind.of(attention_inputs(query, key, key), 16, shares_lists=True)
    assert kind.queries_per_kv == queries_per_kv

    assert check_flash(kind, CPU, kernel).reason == ""
    if queries_per_kv not in (2, 24):
        assert "outputs off by" in check_flash(kind, CPU, packs_pairs).reason


def packs_pairs(inputs, mask, return_lse):
    """A kernel that reads a KV head for every two query heads, right for a ratio of 2."""
    of_query = torch.arange(inputs.query.shape[1]) // 2 % inputs.key.shape[1]
    return kernel(inputs.with_fields(key=inputs.key[:, of_query], value=inputs.value[:, of_query]), mask, return_lse)


_sizes = itertools.count(10_001)
refuses = Mock(side_effect=AssertionError("a check ran"))


@pytest.fixture
def kind():
    """A kind that no other test has."""
    return FlashKind(torch.bfloat16, next(_sizes), 64)


@pytest.mark.parametrize("field", FlashKind._fields)
def test_each_kind_is_checked_once(kind, field):
    check = Mock(return_value=Verdict(lse_factor=1.5))
    other = kind._replace(**{field: torch.float16 if field == "dtype" else next(_sizes)})
    for asked in (kind, other):
        assert flash_verdict(asked, CPU, check) == check.return_value
        assert flash_verdict(asked, CPU, refuses) == check.return_value
    assert check.mock_calls == [mock.call(kind, CPU), mock.call(other, CPU)]


def test_threads_wait_for_one_check(kind):
    slow = Mock(side_effect=lambda kind, device: time.sleep(0.05) or Verdict())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: flash_verdict(kind, CPU, slow), range(4)))
    assert (slow.call_count, found) == (1, [Verdict()] * 4)


def test_running_out_of_memory_is_passed_on_and_no_verdict(kind):
    with pytest.raises(torch.OutOfMemoryError):
        flash_verdict(kind, CPU, partial(check_flash, kernel=Mock(side_effect=torch.OutOfMemoryError("none left"))))
    assert flash_verdict(kind, CPU, Mock(return_value=Verdict())) == Verdict()


@pytest.mark.parametrize(
    "state", [FakeTensorMode, lambda: held_open(HELD["torch.export"])], ids=["a dispatch mode", "another thread exports"]
)
def test_no_check_runs_under_a_mode_or_an_export_and_the_log_says_so_once(kind, state, caplog):
    with caplog.at_level(logging.WARNING, "flexmask"), state():
        # a direct call may still run through FlexAttention, and is no warning
        for asked in (kind._replace(is_direct=True), kind, kind):
            assert flash_verdict(asked, CPU, refuses) is None
    assert [each.getMessage() for each in caplog.records] == [
        f"flexmask: FLASH does not run calls of this kind ({kind}): they were not checked before, and no check can run here (in "
        "torch.compile, a CUDA-graph capture, a dispatch mode, a torch.func transform or an export). Call "
        "flexmask.warmup first"
    ]
    assert flash_verdict(kind, CPU, Mock(return_value=Verdict())) == Verdict()
    with state():
        assert flash_verdict(kind, CPU, refuses) == Verdict()


def code_of(verdict):
    """A number for what a traced call reads of a verdict: none, a refusal, or the factor, more than 10 without a log-sum-exp."""
    if verdict is None:
        return -1
    if verdict.reason:
        return -2
    return verdict.lse_factor + (10 if verdict.lse_reason else 0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "known", [None, Verdict(), Verdict(lse_factor=1 / 0.7, lse_reason="words of its own"), Verdict("it raised: no")]
)
def test_no_check_runs_while_torch_compile_traces(kind, known, dynamic, monkeypatch):
    kind = kind._replace(has_window_or_offset=True, queries_per_kv=1)
    # compiled calls are never direct
    flash_verdict(kind._replace(is_direct=True), CPU, Mock(return_value=Verdict(lse_factor=3.0)))
    if known is not None:
        flash_verdict(kind, CPU, Mock(return_value=known))
    x = torch.zeros(1, 2, 3, kind.head_dim, dtype=torch.bfloat16)
    # more keys than rows, which is an offset
    key, value = torch.zeros(1, 2, 7, kind.head_dim), torch.zeros(1, 2, 7, 64)

    def answer(x):
        return x + code_of(flash_verdict(FlashKind.of(AttentionInputs(x, key, value, 1.0), 128, False), CPU, refuses))

    traced = torch.compile(answer, fullgraph=True, backend="eager", dynamic=dynamic)
    torch.testing.assert_close(traced(x), torch.full_like(x, code_of(known)))
    monkeypatch.setattr(flash_check, "is_traced", lambda: True)
    torch.testing.assert_close(answer(x), traced(x))


@pytest.mark.parametrize(
    ("verdict", "level", "said"),
    [
        (Verdict(seconds=2.34), logging.INFO, "right"),
        (Verdict(lse_reason="no log-sum-exp"), logging.INFO, "no log-sum-exp"),
        (Verdict("its check here found block lists ignored"), logging.WARNING, "its check here found block lists ignored"),
    ],
)
def test_a_check_is_logged_with_its_time(caplog, verdict, level, said):
    size = next(_sizes)
    kind = FlashKind(torch.float16, size, 128, 64, True, True, True, True, True, 1)
    words = f"dtype=torch.float16, head_dim={size}, v_head_dim=128, block_size=64, has_softcap=True, has_window_or_offset=True"
    words += ", has_padding=True, shares_lists=True, needs_grad=True, queries_per_kv=1"
    with caplog.at_level(logging.INFO, "flexmask"):
        flash_verdict(kind, CPU, Mock(return_value=verdict))
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == f"flexmask: FLASH was checked on cpu ({words}) in {verdict.seconds:.1f} s: {said}"


@pytest.mark.gpu
def test_no_check_runs_while_a_cuda_graph_is_captured(cuda, kind):
    device, x = torch.device("cuda", torch.cuda.current_device()), torch.zeros(1, device=cuda)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert flash_verdict(kind, device, refuses) is None
    flash_verdict(kind, device, Mock(return_value=Verdict()))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        assert flash_verdict(kind, device, refuses) == Verdict()
