"""The steps that methods share, as Triton kernels, under the names of `flexmask.plain`: no sort, no scores of all rows and keys.

Locals of kernels, those of the methods too, have the prefixes of flash-linear-attention: ``o_`` offsets of a tile (``o_q`` query
blocks, ``o_kv`` key blocks, ``o_row`` query rows, ``o_dim``), ``m_`` masks, ``p_`` pointers, ``b_`` values of a tile. Numbers of
a program have none: ``head``, ``batch``, ``start``, and ``end``, one past the last. A row of a map, ``map_row``, is a query block
of one head.

Arguments that kernels share: ``q_edges`` and ``kv_edges`` are those of `KernelGeometry`, ``representative`` is a plane of its
`representative`, ``last_rows`` the one of the last; maps of blocks (``chosen``, ``keep``, ``values``) are (batch,
num_heads, num_q_blocks, num_kv_blocks); ``kept``, ``kept_lines``, ``lines`` and ``line_mass`` are (2, batch, num_heads,
num_kv_blocks), key blocks and then block diagonals, or (1, ..) without these; ``active`` is (batch, num_heads) bool; ``gamma``
and ``share`` are float64.
"""

from flexmask.kernels.lists import kept_blocks as kept_blocks
from flexmask.kernels.pooling import key_means as key_means
from flexmask.kernels.representative import representative_mass as representative_mass
from flexmask.kernels.vertical_slash import coverage as coverage
from flexmask.kernels.visibility import kernel_geometry as kernel_geometry
