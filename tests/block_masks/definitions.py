"""Every method by its definition, in plain loops and float64.

A definition takes a `Call`, a head, a query block and the method's options. It returns the kept key blocks, before own blocks
are added and invisible ones dropped, and the margin: the relative distance of the closest decision from the other side. Only
query blocks with a margin must agree with float32.
"""

import math
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask import block_masks
from tests.block_masks.definition_call import Blocks, Call, Definition, Row, gap, on_lines, static, top, top_lines, top_p
from tests.cases import Case


@static
def causal(call: Call, h: int, i: int, j: int) -> bool:
    return True


def is_sink(call: Call, j: int, sink_blocks: int) -> bool:
    return 0 <= j - call.first_block < sink_blocks


def by_position(call: Call, i: int, sink_blocks: int, window_blocks: int) -> Blocks:
    own = call.seen.position_blocks[i][0]
    return [j for j in range(call.num_kv_blocks) if is_sink(call, j, sink_blocks) or own - j < window_blocks]


def streaming_llm(call: Call, h: int, i: int, sink_blocks: int, window_blocks: int) -> Row:
    return by_position(call, i, sink_blocks, window_blocks), math.inf


@static
def tri_shape(call: Call, h: int, i: int, j: int, sink_blocks: int, window_blocks: int, last_blocks: int) -> bool:
    return i > call.last_query_block - last_blocks or j in by_position(call, i, sink_blocks, window_blocks)


@static
def lm_infinite(call: Call, h: int, i: int, j: int, global_tokens: int, local_tokens: int) -> bool:
    if set(call.keys_of(j)) & set(call.valid_keys[:global_tokens]):
        return True
    return any(call.position(row) - k < local_tokens for row in call.seen.rows_of(i) for k in call.keys_of(j))


@static
def moa(call: Call, h: int, i: int, j: int, plan: Any, sink_blocks: int = 1) -> bool:
    alpha, beta = plan if not isinstance(plan[0], tuple) else plan[h]
    length = call.valid_keys[-1] // call.block_size - call.first_block + 1 if call.valid_keys else 0
    span = max(1, math.floor(alpha / call.block_size + beta * length))
    return is_sink(call, j, sink_blocks) or call.seen.position_blocks[i][0] - j < span


def vertical_slash(call: Call, h: int, i: int, vertical_size: int, slash_size: int) -> Row:
    rows = call.seen.valid_rows[-call.block_size :]
    return top_lines(call, h, i, rows, call.valid_keys[:1], 1, vertical_size, slash_size)


def minference(call: Call, h: int, i: int, plan: Any, lines: str = "pooled") -> Row:
    size = call.block_size
    budget = plan if not isinstance(plan[0], tuple) else plan[h]
    num_keys, num_offsets = max(30, budget[0]), max(50, budget[1])
    rows = call.seen.valid_rows[-64:]
    sinks = call.valid_keys[:30]
    if lines == "pooled":
        return top_lines(call, h, i, rows, sinks, 100, num_keys, num_offsets)
    columns = {k: math.inf if k in sinks else 0.0 for k in call.valid_keys}
    offsets = {o: math.inf if o < 100 else 0.0 for o in range(call.kv_len)}
    for row, p in zip(rows, call.attention(h, rows), strict=True):
        for k in columns:
            columns[k] += float(p[k])
        for o in offsets:
            if call.position(row) >= o:
                offsets[o] += float(p[call.position(row) - o])
    keys, margin = top(columns, int(num_keys))
    kept, other = top(offsets, int(num_offsets))
    crossed = {o // size for o in kept} | {o // size + 1 for o in kept if o % size}
    return on_lines(call, i, [k // size for k in keys], sorted(crossed)), min(margin, other)


def oracle(call: Call, h: int, i: int, gamma: float) -> Row:
    mass = dict.fromkeys(call.seen.blocks_of(i), 0.0)
    for row in call.attention(h, call.seen.rows_of(i)).tolist():
        for k, p in enumerate(row):
            if p:
                mass[k // call.block_size] += p
    return top_p(mass, [], gamma)


def flash_prefill(call: Call, h: int, i: int, alpha: float, sink_blocks: int, window_blocks: int, last_blocks: int) -> Row:
    summed = {}
    for j in range(call.num_kv_blocks):
        keys = call.keys_of(j)
        if not keys:
            continue
        reach = math.inf if call.window is None else call.window
        rows = [row for row in call.seen.rows_of(i) if 0 <= call.position(row) - keys[-1] < reach]
        if rows:
            summed[j] = float(call.scores(h, rows, call.mean_key(h, j)[None]).exp().sum())
    limit = alpha * max(summed.values(), default=0.0)
    heavy = [j for j, value in summed.items() if value >= limit]
    margin = min((gap(value, limit) for value in summed.values() if value != limit or alpha != 1), default=math.inf)
    last = i > call.last_query_block - last_blocks
    return list(range(call.num_kv_blocks)) if last else [*heavy, *by_position(call, i, sink_blocks, window_blocks)], margin


def xattention(call: Call, h: int, i: int, stride: int, threshold: float) -> Row:
    size, mass = call.block_size, dict.fromkeys(call.seen.blocks_of(i), 0.0)
    tokens = set(call.valid_keys)
    for first_row in range(i * size, (i + 1) * size, stride):
        means = {}
        for first_key in range(0, call.kv_len, stride):
            # row first_row + stride - 1 - t meets key first_key + t
            pairs = [(first_row + stride - 1 - t, first_key + t) for t in range(stride)]
            pairs = [(q, k) for q, k in pairs if q < call.q_len and q in call.seen.valid_rows and k in tokens]
            start = call.position(0) + first_row
            in_reach = call.window is None or start - (first_key + stride - 1) < call.window
            if pairs and first_key <= start + stride - 1 and in_reach:
                queries, keys = zip(*pairs, strict=True)
                head = call.heads[h]
                products = (head.query[list(queries)] * head.key[list(keys)]).sum(1)
                means[first_key] = float(head.capped(products.mean() * head.scale))
        if not means:
            continue
        shares = torch.tensor(list(means.values()), dtype=torch.float64).softmax(0).tolist()
        for first_key, share in zip(means, shares, strict=True):
            if first_key // size in mass:
                mass[first_key // size] += share
    return top_p(mass, sorted({call.first_block, *call.seen.position_blocks[i]}), threshold)


def mean_cosine(x: Tensor) -> float:
    """Mean cosine of all pairs of rows, each with itself too."""
    units = x / x.norm(dim=1, keepdim=True)
    return float((units @ units.T).mean()) if len(units) else 0.0


def sparge(call: Call, h: int, i: int, similarity_threshold: float, cdf_threshold: float, topk: float | None = None) -> Row:
    (query, key, *_), rows = call.heads[h], call.seen.rows_of(i)
    centre = key[call.valid_keys].mean(0) if call.valid_keys else 0.0
    alike = {j: mean_cosine(key[call.keys_of(j)] - centre) for j in range(call.num_kv_blocks)}
    own = mean_cosine(query[rows])
    margin = min(gap(value, similarity_threshold) for value in [*alike.values(), own])
    if own <= similarity_threshold:
        return list(range(call.num_kv_blocks)), margin
    unlike = [j for j in alike if alike[j] <= similarity_threshold]
    candidates = [j for j in call.seen.blocks_of(i) if j not in unlike and call.keys_of(j)]
    if not candidates:
        return unlike, margin
    means = torch.stack([call.mean_key(h, j) for j in candidates])
    shares = call.score_of_mean(h, rows, means).softmax(0).tolist()
    values = dict(zip(candidates, shares, strict=True))
    if topk is not None:
        filled = len({k // call.block_size for k in call.valid_keys})
        kept, other = top(values, max(1, math.floor(topk * filled)))
        return [*kept, *unlike], min(margin, other)
    running = list(accumulate(sorted(values.values(), reverse=True)))
    within = len(running) if cdf_threshold >= 1 else sum(total <= cdf_threshold for total in running)
    kept, other = top(values, max(1, within))
    return [*kept, *unlike], min(margin, other, *(gap(total, cdf_threshold) for total in running[: within + 1]))


def infllm(call: Call, h: int, i: int, topk_blocks: int, local_tokens: int, execution_blocks: int, sink_blocks: int = 1) -> Row:
    group = i // execution_blocks * execution_blocks
    first = call.position(group * call.block_size)
    rows = call.seen.rows_of(group, execution_blocks)
    sinks = [j for j in range(call.num_kv_blocks) if is_sink(call, j, sink_blocks)]
    local, scores = [], {}
    for j in range(call.num_kv_blocks):
        keys = call.keys_of(j)
        if not keys or first - keys[-1] < local_tokens:
            local.append(j)
        elif j not in sinks and (call.window is None or first - keys[-1] < call.window):
            heads = range(len(call.heads) if rows else 0)
            scores[j] = sum(float(call.score_of_mean(h, rows, call.mean_key(h, j)[None])) for h in heads) / len(call.heads)
    lowest = min(scores.values(), default=0.0)
    kept, margin = top({j: score - lowest for j, score in scores.items()}, topk_blocks)
    return [*local, *sinks, *kept], margin


def hip(call: Call, h: int, i: int, topk_blocks: int, sink_blocks: int, window_blocks: int, query_stride: int = 2) -> Row:
    size, margin = call.block_size, math.inf
    seen = call.seen.blocks_of(i)
    start = max(call.first_block + sink_blocks, seen[0] if seen else 0)
    length = max(0, call.seen.position_blocks[i][0] - window_blocks + 1 - start)
    rows = [row for row in range(i * size, min((i + 1) * size, call.q_len), query_stride) if row in call.seen.valid_rows]

    def score(low: int, high: int) -> float:
        keys = call.keys_of((low + high - 1) // 2)
        if not keys or not rows:
            return -math.inf
        return float(call.scores(h, rows, call.heads[h].key[keys[len(keys) // 2]][None]).max())

    k = topk_blocks
    chunks = [(start + n * length // k, start + (n + 1) * length // k) for n in range(k)]
    chunks = [chunk for chunk in chunks if chunk[0] < chunk[1]]
    while any(high - low > 1 for low, high in chunks):
        halves = [half for low, high in chunks for half in ((low, (low + high) // 2), ((low + high) // 2, high))]
        halves = [(low, high) for low, high in halves if low < high]
        kept, closest = top({n: score(*half) for n, half in enumerate(halves)}, k)
        margin = min(margin, closest)
        chunks = [halves[n] for n in sorted(kept)]
    return [*by_position(call, i, sink_blocks, window_blocks), *(low for low, _ in chunks)], margin


class Tested(NamedTuple):
    """The test of a method: a new one gets an entry below."""

    definition: Definition | None  # None: it has an oracle of its own, in tests/oracle
    sparse: dict[str, Any]  # options under which it leaves something out of a short prompt
    everything: dict[str, Any]  # options under which it leaves out nothing
    others: tuple[dict[str, Any], ...] = ()  # more options under which it is compared with its definition


TESTED = {
    "causal": Tested(causal, {}, {}),
    "flash_prefill": Tested(
        flash_prefill, {"alpha": 1.0, "sink_blocks": 1, "window_blocks": 1, "last_blocks": 1}, {"alpha": 0.0},
        ({"alpha": 0.3, "sink_blocks": 0, "window_blocks": 2, "last_blocks": 0},),
    ),
    "flexprefill": Tested(None, {"gamma": 0.5, "min_budget": 0}, {"gamma": 1.0}),
    "hip": Tested(
        hip, {"topk_blocks": 2, "sink_blocks": 1, "window_blocks": 1}, {"topk_blocks": 16},
        ({"topk_blocks": 1, "sink_blocks": 2, "window_blocks": 2, "query_stride": 1},),
    ),
    "hybrid": Tested(None, {"gamma": 0.5, "min_budget": 0}, {"gamma": 1.0}),
    "infllm": Tested(
        infllm, {"topk_blocks": 1, "local_tokens": 40, "execution_blocks": 2}, {"topk_blocks": 64},
        # at the edges of a block
        ({"topk_blocks": 0, "sink_blocks": 0, "local_tokens": 33, "execution_blocks": 1},),
    ),
    "lm_infinite": Tested(
        lm_infinite, {"global_tokens": 5, "local_tokens": 50}, {"local_tokens": 10**6},
        ({"global_tokens": 16, "local_tokens": 33},),
    ),
    "minference": Tested(
        minference, {"plan": (30, 64)}, {"plan": (10**6, 0)},
        ({"plan": ((40, 50), (64, 20)), "lines": "covering"}, {"plan": ((100, 16), (30, 100))}),
    ),
    "moa": Tested(moa, {"plan": (40, 0.2)}, {"plan": (0, 1.0)}, ({"plan": ((16, 0.0), (10, 0.3)), "sink_blocks": 0},)),
    "oracle": Tested(oracle, {"gamma": 0.6}, {"gamma": 1.0}),
    "published": Tested(None, {"gamma": 0.5, "min_budget": 0}, {"gamma": 1.0}),
    "sparge": Tested(
        sparge, {"similarity_threshold": 0.1, "cdf_threshold": 0.5}, {"cdf_threshold": 1.0},
        ({"similarity_threshold": -0.1, "cdf_threshold": 0.9, "topk": 0.3}, {"similarity_threshold": 0.4, "cdf_threshold": 0.8}),
    ),
    "streaming_llm": Tested(streaming_llm, {"sink_blocks": 1, "window_blocks": 2}, {"window_blocks": 10**6}),
    "tri_shape": Tested(tri_shape, {"sink_blocks": 1, "window_blocks": 2, "last_blocks": 1}, {"last_blocks": 10**6}),
    "vertical_slash": Tested(vertical_slash, {"vertical_size": 64, "slash_size": 64}, {"slash_size": 10**6}),
    "xattention": Tested(xattention, {"stride": 4, "threshold": 0.6}, {"threshold": 1.0}, ({"stride": 16, "threshold": 0.9},)),
}  # fmt: skip
DEFINITIONS = {name: tested.definition for name, tested in TESTED.items() if tested.definition is not None}
MASKS = {name.removesuffix("_mask"): getattr(block_masks, name) for name in block_masks.__all__}
SPARSE = {name: tested.sparse for name, tested in TESTED.items()}
all_masks = pytest.mark.parametrize("name", list(MASKS))


def mask_of(name: str, case: Case, **options: Any) -> BlockMask:
    """The mask of a method, without options under those in which it is sparse."""
    shared = {"block_size": case.config.block_size, **case.keywords()}
    mask: BlockMask = MASKS[name](case.query, case.key, **shared, **(options or SPARSE[name]))
    return mask
