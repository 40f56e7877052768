"""The model's hidden states in training: transformers' weights, in two compiled pieces a layer around SDPA.

All rows of a batch are one row of tokens to what is not attention, so that a piece compiles once for all lengths of rows, and
a batch may hold rows of several lengths.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM


def hidden_states(model: LlamaForCausalLM, batch: Sequence[Tensor], compiled: bool) -> Tensor:
    """Return the last hidden states, (tokens of all rows, hidden_size), after the last norm.

    Parameters
    ----------
    model : LlamaForCausalLM
    batch : sequence of Tensor, (count, num_tokens), int64
        Rows by their length.
    compiled : bool
        Compile what is not attention; compiles again where the number of all tokens changes.
    """
    config = model.config
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert kv_heads is not None and head_dim is not None
    eps = config.rms_norm_eps
    before, after = (_before_compiled, _after_compiled) if compiled else (_before, _after)
    x = model.model.embed_tokens(torch.cat([rows.flatten() for rows in batch]))
    longest = torch.arange(max(rows.shape[1] for rows in batch), device=x.device)[None]
    cos, sin = (
        torch.cat([part[0, : rows.shape[1]].repeat(rows.shape[0], 1) for rows in batch])[:, None]
        for part in model.model.rotary_emb(x, longest)
    )
    sizes = [rows.numel() for rows in batch]
    for layer in model.model.layers:
        part, mlp = layer.self_attn, layer.mlp
        weights = (part.q_proj.weight, part.k_proj.weight, part.v_proj.weight)
        parts = before(x, layer.input_layernorm.weight, *weights, cos, sin, head_dim, eps)
        query, key, value = (flat.split(sizes) for flat in parts)
        shape = (heads, kv_heads, head_dim)
        found = torch.cat([_attention(*each, shape) for each in zip(batch, query, key, value, strict=True)])
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        x = after(x, found, part.o_proj.weight, layer.post_attention_layernorm.weight, *weights, eps)
    return _norm(x, model.model.norm.weight, eps)


def _attention(rows: Tensor, query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return causal attention within rows of one length, (tokens, heads * head_dim)."""
    heads, kv_heads, head_dim = shape
    query, key, value = (
        flat.view(*rows.shape, count, head_dim).transpose(1, 2)
        for flat, count in ((query, heads), (key, kv_heads), (value, kv_heads))
    )
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2).reshape(rows.numel(), heads * head_dim)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _before(
    x: Tensor, norm: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values, (tokens, heads * head_dim)."""
    x = _norm(x, norm, eps)
    q, k = (_rotate(F.linear(x, weight).unflatten(-1, (-1, head_dim)), cos, sin).flatten(1) for weight in (query, key))
    return q, k, F.linear(x, value)


def _after(x: Tensor, found: Tensor, out: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> Tensor:
    """Add the attention's output and the MLP's."""
    x = x + F.linear(found, out)
    inner = _norm(x, norm, eps)
    return x + F.linear(F.silu(F.linear(inner, gate)) * F.linear(inner, up), down)


_before_compiled: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.compile(_before, dynamic=False)
_after_compiled: Callable[..., Tensor] = torch.compile(_after, dynamic=False)
