"""The functions behind the name "flexmask" in transformers: attention and masks, inside other libraries' wrappers.

A forward calls `mask_entry` -> `prefill_mask` (mask.py) for its kinds of layers, then each layer calls `attention_entry` ->
`attention` (attention.py). After a model's last scope both give way to the model's own functions.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexmask._torch import CLASSES_ARE_CONSTANTS, MODULES_ARE_CONSTANTS, is_traced
from flexmask.base.checks import check_word
from flexmask.environment import check_transformers
from flexmask.integrations.huggingface.attention import attention
from flexmask.integrations.huggingface.compat import NAME
from flexmask.integrations.huggingface.mask import PrefillMask, prefill_mask
from flexmask.integrations.huggingface.model_config import set_process_settings
from flexmask.integrations.huggingface.session import stock_name, sweep
from flexmask.integrations.huggingface.wrappers import around, attention_in, code_of, codes, home, is_attention
from flexmask.settings import PrefillSettings, named_settings


def register(
    method: str | Callable[..., BlockMask] | None = None,
    settings: PrefillSettings | str | Path | None = None,
    *,
    name: str = NAME,
    **options: Any,
) -> None:
    """Register ``"flexmask"`` as a name for ``set_attn_implementation`` and ``from_pretrained(attn_implementation=...)``.

    Outside of `sparse_prefill` a model with this name uses the options that `configure` wrote into its config, else the defaults.

    Parameters
    ----------
    method, settings, options
        As in `sparse_prefill`, for every model of the process, until the next call that gives others. They go over what
        `configure` wrote into the models' configs, and under the options of a `sparse_prefill` block. Default: none.
    name
        ``"flex_attention"`` also replaces that implementation, for programs that accept only known names. Default ``"flexmask"``.

    Raises
    ------
    ImportError
        With a transformers older than 4.54 or newer than 5.24.
    OSError, TypeError, ValueError
        For unknown options, values out of range, or an invalid settings file.

    Examples
    --------
    >>> register()
    """
    check_transformers(transformers.__version__)
    check_word("name", name, (NAME, "flex_attention"))
    set_process_settings(named_settings(method, settings, **options))
    for entry in {NAME, name}:
        registered = AttentionMaskInterface().get(entry)
        # before attention, which would get no masks without
        if registered is None or home(registered).startswith("transformers."):
            AttentionMaskInterface.register(entry, mask_entry)
        _register(entry)


def _register(name: str) -> None:
    """Register attention inside the wrappers that other libraries put around the name."""
    current: Any = AttentionInterface().get(name)
    ours = attention_in(current)
    if current is None:
        AttentionInterface.register(name, attention_entry)
    elif ours is None:
        _warn(
            current,
            f"stands for {name!r} in transformers and shows no attention function inside; options of register do not run",
        )
    elif ours is not attention_entry:  # transformers'
        AttentionInterface.register(name, around(current, attention_entry) or attention_entry)
    # the object in which models look up names, and where other libraries put wrappers
    local = ALL_ATTENTION_FUNCTIONS[name]
    if attention_in(local) not in (None, attention_entry):
        ALL_ATTENTION_FUNCTIONS[name] = around(local, AttentionInterface()[name])


def attention_entry(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Any:
    """`attention` (attention.py), inside the wrappers that the model's own attention function has; most have none."""
    # masks of ours are made after a sweep
    config: Any = getattr(module, "config", None)
    if not is_traced() and not isinstance(attention_mask, PrefillMask) and _gives_back(config):
        function = _function_of(type(module), config._attn_implementation)
    elif MODULES_ARE_CONSTANTS or not is_traced():
        function = _WITHIN[_number_within(module)]
    else:
        if CLASSES_ARE_CONSTANTS and _number_within_sdpa(type(module)) != 0:
            # breaks the surrounding graph, where wrappers run
            raise NotImplementedError("torch before 2.13 compiles no graph around attention in another library's wrappers")
        function = attention
    return function(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


def mask_entry(*, config: Any = None, **arguments: Any) -> Any:
    """`prefill_mask`, or the mask of the model's own attention if the scope that had switched it is over."""
    if not is_traced():
        if _gives_back(config):
            mask_function = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)
            return None if mask_function is None else mask_function(config=config, **arguments)
        _check_mask_function(config)
    return prefill_mask(config=config, **arguments)


def _gives_back(config: Any) -> bool:
    """Close scopes that are over; True if that gives the model of a config its own attention."""
    name = getattr(config, "_attn_implementation", None)
    return sweep() and config is not None and config._attn_implementation != name


def _function_of(layer: type, name: str | None) -> Any:
    """The attention function that the file of a model's layer calls by `name`."""
    file = sys.modules.get(layer.__module__)
    functions = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return functions.get(name, getattr(file, "eager_attention_forward", None))


def _of_module(module: nn.Module) -> int:
    config = getattr(module, "config", None)
    return _number(type(module), stock_name(config), getattr(config, "_attn_implementation", None))


def _of_sdpa(layer: type) -> int:
    return _number(layer, "sdpa", NAME)


def _number(layer: type, name: str | None, called_name: str | None) -> int:
    """Number in `_WITHIN` of `attention` inside the named function's wrappers, else SDPA's, without those of the called one."""
    called, stock, sdpa = (_function_of(layer, wanted) for wanted in (called_name, name, "sdpa"))
    key = (id(stock), id(sdpa), id(called))
    if key not in _numbered:
        is_ours = attention_in(stock) is attention_entry
        # libraries wrap what is registered, and a model's own eager attention is not
        alone = stock is None or is_ours or (name == "eager" and is_attention(stock))
        entries = [sdpa] if alone else [stock, sdpa]
        wrapped = (around(entry, attention, codes(called)) for entry in entries)
        inside = next((function for function in wrapped if function is not None), attention)
        if name in _STOCK and around(entries[0], attention) is None:
            _warn(
                entries[0], f"stands for {name!r} in transformers and cannot be put around flexmask's attention; it does not run"
            )
        number = 0 if inside is attention else next(_new_numbers)
        _WITHIN[number] = inside
        _numbered[key] = stock, sdpa, called, number
    return _numbered[key][3]


# torch.compile takes a number as a constant, and no function
_number_within: Callable[[nn.Module], int] = torch.compiler.assume_constant_result(_of_module)
_number_within_sdpa: Callable[[type], int] = torch.compiler.assume_constant_result(_of_sdpa)
_STOCK = ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
_WITHIN: dict[int, Any] = {0: attention}  # `attention` inside other libraries' wrappers, by number; 0: without any
_new_numbers = itertools.count(1)
# by the ids of functions, which are kept here: a freed id would come again
_numbered: dict[tuple[int, int, int], tuple[Any, Any, Any, int]] = {}


def _check_mask_function(config: Any) -> None:
    """Warn of another library's mask function, which runs in decoding only."""
    name = stock_name(config)
    stock, called = (ALL_MASK_ATTENTION_FUNCTIONS.get(wanted) for wanted in (name, getattr(config, "_attn_implementation", None)))
    if name in _STOCK and not home(stock).startswith(("transformers.", "flexmask.")) and code_of(stock) != code_of(called):
        _warn(stock, f"makes masks for {name!r} in transformers; it does not run in a prefill")


def _warn(function: Any, what: str) -> None:
    """Once per function."""
    if id(function) not in _warned:
        _warned[id(function)] = function
        title = f"{home(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        warnings.warn(f"another library's {title} {what} under the name 'flexmask'", UserWarning, stacklevel=3)


_warned: dict[int, Any] = {}
