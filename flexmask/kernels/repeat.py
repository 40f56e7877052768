"""The launches of a selection, noted in one layer and repeated in others of the same plan: only addresses change.

Between its launches a selection makes views, allocates memory and computes the same numbers in every layer, which takes several
times as long as launching. A repetition allocates the same memory and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import driver

from flexmask.base.inputs import SparseInputs
from flexmask.base.selection import BlockLists
from flexmask.kernels.launch import NOTES, Launch, is_watched

_ALLOCATES = ("aten::empty", "aten::new_empty")  # beginnings of names


class _Moved(NamedTuple):
    """An argument that lies in a tensor of the call or in memory that the selection allocates."""

    position: int  # among the launch's arguments
    tensor: int  # its number among those tensors
    distance: int  # bytes from the tensor's first entry
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Step(NamedTuple):
    """A launch; arguments that move are None, other tensors are the plan's."""

    launch: Launch
    moved: tuple[_Moved, ...]
    # as the compiled kernel takes them, tensors as addresses; None: Triton analyses each launch
    passed: list[Any] | None


class _Noted(NamedTuple):
    steps: tuple[_Step, ...]
    layouts: tuple[Any, ...]  # of the call's tensors
    made: tuple[tuple[torch.Size, torch.dtype], ...]  # memory that the selection allocates
    lists: tuple[int, ...]  # their numbers in `made`
    direct: bool


class Repeats:
    """Selections by kernels of one geometry with the same options.

    The first call notes its launches. They are repeated only if the call does nothing else on the device, and only for tensors
    of the same strides and alignment; other calls select as usual.
    """

    def __init__(self) -> None:
        self._noted: _Noted | None = None
        self._may_note = True

    def lists(self, inputs: SparseInputs, select: Callable[[], BlockLists]) -> BlockLists:
        """The lists that `select` makes for `inputs`."""
        moving = [x for x in (inputs.query, inputs.key, inputs.value) if x is not None]
        if self._noted is not None and not is_watched() and tuple(map(_layout, moving)) == self._noted.layouts:
            return _repeated(self._noted, moving)
        if not self._may_note:
            return select()
        self._may_note = False
        lists, self._noted = _noted(moving, select)
        return lists


def _noted(moving: list[Tensor], select: Callable[[], BlockLists]) -> tuple[BlockLists, _Noted | None]:
    """What `select` gives, and its launches if they are all that it does."""
    launches: list[Launch] = []
    token = NOTES.set(launches)
    try:
        with _Watch() as watch:
            lists = select()
    finally:
        NOTES.reset(token)
    tensors = [*moving, *watch.made]
    numbers = {_storage(x): number for number, x in enumerate(tensors)}
    own = [numbers.get(_storage(x), 0) - len(moving) for x in lists]
    # arguments are told from one another by their memory
    if watch.did_more or len(numbers) < len(tensors) or min(own) < 0:
        return lists, None
    if any(_layout(x) != _layout(watch.made[number]) for x, number in zip(lists, own, strict=True)):
        return lists, None
    steps = tuple([_step(launch, tensors, numbers) for launch in launches])
    made = tuple([(x.shape, x.dtype) for x in watch.made])
    is_direct = all(step.passed is not None for step in steps)
    return lists, _Noted(steps, tuple(map(_layout, moving)), made, tuple(own), is_direct)


def _step(launch: Launch, tensors: list[Tensor], numbers: dict[int, int]) -> _Step:
    given, moved = list(launch.arguments), []
    for position, x in enumerate(launch.arguments):
        number = numbers.get(_storage(x)) if isinstance(x, Tensor) else None
        if number is not None:
            distance = x.data_ptr() - tensors[number].data_ptr()
            moved.append(_Moved(position, number, distance, tuple(x.shape), x.stride()))
            # nothing of the noted call is held
            given[position] = None
    passed = None
    if launch.compiled is not None:
        passed = [x.data_ptr() if isinstance(x, Tensor) else x for x in given] + [*launch.kernel.constants_of(launch)]
    return _Step(launch._replace(arguments=tuple(given)), tuple(moved), passed)


def _repeated(noted: _Noted, moving: list[Tensor]) -> BlockLists:
    made = [moving[0].new_empty(shape, dtype=dtype) for shape, dtype in noted.made]
    tensors = [*moving, *made]
    if noted.direct:
        addresses = [x.data_ptr() for x in tensors]
        stream = driver.active.get_current_stream(moving[0].get_device())
        for (_, grid, _, _, compiled), moved, arguments in noted.steps:
            assert compiled is not None and arguments is not None
            passed = arguments.copy()
            for position, number, distance, _, _ in moved:
                passed[position] = addresses[number] + distance
            compiled.launch(grid, stream, passed)
    else:
        for launch, moved, _ in noted.steps:
            given = list(launch.arguments)
            for position, number, distance, shape, strides in moved:
                whole = tensors[number]
                start = whole.storage_offset() + distance // whole.element_size()
                given[position] = torch.as_strided(whole, shape, strides, start)
            launch.kernel[launch.grid](*given, **launch.constants)
    return BlockLists(*[made[number] for number in noted.lists])


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _layout(x: Tensor) -> Any:
    """What launches depend on, beside the address."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


class _Watch(TorchDispatchMode):
    """Notes what is allocated, and notices operators that do more than allocate memory or view what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.did_more = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        schema, result = function._schema, function(*arguments, **(options or {}))
        if schema.name.startswith(_ALLOCATES):
            self.made.append(result)
            return result
        views = [x.alias_info is not None and not x.alias_info.is_write for x in schema.returns]
        # in inference mode operators that may copy, such as contiguous, come as views
        given = {_storage(x) for x in tree_leaves(arguments) if isinstance(x, Tensor)}
        self.did_more |= not views or not all(views) or any(_storage(x) not in given for x in tree_leaves(result))
        return result
