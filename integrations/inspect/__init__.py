"""Inspects one prompt's prefill."""

from flexmask.integrations.inspect.inspection import Inspection as Inspection
from flexmask.integrations.inspect.inspection import ShownHead as ShownHead
from flexmask.integrations.inspect.inspection import inspect_prefill as inspect_prefill
from flexmask.integrations.inspect.page import write_report as write_report

__all__ = ["Inspection", "ShownHead", "inspect_prefill", "write_report"]
