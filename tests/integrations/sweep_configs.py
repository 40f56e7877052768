"""Tiny configurations of every causal-LM type, shrunk from the default."""

from collections.abc import Callable, Iterator
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HIDDEN, HEADS, HEAD_DIM = 64, 4, 16

# by the names in configurations; absent ones are left out
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "decoder_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "ffn_hidden_size"), HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "d_inner", "d_ff", "shared_expert_intermediate_size", "dim_ff", "d_embed"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "kv_channels", "attention_head_dim"), HEAD_DIM),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_hidden_size"), HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "text_vocab_size"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("hidden_size_per_layer_input", "mamba_d_state", "state_size", "mamba_d_ssm", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "attention_types": [[["global", "local"], 1]],
    "rotary_dim": 8,
    "num_kv_shared_layers": 0,
    "index_topk": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    # large enough for attention to matter
    "initializer_range": 0.2,
    "init_std": 0.2,
}
# tried in order, until a model runs
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 8),
    {"num_key_value_heads": HEADS, "num_kv_heads": HEADS},
    {"head_dim": 32, "num_key_value_heads": HEADS},
    {"mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "num_hidden_layers": 6},
)
# what shrinking alone does not get right
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_expand": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": None, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": HIDDEN}},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_expand": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_expand": 2},
}


def causal_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def attempts(name: str) -> Iterator[Callable[[], Any]]:
    """Functions that may build a tiny model of one type."""
    for change in CHANGES:
        for without in ((), ("head_dim",), ("layer_types",)):

            def make(change: dict[str, Any] = change, without: tuple[str, ...] = without) -> Any:
                config = _shrunk(CONFIG_MAPPING[name], {**SIZES, **change, **OVERRIDES.get(name, {})}, without)
                # SDPA leaves the soft cap out
                soft_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
                model = AutoModelForCausalLM.from_config(config, **({"attn_implementation": "eager"} if soft_cap else {})).eval()
                if sum(parameter.numel() for parameter in model.parameters()) > 200_000_000:
                    raise MemoryError("the model is not small")
                return model

            yield make


def _shrunk(kind: Any, sizes: dict[str, Any], without: tuple[str, ...]) -> Any:
    """A configuration with the sizes that it has; its parts are shrunk likewise."""
    default = kind()
    taken = {name: size for name, size in sizes.items() if _has(default, name) and name not in without}
    for part in getattr(kind, "sub_configs", {}):
        inner = getattr(default, part, None)
        if isinstance(inner, PretrainedConfig):
            taken[part] = _shrunk(type(inner), {**sizes, "is_decoder": False}, without)
    if "layer_types" in without and hasattr(default, "layer_types"):
        number = taken.get("num_hidden_layers", 2)
        kinds = list(dict.fromkeys(default.layer_types or ()))
        taken["layer_types"] = [kinds[index % len(kinds)] for index in range(number)]
    return kind(**taken)


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # of a class that only new releases have
        return True
