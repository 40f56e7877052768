"""Selections under test: functions ``(query, key, scale, **options)`` to a map of kept blocks, in plain torch.

query is (batch, num_heads, tokens, head_dim), key (batch, num_kv_heads, tokens, head_dim), tokens a multiple of 128, one whole
prompt; the result is (batch, num_heads, num_blocks, num_blocks) bool, causal, with every diagonal block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexmask.base.inputs import attention_inputs
from flexmask.config import FlexPrefillConfig, compile_time
from flexmask.plain.search import search as plain_search

B = 128
MOST_ENTRIES = 2**29


def causal_blocks(blocks: int, device: torch.device) -> Tensor:
    """(num_blocks, num_blocks) bool."""
    return torch.ones(blocks, blocks, dtype=torch.bool, device=device).tril()


def window_and_sink(blocks: int, device: torch.device, window: int, sink: int) -> Tensor:
    """The nearest `window` block diagonals (at least the own one) and the first `sink` key blocks."""
    block = torch.arange(blocks, device=device)
    near = block[:, None] - block < max(window, 1)
    return (near | (block < sink)) & causal_blocks(blocks, device)


def finish(keep: Tensor) -> Tensor:
    """`keep`, made causal, with the diagonal."""
    blocks = keep.shape[-1]
    return (keep | torch.eye(blocks, dtype=torch.bool, device=keep.device)) & causal_blocks(blocks, keep.device)


# ---- evidence of all rows


def _each_batch_row(function: Callable[..., Any], query: Tensor, key: Tensor, *rest: Any) -> Any:
    """`function` one prompt at a time, to bound memory."""
    parts = [function(query[i : i + 1], key[i : i + 1], *rest) for i in range(query.shape[0])]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def row_evidence(query: Tensor, key: Tensor, scale: float, o: dict[str, Any]) -> dict[str, Tensor]:
    """Attention of each query block's rows to the key blocks: "mean", "max" and "rms" over the rows, (batch, heads, nb, nb).

    ``source``: "means" (softmax over key block means), "x8" (XAttention's antidiagonals, any stride) or "true".
    """
    source = o.get("source", "means")
    if source == "true":
        return _each_batch_row(_true_evidence, query, key, scale)
    if source.startswith("x"):
        return _each_batch_row(_antidiagonal_evidence, query, key, scale, int(source[1:]))
    return _each_batch_row(_mean_evidence, query, key, scale, o)


def _pooled(p: Tensor) -> dict[str, Tensor]:
    """Over the rows (dimension 3) of (batch, heads, nb, rows, nb)."""
    return {"mean": p.mean(3), "max": p.amax(3), "rms": p.square().mean(3).sqrt()}


def _mean_evidence(query: Tensor, key: Tensor, scale: float, o: dict[str, Any]) -> dict[str, Tensor]:
    stride, sub, var, own = int(o.get("stride", 1)), int(o.get("sub", 1)), o.get("var", 0.0), o.get("own", "full")
    batch, heads, tokens, dim = query.shape
    blocks, group, size = tokens // B, heads // key.shape[1], B // sub
    parts = key.float().unflatten(2, (blocks * sub, size))
    means = parts.mean(3)
    rows = query.unflatten(2, (blocks, B))[:, :, :, stride - 1 :: stride].float()
    if o.get("pool"):  # one row a block: its mean
        rows = query.float().unflatten(2, (blocks, B)).mean(3, keepdim=True)
        position = B * torch.arange(blocks, device=query.device)[:, None] + B - 1
    else:
        position = torch.arange(tokens, device=query.device).view(blocks, B)[:, stride - 1 :: stride]
    grouped = rows.view(batch, -1, group, blocks * rows.shape[3], dim)
    scores = scale * (grouped @ means.unsqueeze(2).mT)
    if var:  # second order, by coordinate
        scores += 0.5 * var * scale * scale * (grouped.square() @ parts.var(3, unbiased=False).unsqueeze(2).mT)
    scores = scores.view(batch, heads, blocks, -1, blocks * sub)
    start = size * torch.arange(blocks * sub, device=query.device)
    count = (position[..., None] - start + 1).clamp(0, size)
    if own == "drop":
        count = torch.where(start // B == position[..., None] // B, 0, count)
    bias = (count.float() / size).log() if own == "count" else torch.where(count > 0, 0.0, float("-inf"))
    p = torch.softmax(scores + bias, -1).nan_to_num(0.0)
    return _pooled(p.unflatten(-1, (blocks, sub)).sum(-1) if sub > 1 else p)


def _antidiagonal_evidence(query: Tensor, key: Tensor, scale: float, stride: int) -> dict[str, Tensor]:
    batch, heads, tokens, dim = query.shape
    groups, blocks, per = tokens // stride, tokens // B, B // stride
    flipped = query.unflatten(2, (groups, stride)).flip(3).flatten(3).float()
    strided = key.unflatten(2, (groups, stride)).flatten(3).float()
    grouped = flipped.view(batch, key.shape[1], -1, groups * stride * dim).unflatten(-1, (groups, stride * dim))
    scores = (grouped @ strided.unsqueeze(2).mT).view(batch, heads, groups, groups) * (scale / stride)
    scores.masked_fill_(~torch.ones(groups, groups, dtype=torch.bool, device=query.device).tril(), float("-inf"))
    p = torch.softmax(scores, -1).unflatten(-1, (blocks, per)).sum(-1)
    return _pooled(p.unflatten(2, (blocks, per)))


def _true_evidence(query: Tensor, key: Tensor, scale: float) -> dict[str, Tensor]:
    heads, tokens = query.shape[1:3]
    blocks, group = tokens // B, heads // key.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    found: dict[str, list[Tensor]] = {}
    for head in range(heads):
        scores = (query[:, head] @ key[:, head // group].mT).float() * scale
        p = torch.softmax(scores.masked_fill_(~causal, float("-inf")), -1)
        p = p.unflatten(-1, (blocks, B)).sum(-1)
        for name, value in _pooled(p.unflatten(1, (blocks, B)).unsqueeze(1)).items():
            found.setdefault(name, []).append(value)
    return {name: torch.cat(values, 1) for name, values in found.items()}


def top_p(mass: Tensor, gamma: float | Tensor, first: Tensor | None = None) -> Tensor:
    """The fewest entries of the last dimension whose sum reaches gamma of the whole; those of `first` come first."""
    order = (mass if first is None else mass + first * 1e3).sort(dim=-1, descending=True, stable=True).indices
    ordered = mass.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    kept = before < gamma * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def rows_rule(evidence: dict[str, Tensor], forced: Tensor, o: dict[str, Any]) -> Tensor:
    """Blocks that the rows ask for.

    By top-p (``rows``) and thresholds (``alpha`` on the largest row, ``beta`` on the mean, ``rho`` on the root mean square,
    ``rel`` on the mean relative to the largest one), joined by "or" or "and".
    """
    kept = []
    if o.get("rows"):
        mass, credit = evidence[o.get("stat", "mean")], o.get("credit", "none")
        if credit == "rest":
            mass = mass.masked_fill(forced, 0.0)
        kept.append(top_p(mass, o["rows"], forced if credit == "forced" else None))
    for name, stat in (("alpha", "max"), ("beta", "mean"), ("rho", "rms")):
        if o.get(name):
            kept.append(evidence[stat] >= o[name])
    if o.get("rel"):
        kept.append(evidence["mean"] >= o["rel"] * evidence["mean"].amax(-1, keepdim=True))
    if not kept:
        return torch.zeros_like(evidence["mean"], dtype=torch.bool)
    result = kept[0]
    for each in kept[1:]:
        result = result & each if o.get("join", "or") == "and" else result | each
    return result


# ---- evidence of the last rows


def last_rows(query: Tensor, key: Tensor, scale: float, rows: int) -> tuple[Tensor, Tensor]:
    """True attention of the last `rows` rows by key block (batch, heads, rows, nb), and by block diagonal (batch, heads, nb).

    A token diagonal counts for the two block diagonals that it crosses, as in the project's selection.
    """
    batch, heads, tokens, dim = query.shape
    blocks, device = tokens // B, query.device
    last = query[:, :, -rows:].float().view(batch, key.shape[1], -1, rows, dim)
    scores = scale * (last @ key.float().unsqueeze(2).mT).view(batch, heads, rows, tokens)
    position = torch.arange(tokens - rows, tokens, device=device)
    scores.masked_fill_(torch.arange(tokens, device=device) > position[:, None], float("-inf"))
    p = torch.softmax(scores, -1).unflatten(-1, (blocks, B))
    lead = ((position % B)[:, None] - torch.arange(B, device=device)).float() / B
    by_block = p.sum(-1)
    after = (p * lead.clamp(min=0)[:, None]).sum(-1).mean(2)
    before = (p * (-lead).clamp(min=0)[:, None]).sum(-1).mean(2)
    here = by_block.mean(2) - after - before
    slash = here.flip(-1)  # key block j lies on diagonal nb - 1 - j
    slash[..., 1:] += after.flip(-1)[..., :-1]
    slash[..., :-1] += before.flip(-1)[..., 1:]
    return by_block, slash


def lines_rule(query: Tensor, key: Tensor, scale: float, o: dict[str, Any]) -> Tensor:
    """Key blocks (verticals) and block diagonals (slashes) that the last rows ask for."""
    blocks, device = query.shape[2] // B, query.device
    by_row, slash = last_rows(query, key, scale, int(o.get("lrows", B)))
    column = by_row.amax(2) if o.get("vstat") == "max" else by_row.mean(2)
    sees = column
    if o.get("vfar"):
        near = window_and_sink(blocks, device, int(o.get("window", 8)), int(o.get("sink", 1)))[-1]
        sees = column.masked_fill(near, -1.0)
    count = int(o.get("vert", 8))
    vertical = torch.zeros_like(column, dtype=torch.bool)
    if count:
        vertical.scatter_(-1, sees.topk(min(count, blocks), dim=-1).indices, True)
    if o.get("valpha"):
        vertical |= by_row.amax(2) >= o["valpha"]
    if o.get("vp"):
        vertical |= top_p(column, o["vp"])
    diagonal = torch.zeros_like(vertical)
    if o.get("slash"):
        diagonal |= top_p(slash, o["slash"])
    if o.get("sthr"):
        diagonal |= slash >= o["sthr"]
    block = torch.arange(blocks, device=device)
    distance = (block[:, None] - block).clamp(min=0)
    keep = vertical.unsqueeze(-2) | diagonal[..., distance]
    if o.get("lastp"):
        keep[..., -1, :] |= top_p(by_row.mean(2), o["lastp"])
    if o.get("lastdense"):
        keep[..., -int(o["lastdense"]) :, :] = True
    return keep


# ---- methods


def hybrid(query: Tensor, key: Tensor, scale: float, **o: Any) -> Tensor:
    """Rows, last rows, window and sink together; every option is read where it is used above."""
    blocks = query.shape[2] // B
    forced = window_and_sink(blocks, query.device, int(o.get("window", 8)), int(o.get("sink", 1)))
    keep = forced.expand(*query.shape[:2], -1, -1)
    if any(o.get(name) for name in ("rows", "alpha", "beta", "rho", "rel")):
        wanted = rows_rule(row_evidence(query, key, scale, o), forced, o)
        if o.get("heads"):
            aware = coverage(query, key, scale, tau=o.get("tau", 0.1), with_aware=True)
            wanted = wanted & (aware if o["heads"] == "qa" else ~aware)[..., None, None]
        keep = keep | wanted
    keep = keep | lines_rule(query, key, scale, o)
    if o.get("cov"):
        keep = keep | coverage(query, key, scale, gamma=o["cov"], floor=o.get("floor", 1024), tau=o.get("tau", 0.1))
    return finish(keep)


def coverage(query: Tensor, key: Tensor, scale: float, **o: Any) -> Tensor:
    """The project's selection, or the published one (``selection="reference"``)."""
    options = {"gamma": o.get("gamma", 0.95), "tau": o.get("tau", 0.1), "min_budget": int(o.get("floor", 1024))}
    config = FlexPrefillConfig(**options, selection=o.get("selection", "coverage"))
    gamma, tau = (torch.full((), x, dtype=torch.float64, device=query.device) for x in (config.gamma, config.tau))
    found = []
    for i in range(query.shape[0]):  # one prompt at a time, to bound memory
        inputs = attention_inputs(query[i : i + 1], key[i : i + 1], scale=scale).placed()
        aware = bool(o.get("with_aware"))
        result = plain_search(inputs, compile_time(config), gamma, tau, aware, True)
        found.append(result.stats[0] if aware else result.keep)
    return torch.cat(found)


def published(query: Tensor, key: Tensor, scale: float, **o: Any) -> Tensor:
    """The published code's block sets."""
    return coverage(query, key, scale, selection="reference", **o)


def xattention(query: Tensor, key: Tensor, scale: float, **o: Any) -> Tensor:
    """XAttention: antidiagonal scores by stride, top-p after the first and the own block."""
    mass = row_evidence(query, key, scale, {"source": f"x{int(o.get('stride', 8))}"})["mean"]
    forced = window_and_sink(query.shape[2] // B, query.device, 1, 1)
    return finish(top_p(mass, o.get("threshold", 0.9), forced) | forced)


def flash_prefill(query: Tensor, key: Tensor, scale: float, **o: Any) -> Tensor:
    """FlashPrefill V1: relative threshold on the mean of the rows' attention to key means; 2 sinks, 4 near, 2 last dense."""
    mass = row_evidence(query, key, scale, {})["mean"]
    keep = mass >= o.get("alpha", 0.1) * mass.amax(-1, keepdim=True)
    keep = keep | window_and_sink(query.shape[2] // B, query.device, int(o.get("window", 4)), 2)
    keep[..., -int(o.get("last", 2)) :, :] = True
    return finish(keep)


def causal(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Every block, by the sparse kernel: the noise of the measure."""
    return finish(causal_blocks(query.shape[2] // B, query.device).expand(*query.shape[:2], -1, -1))


METHODS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function for function in (hybrid, coverage, published, xattention, flash_prefill, causal)
}


def parse(text: str) -> Callable[[Tensor, Tensor, float], Tensor]:
    """A method of ``name`` or ``name:option=value,option=value``."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        option, value = pair.split("=")
        try:
            options[option] = float(value)
        except ValueError:
            options[option] = value
    return lambda query, key, scale: METHODS[name](query, key, scale, **options)
