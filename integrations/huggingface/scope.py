"""The open `sparse_prefill` blocks, and which of them a call belongs to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmask.integrations.huggingface.compat import NAME, text_config
from flexmask.integrations.record import PrefillRun
from flexmask.locking import locked

LOCK = threading.RLock()  # held while scopes open and close
# An open block replaces the attention's name in the model's config by this prefix and the encoded name. Nothing depends on
# clean-up: once no scope is open, the next forward restores the name, and a compiled forward runs dense
_PREFIX = f"{NAME}:"


class Scope:
    """One open `sparse_prefill` block. It is open until it is closed, or after an interrupt until nothing holds it."""

    def __init__(
        self, model: PreTrainedModel, run: PrefillRun, probe: Callable[..., Tensor] | None = None, prompt_len: int | None = None
    ) -> None:
        self.model, self.run = model, run
        self.probe = probe  # runs every prefill call instead of its plan
        self.prompt_len = prompt_len  # tokens of a prompt that comes in chunks
        self.config, self.is_closed = text_config(model), False
        self._unhook: Callable[[], Any] = lambda: None
        # weak keys, because torch.nn.DataParallel makes new modules in each forward
        self._layers: MutableMapping[nn.Module, int] = weakref.WeakKeyDictionary()

    @locked(LOCK)
    def open(self, forward_hook: Callable[..., None]) -> None:
        """Take over the model's calls, in this thread or task before other scopes do."""
        scope_ref = ref(self)
        for part in (self.config, *self.model.modules()):
            entry = entry_of(part)
            entry.scopes = (*(scope for scope in entry.scopes if scope() is not None), scope_ref)
        _LOCAL_SCOPES.set((*(scope for scope in _LOCAL_SCOPES.get() if scope() is not None), scope_ref))
        # generate() and PEFT bypass the outer modules
        base = self.model.base_model
        self._unhook = weakref.finalize(self, base.register_forward_hook(forward_hook, with_kwargs=True).remove)

    @locked(LOCK)
    def close(self) -> None:
        """Release the model's calls; its own attention returns unless another scope is open."""
        self.is_closed = True
        self._unhook()
        restore_attention_name(self.config)

    def layer_of(self, module: nn.Module) -> int:
        """The module's `layer_idx`; without one, its place among such modules in the order of their first calls."""
        layer = getattr(module, "layer_idx", None)
        return layer if isinstance(layer, int) else self._layers.setdefault(module, len(self._layers))


# the scopes that the current thread or task opened; a task begins with its creator's scopes, a thread with none
_LOCAL_SCOPES: ContextVar[tuple[ref[Scope], ...]] = ContextVar("flexmask_local_scopes", default=())


class _Entry:
    """Facts about a config or module: its scopes, and of a config what `model_config` keeps."""

    def __init__(self, part: Any) -> None:
        part_id, drop = id(part), _ENTRIES.pop
        self.part: Callable[[], Any] = ref(part, lambda _: drop(part_id, None))
        self.scopes: tuple[ref[Scope], ...] = ()
        self.heads: Mapping[int, int] = {}  # query heads by layer, of the modules of the config's model
        self.saved_settings: tuple[Any, Any, Any] | None = None  # a copy of the saved options, the heads, and the parsed settings


# by id, since configs are not hashable and operators take no modules; an entry is dropped with its config or module
_ENTRIES: dict[int, _Entry] = {}


def entry_of(part: Any) -> _Entry:
    """The entry of a config or module."""
    return _ENTRIES.get(id(part)) or _ENTRIES.setdefault(id(part), _Entry(part))


def open_scopes(part: Any) -> list[Scope]:
    """The open scopes of a config or module in the order of opening."""
    entry = _ENTRIES.get(id(part))
    scopes = [] if entry is None else [scope_ref() for scope_ref in entry.scopes]
    return [scope for scope in scopes if scope is not None and not scope.is_closed]


def scope_of(module: nn.Module) -> Scope | None:
    """The open scope that a module's call belongs to: of a model that contains the module, else of a model with its config."""
    # torch.nn.DataParallel calls copies of modules
    scopes = open_scopes(module) or open_scopes(getattr(module, "config", None))
    return latest_scope(scopes) if scopes else None


def latest_scope(scopes: Sequence[Scope]) -> Scope:
    """The scope that the current thread or task opened last; if it opened none of them, the last of `scopes`."""
    return next((scope for scope_ref in reversed(_LOCAL_SCOPES.get()) if (scope := scope_ref()) in scopes), None) or scopes[-1]


def module_of(module_id: int) -> nn.Module:
    """The module with this id, which `remember` or an open scope has entered."""
    module: nn.Module = _ENTRIES[module_id].part()
    return module


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def remember(module: nn.Module) -> None:
    """Enter a module for `module_of` while torch.compile traces; torch before 2.13 passes no modules to such functions."""
    entry_of(module)


def scoped_name(config: Any) -> str:
    """The name that a block writes into a config: the present one if it is flexmask's, else one that encodes it."""
    present_name = config._attn_implementation
    # in swapped case, because transformers takes every name with "flash" for one of its own kernels
    return present_name if present_name == NAME or is_scoped(config) else _PREFIX + (present_name or "").swapcase()


def is_scoped(config: Any) -> bool:
    """True for a config into which a block has written its name."""
    return str(getattr(config, "_attn_implementation", None)).startswith(_PREFIX)


@locked(LOCK)
def restore_attention_name(config: Any) -> bool:
    """Write the name of the model's own attention back into its config if no scope is open; True if that changed the config."""
    if not is_scoped(config) or open_scopes(config):
        return False
    # the public property would set the name in all parts of the config, for which other scopes may be open
    config._attn_implementation_internal = config._attn_implementation.removeprefix(_PREFIX).swapcase() or None
    return True
