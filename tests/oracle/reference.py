"""A call of a method in plain loops and float64, head by head, which the fast code is tested against.

It shares no code with the fast paths: `tests.oracle.steps` computes every quantity from its definition, `tests.oracle.margins`
gives every decision its margin, and the file of each method takes the method's options. Inputs are assumed finite.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.oracle.flexprefill import flexprefill_selection
from tests.oracle.hybrid import hybrid_selection
from tests.oracle.published import published_selection
from tests.oracle.result import ReferenceResult, stacked, undecided
from tests.oracle.steps import AttentionHead
from tests.oracle.visibility import query_offsets, visibility

SELECTIONS: dict[str, Callable[..., ReferenceResult]] = {
    "flexprefill": flexprefill_selection, "hybrid": hybrid_selection, "published": published_selection,
}  # fmt: skip


def reference(
    query: Tensor, key: Tensor, method: str = "flexprefill", *, block_size: int = 128, scale: float | None = None,
    softcap: float | None = None, window: int | None = None, attention_mask: Tensor | None = None,
    q_offset: int | Tensor | None = None, prompt_len: int | None = None, **options: Any,
) -> ReferenceResult:  # fmt: skip
    """Decide the block mask of every head, in float64. Takes the arguments of the mask functions, which are not checked."""
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    gamma = options.pop("gamma")
    gammas = [float(gamma)] * num_heads if isinstance(gamma, (int, float)) else [float(share) for share in gamma]
    if method == "hybrid":
        options["prompt_len"] = prompt_len
    select = functools.partial(SELECTIONS[method], **options)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale

    heads = []
    for b, offset in enumerate(query_offsets(q_offset, batch, kv_len - q_len)):
        is_token = torch.ones(kv_len, dtype=torch.bool) if attention_mask is None else attention_mask[b].cpu() != 0
        seen = visibility(q_len, offset, is_token, window, block_size)
        for h in range(num_heads):
            if not seen.valid_rows:
                covered = 0.0 if method == "hybrid" else math.nan
                heads.append(undecided(seen)._replace(js_distance=0.0, row_coverage=covered, min_row_coverage=covered))
                continue
            query_head = query[b, h].detach().cpu().double()
            kv_head = key[b, h // (num_heads // num_kv_heads)].detach().cpu().double()
            heads.append(select(AttentionHead(query_head, kv_head, scale, softcap), seen, gamma=gammas[h]))
    return stacked(heads, batch)
