"""FlexPrefill as an attention implementation of Hugging Face transformers. Importing this changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

from flexmask.attention import flexprefill_attention
from flexmask.config import FlexPrefillConfig, config_from
from flexmask.flexprefill import flexprefill_mask
from flexmask.stats import FlexPrefillStats

NAME = "flexprefill"

# what models hand to attention that does not change its result; anything else that is set is refused
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "output_hidden_states", "return_dict"})


@dataclass
class FlexPrefillRun:
    """The settings of one model, and what its prefill calls chose.

    Attributes
    ----------
    config, dense_below, backend, collect_masks
        As in `flexprefill`.
    stats
        By layer index: the statistics of each prefill call, in order. Decoding steps, which are dense, leave none.
    masks
        By layer index, only with `collect_masks`: the mask of each prefill call, None for a call that ran dense.
    """

    config: FlexPrefillConfig = field(default_factory=FlexPrefillConfig)
    dense_below: int | None = None
    backend: str = "auto"
    collect_masks: bool = False
    stats: dict[int, list[FlexPrefillStats]] = field(default_factory=dict)
    masks: dict[int, list[BlockMask | None]] = field(default_factory=dict)


# by attention module rather than by config object, which several models may share
_RUNS: WeakKeyDictionary[nn.Module, FlexPrefillRun] = WeakKeyDictionary()


def register() -> None:
    """Make ``"flexprefill"`` a name that ``set_attn_implementation`` and ``from_pretrained(attn_implementation=...)`` know.

    A model that is set to the name outside of `flexprefill` runs with the default settings.

    Raises
    ------
    ImportError
        With a transformers older than 5.4, which calls mask functions in another way.

    Examples
    --------
    >>> register()
    """
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"flexprefill needs transformers >= 5.4; got {transformers.__version__}")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def flexprefill(
    model: PreTrainedModel,
    gamma: float = 0.95,
    tau: float = 0.1,
    *,
    block_size: int = 128,
    min_budget: int = 1024,
    max_budget: int | None = None,
    selection: str = "coverage",
    query_aware: str = "flatten",
    pattern_queries: str = "last",
    index_queries: str = "last",
    config: FlexPrefillConfig | None = None,
    dense_below: int | None = None,
    backend: str = "auto",
    collect_masks: bool = False,
) -> Iterator[FlexPrefillRun]:
    """Run a model's prefill with FlexPrefill inside a ``with`` block, and set the model back after it, also after an error.

    Calls `register`, whose names stay. Blocks may be nested; settings belong to the model, so that two models do not mix.

    Parameters
    ----------
    model
        A causal language model of transformers without padding, sliding window, soft cap or dropout, with a DynamicCache or none.
    gamma, tau, block_size, min_budget, max_budget, selection, query_aware, pattern_queries, index_queries, config
        As in `FlexPrefillConfig`; `config` instead of the others.
    dense_below, backend
        As in `flexprefill_attention`.
    collect_masks
        Also keep the BlockMask of every prefill call. It is made a second time and held until the run is dropped: for
        pictures and tests, not for speed. Default False.

    Yields
    ------
    FlexPrefillRun
        Its ``stats`` fill while the model runs, and can be read after the block too.

    Raises
    ------
    TypeError, ValueError
        For a `model` that is no PreTrainedModel or cannot change its attention, and for options as in `FlexPrefillConfig`.
    NotImplementedError
        In the model's forward, for what is not served: padding, a static cache, and so on.

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
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel; got {type(model).__name__}")
    config = config_from(
        config,
        gamma=gamma,
        tau=tau,
        block_size=block_size,
        min_budget=min_budget,
        max_budget=max_budget,
        selection=selection,
        query_aware=query_aware,
        pattern_queries=pattern_queries,
        index_queries=index_queries,
    )
    register()
    run = FlexPrefillRun(config, dense_below, backend, collect_masks)
    modules = list(model.modules())
    previous_runs = {module: _RUNS.get(module) for module in modules}
    configs = {id(module.config): module.config for module in modules if isinstance(module, PreTrainedModel)}
    previous_names = [(part, part._attn_implementation) for part in configs.values()]
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"model must go through transformers' attention interface; got {type(model).__name__}, which does not"
            )
        _RUNS.update(dict.fromkeys(modules, run))
        yield run
    finally:
        # a model's own config comes before those of its parts, which setting it overwrites
        for part, name in previous_names:
            part._attn_implementation = name
        for module, previous in previous_runs.items():
            _RUNS.pop(module, None)
            if previous is not None:
                _RUNS[module] = previous


def _mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Refuse every mask but the plain causal one, which needs none: without this, transformers would drop padding silently."""
    if isinstance(q_offset, Tensor) or kv_offset != 0 or kv_length != q_offset + q_length:
        raise _refusal("this cache (a static or sliding one, or keys beyond the prompt)", "a DynamicCache")
    if local_size is not None:
        raise _refusal("a sliding window or chunked attention", 'attn_implementation="sdpa"')
    if mask_function is not causal_mask_function:
        raise _refusal("a mask that is not plainly causal (packed sequences, a bidirectional part)", 'attn_implementation="sdpa"')
    if attention_mask is not None and not attention_mask.all():
        raise _refusal("padding (zeros in attention_mask)", 'prompts of equal length, or attn_implementation="sdpa"')


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention call of transformers: heads first in, (batch, q_len, num_heads, head_dim) out."""
    if attention_mask is not None:
        raise _refusal("a 4-D attention_mask", 'attn_implementation="sdpa"')
    if dropout != 0:
        raise _refusal(f"dropout {dropout}", "model.eval()")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise _refusal("bidirectional or cross attention", 'attn_implementation="sdpa"')
    for name, argument in kwargs.items():
        if name not in _HARMLESS and argument is not None and argument is not False:
            raise _refusal(f"the argument {name}", 'attn_implementation="eager"')

    run = _RUNS.get(module, FlexPrefillRun())
    collects = module in _RUNS and query.shape[2] > 1
    result: Any = flexprefill_attention(
        query,
        key,
        value,
        scale=scaling,
        config=run.config,
        dense_below=run.dense_below,
        backend=run.backend,
        return_stats=collects,
    )
    out: Tensor = result[0] if collects else result
    if collects:
        layer, stats = int(getattr(module, "layer_idx", -1)), result[1]
        run.stats.setdefault(layer, []).append(stats)
        if run.collect_masks:
            # with statistics again: that search is compiled already
            made: Any = None if stats.dense else flexprefill_mask(query, key, scale=scaling, config=run.config, return_stats=True)
            run.masks.setdefault(layer, []).append(made and made[0])
    return out.transpose(1, 2).contiguous(), None


def _refusal(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"flexprefill attention does not serve {what} yet; use {instead}")
