"""flash-attn-4's place, taken by a stand-in."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flexmask import plans
from flexmask.flex.backend import Backend
from tests.flex.stand_in import Lists, forward


@pytest.fixture
def package(monkeypatch):
    """The stand-in, which `package` itself may replace; `calls` are its keywords."""
    stand_in = SimpleNamespace(BlockSparseTensorsTorch=Lists, _flash_attn_fwd=Mock(side_effect=forward))
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.block_sparsity", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return stand_in._flash_attn_fwd


@pytest.fixture
def directly(package, monkeypatch):
    """All calls go directly to the stand-in."""
    monkeypatch.setattr(plans, "chosen_backend", lambda *given, **named: Backend("flash", is_direct=True))
    return package
