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
from flexmask.kernels.launch import LAUNCH_SINK, Launch, is_watched

_ALLOCATES = ("aten::empty", "aten::new_empty")  # beginnings of names


class _TensorArgument(NamedTuple):
    """An argument that lies in a tensor of the call or in memory that the selection allocates."""

    position: int  # among the launch's arguments
    tensor: int  # its number among those tensors
    distance: int  # bytes from the tensor's first entry
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Step(NamedTuple):
    """A launch; None stands for its `tensors`, other tensors among the arguments are the plan's."""

    launch: Launch
    tensors: tuple[_TensorArgument, ...]
    # as the compiled kernel takes them, tensors as addresses; None: Triton analyses each launch
    passed: list[Any] | None
    first: tuple[int, ...] = ()  # memory between launches that none used before
    last: tuple[int, ...] = ()  # and that none uses later


class _Captured(NamedTuple):
    steps: list[_Step]
    layouts: tuple[Any, ...]  # of the call's tensors
    made: list[tuple[torch.Size, torch.dtype]]  # memory that the selection allocates
    lists: list[int]  # their numbers, as all numbers after those of the call's tensors
    direct: bool


class LaunchReplay:
    """Selections by kernels that differ in query, key and value only.

    The first call selects as usual, the second captures its launches. They are replayed only if that call does nothing else on
    the device, and only for tensors of the same strides and alignment; other calls select as usual.
    """

    def __init__(self) -> None:
        self._captured: _Captured | None = None
        self._calls = 0

    def lists(self, inputs: PositionedInputs, select: Callable[[], BlockLists]) -> BlockLists:
        """The lists that `select` makes for `inputs`."""
        moving = [x for x in (inputs.query, inputs.key, inputs.value) if x is not None]
        if self._captured is not None and not is_watched() and tuple(map(_layout, moving)) == self._captured.layouts:
            return _replay(self._captured, moving)
        self._calls += 1
        if self._calls != 2:  # where a kind has one layer nothing is captured
            return select()
        lists, self._captured = _capture(moving, select)
        return lists


class _Capture(TorchDispatchMode):
    """Captures launches and what is allocated, and notices operators that do more than allocate memory or view what is there."""

    def __init__(self, moving: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.made: list[tuple[torch.Size, torch.dtype]] = []
        self.did_more = False
        self._device = moving[0].device
        self._starts = [x.data_ptr() for x in moving]
        # of the latest tensor in each: memory may be freed and allocated again
        self._numbers = {_storage(x): number for number, x in enumerate(moving)}
        # arguments are told from one another by their memory
        self.did_more |= len(self._numbers) < len(moving)

    def add(self, launch: Launch) -> None:
        given, tensors = list(launch.arguments), []
        for position, x in enumerate(launch.arguments):
            number = self._numbers.get(_storage(x)) if isinstance(x, Tensor) else None
            if number is not None:
                distance = x.data_ptr() - self._starts[number]
                tensors.append(_TensorArgument(position, number, distance, tuple(x.shape), x.stride()))
                given[position] = None
        passed = None
        if launch.compiled is not None:
            passed = [x.data_ptr() if isinstance(x, Tensor) else x for x in given] + [*launch.kernel.constants_of(launch)]
        self.steps.append(_Step(launch._replace(arguments=tuple(given)), tuple(tensors), passed))

    def number_of(self, x: Tensor) -> int | None:
        """The number of memory that was allocated for just this tensor."""
        number = self._numbers.get(_storage(x))
        own = -1 if number is None else number - (len(self._starts) - len(self.made))
        if number is None or own < 0 or self.made[own] != (x.shape, x.dtype):
            return None
        return number if x.is_contiguous() and x.data_ptr() == self._starts[number] else None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        schema, result = function._schema, function(*arguments, **(options or {}))
        if schema.name.startswith(_ALLOCATES):
            is_plain = result.is_contiguous() and result.device == self._device
            self.did_more |= not is_plain or result.untyped_storage().nbytes() != result.numel() * result.element_size()
            self._numbers[_storage(result)] = len(self._starts)
            self._starts.append(result.data_ptr())
            self.made.append((result.shape, result.dtype))
            return result
        views = [x.alias_info is not None and not x.alias_info.is_write for x in schema.returns]
        # in inference mode operators that may copy, such as contiguous, come as views
        given = {_storage(x) for x in tree_leaves(arguments) if isinstance(x, Tensor)}
        self.did_more |= not views or not all(views) or any(_storage(x) not in given for x in tree_leaves(result))
        return result


def _capture(moving: list[Tensor], select: Callable[[], BlockLists]) -> tuple[BlockLists, _Captured | None]:
    """Run `select`; give its lists, and its launches if they are all that it does."""
    capture = _Capture(moving)
    token = LAUNCH_SINK.set(capture.add)
    try:
        with capture:
            lists = select()
    finally:
        LAUNCH_SINK.reset(token)
    numbers = [number for number in map(capture.number_of, lists) if number is not None]
    direct = all(step.passed is not None for step in capture.steps)
    # Triton's own launches would take longer than what is left out; the interpreter has no others
    if capture.did_more or len(numbers) < len(lists) or (moving[0].is_cuda and not direct):
        return lists, None
    used = [{x.tensor for x in step.tensors if x.tensor >= len(moving)} for step in capture.steps]
    steps = []
    for place, step in enumerate(capture.steps):
        between = used[place].difference(numbers)
        first, last = between.difference(*used[:place]), between.difference(*used[place + 1 :])
        steps.append(step._replace(first=tuple(first), last=tuple(last)))
    return lists, _Captured(steps, tuple(map(_layout, moving)), capture.made, numbers, direct)


def _replay(captured: _Captured, moving: list[Tensor]) -> BlockLists:
    stream = driver.active.get_current_stream(moving[0].get_device()) if captured.direct else None
    tensors: list[Any] = [*moving, *[None] * len(captured.made)]

    def allocate(numbers: Iterable[int]) -> None:
        for number in numbers:
            shape, dtype = captured.made[number - len(moving)]
            tensors[number] = moving[0].new_empty(shape, dtype=dtype)

    allocate(captured.lists)
    for launch, arguments, passed, first, last in captured.steps:
        allocate(first)
        if passed is not None and launch.compiled is not None:
            passed = passed.copy()
            for position, number, distance, _, _ in arguments:
                passed[position] = tensors[number].data_ptr() + distance
            launch.compiled.launch(launch.grid, stream, passed)
        else:
            given = list(launch.arguments)
            for position, number, distance, sizes, strides in arguments:
                whole = tensors[number]
                start = whole.storage_offset() + distance // whole.element_size()
                given[position] = torch.as_strided(whole, sizes, strides, start)
            launch.kernel[launch.grid](*given, **launch.constants)
        for number in last:
            tensors[number] = None
    return BlockLists(*[tensors[number] for number in captured.lists])


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _layout(x: Tensor) -> Any:
    """Properties of a tensor that launches depend on, beside its address."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
