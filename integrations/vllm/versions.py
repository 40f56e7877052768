"""The releases of vLLM that the plug-in serves, and the check of the installed one."""

from __future__ import annotations

import re

OLDEST, NEWEST = (0, 26), (0, 33)


def check_release(version: str) -> None:
    """Refuse a vLLM outside of the releases whose interfaces were read.

    0.32 was run, on CPUs (tests/vllm). The interfaces of 0.26 and 0.33 were compared with it, from their sources: before 0.26 the
    cache of FLASH_ATTN has another layout.

    Raises
    ------
    ImportError
        With the release that is installed and those that are served.
    """
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise ImportError(f"flexmask serves vLLM {oldest} to {newest}; got {version}")
