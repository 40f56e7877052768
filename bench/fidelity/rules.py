"""The workshop in which hybrid selection was found: evidence of all rows and of the last ones, joined in many ways.

It stays so that the table of alternatives in ``bench/NOTES.md`` can be measured again. Nothing but `bench.fidelity` uses it; the
project's selection is ``flexmask.plain.hybrid``. In these words that selection is, with ``e = 1 - gamma``,
``rule:rho=e/5,valpha=e,sthr=e/5,window=4,vert=4,vstat=max,stride=8,slot=0,last_near=16`` (the last by ``methods.py``).
Plain torch, one whole prompt of a multiple of 128 tokens, memory of the order of tokens squared over 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask import flexprefill_mask

B = 128


def causal_blocks(tokens: int, device: torch.device) -> Tensor:
    """(num_blocks, num_blocks) bool."""
    return torch.ones(tokens // B, tokens // B, dtype=torch.bool, device=device).tril()


def window_and_sink(tokens: int, device: torch.device, window: int, sink: int = 1) -> Tensor:
    """The nearest `window` block diagonals (at least the own one) and the first `sink` key blocks."""
    block = torch.arange(tokens // B, device=device)
    near = block[:, None] - block < max(window, 1)
    return (near | (block < sink)) & causal_blocks(tokens, device)


def finish(keep: Tensor) -> Tensor:
    """`keep`, made causal, with the diagonal."""
    blocks = keep.shape[-1]
    return (keep | torch.eye(blocks, dtype=torch.bool, device=keep.device)).tril()


def top_p(mass: Tensor, gamma: float, first: Tensor | None = None) -> Tensor:
    """The fewest entries of the last dimension whose sum reaches gamma of the whole; those of `first` come first."""
    order = (mass if first is None else mass + first * 1e3).sort(dim=-1, descending=True, stable=True).indices
    ordered = mass.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    kept = before < gamma * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def row_evidence(
    query: Tensor, key: Tensor, scale: float, source: str = "means", stride: int = 1, slot: int | None = None, sub: int = 1
) -> dict[str, Tensor]:
    """Attention of each query block's rows to the key blocks: "mean", "max" and "rms" over the rows, (batch, heads, nb, nb).

    `source`: "means", softmax over the means of key blocks, or of `sub` pieces of each; of every `stride`-th row, from `slot`
    on (None: from ``stride - 1``); "x8", XAttention's antidiagonals of stride 8 (any stride); "true", the softmax itself.
    """
    slot = stride - 1 if slot is None else slot

    def one(q: Tensor, k: Tensor) -> dict[str, Tensor]:
        if source == "means":
            return _mean_evidence(q, k, scale, stride, slot, sub)
        return _true_evidence(q, k, scale) if source == "true" else _antidiagonal_evidence(q, k, scale, int(source[1:]))

    parts = [one(query[i : i + 1], key[i : i + 1]) for i in range(query.shape[0])]  # one prompt at a time, to bound memory
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _pooled(p: Tensor) -> dict[str, Tensor]:
    """Over the rows (dimension 3) of (batch, heads, nb, rows, nb)."""
    return {"mean": p.mean(3), "max": p.amax(3), "rms": p.square().mean(3).sqrt()}


def _mean_evidence(query: Tensor, key: Tensor, scale: float, stride: int, slot: int, sub: int) -> dict[str, Tensor]:
    batch, heads, tokens, dim = query.shape
    blocks, group, size = tokens // B, heads // key.shape[1], B // sub
    means = key.float().unflatten(2, (blocks * sub, size)).mean(3)
    rows = query.unflatten(2, (blocks, B))[:, :, :, slot::stride].float()
    position = torch.arange(tokens, device=query.device).view(blocks, B)[:, slot::stride]
    grouped = rows.reshape(batch, -1, group, blocks * rows.shape[3], dim)
    scores = (scale * (grouped @ means.unsqueeze(2).mT)).view(batch, heads, blocks, -1, blocks * sub)
    start = size * torch.arange(blocks * sub, device=query.device)
    scores.masked_fill_(start > position[..., None], float("-inf"))
    p = torch.softmax(scores, -1)
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
        p = torch.softmax(scores.masked_fill_(~causal, float("-inf")), -1).unflatten(-1, (blocks, B)).sum(-1)
        for name, value in _pooled(p.unflatten(1, (blocks, B)).unsqueeze(1)).items():
            found.setdefault(name, []).append(value)
    return {name: torch.cat(values, 1) for name, values in found.items()}


def last_rows(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """True attention of the last block's rows by key block (batch, heads, rows, nb), and by block diagonal (batch, heads, nb).

    A token diagonal counts for the two block diagonals that it crosses, as in the project's selection.
    """
    batch, heads, tokens, dim = query.shape
    blocks, device = tokens // B, query.device
    last = query[:, :, -B:].float().reshape(batch, key.shape[1], -1, B, dim)
    scores = scale * (last @ key.float().unsqueeze(2).mT).view(batch, heads, B, tokens)
    position = torch.arange(tokens - B, tokens, device=device)
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


def lines(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    window: int,
    vert: int,
    vstat: str,
    vfar: int,
    valpha: float,
    slash: float,
    sthr: float,
) -> Tensor:
    """Key blocks (verticals) and block diagonals (slashes) that the last rows ask for, (batch, heads, nb, nb)."""
    blocks, device = query.shape[2] // B, query.device
    by_row, diagonal_mass = last_rows(query, key, scale)
    ranked = by_row.amax(2) if vstat == "max" else by_row.mean(2)
    if vfar:
        ranked = ranked.masked_fill(window_and_sink(query.shape[2], device, window)[-1], -1.0)
    vertical = torch.zeros_like(ranked, dtype=torch.bool)
    vertical.scatter_(-1, ranked.topk(min(vert, blocks), dim=-1).indices, True)
    if valpha:
        vertical |= by_row.amax(2) >= valpha
    diagonal = torch.zeros_like(vertical)
    if slash:
        diagonal |= top_p(diagonal_mass, slash)
    if sthr:
        diagonal |= diagonal_mass >= sthr
    block = torch.arange(blocks, device=device)
    return vertical.unsqueeze(-2) | diagonal[..., (block[:, None] - block).clamp(min=0)]


def rule(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    rows: float = 0.0,
    alpha: float = 0.0,
    beta: float = 0.0,
    rho: float = 0.0,
    least_even: float = 0.0,
    most_even: float = 0.0,
    source: str = "means",
    stride: int = 1,
    slot: int | None = None,
    sub: int = 1,
    heads: str = "",
    cov: float = 0.0,
    window: int = 8,
    vert: int = 8,
    vstat: str = "mean",
    vfar: int = 0,
    valpha: float = 0.0,
    slash: float = 0.0,
    sthr: float = 0.0,
) -> Tensor:
    """Rows, last rows, window and first block together. An option at 0 (or "") has no part.

    Parameters
    ----------
    query, key, scale
        As in ``methods.py``, which also says what comes back.
    rows, alpha, beta, rho
        What a query block's own rows ask for: top-p of their mean, or a threshold on their maximum, mean or root mean square.
    least_even, most_even
        The root mean square's threshold is at least, or at most, so many times an even share of the row's blocks.
    source, stride, slot, sub
        How their attention is estimated, see `row_evidence`.
    heads
        Rows decide in query-aware heads only ("qa") or in the others ("vs").
    cov
        Join with the project's selection at this gamma.
    window
        Nearest block diagonals.
    vert, vstat, vfar
        How many verticals, by the "mean" or the "max" of the last block's rows, outside of window and first block if `vfar`.
    valpha
        Verticals that some row of the last block gives as much.
    slash, sthr
        Slashes: top-p, or a threshold.
    """
    forced = window_and_sink(query.shape[2], query.device, window)
    keep = forced.expand(*query.shape[:2], -1, -1)
    wanted = []
    if rows or alpha or beta or rho:
        evidence = row_evidence(query, key, scale, source, stride, slot, sub)
        wanted += [top_p(evidence["mean"], rows)] if rows else []
        even = 1 / torch.arange(1, keep.shape[-1] + 1, device=query.device)[:, None]
        share = torch.clamp(torch.full_like(even, rho), least_even * even, most_even * even if most_even else None)
        thresholds: tuple[tuple[str, float | Tensor], ...] = (("max", alpha), ("mean", beta), ("rms", share if rho else 0.0))
        wanted += [evidence[name] >= least for name, least in thresholds if torch.is_tensor(least) or least]
    for each in wanted:
        if heads:
            aware = _query_aware(query, key, scale)
            each = each & (aware if heads == "qa" else ~aware)[..., None, None]
        keep = keep | each
    keep = keep | lines(
        query, key, scale, window=window, vert=vert, vstat=vstat, vfar=vfar, valpha=valpha, slash=slash, sthr=sthr
    )
    if cov:
        mask = flexprefill_mask(query, key, scale=scale, gamma=cov)
        assert not isinstance(mask, tuple)
        keep = keep | mask.to_dense().bool()
    return finish(keep)


def _query_aware(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Heads that the paper's selection finds query-aware, (batch, num_heads) bool."""
    mask_and_stats = flexprefill_mask(query, key, scale=scale, return_stats=True)
    assert isinstance(mask_and_stats, tuple)
    return mask_and_stats[1].is_query_aware
