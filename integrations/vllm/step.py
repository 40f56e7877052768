"""One planned step, as the builder hands it to the layers."""

from __future__ import annotations

from typing import Any, NamedTuple

from flexmask.integrations.vllm.pages import Places
from flexmask.integrations.vllm.plan import StepPlan


class SparseStep(NamedTuple):
    """The plan of a step, metadata for each stock run, and the places of each sparse request's tokens."""

    plan: StepPlan
    stock: tuple[Any, ...]
    places: tuple[Places, ...]
