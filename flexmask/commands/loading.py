"""The model, tokenizer and texts of a command; errors name the option."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexmask.commands.options import CommandError, needs, usage_error
from flexmask.commands.output import Output

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from flexmask.settings import PrefillSettings

_HUB_SECONDS = 10.0
DTYPES = ("float32", "bfloat16", "float16")


def load_config(model: str, option: str = "--model") -> Any:
    model, local, auto = _located(model, option)
    try:
        return auto.AutoConfig.from_pretrained(model, local_files_only=local)
    except Exception as error:  # of whatever reads the file
        raise _not_a_model(model, error) from error


def load_model(
    model: str, output: Output, device: str | None = None, dtype: str | None = None, option: str = "--model"
) -> tuple[PreTrainedModel, Any]:
    """A decoder and its tokenizer, from a folder (without network) or by name, with its default attention."""
    model, local, auto = _located(model, option)
    chosen = chosen_device(device)
    kind = chosen_dtype(dtype, chosen)
    placed = {"device_map": "auto"} if chosen == "auto" else {}
    with output.progress(f"loading {model}"):
        try:
            tokenizer = auto.AutoTokenizer.from_pretrained(model, local_files_only=local)
            loaded = auto.AutoModelForCausalLM.from_pretrained(model, torch_dtype=kind, local_files_only=local, **placed)
        except Exception as error:  # of whatever reads the files
            raise _not_a_model(model, error) from error
        return (loaded if placed else loaded.to(chosen)).eval(), tokenizer


def remark_if_short(output: Output, model: PreTrainedModel, settings: PrefillSettings | None, tokens: int) -> None:
    """Remark, before the wait, that a short prompt runs dense."""
    from flexmask.integrations.huggingface.model_config import model_settings

    dense_below = (settings or model_settings(model)).call_options.policy.dense_below
    if tokens < dense_below:
        output.remark(f"{tokens:,} tokens < dense_below {dense_below:,}: the prompt runs dense. --dense-below 0 makes it sparse.")


def chosen_device(device: str | None) -> str:
    """The device of an option, checked. Default: CUDA if available, else the CPU."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "auto":
        return device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        usage_error(f"no such device: {str(error).splitlines()[0]}", "--device")
    return device


def chosen_dtype(dtype: str | None, device: str) -> torch.dtype:
    """The dtype of an option, checked. Default: float32 on a CPU, else bfloat16."""
    import torch

    if dtype is None:
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    if dtype not in DTYPES:
        usage_error(f"must be one of {', '.join(DTYPES)}; got {dtype!r}", "--dtype")
    return getattr(torch, dtype)


def read_text(path: str, option: str = "--prompt") -> str:
    """The text of a file, or of stdin for ``-``; an empty one is refused."""
    if path == "-":
        text = sys.stdin.read()
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            usage_error(f"cannot read {path}: {reason}", option)
    if not text.strip():
        usage_error(f"{'stdin' if path == '-' else path} is empty", option)
    return text


def token_ids(tokenizer: Any, text: str, most: int | None = None, chat: bool = False) -> Tensor:
    """(1, length): the tokens of a text, at most the first `most`; with `chat` as a user's message."""
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            usage_error("the model's tokenizer has no chat template", "--chat")
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    arguments = {} if most is None else {"truncation": True, "max_length": most}
    return tokenizer(text, return_tensors="pt", add_special_tokens=not chat, **arguments)["input_ids"]


def _located(model: str, option: str) -> tuple[str, bool, Any]:
    """A model's path or name, True for a folder, which is read without network, and transformers."""
    # a shell leaves ~ in --model=~/folder
    model = os.path.expanduser(model)
    path = Path(model)
    is_local = path.is_dir()
    if is_local and not (path / "config.json").is_file():
        usage_error(f"{model} is not a model: it has no config.json", option)
    if not is_local:
        # a name on the hub is one word, or owner/name
        in_a_folder = "/" in model and path.parent.is_dir()
        if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1 or in_a_folder:
            usage_error(f"no folder {model}", option)
    try:
        if not is_local:
            _check_on_hub(model)
        import transformers
    except ImportError as error:
        raise needs("transformers", "hf") from error
    # no second progress bar
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return model, is_local, transformers


def _check_on_hub(model: str) -> None:
    """One request for a name that is not cached: transformers would try for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_HUB_SECONDS)
    except Exception as error:  # of whatever HTTP library it has
        raise _not_a_model(model, error) from error


def _not_a_model(model: str, error: Exception) -> CommandError:
    lines = str(error).strip().splitlines()
    why = lines[0] if lines else type(error).__name__
    return CommandError(f"cannot load {model}: {'' if Path(model).is_dir() else 'no folder here, and on the hub: '}{why}")
