"""Sparse prefill as a model of lm-evaluation-harness: RULER, LongBench and every other task.

Importing this registers the model "flexmask" with the harness, which looks for no entry points of other packages;
``python -m flexmask.integrations.lm_eval`` is the harness's own program with the name registered.
"""

from flexmask.integrations.lm_eval.model import FlexmaskLM

__all__ = ["FlexmaskLM"]
