"""Inspects one prompt's prefill."""

from flexmask.integrations.inspect.inspection import Inspection, ShownHead, inspect_prefill
from flexmask.integrations.inspect.page import write_report

__all__ = ["Inspection", "ShownHead", "inspect_prefill", "write_report"]
