"""FlexPrefill in PyTorch, one step a file, in the order of `flexmask.plain.search`."""
