"""Answers of models behind a sparse prefill: prompts with exact answers, their evaluation, tables."""
