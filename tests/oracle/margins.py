"""Decision margins: the relative distance of each decision from going the other way, ``inf`` where nothing was decided.

Float32 code must decide alike where a margin is wide; where it is tiny, either side is right.
"""

import math
from itertools import accumulate

from tests.oracle import steps
from tests.oracle.steps import Budget, Candidate

# below this a float32 probability may have underflowed
_FLOAT32_SAFE = 2.0**-100
# float32 code takes S from differences of sums up to 1, which rounds smaller values coarsely
COARSE = 0.01


def relative(value: float, threshold: float, coarse: float = 0.0) -> float:
    """Distance from a threshold relative to it, or to `coarse` if that is more; inf where the threshold is 0."""
    return abs(value - threshold) / max(threshold, coarse) if threshold > 0 else math.inf


def gap(last_kept: float, first_dropped: float, coarse: float = 0.0) -> float:
    """From the last kept value to the first dropped one, relative to the larger of the last kept one and `coarse`.

    Ties at exactly 0 are decided by index in every precision.
    """
    if last_kept == 0 or math.isinf(last_kept):
        return math.inf
    if last_kept < _FLOAT32_SAFE:
        return 0.0
    return (last_kept - first_dropped) / max(last_kept, coarse)


def top_p_margin(values: dict[Candidate, float], budget: Budget, coarse: float = 0.0) -> float:
    """Margin of `top_p`: of the running sum on both sides of the cut, and of the last value kept over the first dropped."""
    order = steps.heaviest_first(values)
    running = list(accumulate((values[index] for index in order), initial=0.0))
    threshold = budget.gamma * running[-1]
    count = len(steps.top_p(values, budget))

    margins = [math.inf]
    could_grow = count < len(order) and (budget.cap is None or count < budget.cap)
    if budget.gamma < 1 and could_grow:
        margins.append(relative(running[count], threshold))
    if budget.gamma < 1 and count > budget.floor:
        margins.append(relative(running[count - 1], threshold))
    if 0 < count < len(order):
        margins.append(gap(values[order[count - 1]], values[order[count]], coarse))
    return min(margins)


def pattern_margin(js_distance: float, tau: float) -> float:
    """Distance of D_JS from tau."""
    return math.inf if math.isnan(js_distance) else relative(js_distance, tau)
