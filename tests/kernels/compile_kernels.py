"""Compile the kernels for a GPU that need not be there, and report their shared memory.

``python -m tests.kernels.compile_kernels tight|wide|choice TARGET``, without the interpreter. "choice" compiles every kernel
for a few problems, "tight" and "wide" those that hold tiles of keys near their limits. Writes JSON: name, bytes of shared memory
and problem of every kernel and set of constants.
"""

import json
import sys
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from flexmask import kernels
from flexmask.base.blocks import BlockProblem
from flexmask.base.inputs import AttentionInputs
from flexmask.block_masks.flexprefill import map_top_p_kernels
from flexmask.integrations.vllm import pages_kernel
from flexmask.integrations.vllm.pages import PageTable
from flexmask.kernels.last_rows import join_parts, part_lists
from flexmask.selection.run import run_on_problem
from tests.cases import Config

# most entries of a small and of a medium pooled map
MAPS = {"small": (128 * 128, 256 * 256), "medium": (0, 256 * 256), "large": (0, 0)}


class Problem(NamedTuple):
    """Properties by which the host chooses kernels and constants."""

    head_dim: int = 64
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    rich: bool = False  # with padding, window, soft cap and a largest budget
    map_size: str = "small"
    queries_per_kv: int = 2  # query heads of a KV head
    row_stride: int = 8
    length: int = 1024  # of queries; one that 16 does not divide keeps Triton from vectorizing


class Variant(NamedTuple):
    """A kernel as Triton would compile it."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]


# kernels that hold tiles of keys, and the problems nearest to their limits
WITH_TILES = ("_block_sums_kernel", "_pooled_map_kernel", "_evidence_kernel")
TIGHT = [Problem(128, 128, rich=True, row_stride=16), Problem(256, 128), Problem(256, 64, torch.float32)]
# beyond the shared memory of AMD GPUs
WIDE = [Problem(512, 128, rich=True, row_stride=16), Problem(512, 128), Problem(512, 64, torch.float32)]
# with dims that are no power of two
CHOICE = [
    Problem(rich=True, row_stride=16), Problem(map_size="medium"), Problem(map_size="large"), Problem(80, 128), *TIGHT,
    Problem(128, 256),
]  # fmt: skip


def launched(problem: Problem) -> dict[str, Variant]:
    """Every kernel for a selection of `problem`, pages and joined parts, by what Triton specializes on."""
    found = {}

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: Any, **keywords: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
        options = {name: value for name, value in keywords.items() if name not in kernel.arg_names}
        variant = Variant(kernel, {}, {}, {}, options)
        for index, parameter in enumerate(kernel.params):
            name, value = parameter.name, given[parameter.name]
            variant.signature[name] = mangle_type(value)
            # Triton specializes on 1, and on multiples of 16
            specialized = type(value) is int and not parameter.do_not_specialize
            if parameter.is_constexpr or (specialized and value == 1):
                variant.signature[name], variant.constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor) or (specialized and value % 16 == 0):
                variant.attributes[(index,)] = [["tt.divisibility", 16]]
        found[f"{kernel.fn.__name__} {variant[1:]}"] = variant

    JITFunction.run = record
    map_top_p_kernels.SMALL_MAP, map_top_p_kernels.MEDIUM_MAP = MAPS[problem.map_size]
    head_dim, block_size, dtype, rich, _, queries_per_kv, row_stride, q_len = problem
    kv_len = 2 * q_len if rich else q_len
    sizes = ((2 * queries_per_kv, q_len), (2, kv_len))
    query, key = (torch.empty(2, *each, head_dim, dtype=dtype) for each in sizes)
    scores = (0.1, 3.0, 500, torch.ones(2, kv_len, dtype=torch.bool)) if rich else (0.1,)
    most = 3 * block_size if rich else None
    half = torch.tensor(0.5, dtype=torch.float64)
    numbers = {"gamma": half.repeat(2 * queries_per_kv), "tau": half, "min_coverage": half}
    hybrid = {"method": "hybrid", "row_stride": row_stride, "max_budget": None}
    for rule in ({"query_aware": "flatten"}, {"query_aware": "per_query"}, hybrid):
        options: dict[str, Any] = {"block_size": block_size, "min_budget": block_size, "max_budget": most, **rule}
        config = Config(0.5, 0.5, **options)
        # in a caller's graph numbers are tensors, else arguments
        given = {name: value for name, value in numbers.items() if name in config.options and rich}
        inputs = AttentionInputs(query, key, None, *scores).with_offset()
        statistics = ("row_coverage",) if rich else ()
        blocks = BlockProblem(inputs, block_size, kernels, rich, kernels.kernel_geometry(inputs, block_size))
        run_on_problem(blocks, config.checked_method.with_options(**given), statistics)
    row = torch.empty(4, 2, head_dim, dtype=dtype)
    cache = torch.empty(2, 2, 16, 2 * head_dim, dtype=dtype)
    pages_kernel.keys_and_values(cache, PageTable(torch.arange(2, dtype=torch.int32), 20), (row, row))
    out, lse = torch.empty(3, 2, 2, 4, head_dim, dtype=dtype), torch.empty(3, 2, 2, 4)
    join_parts(out, lse, out[0], lse[0])
    part_lists(out, (1, 2), 1, 2, 1000, block_size)
    return found


def shared_memory(variant: Variant, target: str) -> int:
    name, arch = target.split("_") if "_" in target else ("", target)
    gpu = GPUTarget("cuda", int(arch), 32) if name else GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return int(triton.compile(ASTSource(*variant[:4]), gpu, variant.options).metadata.shared)


def main(which: str, target: str) -> None:
    torch.version.hip = "6.4" if target.startswith("gfx") else None
    variants: dict[str, tuple[Problem, Variant]] = {}
    for problem in {"tight": TIGHT, "wide": WIDE, "choice": CHOICE}[which]:
        for name, variant in launched(problem).items():
            if which == "choice" or variant.kernel.fn.__name__ in WITH_TILES:
                variants.setdefault(name, (problem, variant))
    compiled = [(v.kernel.fn.__name__, shared_memory(v, target), str(problem)) for problem, v in variants.values()]
    print(json.dumps(compiled))


if __name__ == "__main__":
    main(*sys.argv[1:])
