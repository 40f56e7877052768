"""The role of a layer of grouped-query attention, as an engine has it."""

import torch

from flexmask.integrations.serving.layers import LayerShape, SparseLayer, role_of_shape
from flexmask.settings import PrefillSettings

SHAPE = LayerShape(num_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=32, scale=0.2)
SPARSE = {"gamma": 0.7, "block_size": 32, "min_budget": 0, "min_coverage": 0.0, "last_rows_dense": False}
CPU = torch.device("cpu")


def sparse_role(shape=SHAPE, number=0, **options):
    found = role_of_shape(shape, number, PrefillSettings(**options))
    assert isinstance(found, SparseLayer)
    return found
