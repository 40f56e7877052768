"""Changing states of the program use up no recompilations; masks do not depend on TF32, which no mask switches."""

import contextlib
import itertools
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import flexmask
from flexmask import sparse_attention
from flexmask.base.scores import grouped_scores
from tests.block_masks.definitions import MASKS, TESTED
from tests.cases import structured_inputs
from tests.compile_support import counting as counting
from tests.compile_support import cut, default_dtype, recompilations, set_to

STATES = {
    "as it is": contextlib.nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    **{f"{dtype} by default": partial(default_dtype, dtype) for dtype in (torch.bfloat16, torch.float64, torch.float16)},
    "meta by default": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "autocast of another device": lambda: set_to(
        True, lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)
    ),
    "cpu by default": lambda: torch.device("cpu"),
    **{f"{n} threads": partial(set_to, n, torch.get_num_threads, torch.set_num_threads) for n in (2, 3, 4, 5)},
    "deterministic": lambda: set_to(True, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}


@pytest.mark.attention
def test_alternating_states_use_up_no_recompilations(counting):
    before, inputs = torch.get_num_threads(), cut(100)
    with torch.set_grad_enabled(True), recompilations(1):
        graphs = []
        for _ in range(2):
            for state in STATES.values():
                with state():
                    # inference tensors are of another kind
                    for given in (inputs, [x.clone() for x in inputs]):
                        sparse_attention(*given, block_size=32, min_budget=32, dense_below=0)
                graphs.append(counting.frame_count)
    first, second = graphs[: len(STATES)], graphs[len(STATES) :]
    assert torch.get_num_threads() == before
    # one for each state, and two for inference mode
    assert 12 < first[-1] <= len(STATES) + 1 and second[-1] == first[-1]


def test_no_precision_of_the_process_is_set():
    """Other threads multiply at the same time."""
    for path in Path(flexmask.__file__).parent.rglob("*.py"):
        set_there = re.findall(r"allow_tf32|fp32_precision|set_float32_matmul_precision", path.read_text(encoding="utf-8"))
        assert not set_there, path


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [*itertools.product((torch.float32, torch.bfloat16), repeat=2)], ids=str)
def test_compiled_scores_have_the_precision_of_float32(dtypes, cuda, matmul_precision):
    """Torch compiles a round trip through another dtype away."""
    query, key = (torch.randn(2, heads, 70, 64, device=cuda).to(dtype) for heads, dtype in zip((4, 2), dtypes, strict=True))
    matmul_precision.use_tf32()
    scores = torch.compile(grouped_scores, fullgraph=True)(query, key)
    exact, repeated = query.double(), key.double().repeat_interleave(2, 1)
    assert ((scores - exact @ repeated.mT).abs() <= 1e-6 * (exact.abs() @ repeated.abs().mT)).all()


PLAIN = sorted(set(MASKS) - {"hybrid", "flexprefill"})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_a_program_that_multiplies_in_tf32_gets_the_same_blocks(name, dtype, cuda, matmul_precision):
    query, key = (x.to(cuda, dtype) for x in structured_inputs(torch.Generator().manual_seed(7), 1, 8, 2, 704, 704, 64))
    options = {"block_size": 32, **TESTED[name].sparse}
    exact, kept = query.float()[0, 0] @ key.float()[0, 0].mT, MASKS[name](query, key, **options).to_dense()
    matmul_precision.use_tf32()
    assert not torch.equal(query.float()[0, 0] @ key.float()[0, 0].mT, exact) or dtype == torch.bfloat16
    assert torch.equal(MASKS[name](query, key, **options).to_dense(), kept)
    assert matmul_precision.is_tf32()
