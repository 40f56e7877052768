"""Compares dense and sparse prefill of one prompt."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from flexmask.integrations.huggingface.compat import unwrapped
from flexmask.integrations.huggingface.prefill import sparse_prefill
from flexmask.integrations.record.run import PrefillRun
from flexmask.settings import PrefillSettings


@dataclass(frozen=True)
class Generated:
    """Greedy tokens, the first one's logits (float32, CPU), and seconds to it, per timed call and of the warm-up."""

    tokens: tuple[int, ...]
    first_token: tuple[float, ...]
    warm_up: float
    logits: Tensor

    @property
    def seconds(self) -> float:
        """Time to first token: the median of the timed calls."""
        return statistics.median(self.first_token)


@dataclass(frozen=True)
class SideBySide:
    """Dense and sparse generation; `run` is one sparse prefill."""

    prompt_tokens: int
    dense: Generated
    sparse: Generated
    run: PrefillRun

    @property
    def density(self) -> float:
        """Kept share of the visible blocks, mean over layers and heads."""
        means = [float(stats.density.mean()) for calls in self.run.stats.values() for stats in calls]
        return sum(means) / len(means) if means else 1.0

    @property
    def same_tokens(self) -> int:
        """Number of equal new tokens before the first difference."""
        pairs = list(zip(self.dense.tokens, self.sparse.tokens, strict=False))
        return next((token for token, (left, right) in enumerate(pairs) if left != right), len(pairs))

    @property
    def logit_difference(self) -> float:
        """Largest change of a logit after the prompt."""
        return float((self.dense.logits - self.sparse.logits).nan_to_num(0.0).abs().max())

    @property
    def largest_logit(self) -> float:
        logits = self.dense.logits
        return float(logits[logits.isfinite()].abs().max())


def side_by_side(
    model: Any,
    input_ids: Tensor,
    method: str | Callable[..., BlockMask] | None = None,
    settings: PrefillSettings | str | Path | None = None,
    *,
    max_new_tokens: int = 32,
    repeats: int = 1,
    progress: Callable[[int, int], None] | None = None,
    generate: Mapping[str, Any] = {},  # not changed
    **options: Any,
) -> SideBySide:
    """Generate greedily from one prompt with the model's own attention and with sparse prefill, and time the first tokens.

    Each kind first generates one untimed token, which compiles; then `repeats` calls are timed, dense and sparse in turns.

    Parameters
    ----------
    model, method, settings, options
        As in `sparse_prefill`, which also gives the errors.
    input_ids
        (1, length) integer.
    max_new_tokens, repeats
        >= 1.
    progress
        Called with the numbers of finished and of all ``generate`` calls.
    generate
        Further arguments of ``model.generate``.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> found = side_by_side(model, torch.arange(1, 61)[None], max_new_tokens=4)
    >>> found.same_tokens == len(found.dense.tokens)  # 60 tokens are too few to gain from a mask
    True
    """
    inner = unwrapped(model)
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.is_floating_point():
        raise ValueError(f"input_ids must be (1, length) integer; got {tuple(input_ids.shape)} {input_ids.dtype}")
    for name, number in (("max_new_tokens", max_new_tokens), ("repeats", repeats)):
        if number < 1:
            raise ValueError(f"{name} must be >= 1; got {number}")
    chosen: dict[str, Any] = {"method": method, "settings": settings, **options}
    run: PrefillRun | None = None
    seconds: dict[bool, list[float]] = {False: [], True: []}
    outs: dict[bool, tuple[list[int], Tensor]] = {}
    for number, sparse in itertools.product(range(1 + repeats), (False, True)):
        # only the last call generates all tokens, only the warm-up keeps statistics
        new_tokens = max_new_tokens if number == repeats else 1
        block = sparse_prefill(inner, **chosen, collect_stats=number == 0) if sparse else nullcontext()
        with block as opened:
            taken, outs[sparse] = _generate(inner, input_ids, new_tokens, generate)
        seconds[sparse].append(taken)
        run = run or opened
        if progress is not None:
            progress(2 * number + sparse + 1, 2 * (1 + repeats))
    assert run is not None
    dense, sparse_one = (
        Generated(tuple(outs[each][0]), tuple(seconds[each][1:]), seconds[each][0], outs[each][1]) for each in (False, True)
    )
    return SideBySide(input_ids.shape[1], dense, sparse_one, run)


class _FirstToken(LogitsProcessor):
    def __init__(self) -> None:
        self.logits: Tensor | None = None
        self.time = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.logits is None:
            self.logits = scores[0].float().cpu()  # waits for the device
            self.time = time.perf_counter()
        return scores


def _generate(
    model: PreTrainedModel, input_ids: Tensor, new_tokens: int, options: Mapping[str, Any]
) -> tuple[float, tuple[list[int], Tensor]]:
    """Seconds to the first token; new tokens; first logits."""
    first = _FirstToken()
    ids = input_ids.to(model.device)
    arguments = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "logits_processor": LogitsProcessorList([first]),
        "max_new_tokens": new_tokens,
        **options,
    }
    generate: Any = model.generate
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    start = time.perf_counter()
    with torch.no_grad():
        tokens = generate(ids, **arguments)
    assert first.logits is not None
    return first.time - start, (tokens[0, ids.shape[1] :].tolist(), first.logits)
