"""Tiny models of every causal-LM type, shrunk from its default configuration."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers"
HEADS = """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
    num_decoder_attention_heads num_encoder_attention_heads"""
WIDTHS = """hidden_size d_model n_embd dim embedding_size emb_dim decoder_hidden_size intermediate_size ffn_dim decoder_ffn_dim
    encoder_ffn_dim n_inner ffn_hidden_size moe_intermediate_size d_inner d_ff shared_expert_intermediate_size dim_ff d_embed"""
HEAD_DIMS = """head_dim dim_head kv_channels attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim
    attention_hidden_size hidden_size_per_layer_input mamba_d_state state_size mamba_d_ssm ssm_state_size mamba_d_head
    mamba_head_dim"""
# by the names in configurations; absent ones are left out
NAMES = {
    0: "num_kv_shared_layers pad_token_id",
    1: "n_group topk_group n_shared_experts num_nextn_predict_layers bos_token_id",
    4: f"{HEADS} num_experts num_local_experts n_routed_experts moe_num_experts",
    2: f"{LAYERS} num_key_value_heads num_kv_heads num_experts_per_tok moe_topk top_k_experts eos_token_id",
    8: "mamba_n_heads mamba_num_heads rotary_dim",
    16: HEAD_DIMS,
    32: "q_lora_rank kv_lora_rank",
    64: WIDTHS,
    96: "vocab_size vocab_size_per_layer_input decoder_vocab_size text_vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_target_positions max_seq_len",
    2048: "index_topk",
    0.2: "initializer_range init_std",  # large enough for attention to matter
}
SIZES: dict[str, Any] = {name: size for size, names in NAMES.items() for name in names.split()}
SIZES |= {"attention_types": [[["global", "local"], 1]], "is_decoder": True}
# tried in order, until a model runs
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 8),
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"head_dim": 32, "num_key_value_heads": 4},
    {"mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "num_hidden_layers": 6},
)
# what shrinking alone does not get right
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_expand": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": None, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 64}},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_expand": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_expand": 2},
}


def attempts(name: str) -> Iterator[Callable[[], Any]]:
    """Functions that may build a tiny model of one type."""
    for change in CHANGES:
        for without in ("", "head_dim", "layer_types"):
            yield partial(_made, name, {**SIZES, **change, **OVERRIDES.get(name, {})}, without)


def _made(name: str, sizes: dict[str, Any], without: str) -> Any:
    config = shrunk(CONFIG_MAPPING[name], sizes, without)
    # SDPA leaves the soft cap out
    soft_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    model = AutoModelForCausalLM.from_config(config, **({"attn_implementation": "eager"} if soft_cap else {})).eval()
    if sum(parameter.numel() for parameter in model.parameters()) > 200_000_000:
        raise MemoryError("the model is not small")
    return model


def shrunk(kind: Any, sizes: dict[str, Any], without: str = "") -> Any:
    """A configuration with the sizes that it has; its parts are shrunk likewise."""
    default = kind()
    taken = {name: size for name, size in sizes.items() if _has(default, name) and name != without}
    for part in getattr(kind, "sub_configs", {}):
        inner = getattr(default, part, None)
        if isinstance(inner, PretrainedConfig):
            taken[part] = shrunk(type(inner), {**sizes, "is_decoder": False}, without)
    if without == "layer_types" and hasattr(default, "layer_types"):
        number = taken.get("num_hidden_layers", 2)
        kinds = list(dict.fromkeys(default.layer_types or ()))
        taken["layer_types"] = [kinds[index % len(kinds)] for index in range(number)]
    return kind(**taken)


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # of a class that only new releases have
        return True
