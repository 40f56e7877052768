"""Right padding that no attention_mask tells of: found in the token ids, and kept out of the estimate.

Dense causal attention does without a mask there, since no token sees what comes after it. FlexPrefill selects by the last rows of
the prompt, which are padding then. A row's padding is taken to be the run of equal tokens at its end, where there are at least
two: the blocks are chosen by the tokens before it, as if an attention_mask hid the run, so that the prompt's own rows get the
blocks that they get alone. No key is hidden and the run's rows attend too, to the lines that the prompt chose, so that a prompt
which really ends in one repeated token keeps its keys. A row of nothing but one token is left alone, and so is a batch of one
prompt, which needs no padding. A single token of padding cannot be told from a token of the prompt, and decides.

The ids are seen where the model embeds them, and compared on their device: three small kernels a forward, and no wait.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flexmask.base.inputs import AttentionInputs

_log = logging.getLogger("flexmask")


class _Embedded(NamedTuple):
    """The rows that decide, of the token ids that a run's model has embedded last."""

    owner: ReferenceType[Any]
    shape: torch.Size  # of the ids
    deciding: Tensor  # (batch,)


# by thread and task: several may run one model
_LAST: ContextVar[_Embedded | None] = ContextVar("flexmask_embedded", default=None)
_warned = False


def watch_token_ids(model: nn.Module, run: Any) -> RemovableHandle | None:
    """Have a model's embedding layer note, for the calls of `run`, which rows are padding; None where it has no such layer.

    `remove()` of the handle ends it.
    """
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]  # of PreTrainedModel
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(embedding, nn.Module):
        return None
    return embedding.register_forward_pre_hook(_Watch(run))


class _Watch:
    """The hook of one run; models are pickled and copied with their hooks, and a copy's belongs to no run."""

    def __init__(self, run: Any = None) -> None:
        self.owner = None if run is None else ref(run)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Watch, ()

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.owner is None or torch.compiler.is_compiling():
            return
        ids = arguments[0] if arguments else None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or min(ids.shape) < 2:
            _LAST.set(None)
            return
        _LAST.set(_Embedded(self.owner, ids.shape, deciding_rows(ids)))


def deciding_rows(token_ids: Tensor) -> Tensor:
    """The rows of each prompt before two or more equal tokens at its end; all rows where all its tokens are equal.

    Parameters
    ----------
    token_ids
        (batch, length) integer, length > 1.

    Returns
    -------
    Tensor
        (batch,) int64 on the same device.
    """
    length = token_ids.shape[1]
    # True where a token differs from the one before it: the run begins at the last of them
    begins = token_ids[:, 1:] != token_ids[:, :-1]
    since = begins.flip(1).int().argmax(1)  # tokens after the run's first
    return torch.where(begins.any(1) & (since > 0), length - since - 1, length)


def with_deciding_rows(inputs: AttentionInputs, run: Any) -> AttentionInputs:
    """The problem with the rows that decide, where a batch comes without a padding mask.

    Says once on the logger "flexmask" that right padding would spoil the selection where the token ids were not seen: outside of
    a block and a hook, and where a model gets `inputs_embeds`.
    """
    query = inputs.query
    if query.shape[0] == 1 or inputs.attention_mask is not None or torch.compiler.is_compiling():
        return inputs
    if run is not None and run.padding_is_masked:
        return inputs
    last = _LAST.get()
    if run is None or last is None or last.owner() is not run or tuple(last.shape) != (query.shape[0], query.shape[2]):
        _warn()
        return inputs
    return inputs.with_fields(deciding=last.deciding.to(query.device, non_blocking=True))


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        _log.warning(
            "flexmask: a batch without attention_mask runs sparse. If its prompts are padded on the right, the padding decides "
            "what they attend to: pass the attention_mask"
        )
