"""FlexPrefill as a model of lm-evaluation-harness: RULER, LongBench and every other task with a sparse prefill.

Importing this registers the model "flexprefill" with the harness, which looks for no entry points of other packages;
``python -m flexmask.integrations.lm_eval`` is the harness's own program with the name registered.
"""

from flexmask.integrations.lm_eval.model import FlexPrefillLM

__all__ = ["FlexPrefillLM"]
