"""The steps that methods share, in PyTorch; `flexmask.kernels` has the same names."""

from flexmask.plain.pooling import block_means as block_means
from flexmask.plain.pooling import key_means as key_means
from flexmask.plain.vertical_slash import Blocks as Blocks
from flexmask.plain.vertical_slash import RepresentativeMass as RepresentativeMass
from flexmask.plain.vertical_slash import coverage as coverage
from flexmask.plain.vertical_slash import kept_blocks as kept_blocks
from flexmask.plain.vertical_slash import representative_mass as representative_mass


def edges_of(*_: object) -> None:
    """None: only the kernels read edges."""
