"""lm-evaluation-harness with sparse prefill: ``python -m flexmask.integrations.lm_eval``."""
