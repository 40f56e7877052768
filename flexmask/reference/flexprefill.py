"""FlexPrefill in plain loops and float64: slow, obvious, and what the fast code is tested against.

Nothing here is shared with the fast path. Every quantity is written as it is defined, token by
token or offset by offset, and every decision comes with its margin: how far, relatively, it was
from going the other way. Where a margin is wide, float32 code must decide alike.

The method is FlexPrefill, arXiv 2502.20766, section 3, algorithms "Sparse Attention", "Sparse
Pattern Search", "Vertical Slash Index Search" and "Query Aware Index Search". Inputs are assumed
finite; the public functions check shapes and ranges, this module does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# Below this a float32 probability may have underflowed, so that its rank among others is open.
_FLOAT32_SAFE = 2.0**-100
# Slash sums are differences of sums up to 1 in float32 code: below this, rounding is more than a relative margin allows for.
_COARSE = 0.01


@dataclass(frozen=True)
class ReferenceResult:
    """What FlexPrefill decides for each head, and by how much. All tensors are on the CPU.

    "Per head" is shape ``(batch, num_heads)``; margins are relative and ``inf`` where nothing was
    decided.

    Attributes
    ----------
    keep : Tensor
        Bool ``(batch, num_heads, num_q_blocks, num_kv_blocks)``; True means the block is computed.
    full : Tensor
        Bool, as ``keep``; True means kept and every existing pair of the block is visible.
    is_query_aware : Tensor
        Bool per head; True means Query-Aware, False Vertical-Slash.
    js_distance : Tensor
        float64 per head, the paper's D_JS, in ``[0, sqrt(ln 2)]`` or NaN.
    vertical : Tensor
        float64 ``(batch, num_heads, num_kv_blocks)``: the share of attention on each key block.
    slash : Tensor
        float64 ``(batch, num_heads, num_kv_blocks)``: the share on each block diagonal, 0 where
        the diagonal holds no visible block.
    pooled : Tensor
        float64, shape of ``keep``: the block-wise estimate A for every query block.
    num_vertical_blocks, num_slash_blocks : Tensor
        int64 per head: key blocks and block diagonals chosen; for a Query-Aware head its floor.
        Blocks that are always kept are not counted.
    density : Tensor
        float64 per head: kept blocks / visible blocks (0 if none is visible).
    coverage : Tensor
        float64 per head: true attention of the index rows that lies in kept blocks.
    pattern_margin : Tensor
        float64 per head: ``|js_distance - tau| / tau``.
    vertical_margin, slash_margin : Tensor
        float64 per head, of the selection made for the head: of the floor alone if Query-Aware.
    query_aware_margin : Tensor
        float64 per head, of the selection from ``pooled``, whether the head uses it or not.
    margin : Tensor
        float64 per head: the smallest of the margins that its mask depends on.
    """

    keep: Tensor
    full: Tensor
    is_query_aware: Tensor
    js_distance: Tensor
    vertical: Tensor
    slash: Tensor
    pooled: Tensor
    num_vertical_blocks: Tensor
    num_slash_blocks: Tensor
    density: Tensor
    coverage: Tensor
    pattern_margin: Tensor
    vertical_margin: Tensor
    slash_margin: Tensor
    query_aware_margin: Tensor
    margin: Tensor


def reference_flexprefill(
    query: Tensor,
    key: Tensor,
    gamma: float = 0.95,
    tau: float = 0.1,
    *,
    block_size: int = 128,
    min_budget: int = 1024,
    max_budget: int | None = None,
    selection: str = "coverage",
    query_aware: str = "flatten",
    pattern_queries: str = "last",
    index_queries: str = "last",
    share_kv_heads: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None,
) -> ReferenceResult:
    """Decide FlexPrefill's block mask slowly and plainly, in float64.

    Each head compares the true block-wise attention of its representative rows with a pooled
    estimate (Jensen-Shannon distance D). If ``D < tau`` it is Query-Aware and takes the heaviest
    blocks of the pooled map; else it is Vertical-Slash and takes the heaviest key blocks and block
    diagonals. ``gamma`` of each family's own sum is kept.

    Source: FlexPrefill, arXiv 2502.20766, section 3, its four algorithms.

    Differs from the paper: vertical and slash lines are chosen by block, each slash split over the
    two block diagonals it crosses; the pooled estimate weighs a block by its number of valid keys;
    padding, windows and chunks of a longer prompt are defined. ``selection="reference"`` decides
    as the published code does instead, in its own function.

    Parameters
    ----------
    query : Tensor
        ``(batch, num_heads, q_len, head_dim)``, any float dtype and device.
    key : Tensor
        ``(batch, num_kv_heads, kv_len, head_dim)``; ``num_kv_heads`` divides ``num_heads``.
    gamma : float
        Share of attention to keep, in (0, 1]; 1 keeps every visible block. Default ours.
    tau : float
        Distance below which a head is Query-Aware, in [0, 1]; 0 gives none. Default: paper.
    block_size : int
        Tokens per block on both sides. Default: paper.
    min_budget : int
        Tokens: at least ``ceil(min_budget / block_size)`` key blocks and as many block diagonals
        per head. Default: paper.
    max_budget : int, optional
        Tokens: at most ``ceil(max_budget / block_size)`` of each, and of the pooled map's blocks
        in each query block.
    selection : {"coverage", "reference"}
        Ours, or the published code's.
    query_aware : {"flatten", "per_query"}
        Whether a Query-Aware head keeps ``gamma`` of the whole map or of each query block.
    pattern_queries, index_queries : {"last", "middle"}
        Representative rows for the pattern and for the vertical-slash index.
    share_kv_heads : {None, "union", "mean"}
        One mask for the query heads of each key head: every block that one of them keeps, or what
        the mean of their attention and of their estimates decides. Default ours: a mask each.
    scale : float, optional
        Score multiplier, ``1 / sqrt(head_dim)`` unless given.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    window : int, optional
        Tokens a row sees, its own position included.
    attention_mask : Tensor, optional
        ``(batch, kv_len)``, bool or integer; nonzero means a token.
    q_offset : int or Tensor, optional
        Position of query row 0, in ``[0, kv_len - q_len]``; default the upper end. An integer
        tensor is 0-d or ``(batch,)`` and is clamped. Keys at ``q_offset + q_len`` and beyond do
        not exist yet.

    Returns
    -------
    ReferenceResult
        The mask, the quantities it was decided from, statistics and margins.

    Raises
    ------
    ValueError
        If an option word is unknown, an int ``q_offset`` is out of range, or
        ``selection="reference"`` is asked for something the published code cannot do.

    Examples
    --------
    >>> import torch
    >>> query, key = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8)
    >>> result = reference_flexprefill(query, key, 0.5, 0.0, block_size=16, min_budget=0)
    >>> result.keep[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    for name, value, words in (
        ("selection", selection, ("coverage", "reference")),
        ("query_aware", query_aware, ("flatten", "per_query")),
        ("pattern_queries", pattern_queries, ("last", "middle")),
        ("index_queries", index_queries, ("last", "middle")),
        ("share_kv_heads", share_kv_heads, (None, "union", "mean")),
    ):
        if value not in words:
            raise ValueError(f"{name} must be one of {words}; got {value!r}")
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    if selection == "reference":
        _refuse_unpublished(
            q_len == kv_len and q_len % block_size == 0,
            query_aware == "flatten",
            pattern_queries == index_queries == "last",
            softcap is None and window is None,
            attention_mask is None,
            q_offset is None or (isinstance(q_offset, int) and q_offset == 0),
            share_kv_heads != "mean",
        )
    options = _Options(
        gamma=gamma,
        tau=tau,
        block_size=block_size,
        min_blocks=math.ceil(min_budget / block_size),
        max_blocks=None if max_budget is None else math.ceil(max_budget / block_size),
        query_aware=query_aware,
        pattern_queries=pattern_queries,
        index_queries=index_queries,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        softcap=softcap,
    )
    decide = _coverage_heads if selection == "coverage" else _published_heads
    members = num_heads // num_kv_heads
    heads: list[dict[str, object]] = []
    for b, offset in enumerate(_offsets(q_offset, batch, kv_len - q_len)):
        if attention_mask is None:
            is_token = torch.ones(kv_len, dtype=torch.bool)
        else:
            is_token = attention_mask[b].cpu() != 0
        prompt = _prompt(q_len, offset, is_token, window, block_size)
        for g in range(num_kv_heads):
            if not prompt.valid_rows:
                heads += [_empty_head(prompt) for _ in range(members)]
                continue
            key_head = key[b, g].detach().cpu().double()
            queries = [query[b, g * members + m].detach().cpu().double() for m in range(members)]
            if share_kv_heads == "mean":
                heads += decide(queries, key_head, prompt, options)
                continue
            group = [decide([query_head], key_head, prompt, options)[0] for query_head in queries]
            heads += _united(group, queries, key_head, prompt, options) if share_kv_heads == "union" else group
    stacked = {}
    for field in fields(ReferenceResult):
        values = torch.stack([torch.as_tensor(head[field.name]) for head in heads])
        stacked[field.name] = values.reshape(batch, num_heads, *values.shape[1:])
    return ReferenceResult(**stacked)


def _refuse_unpublished(
    whole: bool,
    flatten: bool,
    last_rows: bool,
    plain_scores: bool,
    unpadded: bool,
    from_start: bool,
    own_masks: bool,
) -> None:
    """Raise for what the published code cannot do."""
    for possible, what in (
        (whole, "q_len == kv_len, a multiple of block_size"),
        (flatten, 'query_aware="flatten"'),
        (last_rows, 'pattern_queries="last" and index_queries="last"'),
        (plain_scores, "softcap=None and window=None"),
        (unpadded, "attention_mask=None"),
        (from_start, "q_offset=None"),
        (own_masks, 'share_kv_heads=None or "union"'),
    ):
        if not possible:
            raise ValueError(f'selection="reference" needs {what}')


@dataclass(frozen=True)
class _Options:
    """The settings that every head shares; budgets in blocks."""

    gamma: float
    tau: float
    block_size: int
    min_blocks: int
    max_blocks: int | None
    query_aware: str
    pattern_queries: str
    index_queries: str
    scale: float
    softcap: float | None

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        """Score (rows, head_dim) queries with (keys, head_dim) keys: (rows, keys)."""
        scores = query @ key.T * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores


@dataclass(frozen=True)
class _Prompt:
    """One batch row: which tokens are there and which pairs are visible, for all its heads."""

    offset: int
    valid_rows: list[int]
    is_valid_key: Tensor  # (kv_len,)
    visible: Tensor  # (q_len, kv_len)
    visible_blocks: list[tuple[int, int]]  # (r, j) in the order r * N + j
    full_blocks: list[tuple[int, int]]
    position_blocks: list[list[int]]  # for each query block, floor(position / B) of its rows
    key_blocks: list[int]  # the candidates: some row sees a key in them
    diagonals: list[int]  # the candidates: some visible block lies on them
    num_kv_blocks: int

    def diagonals_of(self, r: int, j: int) -> list[int]:
        """Block diagonals that block (r, j) lies on: two if the chunk starts inside a block."""
        return [block - j for block in self.position_blocks[r] if block >= j]


def _offsets(q_offset: int | Tensor | None, batch: int, largest: int) -> list[int]:
    """Position of query row 0 in every batch row."""
    if q_offset is None:
        return [largest] * batch
    if isinstance(q_offset, Tensor):
        return q_offset.cpu().clamp(0, largest).expand(batch).tolist()
    if not 0 <= q_offset <= largest:
        raise ValueError(f"q_offset must be in [0, kv_len - q_len = {largest}]; got {q_offset}")
    return [q_offset] * batch


def _prompt(q_len: int, offset: int, is_token: Tensor, window: int | None, block_size: int) -> _Prompt:
    """Work out what is visible, pair by pair, and from it what is visible by block."""
    kv_len = len(is_token)
    slot = torch.arange(kv_len)
    position = offset + torch.arange(q_len)
    is_valid_key = is_token & (slot < offset + q_len)
    distance = position[:, None] - slot[None, :]
    visible = is_token[position][:, None] & is_valid_key[None, :] & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)

    num_q_blocks = math.ceil(q_len / block_size)
    num_kv_blocks = math.ceil(kv_len / block_size)
    visible_blocks, full_blocks, position_blocks = [], [], []
    for r in range(num_q_blocks):
        rows = range(r * block_size, min((r + 1) * block_size, q_len))
        position_blocks.append(sorted({(offset + row) // block_size for row in rows}))
        for j in range(num_kv_blocks):
            pairs = visible[rows.start : rows.stop, j * block_size : (j + 1) * block_size]
            if pairs.any():
                visible_blocks.append((r, j))
            if pairs.all():
                full_blocks.append((r, j))
    prompt = _Prompt(
        offset=offset,
        valid_rows=[row for row in range(q_len) if is_token[offset + row]],
        is_valid_key=is_valid_key,
        visible=visible,
        visible_blocks=visible_blocks,
        full_blocks=full_blocks,
        position_blocks=position_blocks,
        key_blocks=sorted({j for _, j in visible_blocks}),
        diagonals=[],
        num_kv_blocks=num_kv_blocks,
    )
    for r, j in visible_blocks:
        prompt.diagonals.extend(prompt.diagonals_of(r, j))
    prompt.diagonals[:] = sorted(set(prompt.diagonals))
    return prompt


def _representative_rows(valid_rows: list[int], which: str, block_size: int) -> list[int]:
    """The last or the middle block_size valid rows, all of them when there are fewer."""
    if which == "last":
        return valid_rows[-block_size:]
    start = max(0, (len(valid_rows) - block_size) // 2)
    return valid_rows[start : start + block_size]


def _attention(query: Tensor, key: Tensor, rows: list[int], prompt: _Prompt, options: _Options) -> Tensor:
    """The rows' true attention p, (len(rows), kv_len); 0 where a key is not visible."""
    scores = options.score(query[rows], key)
    return torch.softmax(scores.masked_fill(~prompt.visible[rows], -math.inf), dim=-1)


def _by_offset(p: Tensor, rows: list[int], offset: int) -> Tensor:
    """a_s[o] = mean over the rows i of p[i, position(i) - o], (kv_len,)."""
    total = torch.zeros(p.shape[1], dtype=torch.float64)
    for attention, row in zip(p, rows, strict=True):
        position = offset + row
        total[: position + 1] += attention[: position + 1].flip(0)
    return total / len(rows)


def _by_block(values: Tensor, block_size: int) -> Tensor:
    """Sum per-token (or per-offset) values over blocks, the last one short if need be."""
    starts = range(0, len(values), block_size)
    return torch.stack([values[start : start + block_size].sum() for start in starts])


def _by_diagonal(by_offset: Tensor, prompt: _Prompt, block_size: int) -> Tensor:
    """S[c] = sum over o of a_s[o] * max(0, 1 - |o - cB| / B), (num_kv_blocks,).

    A slash at offset cB + x meets diagonal c in a fraction 1 - x/B of its rows, c + 1 in x/B.
    """
    offsets = torch.arange(len(by_offset), dtype=torch.float64)
    sums = torch.zeros(prompt.num_kv_blocks, dtype=torch.float64)
    for c in prompt.diagonals:
        tent = (1 - (offsets - c * block_size).abs() / block_size).clamp(min=0)
        sums[c] = (by_offset * tent).sum()
    return sums


def _key_means(key: Tensor, prompt: _Prompt, block_size: int) -> tuple[Tensor, Tensor]:
    """Mean and log count of each block's valid keys; zeros for a block that has none."""
    means = torch.zeros(prompt.num_kv_blocks, key.shape[1], dtype=torch.float64)
    log_counts = torch.zeros(prompt.num_kv_blocks, dtype=torch.float64)
    for j in range(prompt.num_kv_blocks):
        block = slice(j * block_size, (j + 1) * block_size)
        keys = key[block][prompt.is_valid_key[block]]
        if len(keys):
            means[j] = keys.mean(dim=0)
            log_counts[j] = math.log(len(keys))
    return means, log_counts


def _pooled_row(query_mean: Tensor, means: Tensor, log_counts: Tensor, blocks: list[int], options: _Options) -> Tensor:
    """Softmax over the given key blocks of mean query with mean key, (num_kv_blocks,)."""
    scores = options.score(query_mean[None], means)[0] + log_counts
    row = torch.zeros(len(means), dtype=torch.float64)
    row[blocks] = torch.softmax(scores[blocks], dim=0)
    return row


def _pooled_map(query: Tensor, means: Tensor, log_counts: Tensor, prompt: _Prompt, options: _Options) -> Tensor:
    """A: the pooled estimate of every query block, (num_q_blocks, num_kv_blocks)."""
    size = options.block_size
    num_q_blocks = len(prompt.position_blocks)
    pooled = torch.zeros(num_q_blocks, prompt.num_kv_blocks, dtype=torch.float64)
    for r in range(num_q_blocks):
        rows = [row for row in prompt.valid_rows if row // size == r]
        blocks = [j for row, j in prompt.visible_blocks if row == r]
        if rows:
            pooled[r] = _pooled_row(query[rows].mean(dim=0), means, log_counts, blocks, options)
    return pooled


def _js_distance(first: Tensor, second: Tensor) -> float:
    """Square root of the Jensen-Shannon divergence, natural logarithms, 0 log 0 = 0."""
    divergence = 0.0
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        for share in (a, b):
            if share > 0:
                divergence += share / 2 * math.log(2 * share / (a + b))
            elif math.isnan(share):
                divergence = math.nan
    return divergence if math.isnan(divergence) else math.sqrt(max(0.0, divergence))


def _relative(distance: float, threshold: float) -> float:
    """|distance| relative to a threshold; inf where there is no threshold to miss."""
    return abs(distance) / threshold if threshold > 0 else math.inf


def _gap(last_kept: float, first_dropped: float, least: float) -> float:
    """How far the first dropped value is from the last kept one, relative to it or to `least`.

    An exact 0 is 0 in every precision, so the index decides such a tie everywhere.
    """
    if last_kept == 0 or math.isinf(last_kept):
        return math.inf
    if last_kept < _FLOAT32_SAFE:
        return 0.0
    return (last_kept - first_dropped) / max(last_kept, least)


def _heaviest_first(values: list[float], candidates: list[int]) -> list[int]:
    """Candidates by falling value; equal values by rising index."""
    return sorted(candidates, key=lambda index: (-values[index], index))


def _fewest(
    values: list[float],
    candidates: list[int],
    gamma: float,
    at_least: int = 0,
    at_most: int | None = None,
    least: float = 0.0,
) -> tuple[list[int], float]:
    """The fewest candidates whose values sum to >= gamma times the sum of all, and the margin.

    `at_least` and `at_most` then bound how many, `at_least` last; gamma = 1 takes all unsummed.
    Values below `least` are rounded as coarsely as that one.
    """
    order = _heaviest_first(values, candidates)
    running = [0.0]
    for index in order:
        running.append(running[-1] + values[index])
    threshold = gamma * running[-1]

    count = len(order)
    if gamma < 1:
        for length in range(1, len(order) + 1):
            if running[length] >= threshold:
                count = length
                break
    if at_most is not None:
        count = min(count, at_most)
    count = min(max(count, at_least), len(order))

    margins = [math.inf]
    could_grow = count < len(order) and (at_most is None or count < at_most)
    if gamma < 1 and could_grow:
        margins.append(_relative(running[count] - threshold, threshold))
    if gamma < 1 and count > at_least:
        margins.append(_relative(running[count - 1] - threshold, threshold))
    if 0 < count < len(order):
        margins.append(_gap(values[order[count - 1]], values[order[count]], least))
    return order[:count], min(margins)


def _query_aware_blocks(pooled: Tensor, prompt: _Prompt, options: _Options) -> tuple[set[tuple[int, int]], float]:
    """Blocks chosen from A, at most max_blocks a row (Query Aware Index Search); the margin."""
    num_q_blocks, num_kv_blocks = pooled.shape
    values = pooled.flatten().tolist()
    flat = [r * num_kv_blocks + j for r, j in prompt.visible_blocks]
    if options.query_aware == "flatten":
        groups = [flat]
    else:
        groups = [[i for i in flat if i // num_kv_blocks == r] for r in range(num_q_blocks)]
    chosen, margins = [], [math.inf]
    for group in groups:
        kept, margin = _fewest(values, group, options.gamma)
        chosen.extend(kept)
        margins.append(margin)
    blocks = set()
    for r in range(num_q_blocks):
        row = [i for i in chosen if i // num_kv_blocks == r]
        kept, margin = _fewest(values, row, 1.0, at_most=options.max_blocks)
        blocks |= {(r, i % num_kv_blocks) for i in kept}
        margins.append(margin)
    return blocks, min(margins)


def _extend(prompt: _Prompt, key_blocks: list[int], diagonals: list[int]) -> set[tuple[int, int]]:
    """Every visible block in a chosen key block or on a chosen diagonal."""
    return {(r, j) for r, j in prompt.visible_blocks if j in key_blocks or any(c in diagonals for c in prompt.diagonals_of(r, j))}


def _always_kept(prompt: _Prompt) -> set[tuple[int, int]]:
    """Each query block's first visible key block and its visible diagonal block(s)."""
    blocks = set()
    for r in range(len(prompt.position_blocks)):
        visible = [j for row, j in prompt.visible_blocks if row == r]
        blocks |= {(r, j) for j in visible if j == visible[0] or j in prompt.position_blocks[r]}
    return blocks


def _coverage_heads(queries: list[Tensor], key: Tensor, prompt: _Prompt, options: _Options) -> list[dict[str, object]]:
    """Decide one mask under selection="coverage": of one head, or of several by the mean of their attention."""
    size = options.block_size

    # Sparse Pattern Search
    pattern_rows = _representative_rows(prompt.valid_rows, options.pattern_queries, size)
    p = _mean([_attention(query, key, pattern_rows, prompt, options) for query in queries])
    true_share = _by_block(p.mean(dim=0), size)
    seen_keys = prompt.visible[pattern_rows].any(dim=0)
    seen_blocks = [j for j in range(prompt.num_kv_blocks) if seen_keys[j * size : (j + 1) * size].any()]
    means, log_counts = _key_means(key, prompt, size)
    pattern_queries = [query[pattern_rows].mean(dim=0) for query in queries]
    estimate = _mean([_pooled_row(row, means, log_counts, seen_blocks, options) for row in pattern_queries])
    js_distance = _js_distance(estimate, true_share)
    is_query_aware = js_distance < options.tau
    pattern_margin = _relative(js_distance - options.tau, options.tau)
    if math.isnan(js_distance):
        pattern_margin = math.inf

    # Vertical Slash Index Search
    index_rows = _representative_rows(prompt.valid_rows, options.index_queries, size)
    by_head = [_attention(query, key, index_rows, prompt, options) for query in queries]
    p = _mean(by_head)
    vertical = _by_block(p.mean(dim=0), size)
    slash = _by_diagonal(_by_offset(p, index_rows, prompt.offset), prompt, size)

    # Query Aware Index Search
    pooled = _mean([_pooled_map(query, means, log_counts, prompt, options) for query in queries])
    blocks, query_aware_margin = _query_aware_blocks(pooled, prompt, options)

    gamma, at_least, at_most = options.gamma, options.min_blocks, options.max_blocks
    if is_query_aware:
        # Of the two families only the floor: the heaviest min_blocks of each.
        gamma, at_least, at_most = 1.0, 0, options.min_blocks
    key_blocks, vertical_margin = _fewest(vertical.tolist(), prompt.key_blocks, gamma, at_least, at_most)
    diagonals, slash_margin = _fewest(slash.tolist(), prompt.diagonals, gamma, at_least, at_most, _COARSE)
    if is_query_aware and options.gamma == 1 and options.max_blocks is None:
        # Every visible block is kept whatever the floor is.
        vertical_margin = slash_margin = math.inf

    kept = _extend(prompt, key_blocks, diagonals) | _always_kept(prompt)
    if is_query_aware:
        kept |= blocks
    margins = [pattern_margin, vertical_margin, slash_margin]
    if is_query_aware:
        margins.append(query_aware_margin)
    decided = {
        "is_query_aware": is_query_aware,
        "js_distance": _float64(js_distance),
        "vertical": vertical,
        "slash": slash,
        "pooled": pooled,
        "num_vertical_blocks": len(key_blocks),
        "num_slash_blocks": len(diagonals),
        "pattern_margin": _float64(pattern_margin),
        "vertical_margin": _float64(vertical_margin),
        "slash_margin": _float64(slash_margin),
        "query_aware_margin": _float64(query_aware_margin),
        "margin": _float64(min(margins)),
    }
    return [{**_statistics(kept, own, index_rows, prompt, size), **decided} for own in by_head]


def _mean(maps: list[Tensor]) -> Tensor:
    """Mean over heads."""
    return torch.stack(maps).mean(dim=0)


def _united(
    heads: list[dict[str, object]], queries: list[Tensor], key: Tensor, prompt: _Prompt, options: _Options
) -> list[dict[str, object]]:
    """The heads of a group with every block that one of them keeps; the mask hangs on the decisions of all."""
    kept: set[tuple[int, int]] = set()
    for head in heads:
        kept |= {(r, j) for r, j in prompt.visible_blocks if torch.as_tensor(head["keep"])[r, j]}
    margin = min(float(torch.as_tensor(head["margin"])) for head in heads)
    rows = _representative_rows(prompt.valid_rows, options.index_queries, options.block_size)
    united = []
    for head, query in zip(heads, queries, strict=True):
        p = _attention(query, key, rows, prompt, options)
        united.append({**head, **_statistics(kept, p, rows, prompt, options.block_size), "margin": _float64(margin)})
    return united


def _published_count(values: Tensor, options: _Options, smallest: int, largest: int) -> tuple[int, float]:
    """The published code's count of blocks from per-token values, clamped, and the margin.

    The token count is (running sums <= gamma) + 1, the block count that // 128 + 1, with 128
    whatever the block size is. The margin is infinite on a side where the clamp decides.
    """

    def clamped(count: int) -> int:
        return min(max(count, smallest), largest)

    running = values.sort(descending=True).values.cumsum(dim=0).tolist()
    if options.gamma == 1:
        # No sum of shares exceeds 1 but by rounding.
        return clamped((len(running) + 1) // 128 + 1), math.inf
    tokens = 1 + sum(total <= options.gamma for total in running)
    steps = tokens // 128
    count = clamped(steps + 1)
    margins = [math.inf]
    # The count stands while 128 * steps <= tokens < 128 * (steps + 1).
    least, most = 128 * steps - 1, 128 * steps + 127
    if steps > 0 and clamped(steps) != count:
        margins.append(_relative(running[least - 1] - options.gamma, options.gamma))
    if most <= len(running) and clamped(steps + 2) != count:
        margins.append(_relative(running[most - 1] - options.gamma, options.gamma))
    return count, min(margins)


def _published_blocks(pooled: Tensor, prompt: _Prompt, options: _Options) -> tuple[set[tuple[int, int]], float]:
    """Flattened blocks whose running sum stays <= gamma * N, crossing one out; the margin."""
    num_kv_blocks = prompt.num_kv_blocks
    if options.gamma == 1:
        return set(prompt.visible_blocks), math.inf
    values = pooled.flatten().tolist()
    flat = [r * num_kv_blocks + j for r, j in prompt.visible_blocks]
    order = _heaviest_first(values, flat)
    threshold = options.gamma * num_kv_blocks
    kept, total, margin = [], 0.0, math.inf
    for index in order:
        margin = min(margin, _relative(total + values[index] - threshold, threshold))
        if total + values[index] > threshold:
            break
        total += values[index]
        kept.append(index)
    if 0 < len(kept) < len(order):
        margin = min(margin, _gap(values[kept[-1]], values[order[len(kept)]], 0.0))
    return {(i // num_kv_blocks, i % num_kv_blocks) for i in kept}, margin


def _published_js_distance(estimate: Tensor, true_share: Tensor) -> tuple[float, bool]:
    """The published code's distance, and whether float32 leaves open if it is NaN.

    It takes 0 * log 0 in float32, so a share that underflows there gives NaN. Around the smallest
    float32 that depends on how each share was summed.
    """
    shares = torch.cat([estimate, true_share])
    is_open = bool(((shares > 2.0**-160) & (shares < 2.0**-116)).any())
    if (shares.float() == 0).any():
        return math.nan, is_open
    return _js_distance(estimate, true_share), is_open


def _published_heads(queries: list[Tensor], key: Tensor, prompt: _Prompt, options: _Options) -> list[dict[str, object]]:
    """Decide one head as the published code (bytedance/FlexPrefill) does."""
    (query,) = queries
    size, num_kv_blocks = options.block_size, prompt.num_kv_blocks
    rows = prompt.valid_rows[-size:]
    p = _attention(query, key, rows, prompt, options)
    by_token = p.mean(dim=0)
    by_offset = _by_offset(p, rows, prompt.offset)
    vertical = _by_block(by_token, size)
    slash = _by_block(by_offset, size)

    means, log_counts = _key_means(key, prompt, size)
    no_counts = torch.zeros_like(log_counts)
    all_blocks = list(range(num_kv_blocks))
    estimate = _pooled_row(query[rows].mean(dim=0), means, no_counts, all_blocks, options)
    js_distance, is_open = _published_js_distance(estimate, vertical)
    is_query_aware = js_distance < options.tau
    pattern_margin = math.inf
    if options.tau > 0 and is_open:
        pattern_margin = 0.0
    elif not math.isnan(js_distance):
        pattern_margin = _relative(js_distance - options.tau, options.tau)

    pooled = _pooled_map(query, means, no_counts, prompt, options)
    blocks, query_aware_margin = _published_blocks(pooled, prompt, options)

    smallest = options.min_blocks
    largest = num_kv_blocks
    if options.max_blocks is not None:
        largest = min(largest, options.max_blocks)
    counts, margins = [], []
    chosen = []
    for by_unit, by_block in ((by_token, vertical), (by_offset, slash)):
        count, margin = _published_count(by_unit, options, smallest, largest)
        if is_query_aware:
            count, margin = min(smallest, largest), math.inf
        # Block 0 takes a place in the count, and is there even where the count of a head without a floor is 0: the published
        # code fills the places that a head leaves over with block 0.
        values = [math.inf, *by_block.tolist()[1:]]
        places, cut_margin = _fewest(values, all_blocks, 1.0, at_most=max(1, count))
        counts.append(count)
        margins.append(min(margin, cut_margin))
        chosen.append(places)

    kept = _extend(prompt, *chosen)
    if is_query_aware:
        kept |= blocks
    matters = [pattern_margin, *margins]
    if is_query_aware:
        matters.append(query_aware_margin)
    head = {
        **_statistics(kept, p, rows, prompt, size),
        "is_query_aware": is_query_aware,
        "js_distance": _float64(js_distance),
        "vertical": vertical,
        "slash": slash,
        "pooled": pooled,
        "num_vertical_blocks": counts[0],
        "num_slash_blocks": counts[1],
        "pattern_margin": _float64(pattern_margin),
        "vertical_margin": _float64(margins[0]),
        "slash_margin": _float64(margins[1]),
        "query_aware_margin": _float64(query_aware_margin),
        "margin": _float64(min(matters)),
    }
    return [head]


def _float64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _statistics(kept: set[tuple[int, int]], p: Tensor, rows: list[int], prompt: _Prompt, block_size: int) -> dict[str, object]:
    """The mask of one head, its density and its coverage of the index rows' attention p."""
    shape = len(prompt.position_blocks), prompt.num_kv_blocks
    keep, full = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for r, j in kept:
        keep[r, j] = True
    for r, j in kept.intersection(prompt.full_blocks):
        full[r, j] = True
    held = 0.0
    for attention, row in zip(p, rows, strict=True):
        by_block = _by_block(attention, block_size)
        held += float(by_block[keep[row // block_size]].sum())
    return {
        "keep": keep,
        "full": full,
        "density": _float64(len(kept) / len(prompt.visible_blocks)),
        "coverage": _float64(held / len(rows)),
    }


def _empty_head(prompt: _Prompt) -> dict[str, object]:
    """A batch row without a valid query row: nothing to see, nothing to decide."""
    shape = len(prompt.position_blocks), prompt.num_kv_blocks
    names = ("pattern_margin", "vertical_margin", "slash_margin", "query_aware_margin", "margin")
    return {
        "keep": torch.zeros(shape, dtype=torch.bool),
        "full": torch.zeros(shape, dtype=torch.bool),
        "is_query_aware": False,
        "vertical": torch.zeros(prompt.num_kv_blocks, dtype=torch.float64),
        "slash": torch.zeros(prompt.num_kv_blocks, dtype=torch.float64),
        "pooled": torch.zeros(shape, dtype=torch.float64),
        "num_vertical_blocks": 0,
        "num_slash_blocks": 0,
        **{name: _float64(0.0) for name in ("js_distance", "density", "coverage")},
        **{name: _float64(math.inf) for name in names},
    }
