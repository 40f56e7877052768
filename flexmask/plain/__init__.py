"""The steps of selections in PyTorch; `flexmask.kernels` has the same names."""

from flexmask.plain.block_lists import kept_blocks as kept_blocks
from flexmask.plain.last_rows import last_rows_lines as last_rows_lines
from flexmask.plain.pattern import pattern_and_lines as pattern_and_lines
from flexmask.plain.pooling import block_means as block_means
from flexmask.plain.pooling import key_means as key_means
from flexmask.plain.query_aware import query_aware_blocks as query_aware_blocks
from flexmask.plain.representative import coverage as coverage
from flexmask.plain.representative import representative_mass as representative_mass
from flexmask.plain.row_evidence import row_blocks as row_blocks
from flexmask.plain.row_evidence import row_coverage as row_coverage
from flexmask.plain.row_evidence import row_evidence as row_evidence
from flexmask.plain.thresholds import thresholds as thresholds


def edges_of(*_: object) -> None:
    """None: only the kernels read edges."""
