"""FlexPrefill as an attention implementation of Hugging Face transformers. Importing this changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

from flexmask.integrations.blocks import OpenBlock, checked, log_dense, model_settings, warn_unreached
from flexmask.integrations.hooks import hook_flex_attention, unhook_flex_attention
from flexmask.integrations.models import check_servable, text_config, unwrapped
from flexmask.integrations.registration import register
from flexmask.integrations.run import MAX_CALLS, FlexPrefillRun, check_max_calls, own_runs
from flexmask.integrations.settings import CONFIG_KEY, PrefillSettings
from flexmask.integrations.tune import tune
from flexmask.integrations.tune_result import TuneResult

__all__ = [
    "FlexPrefillRun",
    "PrefillSettings",
    "TuneResult",
    "configure",
    "flexprefill",
    "hook_flex_attention",
    "register",
    "tune",
    "unhook_flex_attention",
]


def configure(model: Any, **options: Any) -> PrefillSettings:
    """Write options into a model's config, where ``save_pretrained`` keeps them: ``flexprefill_config`` in ``config.json``.

    They hold wherever the model runs with ``attn_implementation="flexprefill"``, except inside a `flexprefill` block with options
    of its own. Without options: the defaults, which replace what was there.

    Parameters
    ----------
    model
        A model of transformers, wrapped or not, as in `flexprefill`.
    options
        The fields of FlexPrefillConfig, or one as `config`, and those of PrefillSettings; `method` by name only. Or whole
        settings as `config`, as `tune` gives them.

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
    >>> settings = configure(model, gamma=0.9, dense_layers=(0,))
    >>> model.config.flexprefill_config
    {'gamma': 0.9, 'dense_layers': [0]}
    """
    inner = unwrapped(model)
    settings = checked(inner, PrefillSettings.from_options(**options))
    setattr(text_config(inner), CONFIG_KEY, settings.to_dict())
    return settings


class flexprefill(ContextDecorator):
    """Run a model's prefill with FlexPrefill inside a ``with`` block, and set the model back after it, also after an error.

    Calls `register`, whose names stay. Of a model with other parts than text (``config.text_config``) the text part is switched.

    Blocks on one model may be nested, and may overlap in any order, also those of several threads and of asyncio tasks; the model
    gets its own attention back when the last of them is closed. A call runs with the options of the block that its own thread or
    task entered last and has not closed, and goes into that block's statistics. A thread that has no block open, as one that was
    started inside a block, runs in the one that was entered last of all. So a thread without a block runs sparse while another
    one has a block open on the same model: the name of the attention belongs to the model.

    An object can be entered again, also while it is open; each time gives a run of its own.

    While a block is open, the model's config holds its options (``flexprefill_config``), so that ``save_pretrained`` and copies
    keep them; of several blocks, those of the one entered last. A `method` that is a function cannot be saved: then the config
    stays as it is.

    Parameters
    ----------
    model
        A decoder of transformers that goes through its attention interface; or a pipeline with one, torch.compile's module or a
        PEFT model around one.
    gamma, tau
        As in `FlexPrefillConfig`; gammas by head are those of the whole model where it is spread over several processes.
    collect_stats
        Fill ``run.stats``; costs a little time. Default True.
    collect_masks
        Also keep the BlockMask of every prefill call. It is made a second time and held until the run is dropped: for
        pictures and tests, not for speed. Default False.
    max_calls
        Prefill calls of each layer whose statistics and masks are kept at most, the latest; ``run.summary()`` counts those
        before them too. Default 512, None for no limit.
    options
        The other fields of FlexPrefillConfig, or one as `config`, and those of PrefillSettings: `dense_below`, `dense_layers`,
        `layers`, `backend`, `max_mask_bytes`, `method`, `method_options`; or a PrefillSettings as `config`. With no option at
        all, gamma and tau included: what `configure` wrote into the model's config by the time that the block is entered, else
        the defaults.

    Returns
    -------
    FlexPrefillRun
        From ``with``. Its ``stats`` fill while the model runs, and can be read after the block too. At the end of a block the
        logger "flexmask" says which layers ran dense and why: a warning where all did.

    Warns
    -----
    UserWarning
        At the end of a block in which the model ran a prompt, but none of its layers called FlexPrefill's attention.

    Raises
    ------
    ImportError
        As `register`.
    TypeError, ValueError
        For a `model` that is none or cannot change its attention, for unknown options, values out of their range and layers that
        the model does not have.
    NotImplementedError
        On entering, for a model that its config or its layers show not to be served; in the model's forward, for a call that is
        not: see the README of this folder.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> with torch.no_grad(), flexprefill(model, gamma=0.9) as run:
    ...     logits = model(torch.arange(64)[None]).logits
    >>> run.stats[1][0].dense  # layer 1, first prefill: 64 tokens are too few to gain from a mask
    True
    """

    def __init__(
        self,
        model: Any,
        gamma: float | Sequence[float] | None = None,
        tau: float | None = None,
        *,
        collect_stats: bool = True,
        collect_masks: bool = False,
        max_calls: int | None = MAX_CALLS,
        **options: Any,
    ) -> None:
        self._model = unwrapped(model)
        self._options = (gamma, tau, options)
        self._collects = (collect_stats, collect_masks, max_calls)
        check_max_calls(max_calls)
        self._open: list[OpenBlock] = []
        model_settings(self._model, *self._options)  # what is wrong is said here

    def __enter__(self) -> FlexPrefillRun:
        settings = model_settings(self._model, *self._options)
        register()
        check_servable(self._model)
        block = OpenBlock.enter(self._model, FlexPrefillRun(settings, *self._collects))
        self._open.append(block)
        return block.run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        # entered more than once: what this thread or task entered last, unless the block was handed over to it
        own = own_runs()
        block = next((each for each in reversed(tuple(self._open)) if any(each.run is run for run in own)), self._open[-1])
        self._open.remove(block)
        block.leave()
        log_dense(block.run)
        if error is None and block.run.unreached:
            warn_unreached(self._model)
