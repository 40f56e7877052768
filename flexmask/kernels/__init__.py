"""The steps of selections as Triton kernels: the twins of `flexmask.plain`, under the same names.

No sort, and no intermediate larger than the map of blocks.
"""

from flexmask.kernels.block_lists import kept_blocks as kept_blocks
from flexmask.kernels.last_rows import last_rows_lines as last_rows_lines
from flexmask.kernels.pattern import pattern_and_lines as pattern_and_lines
from flexmask.kernels.pooling import key_means as key_means
from flexmask.kernels.query_aware import query_aware_blocks as query_aware_blocks
from flexmask.kernels.row_evidence import row_blocks as row_blocks
from flexmask.kernels.row_evidence import row_coverage as row_coverage
from flexmask.kernels.row_evidence import row_evidence as row_evidence
from flexmask.kernels.vertical_slash import coverage as coverage
from flexmask.kernels.vertical_slash import representative_mass as representative_mass
from flexmask.kernels.visibility import edges_of as edges_of
