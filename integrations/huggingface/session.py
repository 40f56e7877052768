"""What a model has open: its blocks, each with a run, and the attention and options that its configs held before them."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from flexmask.integrations.huggingface.attention import NAME, SESSION, PrefillCall, of_own_heads, process_settings, register
from flexmask.integrations.huggingface.compat import check_servable, text_config, unwrapped
from flexmask.integrations.huggingface.settings import CONFIG_KEY, PrefillSettings, saved_settings
from flexmask.integrations.record.run import MAX_CALLS, PrefillRun
from flexmask.selector import Selector

_log = logging.getLogger("flexmask")
_ABSENT = object()
_LOCK = threading.RLock()  # held while blocks open and close
# the blocks that the current thread or task has opened: a task begins with a copy of those of its creator, a thread with none
_OWN: ContextVar[tuple[OpenBlock, ...]] = ContextVar("flexmask_own_blocks", default=())


class Session:
    """The open blocks of one model, found from each of its modules, in the order in which they were opened.

    It stays on the model, since compiled forwards are tied to it. Readers take no lock. A copy of the model has none.
    """

    def __init__(self) -> None:
        self.blocks: tuple[OpenBlock, ...] = ()
        self._unnumbered: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @classmethod
    def of(cls, model: nn.Module) -> Session:
        """The session of a model, which its parts share.

        Raises
        ------
        ValueError
            If several parts of it have blocks of their own open.
        """
        found = {id(each): each for module in model.modules() if (each := module.__dict__.get(SESSION)) is not None}
        used = [each for each in found.values() if each.blocks] or list(found.values())
        if len(used) > 1 and used[0].blocks:
            raise ValueError("model must have no blocks open on several of its parts; close them first")
        session = used[0] if used else cls()
        for module in model.modules():
            module.__dict__[SESSION] = session
        return session

    def block(self) -> OpenBlock | None:
        """The block that a call belongs to: of those of the calling thread or task the one opened last, else that of all."""
        blocks = self.blocks
        if len(blocks) > 1:
            own = _OWN.get()
            return next((block for block in reversed(blocks) if block in own), blocks[-1])
        return blocks[-1] if blocks else None

    def layer_of(self, module: nn.Module) -> int:
        """The module's `layer_idx`, else its place among the modules without one, in the order of their first calls."""
        layer = getattr(module, "layer_idx", None)
        return layer if isinstance(layer, int) else self._unnumbered.setdefault(module, len(self._unnumbered))


@dataclass(eq=False)
class OpenBlock:
    """One entered block: its run, and all that it switched."""

    model: PreTrainedModel
    run: PrefillRun
    probe: Callable[[PrefillCall], Tensor] | None  # serves every prefill call, if there is one
    session: Session
    configs: list[Any]
    handle: RemovableHandle
    # by layer and by the number of its heads in this process
    selectors: dict[tuple[int, int], Selector] = field(default_factory=dict)

    @classmethod
    def enter(cls, model: PreTrainedModel, run: PrefillRun, probe: Callable[[PrefillCall], Tensor] | None = None) -> OpenBlock:
        """Switch `model` to ``"flexmask"`` and let its calls belong to `run`.

        Raises
        ------
        ImportError
            As `register`.
        NotImplementedError
            For a model that its config or its layers show not to be served.
        ValueError
            For a model that does not go through transformers' attention interface.
        """
        register()
        check_servable(model)
        text = text_config(model)
        configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PreTrainedModel)}
        configs[id(text)] = text
        with _LOCK:
            session = Session.of(model)
            # generate() and PEFT call inside of the model: the part that all ways lead through
            handle = model.base_model.register_forward_hook(_note_forward, with_kwargs=True)
            block = cls(model, run, probe, session, list(configs.values()), handle)
            for config in block.configs:
                _SWITCHED.setdefault(id(config), _Switched(config, config._attn_implementation)).blocks.append(block)
            try:
                model.set_attn_implementation(NAME if text is model.config else {"text_config": NAME})
                if text._attn_implementation != NAME:
                    raise ValueError(
                        f"model must go through transformers' attention interface; got {type(model).__name__}, which does not"
                    )
                _write_options(_SWITCHED[id(text)])
            except BaseException:
                block._give_back()
                raise
            session.blocks = (*session.blocks, block)
        # without those that another thread closed
        _OWN.set((*(each for each in _OWN.get() if each.is_open), block))
        return block

    @property
    def is_open(self) -> bool:
        """True until it is left."""
        return self in self.session.blocks

    def leave(self) -> None:
        """Undo what `enter` did as far as no other open block still wants it."""
        with _LOCK:
            self.session.blocks = tuple(each for each in self.session.blocks if each is not self)
            self._give_back()
        _OWN.set(tuple(each for each in _OWN.get() if each.is_open))

    def selector(self, module: nn.Module, layer: int, num_heads: int) -> Selector:
        """The selector of an attention module, made once."""
        found = self.selectors.get((layer, num_heads))
        if found is None:
            found = of_own_heads(self.run.settings.selector(layer), module, num_heads)
            self.selectors[layer, num_heads] = found
        return found

    def _give_back(self) -> None:
        self.handle.remove()
        for config in self.configs:
            switched = _SWITCHED[id(config)]
            switched.blocks.remove(self)
            _write_options(switched)
            if not switched.blocks:
                # not by its property, which sets the name of all parts too, where other blocks may be open
                config._attn_implementation_internal = switched.name
                del _SWITCHED[id(config)]


@contextmanager
def opened(model: PreTrainedModel, run: PrefillRun, probe: Callable[[PrefillCall], Tensor] | None = None) -> Iterator[OpenBlock]:
    """`OpenBlock.enter` for the time of a ``with`` block."""
    block = OpenBlock.enter(model, run, probe)
    try:
        yield block
    finally:
        block.leave()


@dataclass(eq=False)
class _Switched:
    """One config that open blocks switched, and what it held before the first of them."""

    config: Any
    name: str | None
    blocks: list[OpenBlock] = field(default_factory=list)
    options: Any = _ABSENT
    written: Any = _ABSENT


# by identity, which models may share: configs are not hashable, and keep in their file what they are given. Each holds its
# config, so that no other can take its id
_SWITCHED: dict[int, _Switched] = {}


def _write_options(switched: _Switched) -> None:
    """Let a config hold the options of the block entered last, for whoever saves or copies the model, else its own.

    Blocks whose method is a function, which cannot be saved, are passed over. What somebody else wrote inside a block, as
    `configure` does, are the config's own options from then on.
    """
    now = getattr(switched.config, CONFIG_KEY, _ABSENT)
    if now is not switched.written or now is _ABSENT:
        switched.options = now
    runs = [block.run for block in switched.blocks if text_config(block.model) is switched.config]
    switched.written = next((run.settings.to_dict() for run in reversed(runs) if not callable(run.settings.method)), _ABSENT)
    wanted = switched.options if switched.written is _ABSENT else switched.written
    if wanted is not _ABSENT:
        setattr(switched.config, CONFIG_KEY, wanted)
    elif hasattr(switched.config, CONFIG_KEY):
        delattr(switched.config, CONFIG_KEY)


def _configured(config: Any) -> PrefillSettings | None:
    """The options that a config holds as its own, without those of open blocks; None without any."""
    with _LOCK:
        switched = _SWITCHED.get(id(config))
        if switched is None or getattr(config, CONFIG_KEY, _ABSENT) is not switched.written or switched.written is _ABSENT:
            return saved_settings(config)
        return None if switched.options is _ABSENT else PrefillSettings.from_dict(switched.options, CONFIG_KEY)


def _note_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note a prefill that was not compiled; a function of this module, for models are copied and pickled with their hooks."""
    if torch.compiler.is_compiling() or _is_decoding((*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))):
        return
    session = module.__dict__.get(SESSION)
    block = None if session is None else session.block()
    if block is not None:
        block.run.note_forward()


def _is_decoding(inputs: Iterable[Any]) -> bool:
    tokens = next((each for each in inputs if isinstance(each, Tensor)), None)
    return tokens is not None and tokens.ndim > 1 and tokens.shape[1] <= 1


def model_settings(
    model: PreTrainedModel,
    settings: PrefillSettings | str | Path | None = None,
    method: str | Callable[..., BlockMask] | None = None,
    **options: Any,
) -> PrefillSettings:
    """The settings that a caller names for a model; where he names none, the process's, those in its config, else the defaults.

    Raises
    ------
    TypeError, ValueError
        For unknown options, values out of their range, layers that the model does not have, options by head for other heads.
    """
    config = text_config(model)
    if settings is None and method is None and not options:
        found = process_settings() or _configured(config) or PrefillSettings()
    else:
        found = PrefillSettings.from_options(settings, method, **options)
    found.check_model(config)
    return found


def configure(
    model: Any,
    settings: PrefillSettings | str | Path | None = None,
    method: str | Callable[..., BlockMask] | None = None,
    **options: Any,
) -> PrefillSettings:
    """Write options into a model's config, where ``save_pretrained`` keeps them: ``flexmask_config`` in ``config.json``.

    They hold wherever the model runs with ``attn_implementation="flexmask"``, except inside a `sparse_prefill` block with options
    of its own. Without options: the defaults, which replace what was there.

    Parameters
    ----------
    model
        A model of transformers, wrapped or not, as in `sparse_prefill`.
    settings, method, options
        As in `sparse_prefill`; `method` by name only.

    Returns
    -------
    PrefillSettings
        What was written.

    Raises
    ------
    TypeError, ValueError
        For a `model` that is not one of transformers, unknown options, values out of range, layers that the model does not have.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> settings = configure(model, gamma=0.8, dense_layers=(0,))
    >>> model.config.flexmask_config
    {'dense_layers': [0], 'gamma': 0.8}
    """
    config = text_config(unwrapped(model))
    found = PrefillSettings.from_options(settings, method, **options)
    found.check_model(config)
    setattr(config, CONFIG_KEY, found.to_dict())
    return found


class sparse_prefill(ContextDecorator):
    """Run a model's prefill sparse inside a ``with`` block, and set the model back after it, also after an error.

    Calls `register`, whose names stay. Of a model with other parts than text (``config.text_config``) the text part is switched.

    Blocks on one model may be nested, and may overlap in any order, also those of several threads and of asyncio tasks; the model
    gets its own attention back when the last of them is closed. A call runs with the options of the block that its own thread or
    task entered last and has not closed, and goes into that block's statistics. A thread that has no block open, as one that was
    started inside a block, runs in the one that was entered last of all. So a thread without a block runs sparse while another
    one has a block open on the same model: the name of the attention belongs to the model.

    An object can be entered again, also while it is open; each time gives a run of its own.

    While a block is open, the model's config holds its options (``flexmask_config``), so that ``save_pretrained`` and copies keep
    them; of several blocks, those of the one entered last. A `method` that is a function cannot be saved: then the config stays
    as it is.

    Parameters
    ----------
    model
        A decoder of transformers that goes through its attention interface; or a pipeline with one, torch.compile's module or a
        PEFT model around one.
    method
        As in `flexmask.sparse_attention`. Default ``"hybrid"``.
    settings
        Whole settings, as `tune` gives them, or a file of them, in the place of all other options.
    collect_stats
        Fill ``run.stats``; costs a little time. Default True.
    collect_masks
        Also keep the BlockMask of every prefill call, held until the run is dropped: for pictures and tests, not for speed.
        Default False.
    max_calls
        Prefill calls of each layer whose statistics and masks are kept at most, the latest; ``run.summary()`` counts those
        before them too. Default 512, None for no limit.
    options
        The method's own, as ``gamma=0.9``, and the fields of `PrefillSettings`: `block_size`, `dense_below`, `backend`,
        `max_mask_bytes`, `layers`, `dense_layers`. With neither method, settings nor options: what `configure` wrote into the
        model's config by the time that the block is entered, else the defaults.

    Returns
    -------
    PrefillRun
        From ``with``. Its ``stats`` fill while the model runs, and can be read after the block too. At the end of a block the
        logger "flexmask" says which layers ran dense and why: a warning where all did.

    Warns
    -----
    UserWarning
        At the end of a block in which the model ran a prompt, but none of its layers called this attention.

    Raises
    ------
    ImportError
        As `register`.
    TypeError, ValueError
        For a `model` that is none or cannot change its attention, for unknown options, values out of their range, layers that the
        model does not have and numbers by head for other heads.
    NotImplementedError
        On entering, for a model that its config or its layers show not to be served; in the model's forward, for a call that is
        not: see the README of this folder.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> with torch.no_grad(), sparse_prefill(model, gamma=0.9) as run:
    ...     logits = model(torch.arange(64)[None]).logits
    >>> run.stats[1][0].dense  # layer 1, first prefill: 64 tokens are too few to gain from a mask
    True
    """

    def __init__(
        self,
        model: Any,
        method: str | Callable[..., BlockMask] | None = None,
        settings: PrefillSettings | str | Path | None = None,
        *,
        collect_stats: bool = True,
        collect_masks: bool = False,
        max_calls: int | None = MAX_CALLS,
        **options: Any,
    ) -> None:
        self._model = unwrapped(model)
        self._options = {"settings": settings, "method": method, **options}
        self._collects = (collect_stats, collect_masks, max_calls)
        self._open: list[OpenBlock] = []
        PrefillRun(model_settings(self._model, **self._options), *self._collects)  # what is wrong is said here

    def __enter__(self) -> PrefillRun:
        run = PrefillRun(model_settings(self._model, **self._options), *self._collects)
        self._open.append(OpenBlock.enter(self._model, run))
        return run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        # entered more than once: what this thread or task entered last, unless the block was handed over to it
        own = _OWN.get()
        block = next((each for each in reversed(tuple(self._open)) if each in own), self._open[-1])
        self._open.remove(block)
        block.leave()
        log_dense(block.run)
        if error is None and block.run.unreached:
            warn_unreached(self._model)


def log_dense(run: PrefillRun) -> None:
    """Say on the logger "flexmask" which layers ran dense and why: a warning where nothing else ran."""
    summary = run.dense_summary()
    if summary is not None:
        nothing_else, line = summary
        _log.log(logging.WARNING if nothing_else else logging.INFO, "flexmask: %s", line)


def warn_unreached(model: PreTrainedModel) -> None:
    """Warn of a model that ran without a single call of our attention."""
    warnings.warn(
        f"flexmask did not reach {type(model).__name__}: it ran, but none of its layers called the attention of transformers' "
        "attention interface, so it ran as without the block",
        UserWarning,
        stacklevel=3,
    )
