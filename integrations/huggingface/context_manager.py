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
from flexmask.integrations.huggingface.call import LayerCall
from flexmask.integrations.huggingface.compat import check_servable, unwrapped
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.huggingface.registration import NoteForward, register, switch_attention
from flexmask.integrations.huggingface.scope import LOCK, Scope, latest_scope, scoped_name
from flexmask.integrations.record import MAX_CALLS, PrefillRun
from flexmask.locking import locked
from flexmask.method import UnknownOption
from flexmask.settings import PrefillSettings

_log = logging.getLogger("flexmask")


class _Exit:
    """The function that a ``with`` block ends with. Only it holds the scope strongly: once it is dropped, the scope is closed.

    ``with`` first looks up ``__exit__``, for which `_ExitOfEachBlock` makes an exit that the statement holds to its end. It then
    calls ``__enter__``, which finds this exit in `_LATEST_EXIT` and gives it a new scope. So an interrupt between any two lines
    drops the exit, and with it the scope. An ExitStack takes the same steps, but looks up ``__exit__`` on the class. A scope
    that ``manager.__enter__()`` opened has no exit; the manager holds the scope (`_manual_scopes`) until ``__exit__`` is called.
    """

    def __init__(self, manager: sparse_prefill | None) -> None:
        self.manager = manager  # None if the exit was looked up on the class, whose caller then passes the manager
        self.scope: Scope | None = None

    def __call__(self, *arguments: Any) -> None:
        manager, _, error, _ = arguments if self.manager is None else (self.manager, *arguments)
        scope = self.scope
        if scope is None:
            # without an exit: close the latest scope of this thread or task, or one that another has handed over
            scope = latest_scope(manager._manual_scopes)
            manager._manual_scopes.remove(scope)
        scope.close()
        _report(scope, has_failed=error is not None)


class _ExitOfEachBlock:
    """Descriptor for ``__exit__``, which makes an exit at each lookup."""

    def __get__(self, manager: sparse_prefill | None, owner: type | None = None) -> _Exit:
        block_exit = _Exit(manager)
        _LATEST_EXIT.set(ref(block_exit))
        return block_exit


# the latest exit of the current thread or task; the reference is weak, so that it does not keep the scope open
_LATEST_EXIT: ContextVar[Callable[[], _Exit | None]] = ContextVar("flexmask_latest_exit", default=lambda: None)


class sparse_prefill(ContextDecorator):
    """Run a model's prefill sparse inside a ``with`` block; outside the model runs its own attention, also after an error.

    Calls `register`; the registered names stay. Only the text model, whose config is ``config.get_text_config()``, runs sparse;
    encoders of images and sounds do not. An object can be entered again, also while it is open; each time gives a new run.

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
        self._record_options = (collect_stats, collect_masks, max_calls)
        self._manual_scopes: list[Scope] = []  # scopes that no exit holds
        try:
            PrefillRun(model_settings(self._model, **self._options), *self._record_options)
        except UnknownOption as error:
            raise error.with_names("collect_stats", "collect_masks", "max_calls", "prompt_len") from None

    def __enter__(self) -> PrefillRun:
        block_exit = _LATEST_EXIT.get()()
        register()
        run = PrefillRun(model_settings(self._model, **self._options), *self._record_options)
        scope = Scope(self._model, run, prompt_len=self._prompt_len)
        if block_exit is not None and block_exit.scope is None and block_exit.manager in (None, self):
            # assigned before `_open`: an exit belongs to one entry, even if that fails and its traceback keeps the exit
            block_exit.scope = scope
            _open(scope)
        else:
            _open(scope)
            self._manual_scopes.append(scope)
        return run

    __exit__ = _ExitOfEachBlock()


@contextmanager
def opened_scope(model: PreTrainedModel, run: PrefillRun, probe: Callable[[LayerCall], Tensor] | None = None) -> Iterator[Scope]:
    """Open a scope that records in `run`; a `probe` runs the prefill calls instead of their plans."""
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
        scope.open(NoteForward(scoped_name(scope.config)))
        switch_attention(scope.model)
    except BaseException:
        scope.close()
        raise


def _report(scope: Scope, has_failed: bool) -> None:
    """Log at the end of a block what ran dense and which options were not used; warn if no layer was reached."""
    run = scope.run
    summary = run.dense_summary()
    if summary is not None:
        all_ran_dense, line = summary
        _log.log(logging.WARNING if all_ran_dense else logging.INFO, "flexmask: %s", line)
    if has_failed:
        return
    if run.ignored:
        layers = ", ".join(map(str, run.ignored))
        _log.warning("flexmask: options of layers that called no attention were not used: layers %s", layers)
    if run.unreached:
        warnings.warn(
            f"flexmask did not reach {type(scope.model).__name__}: it ran, but none of its layers called the attention of "
            "transformers' attention interface, so it ran as without the block",
            UserWarning,
            stacklevel=3,
        )
