"""Public names, what they return, and their docstrings."""

import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch

import flexmask
from flexmask import SelectionStats, flexprefill_mask, plan, sparse_attention, sparse_attention_varlen, warmup
from tests.block_masks.definitions import MASKS

PUBLIC = [
    "METHODS", "SelectionStats", "flexprefill_mask", "hybrid_mask", "plan", "sparse_attention",
    "sparse_attention_varlen", "sparse_prefill", "warmup",
]  # fmt: skip
FUNCTIONS = [sparse_attention, plan, sparse_attention_varlen, warmup, *MASKS.values()]
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: x.__name__)


def test_exports_are_pinned():
    assert flexmask.__all__ == PUBLIC and re.fullmatch(r"\d+\.\d+\.\d+", flexmask.__version__)
    with pytest.raises(AttributeError, match="module 'flexmask' has no attribute 'flexprefill'"):
        _ = flexmask.flexprefill


def test_the_adapter_is_loaded_when_it_is_asked_for():
    pytest.importorskip("transformers")
    from flexmask.integrations import huggingface

    assert flexmask.sparse_prefill is huggingface.sparse_prefill


def test_attention_takes_the_same_arguments_packed_and_as_a_batch():
    whole, packed = (inspect.signature(each).parameters for each in (sparse_attention, sparse_attention_varlen))
    of_a_batch = {"attention_mask", "q_offset", "prompt_len"}
    assert set(whole) - set(packed) == of_a_batch
    for name in set(whole) & set(packed):
        assert (whole[name].default, whole[name].annotation) == (packed[name].default, packed[name].annotation), name


@pytest.mark.parametrize("name", [None, *MASKS])
def test_statistics_are_frozen_tensors_by_head(name):
    query, key = torch.randn(2, 4, 64, 16), torch.randn(2, 2, 64, 16)
    if name is None:
        _, stats = sparse_attention(query, key, key, return_stats=True)
    else:
        _, stats = MASKS[name](query, key, block_size=16, return_stats=True)
    tensors = {field.name: field.metadata["dtype"] for field in dataclasses.fields(stats) if field.name != "dense"}
    assert {"density": torch.float32, "dense_heads": torch.bool, "num_slash_blocks": torch.int64}.items() <= tensors.items()
    assert {name: getattr(stats, name).dtype for name in tensors} == tensors
    assert all(x.shape == (2, 4) for x in vars(stats).values() if isinstance(x, torch.Tensor))
    assert stats.dense is (name is None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.density = stats.coverage


def sections(documented: Any) -> dict[str, str]:
    """The numpydoc sections of a docstring; "" is the part before the first."""
    parts = re.split(r"^(\w[\w ]*)\n-+\n", inspect.getdoc(documented) or "", flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def described(section: str) -> set[str]:
    lines = re.findall(r"^(\w.*)\n(?= )", section, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


AS_FLEXPREFILL = "The other parameters, the result and the errors are as in `flexprefill_mask`."
COMMON = set(inspect.signature(flexprefill_mask).parameters) - set(flexprefill_mask.method.defaults)


@functions
def test_docstring_has_its_sections_and_describes_every_parameter(function):
    found, parameters = sections(function), set(inspect.signature(function).parameters)
    names = ["", "Parameters", "Returns", "Raises", "Examples"]
    if AS_FLEXPREFILL in found[""]:
        names, parameters = ["", *(["Parameters"] if "Parameters" in found else []), "Examples"], parameters - COMMON
    assert [name for name in found if name != "Notes"] == names
    assert found[""].partition("\n")[0].endswith(".")
    own = described(found.get("Parameters", "").replace("**", ""))
    assert own - (COMMON - parameters) == parameters
    assert re.search(r"^(?!>>>|\.\.\.).*\S", found["Examples"], re.MULTILINE), "an example without a result"


def test_statistics_describe_every_attribute_and_no_other():
    assert described(sections(SelectionStats)["Attributes"]) == {field.name for field in dataclasses.fields(SelectionStats)}
