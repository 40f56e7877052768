"""The blocks that a model has open, each with a run, and what they switch in its configs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from flexmask._torch import is_traced
from flexmask.base.inputs import AttentionInputs
from flexmask.integrations.huggingface.call import NAME, PrefillCall, of_local_heads
from flexmask.integrations.huggingface.compat import check_servable, text_config
from flexmask.integrations.record.run import PrefillRun
from flexmask.saved_settings import saved_settings
from flexmask.selector import Selector
from flexmask.settings import CONFIG_KEY, PrefillSettings

SESSION = "_flexmask_session"  # attribute of a model's modules
_ABSENT = object()
_LOCK = threading.RLock()  # held while blocks open and close
# opened by the current thread or task; a task begins with its creator's blocks, a thread with none
_OWN: ContextVar[tuple[OpenBlock, ...]] = ContextVar("flexmask_own_blocks", default=())


class Session:
    """The open blocks of one model in the order of opening, found from each of its modules. Copies of the model have none.

    It stays on the model, since compiled forwards guard on it.
    """

    def __init__(self) -> None:
        self.blocks: tuple[OpenBlock, ...] = ()
        self._unnumbered: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @classmethod
    def of(cls, model: nn.Module) -> Session:
        """The session of a model and its parts; ValueError if several parts have blocks open."""
        found = {id(each): each for module in model.modules() if (each := module.__dict__.get(SESSION)) is not None}
        used = [each for each in found.values() if each.blocks] or list(found.values())
        if len(used) > 1 and used[0].blocks:
            raise ValueError("model must have no blocks open on several of its parts; close them first")
        session = used[0] if used else cls()
        for module in model.modules():
            module.__dict__[SESSION] = session
        return session

    def layer_of(self, module: nn.Module) -> int:
        """The module's `layer_idx`, else its place by first call among the modules without one."""
        layer = getattr(module, "layer_idx", None)
        return layer if isinstance(layer, int) else self._unnumbered.setdefault(module, len(self._unnumbered))


@dataclass(eq=False)
class OpenBlock:
    model: PreTrainedModel
    run: PrefillRun
    probe: Callable[[PrefillCall], Tensor] | None  # serves every prefill call
    session: Session
    configs: list[Any]
    handle: RemovableHandle
    # by layer and number of its heads in this process
    selectors: dict[tuple[int, int], Selector] = field(default_factory=dict)

    @classmethod
    def enter(cls, model: PreTrainedModel, run: PrefillRun, probe: Callable[[PrefillCall], Tensor] | None = None) -> OpenBlock:
        """Switch `model` to ``"flexmask"``, which must be registered, and record its calls in `run`."""
        check_servable(model)
        text = text_config(model)
        configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PreTrainedModel)}
        configs[id(text)] = text
        with _LOCK:
            session = Session.of(model)
            # generate() and PEFT bypass the outer modules
            handle = model.base_model.register_forward_hook(_note_forward, with_kwargs=True)
            block = cls(model, run, probe, session, list(configs.values()), handle)
            for config in block.configs:
                SwitchedConfig.of(config).blocks.append(block)
            try:
                model.set_attn_implementation(NAME if text is model.config else {"text_config": NAME})
                if text._attn_implementation != NAME:
                    raise ValueError(
                        f"model must go through transformers' attention interface; got {type(model).__name__}, which does not"
                    )
                SwitchedConfig.of(text).write_options()
            except BaseException:
                block._give_back()
                raise
            session.blocks = (*session.blocks, block)
        # without those that another thread closed
        _OWN.set((*(each for each in _OWN.get() if each.is_open), block))
        return block

    @property
    def is_open(self) -> bool:
        return self in self.session.blocks

    def leave(self) -> None:
        with _LOCK:
            self.session.blocks = tuple(each for each in self.session.blocks if each is not self)
            self._give_back()
        _OWN.set(tuple(each for each in _OWN.get() if each.is_open))

    def call(self, module: nn.Module, inputs: AttentionInputs, tokens: int, prefill: object) -> PrefillCall:
        """A call of one of the model's modules; `tokens` and `prefill` are those of its `PrefillMask`."""
        layer, num_heads, settings = self.session.layer_of(module), inputs.query.shape[1], self.run.settings
        selector = self.selectors.get((layer, num_heads))
        if selector is None:
            selector = self.selectors[layer, num_heads] = of_local_heads(settings.selector(layer), module, num_heads)
        return PrefillCall(inputs, tokens, prefill, layer, settings, selector, self.run, self.probe)

    def _give_back(self) -> None:
        self.handle.remove()
        for config in self.configs:
            SwitchedConfig.of(config).close(self)


def block_of(module: nn.Module) -> OpenBlock | None:
    """The block that serves a call of a module, if one is open."""
    session: Session | None = module.__dict__.get(SESSION)
    blocks = () if session is None else session.blocks
    return latest(blocks) if blocks else None


def latest(blocks: Sequence[OpenBlock]) -> OpenBlock:
    """The block that the current thread or task opened last, else the last."""
    own = _OWN.get()
    return next((block for block in reversed(blocks) if block in own), blocks[-1])


def _note_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note a prefill that was not compiled. Module-level: models are pickled with their hooks."""
    if is_traced() or _is_decoding((*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))):
        return
    block = block_of(module)
    if block is not None:
        block.run.note_forward()


def _is_decoding(inputs: Iterable[Any]) -> bool:
    tokens = next((each for each in inputs if isinstance(each, Tensor)), None)
    return tokens is not None and tokens.ndim > 1 and tokens.shape[1] <= 1


@dataclass(eq=False)
class SwitchedConfig:
    """A config that open blocks switched, and what it held before."""

    config: Any
    name: str | None
    blocks: list[OpenBlock] = field(default_factory=list)
    options: Any = _ABSENT
    written: Any = _ABSENT

    @classmethod
    def of(cls, config: Any) -> SwitchedConfig:
        return SWITCHED.setdefault(id(config), cls(config, config._attn_implementation))

    def write_options(self) -> None:
        """Write the options of the block entered last into the config, else its own.

        Skips blocks whose method is a function. What others wrote inside a block, as `configure` does, becomes the config's own.
        """
        now = getattr(self.config, CONFIG_KEY, _ABSENT)
        if now is not self.written or now is _ABSENT:
            self.options = now
        runs = [block.run for block in self.blocks if text_config(block.model) is self.config]
        self.written = next((run.settings.to_dict() for run in reversed(runs) if not callable(run.settings.method)), _ABSENT)
        wanted = self.options if self.written is _ABSENT else self.written
        if wanted is not _ABSENT:
            setattr(self.config, CONFIG_KEY, wanted)
        elif hasattr(self.config, CONFIG_KEY):
            delattr(self.config, CONFIG_KEY)

    def close(self, block: OpenBlock) -> None:
        """Remove a block; the last one restores the config."""
        self.blocks.remove(block)
        self.write_options()
        if not self.blocks:
            # the property would also set the name of all parts, where other blocks may be open
            self.config._attn_implementation_internal = self.name
            del SWITCHED[id(self.config)]


# per process, by id: models may share a config, which is not hashable and saves its attributes; an entry keeps its config alive
SWITCHED: dict[int, SwitchedConfig] = {}


def configured(config: Any) -> PrefillSettings | None:
    """The config's own options, without those of open blocks."""
    with _LOCK:
        switched = SWITCHED.get(id(config))
        if switched is None or getattr(config, CONFIG_KEY, _ABSENT) is not switched.written or switched.written is _ABSENT:
            return saved_settings(config)
        return None if switched.options is _ABSENT else PrefillSettings.from_dict(switched.options, CONFIG_KEY)
