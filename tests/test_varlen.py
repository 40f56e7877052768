"""sparse_attention_varlen: each packed sequence gets what it gets alone; wrong bounds and arguments are refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from flexmask import sparse_attention_varlen
from flexmask._torch import CPU_TAKES_UNBACKED_SIZES
from flexmask.base.inputs import attention_inputs
from flexmask.flex.packed import attention_in_one_call
from flexmask.varlen import segments_of
from tests.attention_calls import SINKS, flexprefill_attention, flexprefill_attention_varlen
from tests.cases import structured_inputs
from tests.comparisons import assert_same_stats
from tests.compile_support import counting as counting
from tests.compile_support import traced

SPARSE: dict[str, Any] = {"gamma": 0.6, "tau": 0.1, "block_size": 32, "min_budget": 0}
# a sequence without rows, an empty one, a single row and a chunk among them
Q_LENS = (300, 40, 0, 300, 0, 1, 150, 90)
K_LENS = (300, 40, 50, 300, 0, 77, 333, 97)
LONG = 256  # dense below this
assert_close = partial(torch.testing.assert_close, atol=2e-5, rtol=2e-5)


def pack(q_lens=Q_LENS, k_lens=K_LENS, heads=(4, 2), head_dims=(32, 24), seed=0):
    """Query, key and value of structured sequences, and their bounds."""
    generator = torch.Generator().manual_seed(seed)
    parts = [[], [], []]
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        query, key = structured_inputs(generator, 1, *heads, max(q_len, 1), max(k_len, 1), head_dims[0])
        value = torch.randn(1, heads[1], k_len, head_dims[1], generator=generator)
        for part, x in zip(parts, (query[:, :, :q_len], key[:, :, :k_len], value), strict=True):
            part.append(x[0].transpose(0, 1))
    bounds = (torch.tensor([0, *lengths]).cumsum(0).tolist() for lengths in (q_lens, k_lens))
    return [torch.cat(part).contiguous() for part in parts], *bounds


def alone(inputs: list[Tensor], q_bounds: list[int], k_bounds: list[int], **keywords: Any) -> list[Any]:
    """flexprefill_attention of each sequence, None for one without rows."""
    query, key, value = (x.transpose(0, 1)[None] for x in inputs)
    results = []
    for i in range(len(q_bounds) - 1):
        rows, keys = slice(q_bounds[i], q_bounds[i + 1]), slice(k_bounds[i], k_bounds[i + 1])
        given = (query[:, :, rows], key[:, :, keys], value[:, :, keys])
        results.append(flexprefill_attention(*given, **keywords) if rows.stop > rows.start else None)
    return results


def one_call(inputs: list[Tensor], q_bounds: list[int], k_bounds: list[int], **scores: Any) -> Tensor:
    """Dense attention of all sequences by one FlexAttention call, as on GPUs."""
    if not (inputs[0].is_cuda or CPU_TAKES_UNBACKED_SIZES):
        pytest.skip("this torch's C++ template miscompiles a mask of tensors of many sizes; on CPUs no call of ours needs it")
    given = attention_inputs(*(x.transpose(0, 1)[None] for x in inputs), **scores)
    segments = [each for each in segments_of(q_bounds, k_bounds, len(inputs[0]), len(inputs[1])) if each.q_len]
    kernel = "triton" if inputs[0].is_cuda else "cpu"
    return torch.cat([out for out, _ in attention_in_one_call(given, segments, kernel)], 2)[0].transpose(0, 1)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": SPARSE,
    "everything": {**SPARSE, "window": 220, "gamma": 0.2, "softcap": 3.0, "scale": 0.3, "sinks": SINKS},
    "gammas by head": {**SPARSE, "gamma": [0.3, 0.5, 0.7, 1.0]},
    "a tensor of gammas": {**SPARSE, "gamma": torch.tensor([0.3, 0.5, 0.7, 1.0])},
    "hybrid": {"method": "hybrid", "gamma": 0.3, "block_size": 32, "min_budget": 0},
}
# those that compile nothing of their own
CHEAP = {"plain", "hybrid"}


@pytest.mark.parametrize(
    ("name", "below"),
    [
        *(
            pytest.param(name, LONG, marks=[pytest.mark.attention, *([] if name in CHEAP else [pytest.mark.slow])])
            for name in VARIANTS
        ),
        *((name, 10**6) for name in VARIANTS),
    ],
)
def test_each_sequence_gets_what_it_gets_alone(name, below):
    inputs, q_bounds, k_bounds = pack()
    keywords = {**VARIANTS[name], "dense_below": below, "return_stats": True}
    with torch.no_grad():
        expected = alone(inputs, q_bounds, k_bounds, **keywords)
        out, stats = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords)
    assert out.shape == (q_bounds[-1], 4, 24) and out.is_contiguous()
    sparse = 0
    for number, twin in enumerate(expected):
        if twin is None:
            assert stats[number].dense
            continue
        rows = slice(q_bounds[number], q_bounds[number + 1])
        assert_close(out[rows].transpose(0, 1)[None], twin[0])
        assert_same_stats(stats[number], twin[1])
        sparse += not twin[1].dense and bool((twin[1].density < 1).any())
    assert sparse == (3 if below == LONG else 0)


@pytest.mark.attention
@pytest.mark.parametrize("spoiled", [0, 3, 7])
@pytest.mark.parametrize("in_one_call", [False, True])
def test_nan_stays_in_its_sequence(spoiled, in_one_call):
    inputs, q_bounds, k_bounds = pack()
    poisoned = [x.clone() for x in inputs]
    for x, bounds in zip(poisoned, (q_bounds, k_bounds, k_bounds), strict=True):
        x[bounds[spoiled] : bounds[spoiled + 1]] = torch.nan
    with torch.no_grad():
        if in_one_call:
            before, after = (one_call(each, q_bounds, k_bounds) for each in (inputs, poisoned))
        else:
            before, after = (
                flexprefill_attention_varlen(*each, q_bounds, k_bounds, **SPARSE, dense_below=LONG) for each in (inputs, poisoned)
            )
    own = torch.zeros(len(before), dtype=torch.bool)
    own[q_bounds[spoiled] : q_bounds[spoiled + 1]] = True
    assert torch.equal(after[~own], before[~own]) and after[own].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["gradients", "lse and stats", "bounds"])
def test_each_sequence_on_a_gpu_gets_what_it_gets_alone(cuda, what):
    inputs, q_bounds, k_bounds = pack(head_dims=(32, 32))
    inputs = [x.to(cuda) for x in inputs]
    keywords: dict[str, Any] = {**SPARSE, "block_size": 64, "dense_below": LONG}
    filled = [i for i, length in enumerate(Q_LENS) if length]
    if what == "gradients":
        twins = [x.clone().requires_grad_() for x in inputs]
        inputs = [x.requires_grad_() for x in inputs]
        flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords).square().sum().backward()
        sum(x.square().sum() for x in alone(twins, q_bounds, k_bounds, **keywords) if x is not None).backward()
        torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in twins], atol=2e-2, rtol=2e-2)
    elif what == "lse and stats":
        keywords |= {"return_lse": True, "return_stats": True}
        _, lse, stats = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords)
        expected = alone(inputs, q_bounds, k_bounds, **keywords)
        torch.testing.assert_close(lse, torch.cat([expected[i][1][0] for i in filled], 1), atol=2e-3, rtol=0)
        for i in filled:
            assert_same_stats(stats[i], expected[i][2])
    else:
        on_device = [torch.tensor(bounds, dtype=torch.int32, device=cuda) for bounds in (q_bounds, k_bounds)]
        out = flexprefill_attention_varlen(*inputs, *on_device, **keywords)
        assert torch.equal(out, flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords))
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            out += 1  # an empty graph makes a warning
            with pytest.raises(ValueError, match="CUDA graph"):
                flexprefill_attention_varlen(*inputs, *on_device, **keywords)


def test_lengths_come_in_every_form_beside_bounds_of_the_longest():
    inputs, q_bounds, k_bounds = pack()
    expected = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds)
    for form in (tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)):
        given = (form(q_bounds), form(k_bounds))
        for longest in ((max(Q_LENS), max(K_LENS)), (10**6, 2**70)):
            assert torch.equal(flexprefill_attention_varlen(*inputs, *given, *longest), expected)


def test_log_sum_exp_has_flash_attns_layout():
    inputs, q_bounds, k_bounds = pack()
    _, lse = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, return_lse=True)
    expected = [x[1][0] for x in alone(inputs, q_bounds, k_bounds, return_lse=True) if x is not None]
    torch.testing.assert_close(lse, torch.cat(expected, 1))
    assert lse.shape == (4, q_bounds[-1])


@pytest.mark.attention
def test_many_lengths_share_the_compilations(counting):
    """Two graphs for whole prompts, two for chunks."""
    for step in range(12):
        lengths = (300 + 17 * step, 40, 260 + 5 * step)
        inputs, q_bounds, k_bounds = pack(lengths, (lengths[0], 90 + step, 400), seed=step)
        flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **SPARSE, dense_below=LONG)
    assert 2 <= counting.frame_count <= 4


@pytest.mark.attention
@pytest.mark.parametrize("form", [list, torch.tensor])
def test_inside_a_compilation_bounds_are_ints(form):
    inputs, q_bounds, k_bounds = pack((60, 40), (60, 50))
    attend, counter = traced(lambda *given: flexprefill_attention_varlen(*given))
    given = (*inputs, form(q_bounds), form(k_bounds))
    torch._dynamo.reset()
    if form is list:
        assert_close(attend(*given), flexprefill_attention_varlen(*given))
        assert counter.frame_count == 1
    else:
        # torch 2.8 tells the error's type alone
        told = "must be a list or tuple of ints inside torch.compile"
        with pytest.raises(Exception, match=rf"{told}|ExceptionVariable\(<class 'TypeError'>\)"):
            attend(*given)


@pytest.mark.attention
@pytest.mark.parametrize(
    "scores",
    [{}, pytest.param({"window": 270, "softcap": 3.0, "sinks": SINKS}, marks=pytest.mark.slow)],
    ids=["plain", "everything"],
)
def test_one_call_for_all_dense_sequences_is_dense_attention(device, scores):
    scores = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in scores.items()}
    inputs, q_bounds, k_bounds = pack()
    inputs = [x.to(device) for x in inputs]
    with torch.no_grad():
        expected = [x for x in alone(inputs, q_bounds, k_bounds, **scores, dense_below=10**6) if x is not None]
        out = one_call(inputs, q_bounds, k_bounds, **scores)
    assert_close(out, torch.cat(expected, 2)[0].transpose(0, 1))


META = torch.tensor([0, 30, 60]).to("meta")
NO_ROWS = {"query": torch.empty(0, 4, 16), "cu_seqlens_q": [0, 0], "cu_seqlens_k": [0, 60]}
BOUNDS_REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([1, 30, 50], ValueError, r"cu_seqlens_q must begin at 0; got 1"),
    ([0, 30, 49], ValueError, r"cu_seqlens_q must end at total_q = 50; got 49"),
    ([0, 50, 30, 50], ValueError, r"cu_seqlens_q must not decrease; got 50, then 30 for sequence 1"),
    ([50], ValueError, r"cu_seqlens_q must hold at least two bounds"),
    ([0, 10, 30, 50], ValueError, r"cu_seqlens_k must have as many entries as cu_seqlens_q, 4; got 3"),
    ([0, 31, 50], ValueError, r"cu_seqlens_q must give .* sequence 0 has 31 rows and 30 keys"),
    ([0.0, 30.0, 50.0], TypeError, r"cu_seqlens_q\[0\] must be an int; got float"),
    (torch.tensor([False, True]), TypeError, r"cu_seqlens_q must be integer; got torch.bool"),
    (torch.tensor([[0, 30, 50]]), ValueError, r"cu_seqlens_q must be \(num_sequences \+ 1,\); got shape \(1, 3\)"),
    ("0", TypeError, r"cu_seqlens_q must be a tensor or a sequence of ints; got str"),
]
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"cu_seqlens_q": bounds}, error, message) for bounds, error, message in BOUNDS_REFUSED),
    ({"cu_seqlens_k": META}, ValueError, "cu_seqlens_k must hold values; got a tensor on the meta device"),
    ({"query": torch.randn(1, 50, 4, 16)}, ValueError, r"query must be \(total_q, num_heads, head_dim\); got shape"),
    (NO_ROWS, ValueError, r"^query must not be empty; got shape \(0, 4, 16\)$"),
    ({"key": [1]}, TypeError, r"key must be a tensor \(total_k"),
    ({"value": torch.randn(50, 2, 16)}, ValueError, r"value must have key's total_k and num_kv_heads \(60, 2\); got \(50, 2\)"),
    ({"key": torch.randn(60, 2, 16).half()}, TypeError, r"key must have query's dtype"),
    ({"max_seqlen_q": 29}, ValueError, r"max_seqlen_q must be at least the longest sequence, 30 tokens; got 29"),
    ({"max_seqlen_k": 29}, ValueError, r"max_seqlen_k must be at least the longest sequence, 30 tokens; got 29"),
    ({"max_seqlen_k": torch.tensor(30)}, TypeError, r"max_seqlen_k must be an int; got Tensor"),
    ({"attention_mask": torch.ones(60)}, TypeError, r"attention_mask"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(num_heads,\) = \(4,\)"),
    ({"backend": "triton"}, ValueError, r'backend="triton" needs a GPU'),
    ({"method": "published", "block_size": 16}, ValueError, r"method 'published' needs a whole prompt"),
    ({"return_lse": "no"}, TypeError, r"return_lse must be True or False; got 'no'"),
    ({"return_stats": 1}, TypeError, r"return_stats must be True or False; got 1"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_wrong_arguments_are_refused_by_name(changes, error, message):
    key, bounds = torch.randn(60, 2, 16), {"cu_seqlens_q": [0, 30, 50], "cu_seqlens_k": [0, 30, 60]}
    with pytest.raises(error, match=message):
        sparse_attention_varlen(**{"query": torch.randn(50, 4, 16), "key": key, "value": key, **bounds, **changes})
