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
    model, local, auto = _located(model)
    try:
        return auto.AutoConfig.from_pretrained(model, local_files_only=local, trust_remote_code=False)
    except Exception as error:  # whatever reads the file may raise any
        raise _not_a_model(model, error) from error


def load_model(model: str, output: Output, device: str | None = None, dtype: str | None = None) -> tuple[PreTrainedModel, Any]:
    """A decoder and its tokenizer, from a folder (without network) or by name, with its default attention."""
    model, local, auto = _located(model)
    chosen = chosen_device(device)
    # unless it is told not to, transformers asks on stdout whether it may run the model's own code
    how = {"trust_remote_code": False, "local_files_only": local}
    # transformers before 4.56 has the older name
    name = "torch_dtype" if auto.__version__.startswith(("4.54.", "4.55.")) else "dtype"
    placed = {name: chosen_dtype(dtype, chosen), **({"device_map": "auto"} if chosen == "auto" else {})}
    with output.progress(f"loading {model}"):
        load_config(model)  # first, because its errors say more
        try:
            tokenizer = auto.AutoTokenizer.from_pretrained(model, **how)
            # `_check_weights` names the weights that have another shape; transformers' own error does not
            loaded, found = auto.AutoModelForCausalLM.from_pretrained(
                model, ignore_mismatched_sizes=True, output_loading_info=True, **how, **placed
            )
        except Exception as error:  # whatever reads the files may raise any
            raise _not_a_model(model, error) from error
        _check_weights(model, type(loaded).__name__, found, output)
        return (loaded if chosen == "auto" else loaded.to(chosen)).eval(), tokenizer


def _check_weights(model: str, kind: str, found: dict[str, Any], output: Output) -> None:
    """Refuse weights that the files lack or have in other shapes, which would be random; remark on those without a place."""
    missing, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    # an entry is a key, or in release 4 a key with its two shapes
    other = sorted(entry if isinstance(entry, str) else entry[0] for entry in found["mismatched_keys"])
    instead = f"it has {_listed(unexpected)}, which {kind} does not use" if unexpected else ""
    for keys, how in ((missing, "lacks"), (other, "has the wrong shape for")):
        if keys:
            problem = f"the checkpoint {how} {_listed(keys)} of {kind}; such weights would be random"
            raise CommandError("; ".join(filter(None, (f"cannot load {model}: {problem}", instead))))
    if instead:
        output.remark(f"{model}: {instead}")


def _listed(keys: Sequence[str], most: int = 3) -> str:
    more = f" and {len(keys) - most:,} more" if len(keys) > most else ""
    return f"{', '.join(keys[:most])}{more}"


def tokenizer_problem(model: str, config: Any) -> str | None:
    """A line that says that a tokenizer has more tokens than the config's model embeds; None if not, or without a tokenizer."""
    model, _, auto = _located(model)
    try:
        tokenizer = auto.AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
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


def _located(model: str) -> tuple[str, bool, Any]:
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
    """Transformers' warnings on stderr, each once and in one line; its report on weights is told by `_check_weights`."""

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
    from flexmask.environment import one_line

    why = one_line(error)
    if "trust_remote_code" in why:
        why = "it needs code of its own (auto_map), which this program does not run"
    if "above report" in why:
        why = f"{why} {_REMARKS.report}"
    return CommandError(f"cannot load {model}: {'' if Path(model).is_dir() else 'no folder here, and on the hub: '}{why}")
