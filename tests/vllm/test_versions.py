"""The gate of releases, and what the package declares to vLLM."""

from __future__ import annotations

import pytest

from flexmask.integrations.vllm.versions import check_release
from tests.repository import ROOT


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.1rc2"])
def test_releases_that_are_served(version):
    check_release(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "0.9.2"])
def test_other_releases_are_refused_with_the_range(version):
    with pytest.raises(ImportError, match=f"flexmask serves vLLM 0.26 to 0.33; got {version}"):
        check_release(version)


def test_entry_point_names_the_registration():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"flexmask": "flexmask.integrations.vllm.registration:register"}
    assert project["optional-dependencies"]["vllm"] == ["vllm>=0.26,<0.34"]
