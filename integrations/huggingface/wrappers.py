"""Other libraries' wrappers around attention functions, and the same around flexmask's."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

Function = Callable[..., Any]
# what a wrapper holds, by name, and the wrapper with other things in their place
Held = tuple[dict[str, Any], Callable[[dict[str, Any]], Function]]


def is_attention(function: Any) -> bool:
    """True for an attention function of transformers or flexmask, without another library's wrapper."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, types.FunctionType) or not home(function).startswith(("transformers.", "flexmask.")):
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and code.co_varnames[:4] == ("module", "query", "key", "value")


def home(function: Any) -> str:
    """The name of the module that defines a function, or the class of an object. functools.wraps changes ``__module__`` only."""
    while isinstance(function, functools.partial):
        function = function.func
    variables = getattr(function, "__globals__", None)
    return str(type(function).__module__ if variables is None else variables.get("__name__"))


def attention_in(entry: Any) -> Function | None:
    """The attention function that `entry` is or wraps; None if none is found."""
    return next((link for link in _chain(entry) if is_attention(link)), None)


def codes(entry: Any) -> set[Any]:
    """The wrappers of an entry, as `code_of` names them."""
    return {code_of(link) for link in _chain(entry) if not is_attention(link)}


def around(entry: Any, inner: Function, without: Collection[Any] = ()) -> Function | None:
    """`entry` around `inner`, with the same state, without wrappers in `without` (by `code_of`); None if it wraps none."""
    if is_attention(entry):
        return inner
    held = _held(entry, {id(entry)})
    if held is None:
        return None
    values, rebuilt = held
    replaced = {name: around(value, inner, without) for name, value in values.items()}
    if None in replaced.values():
        return None
    try:
        return next(iter(replaced.values())) if code_of(entry) in without else rebuilt(replaced)
    except TypeError:  # a class that cannot be derived from
        return None


def code_of(wrapper: Any) -> Any:
    """The part of a wrapper that it shares with the same one around another function."""
    if isinstance(wrapper, functools.partial):
        return code_of(wrapper.func)
    function = wrapper if isinstance(wrapper, (types.FunctionType, types.MethodType)) else type(wrapper).__call__
    return getattr(function, "__code__", type(wrapper))


def _chain(entry: Any) -> Iterator[Any]:
    """The entry, what it wraps, and so on; nothing after what wraps nothing."""
    yield entry
    held = None if is_attention(entry) else _held(entry, {id(entry)})
    if held is not None:
        yield from _chain(next(iter(held[0].values())))


def _held(wrapper: Any, seen: set[int]) -> Held | None:
    """The parts of `wrapper` that are or lead to an attention function."""
    for values, rebuilt in _parts(wrapper):
        leading = {}
        for name, value in values.items():
            if is_attention(value):
                leading[name] = value
            elif callable(value) and id(value) not in seen and not isinstance(value, type):
                seen.add(id(value))
                if _held(value, seen) is not None:
                    leading[name] = value
        if leading:
            return leading, rebuilt
    return None


def _parts(wrapper: Any) -> Iterator[Held]:
    """Places in which a wrapper may hold the function that it wraps."""
    if isinstance(wrapper, types.FunctionType):
        yield _contents(wrapper), functools.partial(_with_contents, wrapper)
        if not _assigns_globals(wrapper.__code__):
            variables = {name: wrapper.__globals__.get(name) for name in wrapper.__code__.co_names}
            called = {name: value for name, value in variables.items() if _takes_calls(value)}
            yield called, functools.partial(_with_globals, wrapper)
    elif isinstance(wrapper, functools.partial):
        yield {"": wrapper.func}, lambda new: functools.partial(new[""], *wrapper.args, **wrapper.keywords)
        yield wrapper.keywords, lambda new: functools.partial(wrapper.func, *wrapper.args, **{**wrapper.keywords, **new})
        given = {str(number): value for number, value in enumerate(wrapper.args)}
        yield given, lambda new: functools.partial(wrapper.func, *{**given, **new}.values(), **wrapper.keywords)
    elif isinstance(wrapper, types.MethodType):
        owner = wrapper.__self__
        yield _attributes(owner), lambda new: types.MethodType(wrapper.__func__, _with_attributes(owner, new))
        yield {"": wrapper.__func__}, lambda new: types.MethodType(new[""], owner)
    else:
        yield _attributes(wrapper), lambda new: _with_attributes(wrapper, new)
        # the function, not whether there is one
        yield {"__call__": getattr(type(wrapper), "__call__", None)}, lambda new: _object(wrapper, new)  # noqa: B004


def _contents(function: types.FunctionType) -> dict[str, Any]:
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            contents[name] = cell.cell_contents
    return contents


def _takes_calls(function: Any) -> bool:
    """True if a wrapper may call it with an attention call's arguments."""
    if not isinstance(function, types.FunctionType):
        return True
    code = function.__code__
    return code.co_varnames[:1] == ("module",) or (code.co_argcount == 0 and bool(code.co_flags & inspect.CO_VARARGS))


def _assigns_globals(code: types.CodeType) -> bool:
    inner = any(_assigns_globals(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return inner or any(instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for instruction in dis.get_instructions(code))


def _with_contents(function: types.FunctionType, new: dict[str, Any]) -> Function:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(types.CellType(new[name]) if name in new else cell for name, cell in cells)
    return _function(function, function.__globals__, closure)


def _with_globals(function: types.FunctionType, new: dict[str, Any]) -> Function:
    # made in every call: the globals may change
    def call(*args: Any, **kwargs: Any) -> Any:
        return _function(function, {**function.__globals__, **new}, function.__closure__)(*args, **kwargs)

    return call


def _function(function: types.FunctionType, variables: dict[str, Any], closure: Any) -> Function:
    copy = types.FunctionType(function.__code__, variables, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _attributes(owner: Any) -> dict[str, Any]:
    return getattr(owner, "__dict__", {})


def _with_attributes(owner: Any, new: dict[str, Any]) -> Any:
    return _object(owner, {name: property(_constant(value)) for name, value in new.items()})


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda self: value


def _object(owner: Any, members: dict[str, Any]) -> Any:
    """An object with the state of `owner` and other members of its class."""
    copy: Any = object.__new__(type(type(owner).__name__, (type(owner),), members))
    object.__setattr__(copy, "__dict__", _attributes(owner))
    return copy
