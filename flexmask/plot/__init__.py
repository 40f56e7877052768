"""Pictures of masks, of a run's heads and of what methods lose; they need matplotlib.

Each function draws on `axes` or on a new figure of pyplot and returns the Axes:
``plot_density(run).figure.savefig("density.png")``. Every picture reads in grey. Nothing imports matplotlib before it draws.
"""

from flexmask.plot.blocks import block_kinds, plot_attention, plot_block_mask
from flexmask.plot.charts import plot_density, plot_frontier

__all__ = ["block_kinds", "plot_attention", "plot_block_mask", "plot_density", "plot_frontier"]
