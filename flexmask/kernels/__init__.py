"""The steps of selections as Triton kernels, under the names of `flexmask.plain`.

No sort, and no intermediate larger than the map of blocks.

Locals of kernels have the prefixes of flash-linear-attention: ``o_`` offsets of a tile (``o_q`` query blocks, ``o_kv`` key
blocks, ``o_row`` query rows, ``o_dim``), ``m_`` masks, ``p_`` pointers, ``b_`` values of a tile. Numbers of a program have none:
``head``, ``batch``, ``start``, and ``end``, one past the last.

Arguments that kernels share: ``rows`` and ``keys`` are `PackedEdges`, or ``rows`` a plane of its `last_rows`; maps of blocks
(``codes``, ``keep``, ``values``, ``chosen``) are (batch, num_heads, num_q_blocks, num_kv_blocks); ``kept`` and ``lines`` are
(2, batch, num_heads, num_kv_blocks), key blocks and then block diagonals; ``active`` is (batch, num_heads) bool; ``gamma``,
``share`` and ``thresholds`` are float64. ``.._stride`` is between planes, ``.._stride_batch`` between batch rows, 0 where all
agree.
"""

from flexmask.kernels.block_lists import Blocks as Blocks
from flexmask.kernels.block_lists import kept_blocks as kept_blocks
from flexmask.kernels.hybrid import last_rows_lines as last_rows_lines
from flexmask.kernels.hybrid import thresholds as thresholds
from flexmask.kernels.pattern import pattern_and_lines as pattern_and_lines
from flexmask.kernels.pooling import key_means as key_means
from flexmask.kernels.query_aware import query_aware_blocks as query_aware_blocks
from flexmask.kernels.row_blocks import row_blocks as row_blocks
from flexmask.kernels.row_evidence import RowEvidence as RowEvidence
from flexmask.kernels.row_evidence import row_coverage as row_coverage
from flexmask.kernels.row_evidence import row_evidence as row_evidence
from flexmask.kernels.vertical_slash import RepresentativeMass as RepresentativeMass
from flexmask.kernels.vertical_slash import coverage as coverage
from flexmask.kernels.vertical_slash import representative_mass as representative_mass
from flexmask.kernels.visibility import edges_of as edges_of
