"""The settings of each method by rising density, their names in the report, and how figures are shown there."""

from __future__ import annotations

import numpy as np

# hybrid's rows from before a change of its rule
BEFORE = "hybrid_before"
GAMMAS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.91, 0.92, 0.93, 0.95, 0.97, 0.98)
# settings of each method by rising density, as they are named in the rows
CURVES = {
    "hybrid": [f"hybrid:gamma={gamma:g}" for gamma in GAMMAS],
    "coverage": [f"coverage:gamma={gamma}" for gamma in (0.6, 0.7, 0.8, 0.9, 0.95, 0.98)],
    "published": [f"published:gamma={gamma}" for gamma in (0.8, 0.9, 0.95, 0.98, 0.99)],
    "tuned": [f"tuned to gamma {gamma}" for gamma in (0.8, 0.9, 0.95)],
    "tuned_by_loss": [f"tuned by loss to gamma {gamma}" for gamma in (0.8, 0.9, 0.95)],
    "xattention": [f"xattention:threshold={share}" for share in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97)],
    "flash_prefill": [f"flash_prefill:alpha={alpha}" for alpha in (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)],
    "flash_prefill_by_score": [f"flash_prefill:alpha={alpha},last_blocks=0" for alpha in (0.5, 0.2, 0.1)],
    "normalised_flash_prefill": [f"normalised_flash_prefill:alpha={alpha}" for alpha in (0.1, 0.05, 0.02)],
    "sparge": [f"sparge:similarity_threshold=-0.1,topk={share}" for share in (0.1, 0.2, 0.3, 0.5)],
    "sparge_by_share": [f"sparge:cdf_threshold={share}" for share in (0.8, 0.9, 0.95, 0.98)],
    "hip": [f"hip:topk_blocks={count}" for count in (4, 8, 16, 32)],
    "minference": [f"minference:plan={plan}" for plan in ("100/800", "500/3000", "1000/6096")],
    "vertical_slash": [f"vertical_slash:vertical_size={size},slash_size={size}" for size in (1024, 2048, 4096)],
    "infllm": [f"infllm:topk_blocks={blocks},local_tokens={256 * blocks}" for blocks in (4, 8, 16)],
    "streaming_llm": [
        f"streaming_llm:sink_blocks={sinks},window_blocks={window}" for sinks, window in ((1, 8), (1, 16), (8, 32))
    ],
    "lm_infinite": [f"lm_infinite:local_tokens={tokens}" for tokens in (2048, 4096)],
    "tri_shape": [f"tri_shape:window_blocks={blocks}" for blocks in (8, 16, 32)],
    "oracle": [f"oracle:gamma={gamma}" for gamma in (0.8, 0.9, 0.95)],
}
OTHERS = ("causal", "rule:vert=0", "moa", "coverage:gamma=0.9,min_budget=256")
NAMES = {
    "hybrid": "hybrid",
    # measured before the query blocks of its representative rows kept twice the floor
    "hybrid_before": "hybrid before",
    "coverage": "coverage",
    "published": "published",
    "tuned": "hybrid, tuned by outputs",
    "tuned_by_loss": "hybrid, tuned by loss",
    "xattention": "XAttention",
    "flash_prefill": "FlashPrefill",
    "normalised_flash_prefill": "FlashPrefill, rows normalised",
    "flash_prefill_by_score": "FlashPrefill without last blocks",
    "sparge": "SpargeAttn's first stage",
    "sparge_by_share": "SpargeAttn's, by cdf",
    "hip": "HiP-block",
    "minference": "MInference, pooled lines",
    "vertical_slash": "vertical-slash, fixed",
    "infllm": "InfLLM's lookup",
    "streaming_llm": "StreamingLLM",
    "lm_infinite": "LM-Infinite",
    "tri_shape": "tri-shape",
    "moa": "MoA's stand-in plan",
    "oracle": "oracle",
    "flexprefill": "FlexPrefill",
    "causal": "every block (bf16 noise)",
    "rule:vert=0": "window of 8 blocks and first block",
}


def prototype(gamma: float, vertical: bool = True) -> str:
    """The name of the workshop's rule at a gamma, as it was measured first; with the heaviest four key blocks if `vertical`."""
    e = round(1 - gamma, 6)
    share = f"{round(e / 5, 6):g}"
    rest = "vert=4,vstat=max" if vertical else "vert=0"
    return f"rule:rho={share},valpha={e:g},sthr={share},window=4,stride=8,{rest}"


def shown_name(method: str) -> str:
    """A row's name as the report has it."""
    for gamma in GAMMAS:
        if method in (prototype(gamma), prototype(gamma, False)):
            return f"prototype of hybrid, gamma {gamma:g}"
    name, _, options = method.partition(":")
    if method in NAMES or not options:
        return NAMES.get(method, method)
    return f"{NAMES[name]}, {options.replace('=', ' ').replace(',', ', ').replace('min_budget', 'floor').replace('_', ' ')}"


def short(value: float) -> str:
    """A share without its leading 0, as .234."""
    return f"{value:.3f}".replace("0.", ".", 1)


def signed(value: float) -> str:
    """A change with its sign, as +.012."""
    return f"{value:+.3f}".replace("0.", ".", 1)


def between(low: float, high: float, shown=short) -> str:
    """An interval."""
    return f"[{shown(low)}, {shown(high)}]"


def bounded(low: float, high: float, digits: str = "") -> str:
    """An interval whose ends may lie past what was measured."""
    ends = [("?" if not np.isfinite(end) else f"{end:{digits}}" if digits else short(end)) for end in (low, high)]
    return f"[{', '.join(ends)}]"
