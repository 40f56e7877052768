"""Pictures of masks, of a run's heads and of what methods lose; they need matplotlib.

Each function draws on `axes` or on a new figure of pyplot and returns the Axes:
``plot_density(run).figure.savefig("density.png")``. Every picture reads in grey.
"""

from flexmask.pictures.attention_map import plot_attention as plot_attention
from flexmask.pictures.block_map import block_kinds as block_kinds
from flexmask.pictures.block_map import plot_block_mask as plot_block_mask
from flexmask.pictures.frontier import plot_frontier as plot_frontier
from flexmask.pictures.heads import plot_coverage as plot_coverage
from flexmask.pictures.heads import plot_density as plot_density
from flexmask.pictures.heads import plot_distances as plot_distances
from flexmask.pictures.heads import plot_pattern_share as plot_pattern_share
from flexmask.pictures.heads import plot_run as plot_run

__all__ = [
    "block_kinds",
    "plot_attention",
    "plot_block_mask",
    "plot_coverage",
    "plot_density",
    "plot_distances",
    "plot_frontier",
    "plot_pattern_share",
    "plot_run",
]
