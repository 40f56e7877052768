"""The decorator `method`: a function that keeps blocks becomes a mask function and a method in METHODS."""

import functools
import inspect
import pickle
import re
from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest
import torch

from flexmask import METHODS, plan
from flexmask.block_masks.hybrid import Hybrid
from flexmask.mask_function import BlockProblem, Method, count_option, mask_function, method, share_option
from flexmask.settings import PrefillSettings
from tests.comparisons import assert_consistent
from tests.expected import by_block, seen_pairs


@method
def nothing_mask(problem: BlockProblem) -> torch.Tensor:
    return torch.zeros_like(problem.visibility.visible[:, None])


@method
def every_nth_mask(problem: BlockProblem, n: int = 2) -> torch.Tensor:
    """Keep every n-th key block, another set for each head."""
    heads = torch.arange(problem.inputs.query.shape[1])
    columns = torch.arange(problem.visibility.visible.shape[-1])
    return ((columns + heads[:, None]) % n == 0)[None, :, None].expand(1, -1, problem.visibility.visible.shape[1], -1)


def spanned(problem: BlockProblem, blocks: int = count_option(2, 1), *, share: float = share_option(0.5)) -> torch.Tensor:
    return problem.nearest_diagonals(blocks)


spanned_mask = method(spanned)
OWN = {name: METHODS.pop(name) for name in ("nothing", "every_nth", "spanned")}
CHUNK = {"q_offset": torch.tensor([5, 37]), "window": 70, "attention_mask": torch.arange(110)[None] >= torch.tensor([[0], [20]])}


@pytest.fixture(autouse=True)
def own_methods_while_a_test_runs(monkeypatch):
    for name, own in OWN.items():
        monkeypatch.setitem(METHODS, name, own)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_keeps_own_blocks_and_what_the_method_keeps_of_what_is_visible(n):
    query, key = torch.randn(2, 4, 70, 16), torch.randn(2, 2, 110, 16)
    make, heads = (functools.partial(every_nth_mask, n=n), 4) if n else (nothing_mask, 1)
    mask = make(query, key, block_size=16, **CHUNK)
    assert mask.shape[:2] == (2, heads)
    assert_consistent(mask, (70, 110))
    pairs = seen_pairs(70, CHUNK["q_offset"], CHUNK["attention_mask"], CHUNK["window"])
    position = CHUNK["q_offset"][:, None] + torch.arange(70)
    own = torch.arange(110) // 16 == (position // 16)[:, :, None]
    visible, own = (by_block(x, 16)[:, None] for x in (pairs, own))
    chosen = (torch.arange(7) + torch.arange(heads)[:, None]) % n == 0 if n else torch.zeros(1, 7, dtype=torch.bool)
    assert torch.equal(mask.to_dense().bool(), visible & (chosen[None, :, None] | own))


def test_name_doc_and_signature_are_the_methods():
    assert every_nth_mask.__name__ == "every_nth_mask" and every_nth_mask.__doc__.startswith("Keep every n-th")
    names = list(inspect.signature(every_nth_mask).parameters)
    common = ["block_size", "scale", "softcap", "window", "attention_mask", "q_offset", "prompt_len", "return_stats"]
    assert names == ["query", "key", "n", *common] and METHODS["every_nth"] is every_nth_mask.method
    query = torch.randn(1, 2, 40, 16)
    assert every_nth_mask(query, query.clone(), n=3).mask_mod.__name__ == "every_nth(block_size=128, n=3)"


def test_a_function_keeps_its_defaults_as_values_which_torch_compile_traces():
    assert inspect.signature(spanned).parameters["blocks"].default == 2
    assert METHODS["spanned"].defaults == {"blocks": 2, "share": 0.5}
    query = torch.randn(1, 2, 64, 16)
    with pytest.raises(ValueError, match="blocks must be >= 1 blocks; got 0"):
        spanned_mask(query, query, blocks=0)


def test_a_method_is_frozen_and_its_options_are_checked_when_it_is_made():
    made = Hybrid(0.8, min_budget=np.int32(64), block_size=32)
    assert (made.gamma, made.min_budget, made.row_stride, made.block_size) == (0.8, 64, 8, 32)
    assert type(made.min_budget) is int
    with pytest.raises(FrozenInstanceError):
        made.gamma = 0.9
    with pytest.raises(ValueError, match="gamma must be in"):
        Hybrid(2)


def test_options_come_by_position_or_by_name():
    query = torch.randn(1, 2, 40, 16)
    with pytest.raises(TypeError, match="method 'every_nth' takes the options n; got 'm'"):
        every_nth_mask(query, query, m=3)
    with pytest.raises(TypeError, match="every_nth_mask takes 1 options by position; got 2"):
        every_nth_mask(query, query, 3, 4)
    with pytest.raises(TypeError, match="every_nth_mask got n twice, by position and by name"):
        every_nth_mask(query, query, 3, n=4)


class FirstBlock(every_nth_mask.method):  # type: ignore[misc, name-defined]
    def select(self, problem):
        return problem.first_blocks(1)


@pytest.mark.parametrize("cls", [*METHODS.values(), *OWN.values(), FirstBlock], ids=lambda cls: cls.__qualname__)
def test_methods_pickle_as_their_class(cls):
    made = cls(block_size=64)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is cls and vars(again) == vars(made) and repr(again) == repr(made)
    assert repr(made).startswith(f"{cls.__name__}(block_size=64")


def test_settings_and_plans_pickle():
    settings = PrefillSettings("moa", plan=(64, 0.5), layers={1: {"sink_blocks": 2}})
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings and again.layer_method(1).options == {"plan": (64, 0.5), "sink_blocks": 2}
    tensors = [torch.randn(1, 2, 64, 16) for _ in range(3)]
    made = plan(*tensors, "streaming_llm", block_size=16, sink_blocks=1, window_blocks=1, dense_below=0)
    assert torch.equal(pickle.loads(pickle.dumps(made)).run(*tensors), made.run(*tensors))


def test_a_name_belongs_to_one_function():
    def other_mask(problem: BlockProblem) -> None: ...

    def every_nth_mask(problem: BlockProblem) -> None: ...

    with pytest.raises(
        ValueError, match=r"every_nth_mask must have another name: method 'every_nth' is that of .*test_mask_function"
    ):
        method(every_nth_mask)

    class EveryNth(Method):
        """In the same module under the name that the function's class has."""

    EveryNth.__qualname__, EveryNth.__module__ = METHODS["every_nth"].__qualname__, __name__
    with pytest.raises(ValueError, match=rf"method 'every_nth' is that of {re.escape(__name__)}.every_nth_mask$"):
        mask_function("every_nth", EveryNth)

    def every_nth(problem: BlockProblem) -> None: ...

    every_nth.__qualname__ = "every_nth"  # whose class has the qualified name of every_nth_mask's
    with pytest.raises(ValueError, match=rf"method 'every_nth' is that of {re.escape(__name__)}.every_nth_mask$"):
        method(every_nth)
    assert METHODS["every_nth"].defaults == {"n": 2}
    # as a module that is imported again
    first, again = method(other_mask).method, method(other_mask).method
    assert first is not again is METHODS.pop("other")


def test_a_method_with_kernels_has_options_that_its_operator_can_pass():
    @dataclass(frozen=True, eq=False)
    class Paired(Method):
        has_kernels = True
        count: int | None = 1
        pair: tuple[int, int] = (1, 2)

    with pytest.raises(TypeError, match="option pair of a method with kernels must be"):
        mask_function("paired", Paired)
    assert "paired" not in METHODS
