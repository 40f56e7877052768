"""Errors of the heads by layer and prompt, and the file that keeps them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flexmask.integrations.tune.head_errors import HeadErrors

_FORMAT = "flexmask tune 1"


@dataclass
class MeasuredErrors:
    """The errors of every prompt, by layer index."""

    gammas: tuple[float, ...]
    by_prompt: list[dict[int, HeadErrors]]
    complete: list[bool]  # by prompt: all layers are measured
    path: Path | None = None
    made_of: dict[str, str] = field(default_factory=dict)  # the conditions of the errors
    dense: dict[int, str] = field(default_factory=dict)  # why layers stay dense

    @classmethod
    def begin(cls, gammas: tuple[float, ...], prompts: int, path: Path | None, made_of: dict[str, str]) -> MeasuredErrors:
        """Read the errors in `path` if it exists; ValueError for another kind of file or other conditions."""
        if path is None or not path.exists():
            return cls(gammas, [{} for _ in range(prompts)], [False] * prompts, path, made_of)
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            assert saved["format"] == _FORMAT
            before = saved["made_of"]
            by_prompt = [{int(layer): HeadErrors(*errors) for layer, errors in prompt.items()} for prompt in saved["errors"]]
            dense = {int(layer): reason for layer, reason in saved["dense"].items()}
            measured = cls(gammas, by_prompt, [bool(flag) for flag in saved["complete"]], path, made_of, dense)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"resume must be a file that tune wrote, or none yet; got {path}") from error
        other = [name for name in made_of if before.get(name) != made_of[name]]
        if other:
            raise ValueError(f"resume must be a file of the same {', '.join(made_of)}; {path} is of another {other[0]}")
        return measured

    def save(self) -> None:
        if self.path is None:
            return
        errors = [{str(layer): list(errors) for layer, errors in layers.items()} for layers in self.by_prompt]
        saved = {"format": _FORMAT, "made_of": self.made_of, "complete": self.complete, "dense": self.dense, "errors": errors}
        # an interruption leaves the former file
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(saved, allow_nan=False), encoding="utf-8")
        os.replace(part, self.path)

    def heads(self) -> list[tuple[int, int]]:
        """Layer and head of all measured heads, in the order of `by_head`."""
        return [(layer, head) for layer, errors in sorted(self.by_prompt[0].items()) for head in range(len(errors.density))]

    def by_head(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Blocks that each head sees, (heads,), and that it keeps by gamma, as shares of those of all heads; its errors by gamma.

        All three are means over prompts.
        """
        prompts = []
        for of_prompt in self.by_prompt:
            layers = [errors for _, errors in sorted(of_prompt.items())]
            visible = np.repeat([errors.visible for errors in layers], [len(errors.density) for errors in layers])
            density, error = (np.concatenate(by_gamma) for by_gamma in zip(*((x.density, x.error) for x in layers), strict=True))
            prompts.append((visible / visible.sum(), density * visible[:, None] / visible.sum(), error))
        visible, blocks, error = (np.mean(parts, 0) for parts in zip(*prompts, strict=True))
        return visible, blocks, error


def digest(parts: Sequence[Tensor] | Mapping[str, Any]) -> str:
    if isinstance(parts, Mapping):
        text = json.dumps(parts, sort_keys=True)
    else:
        text = "".join(f"{tuple(part.shape)}{part.tolist()}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
