"""The steps of selections in PyTorch; `flexmask.kernels` has the same names."""

from flexmask.plain.hybrid import RowEvidence as RowEvidence
from flexmask.plain.hybrid import last_rows_lines as last_rows_lines
from flexmask.plain.hybrid import row_blocks as row_blocks
from flexmask.plain.hybrid import row_coverage as row_coverage
from flexmask.plain.hybrid import row_evidence as row_evidence
from flexmask.plain.hybrid import thresholds as thresholds
from flexmask.plain.pattern import pattern_and_lines as pattern_and_lines
from flexmask.plain.pooling import block_means as block_means
from flexmask.plain.pooling import key_means as key_means
from flexmask.plain.pooling import query_aware_blocks as query_aware_blocks
from flexmask.plain.vertical_slash import Blocks as Blocks
from flexmask.plain.vertical_slash import RepresentativeMass as RepresentativeMass
from flexmask.plain.vertical_slash import coverage as coverage
from flexmask.plain.vertical_slash import kept_blocks as kept_blocks
from flexmask.plain.vertical_slash import representative_mass as representative_mass


def edges_of(*_: object) -> None:
    """None: only the kernels read edges."""
