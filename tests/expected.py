"""Results of a call by definition, pair by pair of tokens."""

import math

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from tests.cases import Case


def visible_pairs(case: Case) -> Tensor:
    """(batch, q_len, kv_len) bool."""
    (batch, _, q_len, _), kv_len = case.query.shape, case.key.shape[2]
    offset = kv_len - q_len if case.q_offset is None else case.q_offset
    offsets = torch.as_tensor(offset).cpu().clamp(0, kv_len - q_len).expand(batch)
    is_token = torch.ones(batch, kv_len).bool() if case.attention_mask is None else case.attention_mask.cpu() != 0
    return seen_pairs(q_len, offsets, is_token, case.scores.get("window"))


def seen_pairs(q_len: int, offsets: Tensor, is_token: Tensor, window: int | None) -> Tensor:
    """Visible pairs of (batch,) offsets and (batch, kv_len) tokens, (batch, q_len, kv_len) bool."""
    position = offsets[:, None] + torch.arange(q_len)
    distance = position[:, :, None] - torch.arange(is_token.shape[1])
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return near & is_token.gather(1, position)[:, :, None] & is_token[:, None]


def by_block(pairs: Tensor, block_size: int, every: bool = False) -> Tensor:
    """Blocks in which some (or every existing) pair is True, (..., num_q_blocks, num_kv_blocks) bool."""
    short = [-length % block_size for length in pairs.shape[-2:]]
    padded = torch.nn.functional.pad(pairs, (0, short[1], 0, short[0]), value=every)
    blocks = padded.unflatten(-1, (-1, block_size)).unflatten(-3, (-1, block_size)).transpose(-3, -2)
    return blocks.all(-1).all(-1) if every else blocks.any(-1).any(-1)


def expanded(keep: Tensor, case: Case) -> Tensor:
    """Visible pairs under a block map, (batch, num_heads, q_len, kv_len) bool."""
    size = case.config.block_size
    pairs = keep.cpu().repeat_interleave(size, -2).repeat_interleave(size, -1)
    return pairs[..., : case.query.shape[2], : case.key.shape[2]] & visible_pairs(case)[:, None]


def pairs_under(mask: BlockMask, q_len: int, kv_len: int) -> Tensor:
    """Pairs that a BlockMask's mask_mod shows within its listed blocks, (batch, num_heads, q_len, kv_len) bool."""
    batch, num_heads = mask.shape[:2]
    shown = create_mask(mask.mask_mod, batch, num_heads, q_len, kv_len, device=mask.kv_indices.device)
    rows, columns = mask.BLOCK_SIZE
    listed = mask.to_dense().bool().repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    return shown & listed[..., :q_len, :kv_len]


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dense attention under a mask of pairs and its log-sum-exp, in float64; rows that see nothing give 0 and -inf.

    Each of the `sinks`, (num_heads,), is a last key without a value, which the log-sum-exp leaves out.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.masked_fill(~mask.any(-1, keepdim=True), 0.0).softmax(-1)[..., : key.shape[2]]
    return weights.masked_fill(~mask, 0.0) @ value.double(), lse


def rows_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Causal attention of a chunk as engines lay it out, (rows, heads, head_dim), whose last row is the last key's."""
    seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, _ = masked_attention(query, key, value, seen, scale, sinks=sinks)
    return out[0].transpose(0, 1).float()
