"""What models answer behind a sparse prefill: prompts with exact answers, their evaluation, tables."""
