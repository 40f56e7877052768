"""The releases of transformers that the adapter serves; importing this loads neither transformers nor torch."""

from __future__ import annotations

import re

OLDEST, NEWEST = (4, 54), (5, 24)


def check_release(version: str) -> None:
    """Raise ImportError for a release that is not served."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise ImportError(f"flexmask serves transformers {oldest} to {newest}; got {version}")
