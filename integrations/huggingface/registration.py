"""Registers flexmask in transformers as ``"flexmask"``, and under the names that blocks write into configs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexmask._torch import is_traced
from flexmask.base.checks import check_word
from flexmask.environment import check_transformers
from flexmask.integrations.huggingface.attention import attention
from flexmask.integrations.huggingface.compat import NAME, text_config, text_model
from flexmask.integrations.huggingface.mask import mask_for_transformers
from flexmask.integrations.huggingface.model_config import set_process_settings
from flexmask.integrations.huggingface.scope import scope_of, scoped_name
from flexmask.settings import PrefillSettings, named_settings

_WRAPPED_NAMES = ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


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
        As in `sparse_prefill`, for every model of the process, until another call replaces them. They override what `configure`
        wrote into the models' configs, and the options of a `sparse_prefill` block override them. Default: none.
    name
        ``"flex_attention"`` also replaces that implementation, for programs that accept only known names. Default ``"flexmask"``.

    Warns
    -----
    UserWarning
        If another library has wrapped transformers' attention or mask functions: flexmask's run without the wrappers.

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
    _warn_of_wrappers()
    for entry in {NAME, name}:
        register_name(entry)


def switch_attention(model: PreTrainedModel) -> None:
    """Write the name of a block's attention into the `text_config`. ValueError if the model does not read it there."""
    config, part = text_config(model), text_model(model)
    present_name, name = config._attn_implementation, scoped_name(config)
    register_name(name)
    if name == present_name:
        return
    (part or model).set_attn_implementation({"": name} if part else {"text_config": name})
    if config._attn_implementation != name:
        raise ValueError(f"model must go through transformers' attention interface; got {type(model).__name__}, which does not")


def register_name(name: str) -> None:
    """Register flexmask in transformers under this name."""
    # the mask function first: attention without a mask function of its name would get no mask
    AttentionMaskInterface.register(name, mask_for_transformers)
    AttentionInterface.register(name, attention)
    # the objects in which models look up names, and where other libraries put wrappers
    functions: Any
    for functions, own_function in ((ALL_MASK_ATTENTION_FUNCTIONS, mask_for_transformers), (ALL_ATTENTION_FUNCTIONS, attention)):
        if functions[name] is not own_function:
            functions[name] = own_function


class NoteForward:
    """A forward hook of a block, which notes a prefill that was not compiled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a model is pickled with its hooks and with the block's name in its config, which another process does not know
        vars(self).update(state)
        register_name(self.name)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if is_traced():
            return
        candidates = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        tokens = next((value for value in candidates if isinstance(value, Tensor)), None)
        if tokens is not None and tokens.ndim > 1 and tokens.shape[1] <= 1:  # decoding
            return
        scope = scope_of(module)
        if scope is not None:
            scope.run.note_forward()


def _warn_of_wrappers() -> None:
    """Warn if other libraries replaced transformers' own functions, as kvpress does for AdaKV."""
    functions = [table.get(name) for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS) for name in _WRAPPED_NAMES]
    modules = {_defining_module(function) for function in functions if function is not None}
    wrappers = sorted(module for module in modules if module.partition(".")[0] not in ("transformers", "flexmask"))
    if wrappers:
        message = f"{', '.join(wrappers)} wraps attention in transformers; flexmask's attention runs without it"
        warnings.warn(message, UserWarning, stacklevel=3)


def _defining_module(function: Any) -> str:
    """The module that defines a function, or an object's class; by ``__globals__``, as functools.wraps copies ``__module__``."""
    function = getattr(function, "func", function)  # the function of a partial
    return str(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))
