"""The pictures of docs/concepts.md and the steps behind them."""
