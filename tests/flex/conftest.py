"""flash-attn-4's place, taken by a stand-in."""

import sys
from types import ModuleType
from unittest.mock import Mock

import pytest

from flexmask import plans
from flexmask.flex.backend import Backend
from tests.flex.stand_in import Lists, forward


@pytest.fixture
def package(monkeypatch):
    """The stand-in, which `package` itself may replace; `calls` are its keywords."""
    modules = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    block_sparsity, interface = (ModuleType(f"flash_attn.cute.{name}") for name in ("block_sparsity", "interface"))
    block_sparsity.BlockSparseTensorsTorch = Lists
    interface._flash_attn_fwd = Mock(side_effect=forward)
    for name, module in {**modules, block_sparsity.__name__: block_sparsity, interface.__name__: interface}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return interface._flash_attn_fwd


@pytest.fixture
def directly(package, monkeypatch):
    """All calls go directly to the stand-in."""
    monkeypatch.setattr(plans, "chosen_backend", lambda *given, **named: Backend("flash", direct=True))
    return package
