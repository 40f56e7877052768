"""The gate of releases of both engines, the releases that the extras install, and the environments of their tests."""

import dataclasses

import pytest

from flexmask.integrations.serving.versions import check_release, faults_in, release_of
from flexmask.integrations.sglang.versions import RUN as SGLANG
from flexmask.integrations.vllm.versions import RUN as VLLM
from tests.repository import ROOT

RUN = {"vLLM": VLLM, "SGLang": SGLANG}


def test_numbers_of_a_version():
    assert release_of("0.5.16.post1", 3) == (0, 5, 16)
    assert release_of("0.6", 3) == (0, 6, 0)


@pytest.mark.parametrize(("engine", "older", "newer"), [("vLLM", "0.31.0", "1.0.0"), ("SGLang", "0.5.18", "0.9.1")])
def test_releases_that_were_run_are_served_and_newer_ones_with_a_warning_if_their_interfaces_fit(engine, older, newer):
    were_run = [".".join(map(str, release)) for release in RUN[engine]]
    for patch in ("", ".1rc2+cpu"):
        assert {check_release(engine, version + patch, RUN[engine], []) for version in were_run} == {None}
        warning = check_release(engine, newer + patch, RUN[engine], [])
        assert f"got {newer}{patch}, which it was not run with. Its interfaces fit" in warning
    for version in (*were_run, newer):
        with pytest.raises(ImportError, match=f"got {version}, whose interfaces are others: one; two"):
            check_release(engine, version, RUN[engine], ["one", "two"])
    with pytest.raises(ImportError, match=rf"flexmask was run with {engine} 0\..*; got {older}, which it was not run with"):
        check_release(engine, older, RUN[engine], [])


class Has:
    field: int
    __struct_fields__ = ("other",)

    def __init__(self):
        self.set = 1

    def function(self, layer, anything, key):
        """Take three arguments."""


@pytest.mark.parametrize(
    ("name", "wanted", "fault"),
    [
        ("Has.function", ("layer", None, "key"), None),
        ("Has.function", ("layer", "key"), "Has.function must take layer, key; got layer, anything, key"),
        (
            "Has.function",
            ("layer", None, "key", "more"),
            "Has.function must take layer, ..., key, more; got layer, anything, key",
        ),
        ("Has.absent", ("layer",), "Has.absent must take layer; got none"),
        ("Has", {"field", "other", "set", "function"}, None),
        ("Has", {"two", "set", "one"}, "Has must have one, two"),
        ("a set", {"one"}, None),
        ("a set", {"one", "three"}, "a set must have three"),
    ],
)
def test_faults_name_what_is_needed_and_what_is_there(name, wanted, fault):
    found = {"Has": dataclasses.dataclass(init=False)(Has), "a set": {"one", "two"}}
    assert faults_in(found, {name: wanted}) == ([] if fault is None else [fault])


@pytest.fixture
def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# the releases of either engine that the gate is asked for, up to the one after the last that was run
@pytest.mark.parametrize(
    ("engine", "versions", "too_new"),
    [
        ("vLLM", [f"0.{minor}.{patch}" for minor in range(20, max(VLLM)[1] + 2) for patch in (0, 2)], f"0.{max(VLLM)[1] + 2}.0"),
        ("SGLang", [f"0.5.{patch}" for patch in range(8, max(SGLANG)[2] + 2)], f"0.5.{max(SGLANG)[2] + 2}"),
    ],
)
def test_an_extra_installs_the_releases_that_are_served(engine, versions, too_new, project):
    requirements = pytest.importorskip("packaging.requirements")
    (written,) = project["optional-dependencies"][engine.lower()]
    specifier = requirements.Requirement(written).specifier
    assert not specifier.contains(too_new)
    for version in versions:
        try:
            check_release(engine, version, RUN[engine], [])
        except ImportError:
            assert not specifier.contains(version)
        else:
            assert specifier.contains(version)


@pytest.mark.parametrize(
    ("group", "file"), [("vllm.general_plugins", "vllm.registration"), ("sglang.srt.plugins", "sglang.backend")]
)
def test_entry_points_name_the_registration(group, file, project):
    assert project["entry-points"][group] == {"flexmask": f"flexmask.integrations.{file}:register"}
