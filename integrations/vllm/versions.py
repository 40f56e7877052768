"""The releases of vLLM that the plug-in serves, and the check of the installed one."""

from __future__ import annotations

import re

OLDEST, NEWEST = (0, 26), (0, 33)


def check_release(version: str) -> None:
    """Refuse a vLLM outside of the releases whose interfaces were read.

    0.26 was run on a GPU and 0.32 on CPUs (tests/vllm); before 0.26 the cache of FLASH_ATTN has another layout. 0.33 was compared
    with them in its sources. What lies between was neither run nor read.

    Raises
    ------
    ImportError
        With the release that is installed and those that are served.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise ImportError(f"flexmask serves vLLM {oldest} to {newest}; got {version}")
