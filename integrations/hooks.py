"""Models loaded with "flex_attention": FlexPrefill under that name, model by model, with Hugging Face's own mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flexmask.integrations.attention_call import attention_call
from flexmask.integrations.blocks import NAME, log_dense, model_settings
from flexmask.integrations.models import check_servable, text_config, unwrapped
from flexmask.integrations.prefill_mask import HookedMask, PrefillMask, prefill_mask
from flexmask.integrations.run import HOOKS, MAX_CALLS, FlexPrefillRun
from flexmask.integrations.versions import check_release

_STOCK = "flex_attention"


def hook_flex_attention(
    model: Any,
    gamma: float | Sequence[float] | None = None,
    tau: float | None = None,
    *,
    collect_stats: bool = True,
    collect_masks: bool = False,
    max_calls: int | None = MAX_CALLS,
    **options: Any,
) -> FlexPrefillRun:
    """Run the prefill of a model that is loaded with ``attn_implementation="flex_attention"`` with FlexPrefill, under that name.

    The name and Hugging Face's mask stay; the selection and the compiled attention are ours, and decoding is dense. The functions
    behind ``"flex_attention"`` are replaced by ones that hand every model that was not hooked to the former ones.
    `unhook_flex_attention` ends it.

    Parameters
    ----------
    model
        A decoder whose ``config._attn_implementation`` is ``"flex_attention"``, wrapped or not, as in `flexprefill`.
    gamma, tau, collect_stats, collect_masks, max_calls, options
        As in `flexprefill`.

    Returns
    -------
    FlexPrefillRun
        Its ``stats`` fill while the model runs, up to `max_calls` a layer; ``run.summary()`` counts all.

    Raises
    ------
    ImportError, NotImplementedError, TypeError, ValueError
        As `flexprefill`, and ValueError for a model with another attention.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="flex_attention"))
    >>> run = hook_flex_attention(model, gamma=0.9)
    >>> unhook_flex_attention(model)
    """
    model = unwrapped(model)
    settings = model_settings(model, gamma, tau, options)
    check_release()
    text = text_config(model)
    if text._attn_implementation != _STOCK:
        raise ValueError(f'model must be loaded with attn_implementation="{_STOCK}"; got "{text._attn_implementation}"')
    check_servable(model)
    _replace_stock()
    run = FlexPrefillRun(settings, collect_stats, collect_masks, max_calls)
    _HOOKED[id(text)] = text
    HOOKS.update(dict.fromkeys(model.modules(), run))
    return run


def unhook_flex_attention(model: Any) -> None:
    """Give a hooked model its own attention back; does nothing to a model that is not hooked, nor to an open `flexprefill`."""
    inner: PreTrainedModel = unwrapped(model)
    text = text_config(inner)
    runs = {HOOKS.pop(module, None) for module in inner.modules()}
    for run in filter(None, runs):
        log_dense(run)
    if not any(getattr(module, "config", None) is text for module in list(HOOKS)):
        _HOOKED.pop(id(text), None)


# configs of hooked models, by identity: configs are not hashable, and mask functions know nothing else of their model
_HOOKED: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _replace_stock() -> None:
    """Wrap the functions registered as "flex_attention", once, and again if the program has replaced them since."""
    attention, mask = AttentionInterface()[_STOCK], AttentionMaskInterface()[_STOCK]
    if getattr(attention, "hooked_by", None) != NAME:

        def hooked_attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | BlockMask | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            shared = id(getattr(module, "config", None)) in _HOOKED
            if shared and module in HOOKS:
                return attention_call(module, query, key, value, attention_mask, *args, **kwargs)
            if shared and isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool:
                # one row's mask, made for a hooked model with the same config; the former function adds masks to scores
                attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
            return attention(module, query, key, value, attention_mask, *args, **kwargs)

        hooked_attention.hooked_by = NAME  # type: ignore[attr-defined]  # a mark on a function
        AttentionInterface.register(_STOCK, hooked_attention)
    if getattr(mask, "hooked_by", None) != NAME:

        def hooked_mask(**arguments: Any) -> Any:
            if id(arguments.get("config")) not in _HOOKED:
                return mask(**arguments)
            own = prefill_mask(**arguments)
            return HookedMask(own, mask(**arguments)) if isinstance(own, PrefillMask) else own

        hooked_mask.hooked_by = NAME  # type: ignore[attr-defined]  # a mark on a function
        AttentionMaskInterface.register(_STOCK, hooked_mask)
