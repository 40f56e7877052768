"""Measure what a model loses under each method: language modelling, needles, RULER's tasks."""
