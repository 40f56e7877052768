"""sparse_prefill: run a model's prefill sparse inside a ``with`` block."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from flexmask.integrations.huggingface.attention import register
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.huggingface.compat import unwrapped
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.huggingface.session import OpenBlock, latest
from flexmask.integrations.record.run import MAX_CALLS, PrefillRun
from flexmask.selector import UnknownOption
from flexmask.settings import PrefillSettings

_log = logging.getLogger("flexmask")


class sparse_prefill(ContextDecorator):
    """Run a model's prefill sparse inside a ``with`` block, and restore the model afterwards, also after an error.

    Calls `register`; the registered names stay. In a model with ``config.text_config`` only the text part is switched. An object
    can be entered again, also while it is open; each time gives a new run.

    Blocks on one model may nest or overlap, across threads and asyncio tasks; the model gets its own attention back when the last
    one closes. A call uses the block that its thread or task entered last, else the one entered last of all. While blocks are
    open, the model's config holds the options of the one entered last (``flexmask_config``) for ``save_pretrained`` and copies,
    unless `method` is a function.

    Parameters
    ----------
    model
        A decoder of transformers that uses its attention interface; or a pipeline, a torch.compile module or a PEFT model around
        one.
    method
        As in `flexmask.sparse_attention`. Default ``"hybrid"``.
    settings
        Whole settings, as from `tune`, or a file of them, instead of all other options.
    collect_stats
        Fill ``run.stats``; costs a little time. Default True.
    collect_masks
        Also keep every prefill call's BlockMask until the run is dropped. Default False.
    max_calls
        Latest prefill calls per layer to keep; ``run.summary()`` counts earlier ones too. Default 512; None for no limit.
    options
        The method's, as ``gamma=0.9``, and the fields of `PrefillSettings`. Without method, settings and options: what
        `configure` wrote into the model's config before the block is entered, else the defaults.

    Returns
    -------
    PrefillRun
        From ``with``; it fills while the model runs. When the block ends, the logger "flexmask" reports layers that ran dense and
        why, as a warning if all did.

    Warns
    -----
    UserWarning
        When the block ends, if the model ran a prompt but no layer called this attention.

    Raises
    ------
    ImportError
        As `register`.
    TypeError, ValueError
        For a `model` that is not one or cannot change its attention, unknown options, values out of range, layers that the model
        lacks, and options per head of another number.
    NotImplementedError
        On entering, for a model that its config or layers show to be unsupported; in the forward, for an unsupported call; in a
        backward after the block, for checkpointed layers, which run again.

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
        self._options = {"method": method, "settings": settings, **options}
        self._collects = (collect_stats, collect_masks, max_calls)
        self._open: list[OpenBlock] = []
        try:
            PrefillRun(model_settings(self._model, **self._options), *self._collects)
        except UnknownOption as error:
            raise error.with_names("collect_stats", "collect_masks", "max_calls") from None

    def __enter__(self) -> PrefillRun:
        register()
        run = PrefillRun(model_settings(self._model, **self._options), *self._collects)
        self._open.append(OpenBlock.enter(self._model, run))
        return run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        # if entered more than once: the latest of this thread or task, or one handed over to it
        block = latest(tuple(self._open))
        self._open.remove(block)
        block.leave()
        log_dense(block.run)
        if error is None and block.run.unreached:
            warn_unreached(self._model)


@contextmanager
def opened(model: PreTrainedModel, run: PrefillRun, probe: Callable[[PrefillCall], Tensor] | None = None) -> Iterator[OpenBlock]:
    """A block that records in `run`; `probe` serves its prefill calls."""
    register()
    block = OpenBlock.enter(model, run, probe)
    try:
        yield block
    finally:
        block.leave()


def log_dense(run: PrefillRun) -> None:
    summary = run.dense_summary()
    if summary is not None:
        nothing_else, line = summary
        _log.log(logging.WARNING if nothing_else else logging.INFO, "flexmask: %s", line)


def warn_unreached(model: PreTrainedModel) -> None:
    warnings.warn(
        f"flexmask did not reach {type(model).__name__}: it ran, but none of its layers called the attention of transformers' "
        "attention interface, so it ran as without the block",
        UserWarning,
        stacklevel=3,
    )
