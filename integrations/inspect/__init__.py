"""Inspects one prompt's prefill."""

from flexmask.integrations.inspect.heads import NAMED as NAMED
from flexmask.integrations.inspect.heads import RULE as RULE
from flexmask.integrations.inspect.inspection import Inspection as Inspection
from flexmask.integrations.inspect.inspection import ShownHead as ShownHead
from flexmask.integrations.inspect.inspection import inspect_prefill as inspect_prefill
from flexmask.integrations.inspect.probe import HOW_TIMED as HOW_TIMED
from flexmask.integrations.inspect.probe import LayerTime as LayerTime
from flexmask.integrations.inspect.probe import StageTimes as StageTimes

__all__ = ["HOW_TIMED", "NAMED", "RULE", "Inspection", "LayerTime", "ShownHead", "StageTimes", "inspect_prefill"]
