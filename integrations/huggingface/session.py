"""The scopes that a model has open, each with a run, and what they switch in its configs.

An interrupt may come between any two lines. So every scope is listed before it changes anything, and dropped from the list after
its last change is undone. `sweep` undoes what scopes switched that are over: closed, or without their `with` statement.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmask._torch import is_traced
from flexmask.integrations.huggingface.compat import NAME, check_servable, text_config, text_model
from flexmask.integrations.record import PrefillRun
from flexmask.locking import locked
from flexmask.settings import CONFIG_KEY, PrefillSettings, saved_settings

if TYPE_CHECKING:
    from flexmask.integrations.huggingface.call import PrefillCall

SESSION = "_flexmask_session"  # attribute of a model's modules
_ABSENT = object()
_LOCK = threading.RLock()  # held while scopes open and close
# opened by the current thread or task; a task begins with its creator's scopes, a thread with none
_OPENED_HERE: ContextVar[tuple[Scope, ...]] = ContextVar("flexmask_own_scopes", default=())


class Session:
    """The open scopes of one model in the order of opening, found from each of its modules. Copies of the model have none."""

    def __init__(self) -> None:
        self.scopes: tuple[Scope, ...] = ()
        self._unnumbered: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @staticmethod
    def on(module: nn.Module) -> Session | None:
        """The session that `of` noted on a module."""
        return module.__dict__.get(SESSION)

    @classmethod
    def of(cls, model: nn.Module) -> Session:
        """The session of a model and its parts; ValueError if several parts have scopes open."""
        sessions = {id(session): session for module in model.modules() if (session := cls.on(module)) is not None}
        used = [session for session in sessions.values() if session.scopes] or list(sessions.values())
        if len(used) > 1 and used[0].scopes:
            raise ValueError("model must have no blocks open on several of its parts; close them first")
        session = used[0] if used else cls()
        # for good: compiled forwards guard on it
        for module in model.modules():
            module.__dict__[SESSION] = session
        return session

    def layer_of(self, module: nn.Module) -> int:
        """The module's `layer_idx`, else its place by first call among the modules without one."""
        layer = getattr(module, "layer_idx", None)
        return layer if isinstance(layer, int) else self._unnumbered.setdefault(module, len(self._unnumbered))


@dataclass(eq=False)
class Scope:
    """One open `sparse_prefill` block."""

    model: PreTrainedModel
    run: PrefillRun
    probe: Callable[[PrefillCall], Tensor] | None  # serves every prefill call
    session: Session
    configs: list[Any]
    holder: ref[Any]  # what keeps the scope open, as a `with` statement's exit
    closed: bool = False

    @classmethod
    @locked(_LOCK)
    def enter(
        cls, model: PreTrainedModel, run: PrefillRun, holder: object, probe: Callable[[PrefillCall], Tensor] | None = None
    ) -> Scope:
        """Switch `model` to ``"flexmask"``, which must be registered, and record its calls in `run` while `holder` lives."""
        global _scopes
        check_servable(model)
        sweep()
        configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
        configs[id(text_config(model))] = text_config(model)
        scope = cls(model, run, probe, Session.of(model), list(configs.values()), ref(holder))
        try:
            _scopes = (*_scopes, scope)
            scope.switch()
            # without those that another thread closed
            _OPENED_HERE.set((*(earlier for earlier in _OPENED_HERE.get() if earlier.is_open), scope))
            return scope
        except BaseException:
            scope.leave()
            raise

    @property
    def is_open(self) -> bool:
        return self in self.session.scopes and not self.is_over

    @property
    def is_over(self) -> bool:
        """True also after an interrupt that left nobody to close the scope."""
        return self.closed or self.holder() is None

    def leave(self) -> None:
        self.closed = True
        sweep()
        _OPENED_HERE.set(tuple(scope for scope in _OPENED_HERE.get() if scope.is_open))

    def switch(self) -> None:
        text = text_config(self.model)
        # generate() and PEFT bypass the outer modules
        if _note_forward not in self.model.base_model._forward_hooks.values():
            self.model.base_model.register_forward_hook(_note_forward, with_kwargs=True)
        for config in self.configs:
            SwitchedConfig.of(config).scopes.append(self)
        part = text_model(self.model)
        (part or self.model).set_attn_implementation({"": NAME} if part else {"text_config": NAME})
        if text._attn_implementation != NAME:
            raise ValueError(
                f"model must go through transformers' attention interface; got {type(self.model).__name__}, which does not"
            )
        SwitchedConfig.of(text).write_options()
        self.session.scopes = (*self.session.scopes, self)

    def give_back(self) -> None:
        """Undo `switch`, or the part of it that was done and is not undone yet."""
        self.session.scopes = tuple(scope for scope in self.session.scopes if scope is not self)
        for config in self.configs:
            switched = SWITCHED.get(id(config))
            if switched is not None:
                switched.close(self)
        # last: it sweeps
        base = self.model.base_model
        if not any(scope.model.base_model is base for scope in _scopes if not scope.is_over):
            remove_hook(base, _note_forward)


_scopes: tuple[Scope, ...] = ()  # per process: scopes of which something may be switched


def sweep() -> bool:
    """Undo what scopes switched that are over; False if there are none."""
    return any(scope.is_over for scope in _scopes) and _give_back()


@locked(_LOCK)
def _give_back() -> bool:
    global _scopes
    over = [scope for scope in _scopes if scope.is_over]
    for scope in over:
        scope.give_back()
    _scopes = tuple(scope for scope in _scopes if scope not in over)
    return bool(over)


def remove_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a forward hook, also one that an interrupt left without its handle."""
    for number in [number for number, known in module._forward_hooks.items() if known is hook]:
        module._forward_hooks_with_kwargs.pop(number, None)
        del module._forward_hooks[number]


def scope_of(module: nn.Module) -> Scope | None:
    """The scope that serves a call of a module, if one is open."""
    session = Session.on(module)
    scopes = () if session is None else session.scopes
    return latest(scopes) if scopes else None


def latest(scopes: Sequence[Scope]) -> Scope:
    """The scope that the current thread or task opened last, else the last."""
    opened_here = _OPENED_HERE.get()
    return next((scope for scope in reversed(scopes) if scope in opened_here), scopes[-1])


def _note_forward(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
    """Note a prefill that was not compiled. Module-level: models are pickled with their hooks."""
    if is_traced():
        return
    sweep()
    # without kwargs after an interrupt while the hook was added or removed
    kwargs = kwargs_and_output[0] if len(kwargs_and_output) == 2 else {}
    given = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    tokens = next((value for value in given if isinstance(value, Tensor)), None)
    if tokens is not None and tokens.ndim > 1 and tokens.shape[1] <= 1:  # decoding
        return
    scope = scope_of(module)
    if scope is not None:
        scope.run.note_forward()


@dataclass(eq=False)
class SwitchedConfig:
    """A config that open scopes switched, and what it held before."""

    config: Any
    name: str | None
    scopes: list[Scope] = field(default_factory=list)
    options: Any = _ABSENT
    written: tuple[Any, ...] = ()  # by scopes; two while one replaces the other

    @classmethod
    def of(cls, config: Any) -> SwitchedConfig:
        return SWITCHED.setdefault(id(config), cls(config, config._attn_implementation))

    def write_options(self) -> None:
        """Write the options of the scope entered last, without functions, else the config's own: also what `configure` wrote."""
        if not self.holds_written():
            self.options = getattr(self.config, CONFIG_KEY, _ABSENT)
        runs = [scope.run for scope in self.scopes if text_config(scope.model) is self.config]
        options = next((run.settings.to_dict() for run in reversed(runs) if not callable(run.settings.method)), _ABSENT)
        wanted = self.options if options is _ABSENT else options
        # noted before it is written
        self.written = (*self.written, options)
        if wanted is not _ABSENT:
            setattr(self.config, CONFIG_KEY, wanted)
        elif hasattr(self.config, CONFIG_KEY):
            delattr(self.config, CONFIG_KEY)
        self.written = (options,)

    def holds_written(self) -> bool:
        """True if the config holds options that a scope wrote."""
        now = getattr(self.config, CONFIG_KEY, _ABSENT)
        return now is not _ABSENT and any(now is options for options in self.written)

    def close(self, scope: Scope) -> None:
        """Remove a scope; the last one restores the config."""
        if scope in self.scopes:
            self.scopes.remove(scope)
        self.write_options()
        if not self.scopes:
            # the property would also set the name of all parts, where other scopes may be open
            self.config._attn_implementation_internal = self.name
            del SWITCHED[id(self.config)]


# per process, by id: models may share a config, which is not hashable and saves its attributes; an entry keeps its config alive
SWITCHED: dict[int, SwitchedConfig] = {}


@locked(_LOCK)
def configured(config: Any) -> PrefillSettings | None:
    """The config's own options, without those of open scopes."""
    switched = SWITCHED.get(id(config))
    if switched is None or not switched.holds_written():
        return saved_settings(config)
    return None if switched.options is _ABSENT else PrefillSettings.from_dict(switched.options, CONFIG_KEY)


def stock_name(config: Any) -> str | None:
    """The attention implementation of a config without open scopes."""
    switched = SWITCHED.get(id(config))
    return getattr(config, "_attn_implementation", None) if switched is None else switched.name
