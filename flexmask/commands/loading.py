"""The model, tokenizer and texts of a command; errors name the option."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexmask.commands.options import CommandError, missing_package, usage_error
from flexmask.commands.output import Output
from flexmask.logged_once import first_time

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from flexmask.settings import PrefillSettings

_HUB_SECONDS = 10.0
DTYPES = ("float32", "bfloat16", "float16")


def load_config(model: str) -> Any:
    """The config of a model, from a folder (without network) or by name."""
    path, is_local, transformers = _find_model(model)
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=is_local, trust_remote_code=False)
    except Exception as error:  # whatever reads the file may raise any
        raise _not_a_model(model, error) from error


def load_model(model: str, output: Output, device: str | None = None, dtype: str | None = None) -> tuple[PreTrainedModel, Any]:
    """A decoder and its tokenizer, from a folder (without network) or by name, with its default attention."""
    model, is_local, transformers = _find_model(model)
    device = chosen_device(device)
    # without trust_remote_code=False, transformers asks on stdout whether it may run the model's own code
    load_options = {"trust_remote_code": False, "local_files_only": is_local}
    # the argument's name in transformers before 4.56, and after it
    dtype_name = "torch_dtype" if transformers.__version__.startswith(("4.54.", "4.55.")) else "dtype"
    placement = {dtype_name: chosen_dtype(dtype, device), **({"device_map": "auto"} if device == "auto" else {})}
    with output.progress(f"loading {model}"):
        load_config(model)  # first, because its errors say more
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model, **load_options)
            # `_check_weights` names the weights that have another shape; transformers' own error does not
            loaded_model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
                model, ignore_mismatched_sizes=True, output_loading_info=True, **load_options, **placement
            )
        except Exception as error:  # whatever reads the files may raise any
            raise _not_a_model(model, error) from error
        _check_weights(model, type(loaded_model).__name__, loading_info, output)
        return (loaded_model if device == "auto" else loaded_model.to(device)).eval(), tokenizer


def _check_weights(model: str, class_name: str, loading_info: dict[str, Any], output: Output) -> None:
    """Refuse a checkpoint without some of the model's weights, or with wrong shapes; remark on weights that nothing uses."""
    missing, unexpected = sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"])
    # an entry is a key, or in release 4 a key with its two shapes
    mismatched = sorted(entry if isinstance(entry, str) else entry[0] for entry in loading_info["mismatched_keys"])
    unused = f"it has {_listed(unexpected)}, which {class_name} does not use" if unexpected else ""
    for keys, verb in ((missing, "lacks"), (mismatched, "has the wrong shape for")):
        if keys:
            problem = f"the checkpoint {verb} {_listed(keys)} of {class_name}; such weights would be random"
            raise CommandError("; ".join(filter(None, (f"cannot load {model}: {problem}", unused))))
    if unused:
        output.remark(f"{model}: {unused}")


def _listed(keys: Sequence[str], most: int = 3) -> str:
    more = f" and {len(keys) - most:,} more" if len(keys) > most else ""
    return f"{', '.join(keys[:most])}{more}"


def tokenizer_problem(model: str, config: Any) -> str | None:
    """A line if a tokenizer has more tokens than the config's model embeds; None if it has not, or without a tokenizer."""
    model, _, transformers = _find_model(model)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        last, rows = max(tokenizer.get_vocab().values()), int(config.get_text_config().vocab_size)
    except Exception:  # from whatever reads the files, or a config without a vocabulary
        return None
    return None if last < rows else f"the tokenizer has tokens up to {last:,}; the model embeds those below {rows:,}"


def remark_if_short(output: Output, settings: PrefillSettings, tokens: int) -> None:
    """Remark, before the wait, that a short prompt runs dense."""
    dense_below = settings.call_options.policy.dense_below
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
        on_cpu = device.startswith("cpu") or (device == "auto" and not torch.cuda.is_available())
        return torch.float32 if on_cpu else torch.bfloat16
    if dtype not in DTYPES:
        usage_error(f"must be one of {', '.join(DTYPES)}; got {dtype!r}", "--dtype")
    return getattr(torch, dtype)


def read_text(path: str, output: Output) -> str:
    """The UTF-8 text of a file, or of stdin for ``-``, with its line ends; an empty one is refused."""
    name = "stdin" if path == "-" else path
    try:
        text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        usage_error(f"cannot read {name}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}", "--prompt")
    if text.startswith("\ufeff"):  # which would be a token
        text = text[1:]
        output.remark(f"{name} begins with a byte order mark, which is left out")
    if not text.strip():
        usage_error(f"{name} is empty", "--prompt")
    return text


def prompt_ids(model: PreTrainedModel, tokenizer: Any, text: str) -> Tensor:
    """The tokens of a text, (1, length); an error of ``--prompt`` if the model cannot read them."""
    from flexmask.integrations.huggingface.compat import learned_positions

    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
    length = ids.shape[1]
    if length < 2:
        usage_error(f"must hold at least two tokens; got {length}", "--prompt")
    embeddings: Any = model.get_input_embeddings()
    rows = len(embeddings.weight)
    if int(ids.max()) >= rows:
        usage_error(f"contains token {int(ids.max()):,}; the model embeds only tokens below {rows:,}", "--prompt")
    longest = learned_positions(model)
    if longest is not None and length > longest:
        usage_error(f"{length:,} tokens exceed the {longest:,} positions that the model has learned", "--prompt")
    return ids


def _find_model(model: str) -> tuple[str, bool, Any]:
    """A model's path or name; True for a folder, which needs no network; and the module transformers."""
    model = os.path.expanduser(model)
    path = Path(model)
    is_local = path.is_dir()
    # a name on the hub is one word, or owner/name
    is_name = not model.startswith((".", "/", "~")) and model.count("/") <= 1 and not ("/" in model and path.parent.is_dir())
    if is_local and not (path / "config.json").is_file():
        usage_error(f"{model} is not a model: it has no config.json", "MODEL")
    if not is_local and (path.exists() or not is_name):
        usage_error(f"no folder {model}", "MODEL")
    try:
        if not is_local:
            _check_on_hub(model)
        import transformers
    except ImportError as error:
        raise missing_package("transformers", "hf") from error
    # the command shows a progress bar of its own
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.add_handler(_REMARKS)
    return model, is_local, transformers


def _check_on_hub(model: str) -> None:
    """Make one request for a name that is not cached: transformers would try for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_HUB_SECONDS)
    except Exception as error:  # from whatever HTTP library it uses
        raise _not_a_model(model, error) from error


class _Remarks(logging.Handler):
    """Prints transformers' warnings on stderr, each once and in one line; keeps its report on weights for `_not_a_model`."""

    report = ""

    def emit(self, record: logging.LogRecord) -> None:
        from flexmask.environment import one_line

        text = one_line(record.getMessage())
        if "LOAD REPORT" in text:
            self.report = text
        elif first_time("transformers", text):
            print(f"transformers: {text}", file=sys.stderr)


_REMARKS = _Remarks(logging.WARNING)


def _not_a_model(model: str, error: Exception) -> CommandError:
    """The error of a command for what transformers or the hub raised about a model."""
    from flexmask.environment import one_line

    reason = one_line(error)
    if "trust_remote_code" in reason:
        reason = "it needs code of its own (auto_map), which this program does not run"
    if "above report" in reason:
        reason = f"{reason} {_REMARKS.report}"
    return CommandError(f"cannot load {model}: {'' if Path(model).is_dir() else 'no folder here, and on the hub: '}{reason}")
