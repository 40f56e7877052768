"""sparse_prefill: run a model's prefill sparse inside a ``with`` block."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from flexmask.integrations.huggingface.compat import unwrapped
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.huggingface.session import OpenBlock, latest
from flexmask.integrations.huggingface.settings import PrefillSettings
from flexmask.integrations.record.run import MAX_CALLS, PrefillRun

_log = logging.getLogger("flexmask")


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
        block = latest(tuple(self._open))
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
