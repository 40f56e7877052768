"""RULER by lm-evaluation-harness, for RULER.md."""
