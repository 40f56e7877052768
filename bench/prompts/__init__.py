"""Inputs to measure on."""
