"""Every mask: lists and mask_mod agree, and keep own positions; dense if it keeps everything; traced whole; bounded memory."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from flexmask import METHODS
from flexmask._torch import CPU_TAKES_UNBACKED_SIZES
from flexmask.base.inputs import attention_inputs
from flexmask.flex.run import run_flex_attention
from flexmask.selection import prepare
from tests.attention_calls import call, padding
from tests.block_masks.definitions import MASKS, SPARSE, TESTED, all_masks, mask_of
from tests.comparisons import assert_consistent, assert_one_list, assert_same_attention, assert_same_stats
from tests.compile_support import assert_same_lists, lists_of, traced
from tests.expected import visible_pairs

_SLOT = torch.arange(240)
HOLES = (_SLOT % 5 > 0) & ((_SLOT < torch.tensor([[24], [48]])) | (_SLOT >= torch.tensor([[48], [96]])))
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"batch": 2, "heads": (4, 2)},
    "ragged": {"q_len": 333, "heads": (4, 1)},
    "one row": {"q_len": 1, "kv_len": 63, "block_size": 16},
    "shorter than a block": {"q_len": 10, "block_size": 64},
    "chunk": {"q_len": 129, "kv_len": 500, "block_size": 48, "heads": (4, 2)},
    "bfloat16": {"q_len": 1000, "block_size": 128, "heads": (2, 1), "dtype": torch.bfloat16},
    "left padding": {"batch": 2, "attention_mask": padding(256, ("left", 51), ("left", 102))},
    "right padding": {"batch": 2, "attention_mask": padding(256, ("right", 51), ("right", 102))},
    "holes and window": {"batch": 2, "q_len": 200, "kv_len": 240, "scores": {"window": 70}, "attention_mask": HOLES.long()},
    "window of one token": {"q_len": 100, "scores": {"window": 1}},
    "offset": {"q_len": 100, "kv_len": 400, "q_offset": 65},
    "offsets by batch row": {
        "batch": 3, "q_len": 128, "kv_len": 300, "scores": {"window": 150, "softcap": 20.0, "scale": 0.2},
        "q_offset": torch.tensor([50, 172, 100]), "attention_mask": padding(300, ("left", 42), ("left", 18), ("all", 0)),
    },
}  # fmt: skip
ON_GPU = ("whole", "offsets by batch row")  # one compilation each there
# the published code takes whole, unpadded prompts only
SERVED = {"published": ("whole",)}


def serves(name, setting):
    return setting in SERVED.get(name, (setting,))


def call_in(**setting):
    return call(**{"q_len": 256, "heads": (4, 4), "block_size": 32, "seed": 7, **setting})


@functools.cache
def case_of(setting):
    return call_in(**SETTINGS[setting])


@functools.cache
def made(name, setting, device="cpu"):
    """The mask of a method in a setting in which it drops blocks, and the pairs that its mask_mod allows, on the CPU."""
    case = case_of(setting).to(device)
    mask = mask_of(name, case)
    sizes = (*mask.shape[:2], case.query.shape[2], case.key.shape[2])
    return mask, create_mask(mask.mask_mod, *sizes, device=device).cpu()


@pytest.mark.parametrize(
    ("name", "setting", "device"),
    [
        *((name, setting, "cpu") for name in MASKS for setting in SETTINGS if serves(name, setting)),
        *(pytest.param(name, at, "cuda", marks=pytest.mark.gpu) for name in MASKS for at in ON_GPU if serves(name, at)),
    ],
)
def test_lists_equal_the_mask_mod_which_hides_what_is_hidden_and_shows_each_row_itself(name, setting, device):
    case, (mask, allowed) = case_of(setting), made(name, setting, device)
    batch, num_heads, q_len, _ = case.query.shape
    assert mask.shape[0] == batch and mask.shape[1] in (1, num_heads)
    assert mask.BLOCK_SIZE == (case.config.block_size, case.config.block_size)
    assert_consistent(mask, (q_len, case.key.shape[2]))
    for counts, indices in (lists_of(mask)[:2], lists_of(mask)[2:]):
        assert counts.device.type == device
        assert_one_list(counts, indices)
    visible = visible_pairs(case)
    assert not (allowed & ~visible[:, None]).any()
    sees_something = visible.any(-1)
    last_visible = torch.where(sees_something, visible.shape[-1] - 1 - visible.flip(-1).int().argmax(-1), 0)
    own = last_visible[:, None, :, None].expand(*allowed.shape[:3], 1)
    assert torch.equal(allowed.gather(-1, own).squeeze(-1), sees_something[:, None].expand(allowed.shape[:3]))
    assert name != "causal" or torch.equal(allowed, visible[:, None])


@all_masks
def test_sparse_settings_leave_something_out(name):
    kept, causal = (made(each, "whole")[0].to_dense().expand(2, 4, 8, 8).sum() for each in (name, "causal"))
    assert kept / causal < (0.9 if SPARSE[name] else 1.01)


@pytest.fixture(scope="module")
def lengths_forgotten():
    """Forget what was compiled before: masks of the same heads share compilations."""
    torch._dynamo.reset()


@pytest.mark.attention
@pytest.mark.usefixtures("lengths_forgotten")
@all_masks
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_keeping_everything_is_dense_attention(name, device):
    shared = {"q_len": 300, "kv_len": 333, "attention_mask": padding(333, ("left", 66), ("left", 133)), "scores": {"window": 200}}
    case = call_in(batch=2, heads=(4, 2), **({} if name == "published" else shared))
    there = case.to(device)
    with torch.compiler.set_stance("force_eager"):  # other tests compile masks
        mask = mask_of(name, there, **TESTED[name].everything)
    if not CPU_TAKES_UNBACKED_SIZES:
        torch._dynamo.reset()  # the C++ of this torch compiles for constant lengths alone
    with torch.no_grad():
        inputs = attention_inputs(there.query, there.key, there.value)
        out, _ = run_flex_attention(inputs, mask, "cpu" if device == "cpu" else "triton")
    everything = torch.ones(2, 4, *(-(-x.shape[2] // 32) for x in (case.query, case.key)), dtype=torch.bool)
    assert_same_attention(out, case.under(everything)[0])


# with padding, a window and offsets by batch row, where a method serves these
FULLEST = {name: "offsets by batch row" if serves(name, "offsets by batch row") else "whole" for name in MASKS}


@pytest.mark.parametrize(("name", "setting"), [*FULLEST.items(), *((name, "ragged") for name in MASKS if serves(name, "ragged"))])
def test_no_value_is_read(name, setting):
    case, mode = case_of(setting), FakeTensorMode()
    fakes = {field: mode.from_tensor(x) for field, x in vars(case).items() if isinstance(x, Tensor)}
    # reading a fake tensor raises
    with mode:
        mask = mask_of(name, replace(case, **fakes))
        with pytest.raises(DataDependentOutputException):
            mask.kv_num_blocks.sum().item()
    assert mask.shape == made(name, setting)[0].shape


OTHER_RULES = [
    {"tau": 0.3, "query_aware": "per_query", "pattern_queries": "middle", "max_budget": 64},
    {"gamma": 1.0, "tau": 0.0},
]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in MASKS), *(("flexprefill", rules) for rules in OTHER_RULES)], ids=str
)
def test_a_mask_function_is_traced_whole(name, options):
    case = case_of(FULLEST[name])
    options = {**SPARSE[name], **options, "block_size": case.config.block_size, **case.keywords(), "return_stats": True}
    torch._dynamo.reset()  # the function below would run out of recompilations
    run, counter = traced(lambda query, key: MASKS[name](query, key, **options))
    (mask, stats), (expected, expected_stats) = run(case.query, case.key), MASKS[name](case.query, case.key, **options)
    assert_same_lists(mask, expected)
    assert_same_stats(stats, expected_stats)
    assert counter.frame_count == 1 and not stats.density.isnan().any()


TOKENS, HEADS, HEAD_DIM = 131072, 16, 64


class Largest(TorchDispatchMode):
    """The largest storage that any operator returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", MASKS)
def test_memory_stays_within_what_the_method_states(name):
    by_rows = METHODS[name]().floats_per_row(TOKENS) > 0
    with FakeTensorMode(), Largest() as largest:
        # methods that go slice by slice need only the last rows
        rows = 512 if name == "oracle" else 4096 if by_rows else TOKENS
        query, key = torch.empty(1, HEADS, rows, HEAD_DIM), torch.empty(1, 4, TOKENS, HEAD_DIM)
        inputs = attention_inputs(query, key)
        stated = HEADS * METHODS[name].checked(128, {}).for_inputs(inputs).peak_bytes_per_head(inputs)
        largest.nbytes = 0
        MASKS[name](query, key)
    a_slice = 4 * max(prepare.MAX_FLOATS_PER_SLICE, HEADS * 128 * TOKENS) if by_rows else 0
    assert largest.nbytes <= max(stated, a_slice) and largest.nbytes < TOKENS**2 / 8


def test_a_group_of_infllm_beyond_the_prompt_takes_no_more_memory():
    case = case_of("left padding")
    query, key, keywords = case.query, case.key, {**SPARSE["infllm"], "block_size": 32, **case.keywords()}
    expected = MASKS["infllm"](query, key, **{**keywords, "execution_blocks": 8})
    with Largest() as largest:
        mask = MASKS["infllm"](query, key, **{**keywords, "execution_blocks": 10**4})
    assert_same_lists(mask, expected)
    assert largest.nbytes < 2**21
