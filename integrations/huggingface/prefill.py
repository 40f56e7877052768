"""sparse_prefill: run a model's prefill sparse inside a ``with`` block."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.huggingface.compat import unwrapped
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.huggingface.registration import register
from flexmask.integrations.huggingface.session import Scope, latest
from flexmask.integrations.record import MAX_CALLS, PrefillRun
from flexmask.selector import UnknownOption
from flexmask.settings import PrefillSettings

_log = logging.getLogger("flexmask")


class _Exit:
    """``__exit__`` as one ``with`` statement or ExitStack looks it up, before it enters. A scope is over when its exit is gone.

    Nothing else shows an interrupt before the first line of an ``__exit__``: the program may keep the `sparse_prefill`.
    """

    def __init__(self, context: sparse_prefill | None = None) -> None:
        self.context = context
        self.scope: Scope | None = None

    def __get__(self, context: sparse_prefill | None, kind: type | None = None) -> _Exit:
        looked_up = _Exit(context)
        _LOOKED_UP[threading.get_ident()] = ref(looked_up)
        return looked_up

    @classmethod
    def of(cls, context: sparse_prefill) -> _Exit | None:
        """The exit that this thread has looked up for a context that it enters."""
        latest_one = _LOOKED_UP.pop(threading.get_ident(), None)
        looked_up = None if latest_one is None else latest_one()
        return looked_up if looked_up is not None and looked_up.context in (None, context) else None

    def __call__(self, *given: Any) -> None:
        # looked up on the class, it gets the context
        context, _, error, _ = given if self.context is None else (self.context, *given)
        # entered by hand: the latest of this thread or task, or one handed over to it
        scope = self.scope or latest(tuple(context._by_hand))
        scope.leave()
        context._by_hand.pop(scope, None)
        summary = scope.run.dense_summary()
        if summary is not None:
            nothing_else, line = summary
            _log.log(logging.WARNING if nothing_else else logging.INFO, "flexmask: %s", line)
        if error is None and scope.run.unreached:
            warnings.warn(
                f"flexmask did not reach {type(scope.model).__name__}: it ran, but none of its layers called the attention of "
                "transformers' attention interface, so it ran as without the block",
                UserWarning,
                stacklevel=2,
            )


_LOOKED_UP: dict[int, ref[_Exit]] = {}  # the latest, by thread


class sparse_prefill(ContextDecorator):
    """Run a model's prefill sparse inside a ``with`` block, and restore the model afterwards, also after an error.

    Calls `register`; the registered names stay. Only the text model is switched, which has ``config.get_text_config()``;
    encoders of images and sounds are not. An object can be entered again, also while it is open; each time gives a new run.

    Blocks on one model may nest or overlap, across threads and asyncio tasks; the model gets its own attention back when the last
    one closes. A call uses the block that its thread or task entered last, else the one entered last of all. The model's config
    holds the options of the block entered last (``flexmask_config``) for ``save_pretrained``, unless `method` is a function.

    Parameters
    ----------
    model
        A decoder of transformers that uses its attention interface; or a pipeline, a torch.compile module or a PEFT model of one.
    method
        As in `flexmask.sparse_attention`. Default ``"hybrid"``.
    settings
        Whole settings, or a file of them, instead of all other options.
    collect_stats, collect_masks
        Keep statistics (default True) and the BlockMask (default False) of every prefill call until the run is dropped.
    max_calls
        Latest prefill calls per layer to keep; ``run.summary()`` counts earlier ones too. Default 512; None for no limit.
    options
        The method's, as ``gamma=0.9``, and the fields of `PrefillSettings`. They go one by one over those that `register`
        got, and both over what `configure` had written into the model's config when the block is entered, else over the defaults.
        A named option holds for all layers; a named method comes without the options of the other.

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
        On entering, for an unsupported model; in the forward, for an unsupported call; in a backward after the block, for
        checkpointed layers, which run again.

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
        self._by_hand: dict[Scope, _Exit] = {}  # scopes entered without an exit
        try:
            PrefillRun(model_settings(self._model, **self._options), *self._collects)
        except UnknownOption as error:
            raise error.with_names("collect_stats", "collect_masks", "max_calls") from None

    def __enter__(self) -> PrefillRun:
        looked_up = _Exit.of(self)
        holder = looked_up or _Exit()
        register()
        run = PrefillRun(model_settings(self._model, **self._options), *self._collects)
        try:
            holder.scope = scope = Scope.enter(self._model, run, holder)
            if looked_up is None:
                self._by_hand[scope] = holder
            return run
        except BaseException:
            if holder.scope is not None:
                self._by_hand.pop(holder.scope, None)
                holder.scope.leave()
            raise

    __exit__ = _Exit()


@contextmanager
def opened(model: PreTrainedModel, run: PrefillRun, probe: Callable[[PrefillCall], Tensor] | None = None) -> Iterator[Scope]:
    """A scope that records in `run`; `probe` serves its prefill calls."""
    register()
    holder = _Exit()
    scope = Scope.enter(model, run, holder, probe)
    try:
        yield scope
    finally:
        scope.leave()
