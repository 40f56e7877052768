"""Captures the kernel launches of one layer's selection and replays them in later layers of the same plan.

A replay changes only addresses of tensors. Between launches an eager selection spends as long on views and size arithmetic as on
launching; a replay skips both. It allocates each piece of memory when a launch needs it and frees it after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import driver

from flexmask.base.inputs import PositionedInputs
from flexmask.base.selection import BlockLists
from flexmask.kernels.launch import LAUNCH_SINK, Launch, has_launch_hooks

_ALLOCATES = ("aten::empty", "aten::new_empty")  # beginnings of names


class _TensorArgument(NamedTuple):
    """An argument that lies in a tensor of the call or in memory that the selection allocates."""

    position: int  # among the launch's arguments
    tensor: int  # index of the tensor: first those of the call, then the allocations
    distance: int  # bytes from the tensor's first entry


class _CapturedLaunch(NamedTuple):
    """A launch. Among its arguments None stands for each of `tensors`; other tensors are the plan's."""

    launch: Launch
    tensors: tuple[_TensorArgument, ...]
    # arguments as the compiled kernel takes them, tensors as addresses; None: Triton analyses each launch
    passed: list[Any] | None
    first: tuple[int, ...] = ()  # indices of allocations that no launch used before
    last: tuple[int, ...] = ()  # indices of allocations that no launch uses later


class _Captured(NamedTuple):
    launches: list[_CapturedLaunch]
    layouts: tuple[Any, ...]  # of the call's tensors
    allocations: list[tuple[torch.Size, torch.dtype]]  # memory that the selection allocates
    lists: list[int]  # indices of the four lists; allocations are counted after the call's tensors
    all_compiled: bool  # every launch is of a compiled kernel


class LaunchReplay:
    """Replays selections by kernels that differ only in query, key and value.

    The first call selects as usual, the second captures its launches. They are replayed only if that call does nothing else on
    the device, and only for tensors of the same strides and alignment; other calls select as usual.
    """

    def __init__(self) -> None:
        self._captured: _Captured | None = None
        self._calls = 0

    def lists(self, inputs: PositionedInputs, select: Callable[[], BlockLists]) -> BlockLists:
        """The lists that `select` makes for `inputs`."""
        call_tensors = [x for x in (inputs.query, inputs.key, inputs.value) if x is not None]
        if self._captured is not None and not has_launch_hooks() and tuple(map(_layout, call_tensors)) == self._captured.layouts:
            return _replay(self._captured, call_tensors)
        self._calls += 1
        if self._calls != 2:  # the first call only counts: a plan that runs once never pays for a capture
            return select()
        lists, self._captured = _capture(call_tensors, select)
        return lists


class _Capture(TorchDispatchMode):
    """Captures launches and what is allocated, and notices operators that do more than allocate memory or view what is there."""

    def __init__(self, call_tensors: list[Tensor]) -> None:
        super().__init__()
        self.launches: list[_CapturedLaunch] = []
        self.allocations: list[tuple[torch.Size, torch.dtype]] = []
        self._device = call_tensors[0].device
        self._starts = [x.data_ptr() for x in call_tensors]
        # index of the latest tensor in each memory, which may be freed and allocated again
        self._indices = {_storage(x): index for index, x in enumerate(call_tensors)}
        # arguments are told from one another by their memory
        self.is_replayable = len(self._indices) == len(call_tensors)

    def add(self, launch: Launch) -> None:
        """Capture a launch."""
        arguments, tensors = list(launch.arguments), []
        for position, x in enumerate(launch.arguments):
            index = self._indices.get(_storage(x)) if isinstance(x, Tensor) else None
            if index is not None:
                tensors.append(_TensorArgument(position, index, x.data_ptr() - self._starts[index]))
                arguments[position] = None
        passed = None
        if launch.compiled is not None:
            passed = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        self.launches.append(_CapturedLaunch(launch._replace(arguments=tuple(arguments)), tuple(tensors), passed))

    def index_of(self, x: Tensor) -> int | None:
        """The index of an allocation that holds just this tensor."""
        index = self._indices.get(_storage(x))
        allocation = -1 if index is None else index - (len(self._starts) - len(self.allocations))
        if index is None or allocation < 0 or self.allocations[allocation] != (x.shape, x.dtype):
            return None
        return index if x.is_contiguous() and x.data_ptr() == self._starts[index] else None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        schema, result = function._schema, function(*arguments, **(options or {}))
        if schema.name.startswith(_ALLOCATES):
            is_plain = result.is_contiguous() and result.device == self._device
            self.is_replayable &= is_plain and result.untyped_storage().nbytes() == result.numel() * result.element_size()
            self._indices[_storage(result)] = len(self._starts)
            self._starts.append(result.data_ptr())
            self.allocations.append((result.shape, result.dtype))
            return result
        views = [x.alias_info is not None and not x.alias_info.is_write for x in schema.returns]
        # in inference mode operators that may copy, such as contiguous, come as views
        storages = {_storage(x) for x in tree_leaves(arguments) if isinstance(x, Tensor)}
        self.is_replayable &= bool(views) and all(views) and all(_storage(x) in storages for x in tree_leaves(result))
        return result


def _capture(call_tensors: list[Tensor], select: Callable[[], BlockLists]) -> tuple[BlockLists, _Captured | None]:
    """Run `select`. Returns its lists, and its launches if they are all that it does on the device."""
    capture = _Capture(call_tensors)
    token = LAUNCH_SINK.set(capture.add)
    try:
        with capture:
            lists = select()
    finally:
        LAUNCH_SINK.reset(token)
    list_indices = [index for index in map(capture.index_of, lists) if index is not None]
    all_compiled = all(entry.passed is not None for entry in capture.launches)
    # Triton's own launches would take longer than what is left out; the interpreter has no others
    if not capture.is_replayable or len(list_indices) < len(lists) or (call_tensors[0].is_cuda and not all_compiled):
        return lists, None
    used = [{x.tensor for x in entry.tensors if x.tensor >= len(call_tensors)} for entry in capture.launches]
    launches = []
    for place, entry in enumerate(capture.launches):
        between = used[place].difference(list_indices)
        first, last = between.difference(*used[:place]), between.difference(*used[place + 1 :])
        launches.append(entry._replace(first=tuple(first), last=tuple(last)))
    return lists, _Captured(launches, tuple(map(_layout, call_tensors)), capture.allocations, list_indices, all_compiled)


def _replay(captured: _Captured, call_tensors: list[Tensor]) -> BlockLists:
    """Repeat the launches with other tensors of the call, and return their lists."""
    stream = driver.active.get_current_stream(call_tensors[0].get_device()) if captured.all_compiled else None
    tensors: list[Any] = [*call_tensors, *[None] * len(captured.allocations)]

    def allocate(indices: Iterable[int]) -> None:
        for index in indices:
            shape, dtype = captured.allocations[index - len(call_tensors)]
            tensors[index] = call_tensors[0].new_empty(shape, dtype=dtype)

    allocate(captured.lists)
    for launch, tensor_arguments, passed, first, last in captured.launches:
        allocate(first)
        if passed is not None and launch.compiled is not None:
            passed = passed.copy()
            for position, index, distance in tensor_arguments:
                passed[position] = tensors[index].data_ptr() + distance
            launch.compiled.launch(launch.grid, stream, passed)
        else:
            arguments = list(launch.arguments)
            for position, index, distance in tensor_arguments:
                whole = tensors[index]
                # a kernel reads the first entry's address
                arguments[position] = whole.as_strided((1,), (1,), whole.storage_offset() + distance // whole.element_size())
            launch.kernel[launch.grid](*arguments, **launch.constants)
        for index in last:
            tensors[index] = None
    return BlockLists(*[tensors[index] for index in captured.lists])


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _layout(x: Tensor) -> Any:
    """Properties of a tensor that launches depend on, beside its address."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
