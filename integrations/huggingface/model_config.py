"""Options in a model's config, by `configure` and by open blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from flexmask.integrations.huggingface.call import process_settings
from flexmask.integrations.huggingface.compat import text_config, unwrapped
from flexmask.integrations.huggingface.settings import CONFIG_KEY, PrefillSettings, saved_settings

if TYPE_CHECKING:
    from flexmask.integrations.huggingface.session import OpenBlock

LOCK = threading.RLock()  # held while blocks open and close
_ABSENT = object()


def model_settings(
    model: PreTrainedModel,
    settings: PrefillSettings | str | Path | None = None,
    method: str | Callable[..., BlockMask] | None = None,
    **options: Any,
) -> PrefillSettings:
    """The settings that a caller names, else the process's, the config's, or the defaults."""
    config = text_config(model)
    if settings is None and method is None and not options:
        found = process_settings() or configured(config) or PrefillSettings()
    else:
        found = PrefillSettings.from_options(settings, method, **options)
    found.check_model(config)
    return found


def configure(
    model: Any,
    settings: PrefillSettings | str | Path | None = None,
    method: str | Callable[..., BlockMask] | None = None,
    **options: Any,
) -> PrefillSettings:
    """Write options into a model's config, where ``save_pretrained`` keeps them: ``flexmask_config`` in ``config.json``.

    They apply wherever the model runs with ``attn_implementation="flexmask"``, except inside a `sparse_prefill` block with its
    own options. Without options the defaults replace what was there.

    Parameters
    ----------
    model
        A model of transformers, wrapped or not, as in `sparse_prefill`.
    settings, method, options
        As in `sparse_prefill`; `method` by name only.

    Returns
    -------
    PrefillSettings
        The settings written.

    Raises
    ------
    TypeError, ValueError
        For a `model` that is not one of transformers, unknown options, values out of range, layers that the model lacks.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> settings = configure(model, gamma=0.8, dense_layers=(0,))
    >>> model.config.flexmask_config
    {'dense_layers': [0], 'gamma': 0.8}
    """
    config = text_config(unwrapped(model))
    found = PrefillSettings.from_options(settings, method, **options)
    found.check_model(config)
    setattr(config, CONFIG_KEY, found.to_dict())
    return found


@dataclass(eq=False)
class SwitchedConfig:
    """A config that open blocks switched, and what it held before."""

    config: Any
    name: str | None
    blocks: list[OpenBlock] = field(default_factory=list)
    options: Any = _ABSENT
    written: Any = _ABSENT

    @classmethod
    def of(cls, config: Any) -> SwitchedConfig:
        return SWITCHED.setdefault(id(config), cls(config, config._attn_implementation))

    def write_options(self) -> None:
        """Write the options of the block entered last into the config, else its own.

        Skips blocks whose method is a function. What others wrote inside a block, as `configure` does, becomes the config's own.
        """
        now = getattr(self.config, CONFIG_KEY, _ABSENT)
        if now is not self.written or now is _ABSENT:
            self.options = now
        runs = [block.run for block in self.blocks if text_config(block.model) is self.config]
        self.written = next((run.settings.to_dict() for run in reversed(runs) if not callable(run.settings.method)), _ABSENT)
        wanted = self.options if self.written is _ABSENT else self.written
        if wanted is not _ABSENT:
            setattr(self.config, CONFIG_KEY, wanted)
        elif hasattr(self.config, CONFIG_KEY):
            delattr(self.config, CONFIG_KEY)

    def close(self, block: OpenBlock) -> None:
        """Remove a block; the last one restores the config."""
        self.blocks.remove(block)
        self.write_options()
        if not self.blocks:
            # the property would also set the name of all parts, where other blocks may be open
            self.config._attn_implementation_internal = self.name
            del SWITCHED[id(self.config)]


# per process, by id: models may share a config, which is not hashable and saves its attributes; an entry keeps its config alive
SWITCHED: dict[int, SwitchedConfig] = {}


def configured(config: Any) -> PrefillSettings | None:
    """The config's own options, without those of open blocks."""
    with LOCK:
        switched = SWITCHED.get(id(config))
        if switched is None or getattr(config, CONFIG_KEY, _ABSENT) is not switched.written or switched.written is _ABSENT:
            return saved_settings(config)
        return None if switched.options is _ABSENT else PrefillSettings.from_dict(switched.options, CONFIG_KEY)
