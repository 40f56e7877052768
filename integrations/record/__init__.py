"""What the prefill calls of a model chose: a record of one run, its summary, and its file."""

from flexmask.integrations.record.run import MAX_CALLS as MAX_CALLS
from flexmask.integrations.record.run import PrefillRun as PrefillRun
from flexmask.integrations.record.summary import CallSize as CallSize
from flexmask.integrations.record.summary import LayerSummary as LayerSummary
from flexmask.integrations.record.summary import RunSummary as RunSummary

__all__ = ["MAX_CALLS", "CallSize", "LayerSummary", "PrefillRun", "RunSummary"]
