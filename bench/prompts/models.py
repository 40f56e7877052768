"""Models in known shapes with random weights, and prompts for them."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

# config.json of models without weights: sizes from their own, in the last three with dense or fewer experts (bench/README.md)
SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text())


def load(options: argparse.Namespace) -> Any:
    """Load the model of the command line onto its device."""
    return _load_parallel(options) if options.tensor_parallel else random_model(options)


def _load_parallel(options: argparse.Namespace) -> Any:
    """Load this process's shard; the weights go through a checkpoint of the first process."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        if dist.get_rank() == 0:
            random_model(options).save_pretrained(folder)
        dist.broadcast_object_list(paths, 0)
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_pretrained(paths[0], dtype=dtype, attn_implementation="sdpa", tp_plan="auto").eval()
        dist.barrier()  # keeps the folder until every process has read it
    return model


def shape_config(shape: str, layers: int | None = None) -> Any:
    """The config of a known shape, perhaps with fewer layers than the model has."""
    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    return AutoConfig.for_model(**sizes)


def random_model(options: argparse.Namespace) -> Any:
    """Random weights in the shape of the command line, made on its device."""
    config = shape_config(options.shape, options.layers)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.dtype))
    try:
        with torch.device(options.device):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(before)


def prompt_ids(tokens: int, vocab_size: int) -> Tensor:
    """Seeded random tokens, (1, tokens)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(1000, vocab_size // 2), vocab_size, (1, tokens), generator=generator)
