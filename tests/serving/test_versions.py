"""The gate of releases of both engines, the releases that the extras install, and the environments of their tests."""

import dataclasses
import re

import pytest

from flexmask.integrations.serving import versions
from flexmask.integrations.serving.versions import SERVED, check_interfaces, faults_in, refuse_older, release_of
from tests.repository import ROOT, python


def test_numbers_of_a_version():
    assert release_of("0.5.16.post1", 3) == (0, 5, 16)
    assert release_of("0.6", 3) == (0, 6, 0)


def test_two_neighbouring_minor_releases_of_each_engine_are_served():
    for older, newer in SERVED.values():
        assert newer == (*older[:-1], older[-1] + 1)


@pytest.mark.parametrize(("engine", "older", "newer"), [("vLLM", "0.31.2", "1.0.0"), ("SGLang", "0.5.21.post1", "0.9.1")])
def test_older_releases_are_refused_newer_ones_warn_if_their_interfaces_fit(engine, older, newer, monkeypatch, caplog):
    served = [".".join(map(str, release)) for release in SERVED[engine]]
    start = f"flexmask serves {engine} {served[0]} and {served[1]}; got "
    for version in (*served, *(f"{each}.1rc2+cpu" for each in served)):
        refuse_older(engine, version)
        check_interfaces(engine, version, [])
    assert caplog.messages == []
    refuse_older(engine, newer)
    check_interfaces(engine, newer, [])
    (warning,) = caplog.records
    # engines show only loggers below their own
    assert (warning.name, warning.levelname) == (f"{engine.lower()}.flexmask", "WARNING")
    assert warning.message.startswith(f"{start}{newer}, which flexmask has not been tested with. Its interfaces match")
    for version in (*served, newer):
        with pytest.raises(
            ImportError, match=f"{start}{version}, whose interfaces differ from those that flexmask needs: one; two"
        ):
            check_interfaces(engine, version, ["one", "two"])
    with pytest.raises(ImportError, match=f"{start}{older}, which no release of flexmask has served"):
        refuse_older(engine, older)
    release = release_of(older, len(SERVED[engine][0]))
    monkeypatch.setitem(versions.LAST_SERVED_BY, (engine, release), "0.1.4")
    with pytest.raises(ImportError, match=f"{start}{older}, which flexmask 0.1.4 served last"):
        refuse_older(engine, older)


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
        # by a path
        ("logging.Logger.warning", ("msg",), None),
        ("logging.Logger", {"warning", "one"}, "logging.Logger must have one"),
        ("no_engine.Absent.function", ("layer",), "no_engine.Absent.function must take layer; got none"),
        ("logging.Absent", {"one"}, "logging.Absent must have one"),
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


@pytest.mark.parametrize("engine", SERVED)
def test_an_extra_asks_for_no_older_release_and_pins_nothing(engine, project):
    requirements = pytest.importorskip("packaging.requirements")
    (written,) = project["optional-dependencies"][engine.lower()]
    oldest = ".".join(map(str, SERVED[engine][0]))
    assert requirements.Requirement(written) == requirements.Requirement(f"{engine.lower()}>={oldest}")


def test_files_name_the_releases_that_are_served():
    """The workflow runs them, the environments of tests are of the newest or of the one before, and one table has them."""
    workflow, table = ((ROOT / name).read_text() for name in (".github/workflows/engines.yml", "docs/versions.md"))
    for engine, served in SERVED.items():
        name = engine.lower()
        found = re.findall(rf"engine: {name},.*release: ([\d.]+)", workflow)
        assert {release_of(each, len(served[0])) for each in found} == set(served)
        environment = "".join((ROOT / f"tests/{name}" / file).read_text() for file in ("requirements.txt", "environment.sh"))
        pinned = re.search(rf"\b{name}(?:-cpu)?==(?:\${{3:-)?([\d.]+)", environment)
        assert release_of(pinned[1], len(served[0])) in served
        row = re.search(rf"^\| {engine} \|.*$", table, re.M)[0]
        assert " and ".join(".".join(map(str, release)) for release in served) in row


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_entry_point_loads_nothing_else_of_flexmask(engine, project):
    """Every process of an engine loads it, wherever flexmask is installed."""
    group = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}[engine]
    module = f"flexmask.integrations.{engine}.registration"
    assert project["entry-points"][group] == {"flexmask": f"{module}:register"}
    loaded = python("-c", f"import sys, {module}; print(*(x for x in sys.modules if x[:5] in ('flexm', 'torch')))").split()
    packages = ("flexmask", "flexmask.integrations", f"flexmask.integrations.{engine}")
    assert sorted(loaded) == sorted([*packages, module])
