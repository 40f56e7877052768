"""The mask function of every method, and the options under which it is sparse."""

from typing import Any

import pytest
from torch.nn.attention.flex_attention import BlockMask

from flexmask import block_masks
from tests.block_masks.definitions import TESTED
from tests.cases import Case

MASKS = {name.removesuffix("_mask"): getattr(block_masks, name) for name in block_masks.__all__}
SPARSE = {name: tested.sparse for name, tested in TESTED.items()}
all_masks = pytest.mark.parametrize("name", list(MASKS))


def mask_of(name: str, case: Case, **options: Any) -> BlockMask:
    """The mask of a method, without options under those in which it is sparse."""
    shared = {"block_size": case.config.block_size, **case.keywords()}
    mask: BlockMask = MASKS[name](case.query, case.key, **shared, **(options or SPARSE[name]))
    return mask
