"""Causality inside a block, for flash-attn-4: rows of a chunk stand at the last keys. Imports CuTe."""

from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute import utils


@cute.jit
def causal(batch: Any, head: Any, row: Any, key: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    offset = utils.scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, cutlass.Int32)
    return key <= row + offset
