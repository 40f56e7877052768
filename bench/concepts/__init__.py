"""The algorithm drawn step by step on two heads of the small retriever, for docs/concepts.md."""
