"""A gamma per head, from the user's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from flexmask.attention import RECOMMENDED
from flexmask.base.checks import check_share, check_word, plain_numbers
from flexmask.integrations.huggingface.compat import (
    check_in_one_process,
    check_servable,
    input_device,
    text_config,
    unwrapped,
)
from flexmask.integrations.huggingface.model_config import shaped_config
from flexmask.integrations.huggingface.prefill import opened
from flexmask.integrations.record import PrefillRun
from flexmask.integrations.tune.measured import MeasuredErrors, digest
from flexmask.integrations.tune.probe import HeadProbe, backward_through_loss
from flexmask.integrations.tune.result import TuneResult as TuneResult
from flexmask.integrations.tune.result import check_target, result_of
from flexmask.selector import METHODS
from flexmask.settings import CONFIG_KEY, PrefillSettings


def tune(
    model: Any,
    input_ids: Tensor | Sequence[Tensor],
    method: str = RECOMMENDED,
    *,
    density: float | None = None,
    error: float | None = None,
    gammas: Sequence[float] | None = None,
    gradient: bool = False,
    resume: str | Path | None = None,
    progress: bool | Callable[[int, int], None] = True,
    **options: Any,
) -> TuneResult:
    """Find a gamma for every head of a model, from prompts like those that it will read.

    One dense prefill per prompt compares every head's output at every gamma with the dense one by relative squared error,
    ``||o_gamma - o||^2 / ||o||^2``, or by its effect on the loss (`gradient`). Then gammas are lowered greedily where dropping a
    block costs least error, down to the target. Errors assume that all other layers are dense.

    Parameters
    ----------
    model
        As in `sparse_prefill`, in one process.
    input_ids
        (length,) or (batch, length) integer, or a sequence of such tensors. Every row is a prompt without padding, longer than a
        block, of equal weight. Use prompts as long as those to come: density falls with the length.
    method
        A name in `flexmask.METHODS` whose option gamma may differ by head. Default ``"hybrid"``.
    density
        Target in (0, 1]: kept / visible blocks of all measured heads is at most this, by at most one step of one head.
    error
        Target >= 0 instead of `density`: mean error over heads is at most this.
    gammas
        Choices, in (0, 1]. Default: 0.6 to 1 for hybrid, 0.3 to 1 for others. 1 keeps all blocks and costs nothing to measure.
    gradient
        Weigh errors by the prompt's next-token loss L: ``sum over tokens t of (dL/do_t . (o_gamma,t - o_t))^2`` / scored tokens,
        in squared nats, from one backward pass over at most 4,096 evenly spaced tokens. Takes the memory of training without
        gradients of weights (less with checkpointed activations), plus q, k, v of all layers. Default False, to save that memory.
    resume
        JSON file to write after each layer and to continue from. Default: none.
    progress
        Show transformers' progress bar. Default True. Or a function of the measured and all layers, over all prompts.
    options
        The method's other options, and fields of `PrefillSettings`; `dense_below` is for windows only.

    Returns
    -------
    TuneResult
        Its `settings` leave out layers that stay dense: in `dense_layers`, with a window shorter than `dense_below`, with
        unsupported head sizes.

    Raises
    ------
    TypeError, ValueError
        For arguments of a wrong type or out of range, a target beyond what the gammas reach, a `resume` of other prompts or
        another model, a model without a layer to measure or with attention that is not finite.
    ImportError, NotImplementedError
        As `sparse_prefill`; also for a model spread over processes, or that calls attention twice in a layer.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> text = torch.randint(64, (1, 600), generator=torch.Generator().manual_seed(0))
    >>> result = tune(model, text, density=0.8, block_size=32, min_budget=64)
    >>> result.density <= 0.8
    True
    >>> len(result.rows())  # two layers of two heads
    4
    """
    inner = unwrapped(model)
    check_target(density, error)
    check_word("method", method, tuple(name for name, known in METHODS.items() if "gamma" in known.shares))
    if not isinstance(gradient, bool):
        raise TypeError(f"gradient must be True or False; got {gradient!r}")
    set_by_tune = [name for name in ("gamma", "layers") if name in options]
    if set_by_tune:
        raise TypeError(f"options must be without {set_by_tune[0]}, which tune finds")
    base = PrefillSettings(method, **options)
    base.check_model(shaped_config(inner))
    chosen = _checked_gammas(METHODS[method].gammas if gammas is None else gammas)
    prompts = _prompts(input_ids, base.block_size)
    check_servable(inner)
    check_in_one_process(inner, "tune")
    left_out = ("_name_or_path", "transformers_version", CONFIG_KEY)
    config = {name: str(value) for name, value in inner.config.to_dict().items() if name not in left_out}
    weights = {name: float(x.detach().flatten()[0]) for name, x in inner.named_parameters() if x.numel() and not x.is_meta}
    made_of = {
        "model": f"{type(inner).__name__}, {inner.dtype}, config {digest(config)}, weights {digest(weights)}",
        "prompts": digest(prompts),
        "gammas": str(chosen),
        "options": str(sorted(base.to_dict().items())),
        "errors": "of the loss" if gradient else "of the output",
    }
    measured = MeasuredErrors.begin(chosen, len(prompts), None if resume is None else Path(resume), made_of)
    _measure(inner, prompts, base, measured, gradient, progress)
    return result_of(base, measured, density, error)


def _measure(
    model: PreTrainedModel,
    prompts: list[Tensor],
    settings: PrefillSettings,
    measured: MeasuredErrors,
    gradient: bool,
    progress: bool | Callable[[int, int], None],
) -> None:
    """Fill `measured`."""
    total = len(prompts) * getattr(text_config(model), "num_hidden_layers", 0)
    done = sum(map(len, measured.by_prompt))
    with logging.tqdm(total=total, initial=done, desc="tune: layers", leave=False, disable=progress is not True) as bar:

        def advance(layers: int = 1) -> None:
            nonlocal done
            done += layers
            bar.update(layers)
            if callable(progress):
                progress(done, total)

        advance(0)
        run = PrefillRun(settings, collect_stats=False)
        for number, prompt in enumerate(prompts):
            if measured.complete[number]:
                continue
            probe = HeadProbe(measured, number, advance, gradient)
            with opened(model, run, probe) as scope:
                if gradient:
                    backward_through_loss(scope, prompt)
                else:
                    with torch.no_grad():
                        model.base_model(input_ids=prompt[None].to(input_device(model)), use_cache=False)
            probe.weigh()
            if not measured.by_prompt[number]:
                why = "; ".join(sorted(set(measured.dense.values()))) or "no layer calls flexmask's attention"
                raise ValueError(f"model must have a layer to tune; got {type(model).__name__}: {why}")
            measured.complete[number] = True
            measured.save()


def _checked_gammas(gammas: Any) -> tuple[float, ...]:
    gammas = plain_numbers(gammas)
    if not isinstance(gammas, tuple) or not gammas:
        raise TypeError(f"gammas must be a sequence of numbers, at least one; got {gammas!r}")
    for number, gamma in enumerate(gammas):
        check_share(f"gammas[{number}]", gamma)
    return tuple(sorted({float(gamma) for gamma in gammas}))


def _prompts(input_ids: Any, block_size: int) -> list[Tensor]:
    given = [input_ids] if isinstance(input_ids, Tensor) else list(input_ids) if isinstance(input_ids, (list, tuple)) else []
    if not given or not all(isinstance(tensor, Tensor) for tensor in given):
        raise TypeError(f"input_ids must be a tensor or a sequence of tensors; got {type(input_ids).__name__}")
    rows: list[Tensor] = []
    for ids in given:
        if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"input_ids must be (length,) or (batch, length) integer; got {tuple(ids.shape)} {ids.dtype}")
        rows += ids.reshape(-1, ids.shape[-1])
    for row in rows:
        if len(row) <= block_size:
            raise ValueError(f"input_ids must hold more than block_size ({block_size}) tokens a prompt; got {len(row)}")
    if not rows:
        raise ValueError("input_ids must hold a prompt; got none")
    return rows
