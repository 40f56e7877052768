"""Inputs to measure on: synthetic, calibrated to a density, captured from the trained retriever, or a model's own."""
