"""sparse_prefill: run a model's prefill sparse inside a ``with`` block."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from flexmask.base.checks import check_prompt_len, plain_number
from flexmask.integrations.huggingface.call import PrefillCall
from flexmask.integrations.huggingface.compat import check_servable, unwrapped
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.huggingface.registration import NoteForward, register, switch_attention
from flexmask.integrations.huggingface.scope import LOCK, Scope, block_name, latest
from flexmask.integrations.record import MAX_CALLS, PrefillRun
from flexmask.locking import locked
from flexmask.method import UnknownOption
from flexmask.settings import PrefillSettings

_log = logging.getLogger("flexmask")


class _Exit:
    """Descriptor for ``__exit__``.

    Each lookup (by a ``with`` statement or an ExitStack, before ``__enter__``) creates a callable that holds the only strong
    reference to the scope. If an interrupt arrives before ``__exit__`` runs, dropping that callable closes the scope.
    """

    def __init__(self, context: sparse_prefill | None = None) -> None:
        self.context = context
        self.scope: Scope | None = None

    def __get__(self, context: sparse_prefill | None, kind: type | None = None) -> _Exit:
        looked_up = _Exit(context)
        _LOOKED_UP.set(ref(looked_up))
        return looked_up

    def __call__(self, *given: Any) -> None:
        # looked up on the class, it gets the context
        context, _, error, _ = given if self.context is None else (self.context, *given)
        # entered by hand: the latest of this thread or task, or one handed over to it
        scope = self.scope or latest(context._by_hand)
        scope.close()
        if self.scope is None:
            context._by_hand.remove(scope)
        summary = scope.run.dense_summary()
        if summary is not None:
            nothing_else, line = summary
            _log.log(logging.WARNING if nothing_else else logging.INFO, "flexmask: %s", line)
        if error is None and scope.run.ignored:
            layers = ", ".join(map(str, scope.run.ignored))
            _log.warning("flexmask: options of layers that called no attention were not used: layers %s", layers)
        if error is None and scope.run.unreached:
            warnings.warn(
                f"flexmask did not reach {type(scope.model).__name__}: it ran, but none of its layers called the attention of "
                "transformers' attention interface, so it ran as without the block",
                UserWarning,
                stacklevel=2,
            )


_LOOKED_UP: ContextVar[ref[_Exit] | None] = ContextVar("flexmask_looked_up", default=None)  # the latest exit


class sparse_prefill(ContextDecorator):
    """Run a model's prefill sparse inside a ``with`` block; outside the model runs its own attention, also after an error.

    Calls `register`; the registered names stay. Only the text model is served, which has ``config.get_text_config()``;
    encoders of images and sounds are not. An object can be entered again, also while it is open; each time gives a new run.

    Blocks on one model may nest or overlap, across threads and asyncio tasks. A call uses the block that its thread or task
    entered last, else the one entered last of all. The model's config holds the name of the block's attention while one is open,
    and never its options: ``save_pretrained`` writes what it writes outside, and `configure` stores options.

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
    prompt_len
        Tokens of the prompts, padding included, if they come in chunks, as in `flexmask.sparse_attention`. Default None: each
        chunk selects as if the prompt ended with it.
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
        When the block ends, if the model ran a prompt but no layer called this attention. As `register`.

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
        prompt_len: int | None = None,
        **options: Any,
    ) -> None:
        self._prompt_len = plain_number(prompt_len)
        check_prompt_len(self._prompt_len)
        self._model = unwrapped(model)
        self._options = {"method": method, "settings": settings, **options}
        self._collects = (collect_stats, collect_masks, max_calls)
        self._by_hand: list[Scope] = []  # entered without an exit
        try:
            PrefillRun(model_settings(self._model, **self._options), *self._collects)
        except UnknownOption as error:
            raise error.with_names("collect_stats", "collect_masks", "max_calls", "prompt_len") from None

    def __enter__(self) -> PrefillRun:
        looked_up = _LOOKED_UP.get()
        leave = None if looked_up is None else looked_up()
        register()
        run = PrefillRun(model_settings(self._model, **self._options), *self._collects)
        scope = Scope(self._model, run, prompt_len=self._prompt_len)
        if leave is not None and leave.scope is None and leave.context in (None, self):
            leave.scope = scope
            _open(scope)
        else:
            _open(scope)
            self._by_hand.append(scope)
        return scope.run

    __exit__ = _Exit()


@contextmanager
def opened(model: PreTrainedModel, run: PrefillRun, probe: Callable[[PrefillCall], Tensor] | None = None) -> Iterator[Scope]:
    """A scope that records in `run`; `probe` serves its prefill calls."""
    register()
    scope = Scope(model, run, probe)
    _open(scope)
    try:
        yield scope
    finally:
        scope.close()


@locked(LOCK)
def _open(scope: Scope) -> None:
    check_servable(scope.model)
    try:
        scope.open(NoteForward(block_name(scope.config)))
        switch_attention(scope.model)
    except BaseException:
        scope.close()
        raise
