"""A record of the prefill calls of one run: statistics, summary, file."""

from flexmask.integrations.record.calls import CallSize as CallSize
from flexmask.integrations.record.run import MAX_CALLS as MAX_CALLS
from flexmask.integrations.record.run import PrefillRun as PrefillRun
from flexmask.integrations.record.summary import LayerSummary as LayerSummary
from flexmask.integrations.record.summary import RunSummary as RunSummary

__all__ = ["MAX_CALLS", "CallSize", "LayerSummary", "PrefillRun", "RunSummary"]
