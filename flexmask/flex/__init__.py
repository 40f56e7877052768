"""Running attention under a mask: BlockMask, FlexAttention's backends, dense attention."""
