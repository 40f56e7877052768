"""The model's hidden states in training: transformers' weights, in two compiled pieces a layer around SDPA.

All rows of a batch are one row of tokens to what is not attention, so that a piece compiles once for all lengths of rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM


def hidden_states(model: LlamaForCausalLM, token_ids: Tensor, compiled: bool) -> Tensor:
    """Return the last hidden states, (batch * num_tokens, hidden_size), after the last norm.

    Parameters
    ----------
    model : LlamaForCausalLM
    token_ids : Tensor, (batch, num_tokens), int64
    compiled : bool
        Compile what is not attention; compiles again where ``batch * num_tokens`` changes.
    """
    config = model.config
    batch, num_tokens = token_ids.shape
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert kv_heads is not None and head_dim is not None
    eps = config.rms_norm_eps
    before, after = (_before_compiled, _after_compiled) if compiled else (_before, _after)
    x = model.model.embed_tokens(token_ids.flatten())
    positions = torch.arange(num_tokens, device=x.device)[None]
    cos, sin = (part[0].repeat(batch, 1)[:, None] for part in model.model.rotary_emb(x, positions))
    for layer in model.model.layers:
        part, mlp = layer.self_attn, layer.mlp
        weights = (part.q_proj.weight, part.k_proj.weight, part.v_proj.weight)
        query, key, value = before(x, layer.input_layernorm.weight, *weights, cos, sin, head_dim, eps)
        query, key, value = (
            each.view(batch, num_tokens, count, head_dim).transpose(1, 2)
            for each, count in ((query, heads), (key, kv_heads), (value, kv_heads))
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        found = found.transpose(1, 2).reshape(batch * num_tokens, heads * head_dim)
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        x = after(x, found, part.o_proj.weight, layer.post_attention_layernorm.weight, *weights, eps)
    return _norm(x, model.model.norm.weight, eps)


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
