"""The cells of the support table: what they are, and how each is run."""

import itertools
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

from tests.integrations.families import FAMILIES, NUM_LAYERS, VOCABULARY

# one set of lengths: each further one may cost a compilation
BATCH, LENGTH, CHUNK, PADS, STEPS = 2, 530, 300, 45, 3
RELEASE = tuple(int(number) for number in transformers.__version__.split(".")[:2])


class Cell(NamedTuple):
    """A way to run a family's model.

    A forward in chunks is two calls over one cache; a forward is followed by one of a single token.
    """

    family: str
    cache: str
    padding: str
    prefill: str
    call: str

    def __str__(self) -> str:
        return "-".join(self)


CHOICES = (
    tuple(FAMILIES),
    ("dynamic", "static"),
    ("unpadded", "left", "right"),
    ("one-shot", "chunked"),
    ("generate", "forward"),
)
ALL_CELLS = tuple(itertools.starmap(Cell, itertools.product(*CHOICES)))


# of every family those that need the same few kernels; the cache of a window keeps other keys for a second chunk
FEWER_CELLS = tuple(
    Cell(family.name, *ways)
    for family in FAMILIES.values()
    for ways in (
        ("dynamic", "left", "one-shot", "generate"),
        ("static", "right", "one-shot", "forward"),
        ("dynamic" if family.sliding_layers() else "static", "unpadded", "chunked", "generate"),
    )
)


def refusal(cell: Cell) -> tuple[str, type[Exception], str] | None:
    """The reason why transformers cannot run a cell in this release, with its error; None where it can."""
    if not FAMILIES[cell.family].available:
        return "no such family in this release", AttributeError, cell.family
    if RELEASE < (4, 57) and cell.family == "Qwen3Moe" and (cell.cache, cell.call) == ("static", "generate"):
        return ("generate has no static cache for it in this release", ValueError, "does not support .*'static'")
    if RELEASE == (5, 0) and (cell.prefill, cell.call) == ("chunked", "generate"):
        if cell.cache == "dynamic":
            return "generate makes no cache for chunks in this release", ValueError, "Cannot use prefill chunking without a cache"
        if len(FAMILIES[cell.family].sliding_layers()) < NUM_LAYERS:  # the cache of a window has no end
            return "generate leaves out a place of the cache and runs past its end in this release", IndexError, "out of bounds"
    return None


def run_cell(model: Any, cell: Cell) -> tuple[Tensor, Tensor | None]:
    """Logits of all real tokens, (tokens, vocabulary), and the tokens chosen, if any."""
    tokens, mask = prompt(cell.padding)
    with torch.no_grad():
        if cell.call == "forward":
            return _forward(model, cell, tokens, mask), None
        return _generate(model, cell, tokens, mask)


def prompt(padding: str) -> tuple[Tensor, Tensor]:
    """Tokens (batch, length), and which of them are real."""
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padding != "unpadded":
        mask[1, slice(PADS) if padding == "left" else slice(LENGTH - PADS, LENGTH)] = 0
    return tokens * mask, mask


def _forward(model: Any, cell: Cell, tokens: Tensor, mask: Tensor) -> Tensor:
    length = LENGTH + STEPS
    cache = static_cache(model, length) if cell.cache == "static" else dynamic_cache(model)
    tokens = torch.cat([tokens, tokens[:, 1:2]], 1)
    mask = torch.cat([mask, torch.ones(BATCH, 1, dtype=mask.dtype)], 1)
    ends = [LENGTH, LENGTH + 1] if cell.prefill == "one-shot" else [CHUNK, LENGTH, LENGTH + 1]
    logits = []
    for start, end in zip([0, *ends], ends, strict=False):
        padding = None if cell.padding == "unpadded" else mask[:, :end]
        logits.append(model(tokens[:, start:end], attention_mask=padding, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, 1)[mask.bool()]


def _generate(model: Any, cell: Cell, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    if cell.cache == "static":
        options["cache_implementation"] = "static"
    if cell.prefill == "chunked":
        options["prefill_chunk_size"] = CHUNK
    right = cell.padding == "right"
    if right:
        # the first token would come from a pad: tokens are given, and the logits of real ones compared
        options["prefix_allowed_tokens_fn"] = lambda batch, so_far: [len(so_far) % (VOCABULARY - 1) + 1 + batch]
    out = model.generate(tokens, attention_mask=mask, **options)
    logits = torch.stack(out.logits, 1)
    if not right:
        return logits.flatten(0, 1), out.sequences[:, LENGTH:]
    return torch.cat([logits[0], logits[1, 1:]]), None


def static_cache(model: Any, length: int) -> StaticCache:
    sizes: dict[str, Any] = {"max_batch_size": BATCH, "dtype": torch.float32, "device": "cpu"} if RELEASE < (4, 56) else {}
    return StaticCache(config=model.config, max_cache_len=length, **sizes)


def dynamic_cache(model: Any) -> DynamicCache:
    return DynamicCache() if RELEASE < (4, 56) else DynamicCache(config=model.config)
