"""flexprefill_attention_varlen: each packed sequence gets what it gets alone, and nothing of the others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_mask

from flexmask import compilation, flexprefill_attention, flexprefill_attention_varlen
from flexmask.base.inputs import attention_inputs
from flexmask.flex.packed import Segment, _calls, _mask, _table, attention_in_one_call, dense_attention_packed
from flexmask.stats import FlexPrefillStats
from flexmask.varlen import segments_of
from tests.cases import structured_inputs
from tests.comparisons import TOLERANCES

SPARSE: dict[str, Any] = {"gamma": 0.6, "tau": 0.1, "block_size": 32, "min_budget": 0}
# long ones and short ones in turn, a sequence without rows, one without anything, a single row, a chunk
Q_LENS = (300, 40, 0, 300, 0, 1, 150, 90)
K_LENS = (300, 40, 50, 300, 0, 77, 333, 97)
LONG = 256  # dense below this


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def pack(q_lens=Q_LENS, k_lens=K_LENS, heads=(4, 2), head_dims=(32, 24), seed=0):
    """Query, key and value of sequences that have structure of their own, and their bounds."""
    generator = torch.Generator().manual_seed(seed)
    parts = [[], [], []]
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        query, key = structured_inputs(generator, 1, *heads, max(q_len, 1), max(k_len, 1), head_dims[0])
        value = torch.randn(1, heads[1], k_len, head_dims[1], generator=generator)
        for part, x in zip(parts, (query[:, :, :q_len], key[:, :, :k_len], value), strict=True):
            part.append(x[0].transpose(0, 1))
    return [torch.cat(part).contiguous() for part in parts], bounds_of(q_lens), bounds_of(k_lens)


def alone(inputs: list[Tensor], q_bounds: list[int], k_bounds: list[int], **keywords: Any) -> list[Any]:
    """The plain twin: flexprefill_attention of each sequence, None for one without rows."""
    query, key, value = (x.transpose(0, 1)[None] for x in inputs)
    results = []
    for i in range(len(q_bounds) - 1):
        rows, keys = slice(q_bounds[i], q_bounds[i + 1]), slice(k_bounds[i], k_bounds[i + 1])
        given = (query[:, :, rows], key[:, :, keys], value[:, :, keys])
        results.append(flexprefill_attention(*given, **keywords) if rows.stop > rows.start else None)
    return results


def assert_close(out: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


SINKS = torch.tensor([-2.0, 0.5, 3.0, 6.0])
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 200, "gamma": 0.2},
    "softcap and scale": {"softcap": 3.0, "scale": 0.3},
    "sinks": {"sinks": SINKS},
    "everything": {"window": 220, "gamma": 0.2, "softcap": 3.0, "scale": 0.3, "sinks": SINKS},
    "gammas by head": {"gamma": [0.3, 0.5, 0.7, 1.0]},
    "a tensor of gammas": {"gamma": torch.tensor([0.3, 0.5, 0.7, 1.0])},
    "hybrid": {"selection": "hybrid", "gamma": 0.3},
}
# those that compile nothing of their own
CHEAP = {"plain", "hybrid"}


@pytest.mark.attention
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name not in CHEAP else name for name in VARIANTS])
def test_each_sequence_gets_what_it_gets_alone(name):
    inputs, q_bounds, k_bounds = pack()
    keywords = {**SPARSE, **VARIANTS[name], "dense_below": LONG, "return_stats": True}
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
    assert sparse == 3


@pytest.mark.parametrize("name", VARIANTS)
def test_dense_sequences_get_what_they_get_alone(name):
    inputs, q_bounds, k_bounds = pack()
    keywords = {**SPARSE, **VARIANTS[name], "dense_below": 10**6, "return_stats": True}
    out, stats = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords)
    expected = [x[0] for x in alone(inputs, q_bounds, k_bounds, **keywords) if x is not None]
    assert_close(out, torch.cat(expected, 2)[0].transpose(0, 1))
    assert all(each.dense for each in stats)


def assert_same_stats(found: FlexPrefillStats, expected: FlexPrefillStats) -> None:
    """Equal to the bit: what the masks were made of."""
    for name, tensor in vars(expected).items():
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(getattr(found, name), tensor, rtol=0, atol=0, equal_nan=True)
        else:
            assert getattr(found, name) == tensor


@pytest.mark.parametrize("wrong", ["all rows as one sequence", "bounds off by a block"])
def test_comparison_notices_rows_of_another_sequence(wrong):
    inputs, q_bounds, _ = pack(Q_LENS[:2], Q_LENS[:2])
    bounds = [0, q_bounds[-1]] if wrong.startswith("all") else [0, q_bounds[1] - 32, q_bounds[-1]]
    with torch.no_grad():
        first = alone(inputs, q_bounds, q_bounds, **SPARSE, dense_below=10**6)
        out = flexprefill_attention_varlen(*inputs, bounds, bounds, **SPARSE, dense_below=10**6)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(out[slice(*q_bounds[1:])].transpose(0, 1)[None], first[1])


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
    assert torch.equal(after[~own], before[~own])
    assert after[own].isnan().any()


def one_call(inputs: list[Tensor], q_bounds: list[int], k_bounds: list[int], **scores: Any) -> Tensor:
    """Dense attention of all sequences by one FlexAttention call, as on GPUs."""
    given = attention_inputs(*(x.transpose(0, 1)[None] for x in inputs), **scores)
    segments = [each for each in segments_of(q_bounds, k_bounds, len(inputs[0]), len(inputs[1])) if each.q_len]
    kernel = "triton" if inputs[0].is_cuda else "cpu"
    return torch.cat([out for out, _ in attention_in_one_call(given, segments, kernel)], 2)[0].transpose(0, 1)


@pytest.mark.parametrize("window", [None, 70, 270])
def test_mask_of_one_call_is_each_sequence_alone(window):
    """Pairs of the mask_mod, kept blocks and full blocks, against a map of tokens."""
    q_lens, k_lens = (300, 1, 150, 129), (300, 77, 333, 600)
    segments = segments_of(bounds_of(q_lens), bounds_of(k_lens), sum(q_lens), sum(k_lens))
    mask = _mask(_table(segments, torch.device("cpu")), window)
    pairs = torch.zeros(mask.shape[-2:], dtype=torch.bool)
    real = torch.zeros(len(pairs), dtype=torch.bool)
    row = key = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        back = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
        pairs[row : row + q_len, key : key + k_len] = (back >= 0) & (back < (window or 10**6))
        real[row : row + q_len] = True
        row, key = row + -(-q_len // 128) * 128, key + -(-k_len // 128) * 128
    assert pairs.shape == (row, key)
    found = create_mask(mask.mask_mod, 1, 1, row, key, device="cpu")[0, 0]
    assert torch.equal(found[real], pairs[real])
    # rows behind the last one count for the lists, and see no key of another sequence
    blocks = found.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(3).any(1))
    full = torch.zeros_like(blocks.any(3).any(1))
    for block in range(len(full)):
        full[block, mask.full_kv_indices[0, 0, block, : mask.full_kv_num_blocks[0, 0, block]].long()] = True
    assert torch.equal(full, blocks.all(3).all(1))
    assert full.any() == (window != 70)


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


def test_calls_are_cut_where_their_lists_would_grow(monkeypatch):
    monkeypatch.setattr("flexmask.flex.packed._MOST_PAIRS", 12)
    segments = [each for each in segments_of(bounds_of(Q_LENS), bounds_of(K_LENS), sum(Q_LENS), sum(K_LENS)) if each.q_len]
    calls = _calls(segments)
    assert [segment for call in calls for segment in call] == segments
    for call in calls:
        blocks = [
            sum(-(-length // 128) for length in lengths) for lengths in zip(*((x.q_len, x.kv_len) for x in call), strict=True)
        ]
        assert blocks[0] * blocks[1] <= 12 or len(call) == 1
    assert [len(call) for call in calls] == [1, 1, 1, 2, 1]


@pytest.mark.gpu
def test_dense_sequences_share_a_call_on_a_gpu(cuda, monkeypatch):
    calls: list[int] = []
    run = attention_in_one_call
    monkeypatch.setattr(
        "flexmask.flex.packed.attention_in_one_call",
        lambda inputs, part, *rest: calls.append(len(part)) or run(inputs, part, *rest),
    )
    inputs, q_bounds, k_bounds = pack()
    inputs = [x.to(cuda) for x in inputs]
    given = attention_inputs(*(x.transpose(0, 1)[None] for x in inputs))
    segments = [each for each in segments_of(q_bounds, k_bounds, q_bounds[-1], k_bounds[-1]) if each.q_len]
    outs = dense_attention_packed(given, segments)
    assert calls == [5]  # the single row goes alone
    expected = [x for x in alone(inputs, q_bounds, k_bounds, dense_below=10**6) if x is not None]
    for (out, _), twin in zip(outs, expected, strict=True):
        assert_close(out, twin)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["gradients", "lse", "stats", "bounds"])
def test_on_a_gpu_as_alone(cuda, what):
    inputs, q_bounds, k_bounds = pack(head_dims=(32, 32))
    inputs = [x.to(cuda) for x in inputs]
    keywords: dict[str, Any] = {**SPARSE, "block_size": 64, "dense_below": LONG}
    filled = [i for i, length in enumerate(Q_LENS) if length]
    if what == "gradients":
        twins = [x.clone().requires_grad_() for x in inputs]
        inputs = [x.requires_grad_() for x in inputs]
        flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords).square().sum().backward()
        sum(x.square().sum() for x in alone(twins, q_bounds, k_bounds, **keywords) if x is not None).backward()
        for x, twin in zip(inputs, twins, strict=True):
            torch.testing.assert_close(x.grad, twin.grad, atol=2e-2, rtol=2e-2)
    elif what == "lse":
        _, lse = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords, return_lse=True)
        expected = alone(inputs, q_bounds, k_bounds, **keywords, return_lse=True)
        torch.testing.assert_close(lse, torch.cat([expected[i][1][0] for i in filled], 1), atol=2e-3, rtol=0)
    elif what == "stats":
        _, stats = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords, return_stats=True)
        expected = alone(inputs, q_bounds, k_bounds, **keywords, return_stats=True)
        for i in filled:
            assert_same_stats(stats[i], expected[i][1])
    else:
        on_device = [torch.tensor(bounds, dtype=torch.int32, device=cuda) for bounds in (q_bounds, k_bounds)]
        out = flexprefill_attention_varlen(*inputs, *on_device, **keywords)
        assert torch.equal(out, flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **keywords))
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="CUDA graph"):
            flexprefill_attention_varlen(*inputs, *on_device, **keywords)


def test_lengths_come_in_every_form():
    inputs, q_bounds, k_bounds = pack()
    expected = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds)
    for form in (tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)):
        given = (form(q_bounds), form(k_bounds))
        assert torch.equal(flexprefill_attention_varlen(*inputs, *given, max(Q_LENS), max(K_LENS)), expected)


def test_gradients_on_a_cpu_flow_where_all_sequences_run_dense():
    inputs, q_bounds, k_bounds = pack()
    twins = [x.clone().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    flexprefill_attention_varlen(*inputs, q_bounds, k_bounds).square().sum().backward()
    sum(x.square().sum() for x in alone(twins, q_bounds, k_bounds) if x is not None).backward()
    for x, twin in zip(inputs, twins, strict=True):
        torch.testing.assert_close(x.grad, twin.grad)
    with pytest.raises(ValueError, match="no_grad"):
        flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **SPARSE, dense_below=LONG)


def test_log_sum_exp_has_flash_attns_layout():
    inputs, q_bounds, k_bounds = pack()
    _, lse = flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, return_lse=True)
    expected = [x[1][0] for x in alone(inputs, q_bounds, k_bounds, return_lse=True) if x is not None]
    torch.testing.assert_close(lse, torch.cat(expected, 1))
    assert lse.shape == (4, q_bounds[-1])


@pytest.mark.attention
def test_many_lengths_share_the_compilations(monkeypatch):
    """Twelve packs of other totals: two graphs for whole prompts, two for chunks."""
    torch._dynamo.reset()
    compilation._compile.cache_clear()
    counter, compile_ = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(compilation.torch, "compile", lambda function, **options: compile_(function, **options, backend=counter))
    try:
        with torch.no_grad():
            for step in range(12):
                lengths = (300 + 17 * step, 40, 260 + 5 * step)
                inputs, q_bounds, k_bounds = pack(lengths, (lengths[0], 90 + step, 400), seed=step)
                flexprefill_attention_varlen(*inputs, q_bounds, k_bounds, **SPARSE, dense_below=LONG)
    finally:
        torch._dynamo.reset()
        compilation._compile.cache_clear()
    assert 2 <= counter.frame_count <= 4


RIGHT = {"q_bounds": [0, 30, 50], "k_bounds": [0, 30, 60]}
BOUNDS_REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "first": ([1, 30, 50], ValueError, r"cu_seqlens_q must begin at 0; got 1"),
    "total": ([0, 30, 49], ValueError, r"cu_seqlens_q must end at total_q = 50; got 49"),
    "decreasing": ([0, 50, 30, 50], ValueError, r"cu_seqlens_q must not decrease; got 50, then 30 for sequence 1"),
    "one bound": ([50], ValueError, r"cu_seqlens_q must hold at least two bounds"),
    "other number": ([0, 10, 30, 50], ValueError, r"cu_seqlens_k must have as many entries as cu_seqlens_q, 4; got 3"),
    "more rows": ([0, 31, 50], ValueError, r"cu_seqlens_q must give .* sequence 0 has 31 rows and 30 keys"),
    "floats": ([0.0, 30.0, 50.0], TypeError, r"cu_seqlens_q\[0\] must be an int; got float"),
    "bools": (torch.tensor([False, True]), TypeError, r"cu_seqlens_q must be integer; got torch.bool"),
    "floating tensor": (torch.tensor([0.0, 30.0, 50.0]), TypeError, r"cu_seqlens_q must be integer; got torch.float32"),
    "two dimensions": (
        torch.tensor([[0, 30, 50]]),
        ValueError,
        r"cu_seqlens_q must be \(num_sequences \+ 1,\); got shape \(1, 3\)",
    ),
    "text": ("0", TypeError, r"cu_seqlens_q must be a tensor or a sequence of ints; got str"),
    "none": (None, TypeError, r"cu_seqlens_q must be a tensor or a sequence of ints; got NoneType"),
}


@pytest.mark.parametrize("name", BOUNDS_REFUSED)
def test_wrong_bounds_are_refused_by_name(name):
    bounds, error, message = BOUNDS_REFUSED[name]
    query, key = torch.randn(50, 4, 16), torch.randn(60, 2, 16)
    flexprefill_attention_varlen(query, key, key, RIGHT["q_bounds"], RIGHT["k_bounds"])
    with pytest.raises(error, match=message):
        flexprefill_attention_varlen(query, key, key, bounds, RIGHT["k_bounds"])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": torch.randn(1, 50, 4, 16)}, ValueError, r"query must be \(total_q, num_heads, head_dim\); got shape"),
        ({"query": torch.randn(0, 4, 16)}, ValueError, r"query must not be empty"),
        ({"key": [1]}, TypeError, r"key must be a tensor \(total_k"),
        (
            {"value": torch.randn(50, 2, 16)},
            ValueError,
            r"value must have key's total_k and num_kv_heads \(60, 2\); got \(50, 2\)",
        ),
        ({"key": torch.randn(60, 2, 16).half()}, TypeError, r"key must have query's dtype"),
        ({"query": torch.randn(50, 3, 16)}, ValueError, r"num_heads must be a multiple"),
        ({"max_seqlen_q": 29}, ValueError, r"max_seqlen_q must be at least the longest sequence, 30 tokens; got 29"),
        ({"max_seqlen_k": 30.5}, TypeError, r"max_seqlen_k must be an int"),
        ({"attention_mask": torch.ones(60)}, TypeError, r"attention_mask"),
        ({"q_offset": 3}, TypeError, r"q_offset"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(num_heads,\) = \(4,\)"),
        ({"gamma": [0.5, 0.5]}, ValueError, r"gamma must hold one number for each of query's 4 heads"),
        ({"dense_below": -1}, ValueError, r"dense_below"),
        ({"max_mask_bytes": 0}, ValueError, r"max_mask_bytes"),
        ({"backend": "triton"}, ValueError, r'backend="triton" needs a GPU'),
        ({"selection": "reference", "block_size": 16}, ValueError, r'selection="reference" needs a whole prompt'),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, error, message):
    key = torch.randn(60, 2, 16)
    given = {"query": torch.randn(50, 4, 16), "key": key, "value": key, "cu_seqlens_q": [0, 30, 50], "cu_seqlens_k": [0, 30, 60]}
    with pytest.raises(error, match=message):
        flexprefill_attention_varlen(**{**given, **changes})


@pytest.mark.attention
@pytest.mark.parametrize("form", [list, torch.tensor])
def test_inside_a_compilation_bounds_are_ints(form):
    inputs, q_bounds, k_bounds = pack((60, 40), (60, 50))
    counter = CompileCounterWithBackend("eager")

    @torch.compile(fullgraph=True, backend=counter)
    def attend(*given):
        return flexprefill_attention_varlen(*given)

    given = (*inputs, form(q_bounds), form(k_bounds))
    torch._dynamo.reset()
    if form is list:
        assert_close(attend(*given), flexprefill_attention_varlen(*given))
        assert counter.frame_count == 1
    else:
        with pytest.raises(Exception, match=re.escape("must be a list or tuple of ints inside torch.compile")):
            attend(*given)


def test_a_cpu_tensor_of_bounds_is_not_read_twice(monkeypatch):
    """Bounds on a device come over in one copy, both together: here the reads are counted."""
    reads: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: reads.append(len(x)) or tolist(x))
    same = torch.tensor([0, 30, 50])
    segments = segments_of(same, same, 50, 50)
    assert reads == [3]
    assert segments == [Segment(slice(0, 30), slice(0, 30)), Segment(slice(30, 50), slice(30, 50))]
