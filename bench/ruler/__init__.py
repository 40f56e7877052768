"""RULER by lm-evaluation-harness, dense and sparse: the runs behind RULER.md."""
