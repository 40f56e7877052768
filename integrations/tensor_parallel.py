"""Options by head under tensor parallelism, where each process has some heads of a layer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from flexmask.config import FlexPrefillConfig


def of_own_heads(config: FlexPrefillConfig, module: nn.Module, num_heads: int) -> FlexPrefillConfig:
    """`config` with the gammas of the `num_heads` heads that this process has of an attention module.

    transformers gives the processes of a mesh equal shares of the heads, in order. Where gamma is one number, or the module is
    not spread so, it is the config itself: the call then refuses a wrong length.
    """
    gamma = config.gamma
    if not isinstance(gamma, tuple) or len(gamma) == num_heads or len(gamma) % num_heads:
        return config
    rank = _rank(module, len(gamma) // num_heads)
    return config if rank is None else replace(config, gamma=gamma[rank * num_heads : (rank + 1) * num_heads])


def _rank(module: nn.Module, processes: int) -> int | None:
    """Place of this process among `processes` that share the module's weights; None where these are not spread over so many."""
    for parameter in module.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        names = tuple(mesh.mesh_dim_names or ())
        # a mesh may hold other dimensions too, over which batches or layers are spread
        dim = names.index("tp") if "tp" in names else 0 if mesh.ndim == 1 and not names else None
        if dim is not None and mesh.size(dim) == processes:
            rank: int = mesh.get_local_rank(dim)
            return rank
    return None
