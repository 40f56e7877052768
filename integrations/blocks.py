"""Opening and closing a block on a model: the name of its attention, its options, and their return in any order of closing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from flexmask.integrations.models import text_config
from flexmask.integrations.right_padding import watch_token_ids
from flexmask.integrations.run import LOCK, RUNS, FlexPrefillRun
from flexmask.integrations.settings import CONFIG_KEY, PrefillSettings, process_settings, saved_settings

NAME = "flexprefill"
_log = logging.getLogger("flexmask")
_ABSENT = object()


@dataclass(eq=False)
class OpenBlock:
    """One entered block: its run, and all that it switched."""

    model: PreTrainedModel
    run: FlexPrefillRun
    modules: list[nn.Module]
    configs: list[Any]
    handles: list[RemovableHandle | None] = field(default_factory=list)

    @classmethod
    def enter(cls, model: PreTrainedModel, run: FlexPrefillRun) -> OpenBlock:
        """Switch `model` to "flexprefill" and let its calls belong to `run`.

        Raises
        ------
        ValueError
            For a model that does not go through transformers' attention interface.
        """
        modules = list(model.modules())
        configs = {id(module.config): module.config for module in modules if isinstance(module, PreTrainedModel)}
        text = text_config(model)
        configs[id(text)] = text
        block = cls(model, run, modules, list(configs.values()))
        with LOCK:
            for config in block.configs:
                _FORMER.setdefault(id(config), _Former(config, config._attn_implementation)).blocks.append(block)
            try:
                model.set_attn_implementation(NAME if text is model.config else {"text_config": NAME})
                if text._attn_implementation != NAME:
                    raise ValueError(
                        f"model must go through transformers' attention interface; got {type(model).__name__}, which does not"
                    )
                _write_options(_FORMER[id(text)])
            except BaseException:
                block._give_back()
                raise
            # generate() and PEFT call inside of the model: the part that all ways lead through
            block.handles.append(model.base_model.register_forward_hook(_note_forward, with_kwargs=True))
            block.handles.append(watch_token_ids(model, run))
        RUNS.open(modules, run)
        return block

    def leave(self) -> None:
        """Undo what `enter` did as far as no other open block still wants it."""
        RUNS.close(self.modules, self.run)
        with LOCK:
            for handle in filter(None, self.handles):
                handle.remove()
            self._give_back()

    def _give_back(self) -> None:
        for config in self.configs:
            former = _FORMER[id(config)]
            former.blocks.remove(self)
            _write_options(former)
            if not former.blocks:
                # not by its property, which sets the name of all parts too, where other blocks may be open
                config._attn_implementation_internal = former.name
                del _FORMER[id(config)]


@dataclass(eq=False)
class _Former:
    """One config that open blocks switched, and what it held before the first of them."""

    config: Any
    name: str | None
    blocks: list[OpenBlock] = field(default_factory=list)
    options: Any = _ABSENT
    written: Any = _ABSENT


# by identity: configs are not hashable; each holds its config, so that no other can take its id
_FORMER: dict[int, _Former] = {}


def _write_options(former: _Former) -> None:
    """Let a config hold the options of the block entered last, for whoever saves or copies the model, else its own.

    Blocks whose method is a function, which cannot be saved, are passed over. What somebody else wrote inside a block, as
    `configure` does, are the config's own options from then on.
    """
    now = getattr(former.config, CONFIG_KEY, _ABSENT)
    if now is not former.written or now is _ABSENT:
        former.options = now
    runs = [block.run for block in former.blocks if text_config(block.model) is former.config]
    former.written = next((run.settings.to_dict() for run in reversed(runs) if not callable(run.settings.method)), _ABSENT)
    wanted = former.options if former.written is _ABSENT else former.written
    if wanted is not _ABSENT:
        setattr(former.config, CONFIG_KEY, wanted)
    elif hasattr(former.config, CONFIG_KEY):
        delattr(former.config, CONFIG_KEY)


def configured(config: Any) -> PrefillSettings | None:
    """The options that a config holds as its own, without those of open blocks; None without any."""
    with LOCK:
        former = _FORMER.get(id(config))
        if former is None or getattr(config, CONFIG_KEY, _ABSENT) is not former.written or former.written is _ABSENT:
            return saved_settings(config)
        return None if former.options is _ABSENT else PrefillSettings.from_dict(former.options)


def _note_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note a prefill that was not compiled; a function of this module, for models are copied and pickled with their hooks."""
    if torch.compiler.is_compiling() or _is_decoding((*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))):
        return
    run = RUNS.get(module)
    if run is not None:
        run.note_forward()


def _is_decoding(inputs: Iterable[Any]) -> bool:
    tokens = next((each for each in inputs if isinstance(each, Tensor)), None)
    return tokens is not None and tokens.ndim > 1 and tokens.shape[1] <= 1


def model_settings(
    model: PreTrainedModel, gamma: float | Sequence[float] | None, tau: float | None, options: dict[str, Any]
) -> PrefillSettings:
    """The settings that a caller names for a model; where he names none, the process's, those in its config, else the defaults.

    Raises
    ------
    TypeError, ValueError
        For unknown options, values out of their range, layers that the model does not have.
    """
    options = {**options, **{name: value for name, value in (("gamma", gamma), ("tau", tau)) if value is not None}}
    settings = None if options else process_settings() or configured(text_config(model))
    return checked(model, settings or PrefillSettings.from_options(**options))


def checked(model: PreTrainedModel, settings: PrefillSettings) -> PrefillSettings:
    """`settings`, unless they name layers that the model does not have."""
    number = getattr(text_config(model), "num_hidden_layers", None)
    if number is not None:
        settings.check_layers(number)
    return settings


def log_dense(run: FlexPrefillRun) -> None:
    """Say on the logger "flexmask" which layers ran dense and why: a warning where nothing else ran."""
    summary = run.dense_summary()
    if summary is not None:
        nothing_else, line = summary
        _log.log(logging.WARNING if nothing_else else logging.INFO, "flexprefill: %s", line)


def warn_unreached(model: PreTrainedModel) -> None:
    """Warn of a model that ran without a single call of our attention."""
    warnings.warn(
        f"FlexPrefill did not reach {type(model).__name__}: it ran, but none of its layers called the attention of "
        "transformers' attention interface, so it ran as without the block",
        UserWarning,
        stacklevel=3,
    )
