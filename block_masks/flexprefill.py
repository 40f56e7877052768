"""FlexPrefill among the other masks; its code is `flexmask.flexprefill`."""

from flexmask.flexprefill import flexprefill_mask as flexprefill_mask

__all__ = ["flexprefill_mask"]
