"""FlexPrefill block masks for FlexAttention."""

from flexmask.attention import flexprefill_attention as flexprefill_attention
from flexmask.config import FlexPrefillConfig as FlexPrefillConfig
from flexmask.gallery import sparse_attention as sparse_attention
from flexmask.mask import flexprefill_mask as flexprefill_mask
from flexmask.stats import FlexPrefillStats as FlexPrefillStats
from flexmask.varlen import flexprefill_attention_varlen as flexprefill_attention_varlen
from flexmask.warmup import warmup as warmup

__all__ = [
    "FlexPrefillConfig",
    "FlexPrefillStats",
    "flexprefill_attention",
    "flexprefill_attention_varlen",
    "flexprefill_mask",
    "sparse_attention",
    "warmup",
]
__version__ = "0.1.0"
