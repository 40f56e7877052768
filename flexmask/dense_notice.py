"""One log line a process and reason for attention that runs dense where no run records it."""

from __future__ import annotations

import logging
import re

from flexmask._torch import is_traced

_log = logging.getLogger("flexmask")
_said: set[str] = set()


def notice_dense(reason: str | None, q_len: int) -> None:
    """Log why a call runs dense, if it does: once per reason, whatever its numbers. Decoding, a single row, is not logged."""
    if reason is None or q_len == 1 or is_traced():
        return
    kind = re.sub(r"\d+", "", reason)
    if kind not in _said:
        _said.add(kind)
        _log.warning("flexmask: attention ran dense: %s (logged once per process and reason)", reason)
