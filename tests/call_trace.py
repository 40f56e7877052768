"""The functions of flexmask that a call enters before the first step of its method."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.repository import ROOT

METHODS = str(ROOT / "block_masks")
FOLDERS = (str(ROOT / "flexmask"), METHODS, str(ROOT / "integrations"))


def functions_before_the_method(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """File and name of each, in the order in which `call`, which is warm, enters them."""
    entered: list[tuple[str, str]] = []
    is_there = False

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal is_there
        code = frame.f_code
        file = str(Path(code.co_filename).resolve())
        if is_there or event != "call" or not file.startswith(FOLDERS) or code.co_name.startswith("<"):
            return
        if file.startswith(METHODS):
            is_there = True
        elif (file, code.co_name) not in entered:
            entered.append((file, code.co_name))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert is_there, "no method ran"
    return entered
