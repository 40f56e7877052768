"""Run a cell of the support table; ``python -m tests.integrations.support`` runs every cell and writes the table."""

import functools
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface, AttentionMaskInterface

from flexmask.integrations.huggingface import PrefillRun, sparse_prefill
from tests.expected import masked_attention
from tests.integrations.common import BATCH, KEEP_ALL, LENGTH, dynamic_cache, static_cache
from tests.integrations.families import FAMILIES, VOCABULARY
from tests.repository import ROOT

PATH = ROOT / "integrations" / "huggingface" / "SUPPORT.md"
# one set of lengths: each further one may cost a compilation
CHUNK, PADS, STEPS = 300, 45, 3
CACHES, PADDINGS = ("dynamic", "static"), ("unpadded", "left", "right")
PREFILLS, CALLS = ("one-shot", "chunked"), ("generate", "forward")
TOLERANCE = 1e-4
SPARSE: dict[str, Any] = {**KEEP_ALL, "gamma": 0.4, "tau": 0.13}
# few blocks lie in a window
SPARSE_IN_WINDOWS: dict[str, Any] = {"tau": 0.17}


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


@torch.no_grad()
def run_cell(model: Any, cell: Cell) -> tuple[Tensor, Tensor | None]:
    """Logits of all real tokens, (tokens, vocabulary), and the tokens chosen, if any."""
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if cell.padding != "unpadded":
        mask[1, slice(PADS) if cell.padding == "left" else slice(LENGTH - PADS, LENGTH)] = 0
    return (_forward if cell.call == "forward" else _generate)(model, cell, tokens * mask, mask)


def _forward(model: Any, cell: Cell, tokens: Tensor, mask: Tensor) -> tuple[Tensor, None]:
    cache = static_cache(model, LENGTH + STEPS) if cell.cache == "static" else dynamic_cache(model)
    tokens = torch.cat([tokens, tokens[:, 1:2]], 1)
    mask = torch.cat([mask, mask.new_ones(BATCH, 1)], 1)
    ends = [LENGTH, LENGTH + 1] if cell.prefill == "one-shot" else [CHUNK, LENGTH, LENGTH + 1]
    logits = []
    for start, end in zip([0, *ends], ends, strict=False):
        padding = None if cell.padding == "unpadded" else mask[:, :end]
        logits.append(model(tokens[:, start:end], attention_mask=padding, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, 1)[mask.bool()], None


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


class Result(NamedTuple):
    """The largest differences of a cell's logits, or why transformers cannot run it."""

    at_gamma_one: float = 0.0
    under_its_masks: float = 0.0
    refused: str = ""


@functools.cache
def model_of(family: str) -> Any:
    return FAMILIES[family].make()


def run_sparse(cell: Cell, **settings: Any) -> tuple[Tensor, Tensor | None, PrefillRun]:
    model = model_of(cell.family)
    with sparse_prefill(model, **settings, collect_masks=True) as run:
        return *run_cell(model, cell), run


def assert_near(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> float:
    """Logits are near, and the same tokens were chosen; gives the largest difference."""
    (logits, tokens), (expected, chosen) = one, other
    assert logits.shape == expected.shape
    assert tokens is None or (chosen is not None and torch.equal(tokens, chosen))
    far = float((logits - expected).abs().max())
    assert far < TOLERANCE
    return far


@contextmanager
def written_out(model: Any, masks: dict[int, list[BlockMask | None]]) -> Iterator[None]:
    """Run a model with `masks`, those of each layer's prefill calls, by attention written out in float64."""
    left = {layer: [mask for mask in calls if mask is not None] for layer, calls in masks.items()}

    def attention(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **_):
        batch, num_heads, q_len, _ = query.shape
        visible = attention_mask[..., : key.shape[2]].expand(batch, num_heads, -1, -1)
        if q_len > 1:
            mask = left[module.layer_idx].pop(0)
            chosen = create_mask(mask.mask_mod, batch, num_heads, q_len, mask.shape[3], device=query.device)
            assert chosen.shape == visible.shape
            assert not (chosen & ~visible).any(), "a mask shows what transformers hides"
            visible = chosen
        out, _ = masked_attention(query, key, value, visible, scaling, softcap, s_aux)
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("written-out", attention)
    sdpa_mask = AttentionMaskInterface()["sdpa"]
    AttentionMaskInterface.register("written-out", lambda **given: sdpa_mask(**{**given, "allow_is_causal_skip": False}))
    former = model.config._attn_implementation
    model.set_attn_implementation("written-out")
    try:
        yield
        assert not any(left.values()), "fewer prefill calls than masks"
    finally:
        model.set_attn_implementation(former)


def result_of(cell: Cell) -> Result:
    """Assert that a cell equals dense attention at gamma 1, and attention under its masks below."""
    try:
        dense = run_cell(model_of(cell.family), cell)
    except Exception as error:  # transformers' own
        return Result(refused=f"{type(error).__name__}: {error}".splitlines()[0])
    logits, tokens, run = run_sparse(cell, **KEEP_ALL)
    at_gamma_one = assert_near((logits, tokens), dense)
    assert not any(stats.dense for calls in run.stats.values() for stats in calls)

    layers = dict.fromkeys(FAMILIES[cell.family].sliding_layers(), SPARSE_IN_WINDOWS)
    logits, tokens, run = run_sparse(cell, **SPARSE, layers=layers)
    every = [stats for calls in run.stats.values() for stats in calls]
    query_aware = torch.stack([stats.is_query_aware for stats in every])
    assert torch.stack([stats.density for stats in every]).mean() < 0.7
    assert query_aware.any()
    assert not query_aware.all()
    assert (logits - dense[0]).abs().max() > 100 * TOLERANCE
    with written_out(model_of(cell.family), run.masks):
        return Result(at_gamma_one, assert_near((logits, tokens), run_cell(model_of(cell.family), cell)))


def support_table() -> str:
    """The page as it is, with the results of this release in its first paragraph and in its table."""
    rows, refused = [], 0
    for name, family in FAMILIES.items():
        results = [
            [result_of(Cell(name, *kind, *way)) for way in itertools.product(PREFILLS, CALLS)]
            for kind in itertools.product(CACHES, PADDINGS)
        ]
        texts = ["; ".join(dict.fromkeys(each.refused or "ok" for each in ways)) for ways in results]
        every = list(itertools.chain(*results))
        refused += sum(each.refused != "" for each in every)
        texts += [f"{max(each.at_gamma_one for each in every):.0e}", f"{max(each.under_its_masks for each in every):.0e}"]
        rows.append(" | ".join([f"| {name}: {family.note}" if family.note else f"| {name}", *texts]) + " |\n")
    releases = f"with transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}, in"
    cells = len(FAMILIES) * len(CACHES) * len(PADDINGS) * len(PREFILLS) * len(CALLS)
    counts = f"float32 on a CPU: {cells} cells, {refused} of them refused"
    text = PATH.read_text(encoding="utf-8")
    before = re.sub(r"with transformers .*? of them refused", f"{releases}\n{counts}", text, count=1, flags=re.DOTALL)
    head, line, _ = before.partition("| --- |\n")
    return head + line + "".join(rows)


if __name__ == "__main__":
    PATH.write_text(support_table(), encoding="utf-8")
