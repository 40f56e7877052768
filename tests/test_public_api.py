"""The public API: names, signatures, defaults and their documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexmask
from flexmask import (
    FlexPrefillConfig,
    FlexPrefillStats,
    flexprefill_attention,
    flexprefill_attention_varlen,
    flexprefill_mask,
    sparse_attention,
)
from flexmask.block_masks import MASKS

PUBLIC = [
    "FlexPrefillConfig",
    "FlexPrefillStats",
    "flexprefill_attention",
    "flexprefill_attention_varlen",
    "flexprefill_mask",
    "sparse_attention",
    "warmup",
]

SELECTION = (
    "gamma: float | Sequence[float] | Tensor = 0.95, tau: float = 0.1, *, block_size: int = 128, min_budget: int = 1024, "
    "max_budget: int | None = None, "
    "selection: str = 'coverage', query_aware: str = 'flatten', pattern_queries: str = 'last', index_queries: str = 'last', "
    "row_stride: int = 8"
)
CALL = (
    "scale: float | None = None, softcap: float | None = None, window: int | None = None, attention_mask: Tensor | None = None, "
    "q_offset: int | Tensor | None = None, config: FlexPrefillConfig | None = None, return_stats: bool = False"
)
SIGNATURES = {
    "flexprefill_mask": f"(query: Tensor, key: Tensor, {SELECTION}, {CALL}) -> BlockMask | tuple[BlockMask, FlexPrefillStats]",
    "flexprefill_attention": f"(query: Tensor, key: Tensor, value: Tensor, {SELECTION}, {CALL}, "
    "sinks: Tensor | None = None, backend: str = 'auto', "
    "dense_below: int | None = None, return_lse: bool = False, max_mask_bytes: int = 1073741824) "
    "-> Tensor | tuple[Tensor | FlexPrefillStats, ...]",
    "flexprefill_attention_varlen": "(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Bounds, cu_seqlens_k: Bounds, "
    f"max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, {SELECTION}, "
    "scale: float | None = None, softcap: float | None = None, window: int | None = None, "
    "config: FlexPrefillConfig | None = None, return_stats: bool = False, sinks: Tensor | None = None, backend: str = 'auto', "
    "dense_below: int | None = None, return_lse: bool = False, max_mask_bytes: int = 1073741824) "
    "-> Tensor | tuple[Tensor | tuple[FlexPrefillStats, ...], ...]",
    "sparse_attention": "(query: Tensor, key: Tensor, value: Tensor, method: str | Callable[..., BlockMask] = flexprefill, *, "
    "block_size: int = 128, scale: float | None = None, softcap: float | None = None, window: int | None = None, "
    "attention_mask: Tensor | None = None, q_offset: int | Tensor | None = None, sinks: Tensor | None = None, "
    "backend: str = auto, dense_below: int | None = None, return_lse: bool = False, max_mask_bytes: int = 1073741824, "
    "**options: Any) -> Tensor | tuple[Any, ...]",
    "warmup": "(num_heads: int, num_kv_heads: int, head_dim: int, *, dtype: dtype, device: device | str, "
    "v_head_dim: int | None = None, batch: int = 1, chunked: bool = False, padded: bool = False, **options: Any) -> float",
    "FlexPrefillConfig": f"({SELECTION.replace('*, ', '').replace(' | Tensor', '', 1)}) -> None",
    "FlexPrefillStats": "(is_query_aware: Tensor, js_distance: Tensor, density: Tensor, num_vertical_blocks: Tensor, "
    "num_slash_blocks: Tensor, coverage: Tensor, row_coverage: Tensor, is_dense: Tensor, dense: bool = False) -> None",
}


def test_exports_are_pinned():
    assert flexmask.__all__ == PUBLIC
    assert all(hasattr(flexmask, name) for name in PUBLIC)


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", flexmask.__version__)


@pytest.mark.parametrize("name", PUBLIC)
def test_signature_is_pinned(name):
    shown = str(inspect.signature(getattr(flexmask, name))).replace("'", "").replace("torch.", "")
    assert shown == SIGNATURES[name].replace("'", "")


@pytest.mark.parametrize("name", SIGNATURES)
def test_string_defaults_are_strings(name):
    # the quotes that the comparison above leaves out
    parameters = inspect.signature(getattr(flexmask, name)).parameters.values()
    for parameter in parameters:
        if parameter.annotation == "str":
            assert isinstance(parameter.default, str)


@pytest.mark.parametrize("kind", [FlexPrefillConfig, FlexPrefillStats])
def test_dataclasses_are_frozen(kind):
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen


def test_config_and_functions_have_the_same_defaults():
    for field in dataclasses.fields(FlexPrefillConfig):
        for function in (flexprefill_mask, flexprefill_attention, flexprefill_attention_varlen):
            assert inspect.signature(function).parameters[field.name].default == field.default


def test_mask_returns_statistics_only_when_asked():
    query, key = torch.randn(1, 2, 64, 16), torch.randn(1, 1, 64, 16)
    assert not isinstance(flexprefill_mask(query, key, block_size=16), tuple)
    mask, stats = flexprefill_mask(query, key, block_size=16, return_stats=True)
    assert mask.shape == (1, 2, 64, 64)
    assert isinstance(stats, FlexPrefillStats)
    assert not stats.dense


def test_attention_returns_what_is_asked_for_in_this_order():
    query, key, value = torch.randn(1, 2, 64, 16), torch.randn(1, 1, 64, 16), torch.randn(1, 1, 64, 24)
    out = flexprefill_attention(query, key, value)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, 2, 64, 24)
    _, lse, stats = flexprefill_attention(query, key, value, return_lse=True, return_stats=True)
    assert lse.shape == (1, 2, 64)
    assert lse.dtype == torch.float32
    assert stats.dense


@pytest.mark.parametrize("dense", [False, True])
def test_statistics_are_tensors_by_head(dense):
    query, key = torch.randn(2, 4, 64, 16), torch.randn(2, 2, 64, 16)
    if dense:
        _, stats = flexprefill_attention(query, key, key, block_size=16, return_stats=True)
    else:
        _, stats = flexprefill_mask(query, key, block_size=16, return_stats=True)
    dtypes = {name: getattr(stats, name).dtype for name in SIGNATURES["FlexPrefillStats"][1:].split(": Tensor, ")[:-1]}
    assert dtypes == {
        "is_query_aware": torch.bool,
        "js_distance": torch.float32,
        "density": torch.float32,
        "num_vertical_blocks": torch.int64,
        "num_slash_blocks": torch.int64,
        "coverage": torch.float32,
        "row_coverage": torch.float32,
        "is_dense": torch.bool,
    }
    assert all(getattr(stats, name).shape == (2, 4) for name in dtypes)
    assert stats.dense is dense


# Docstrings


def sections(documented: Any) -> dict[str, str]:
    """The numpydoc sections of a docstring; what stands before the first is under ""."""
    parts = re.split(r"^(\w[\w ]*)\n-+\n", inspect.getdoc(documented) or "", flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def described(section: str) -> set[str]:
    """Names that a Parameters or Attributes section describes."""
    lines = re.findall(r"^(\w.*)\n(?= )", section, re.MULTILINE)
    return {name for line in lines for name in line.split(" : ")[0].split(", ")}


DOCUMENTED: list[Callable[..., Any]] = [
    flexprefill_mask,
    flexprefill_attention,
    flexprefill_attention_varlen,
    sparse_attention,
    FlexPrefillConfig,
    *MASKS.values(),
]


@pytest.mark.parametrize("documented", dict.fromkeys(DOCUMENTED), ids=lambda x: x.__name__)
def test_docstring_has_its_sections_in_order(documented):
    expected = ["", "Parameters", *([] if isinstance(documented, type) else ["Returns"]), "Raises", "Examples"]
    assert [name for name in sections(documented) if name != "Notes"] == expected
    assert all(text.strip() for text in sections(documented).values())


@pytest.mark.parametrize("documented", dict.fromkeys(DOCUMENTED), ids=lambda x: x.__name__)
def test_docstring_describes_every_parameter_and_no_other(documented):
    assert described(sections(documented)["Parameters"]) == set(inspect.signature(documented).parameters)


def test_statistics_describe_every_attribute_and_no_other():
    fields = {field.name for field in dataclasses.fields(FlexPrefillStats)}
    assert described(sections(FlexPrefillStats)["Attributes"]) == fields


@pytest.mark.parametrize("documented", [flexprefill_mask, flexprefill_attention, flexprefill_attention_varlen, FlexPrefillConfig])
def test_docstring_names_the_paper(documented):
    assert "https://arxiv.org/abs/2502.20766" in sections(documented)[""]


@pytest.mark.parametrize("documented", dict.fromkeys([*DOCUMENTED, FlexPrefillStats]), ids=lambda x: x.__name__)
def test_docstring_starts_with_one_sentence(documented):
    first, rest = sections(documented)[""].split("\n", 1) if "\n" in sections(documented)[""] else (sections(documented)[""], "")
    assert first.endswith(".") or ";" in first
    assert not rest.split("\n", 1)[0].strip()


@pytest.mark.parametrize("documented", dict.fromkeys(DOCUMENTED), ids=lambda x: x.__name__)
def test_example_checks_a_result(documented):
    example = sections(documented)["Examples"]
    assert ">>> " in example
    assert re.search(r"^(?!>>>|\.\.\.).*\S", example, re.MULTILINE)


def test_defaults_in_the_docstring_are_those_of_the_signature():
    text = sections(FlexPrefillConfig)["Parameters"]
    for name in ("gamma", "tau", "block_size", "min_budget"):
        entry = re.search(rf"^{name}\n((?: .*\n?)+)", text, re.MULTILINE).group(1)
        stated = re.search(r"[Dd]efault (\d+(?:\.\d+)?)", entry).group(1)
        assert float(stated) == inspect.signature(FlexPrefillConfig).parameters[name].default


def test_undescribed_parameter_is_noticed():
    def function(query, key):
        """Do nothing.

        Parameters
        ----------
        query
            Described.
        """

    assert described(sections(function)["Parameters"]) == {"query"} != set(inspect.signature(function).parameters)
