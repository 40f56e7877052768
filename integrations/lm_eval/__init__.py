"""Sparse prefill as a model of lm-evaluation-harness. Importing this registers the model "flexmask".

``python -m flexmask.integrations.lm_eval`` is the harness's program with the name registered.
"""

from flexmask.integrations.lm_eval.model import FlexmaskLM

__all__ = ["FlexmaskLM"]
