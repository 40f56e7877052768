"""FlexPrefill among the other masks; its code is `flexmask.mask`."""

from flexmask.mask import flexprefill_mask as flexprefill_mask

__all__ = ["flexprefill_mask"]
