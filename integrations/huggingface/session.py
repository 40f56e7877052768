"""The blocks that a model has open, each with a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from flexmask.integrations.huggingface.attention import register
from flexmask.integrations.huggingface.call import NAME, SESSION, PrefillCall, of_own_heads
from flexmask.integrations.huggingface.compat import check_servable, text_config
from flexmask.integrations.huggingface.model_config import LOCK, SwitchedConfig
from flexmask.integrations.record.run import PrefillRun
from flexmask.selector import Selector

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

    def block(self) -> OpenBlock | None:
        blocks = self.blocks
        return latest(blocks) if blocks else None

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
        """Switch `model` to ``"flexmask"`` and record its calls in `run`."""
        register()
        check_servable(model)
        text = text_config(model)
        configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PreTrainedModel)}
        configs[id(text)] = text
        with LOCK:
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
        with LOCK:
            self.session.blocks = tuple(each for each in self.session.blocks if each is not self)
            self._give_back()
        _OWN.set(tuple(each for each in _OWN.get() if each.is_open))

    def selector(self, module: nn.Module, layer: int, num_heads: int) -> Selector:
        found = self.selectors.get((layer, num_heads))
        if found is None:
            found = of_own_heads(self.run.settings.selector(layer), module, num_heads)
            self.selectors[layer, num_heads] = found
        return found

    def _give_back(self) -> None:
        self.handle.remove()
        for config in self.configs:
            SwitchedConfig.of(config).close(self)


def latest(blocks: Sequence[OpenBlock]) -> OpenBlock:
    """The block that the current thread or task opened last, else the last."""
    own = _OWN.get()
    return next((block for block in reversed(blocks) if block in own), blocks[-1])


@contextmanager
def opened(model: PreTrainedModel, run: PrefillRun, probe: Callable[[PrefillCall], Tensor] | None = None) -> Iterator[OpenBlock]:
    block = OpenBlock.enter(model, run, probe)
    try:
        yield block
    finally:
        block.leave()


def _note_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note a prefill that was not compiled. Module-level: models are pickled with their hooks."""
    if torch.compiler.is_compiling() or _is_decoding((*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))):
        return
    session = module.__dict__.get(SESSION)
    block = None if session is None else session.block()
    if block is not None:
        block.run.note_forward()


def _is_decoding(inputs: Iterable[Any]) -> bool:
    tokens = next((each for each in inputs if isinstance(each, Tensor)), None)
    return tokens is not None and tokens.ndim > 1 and tokens.shape[1] <= 1
