"""A gamma per head, from the user's text."""

from flexmask.integrations.tune.result import TuneResult as TuneResult
from flexmask.integrations.tune.search import tune as tune

__all__ = ["TuneResult", "tune"]
