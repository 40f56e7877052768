"""The gate of releases, and what the package declares to vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexmask.integrations.vllm.versions import RUN, check_release, interface_faults
from tests.repository import ROOT


@pytest.mark.parametrize("release", RUN)
def test_releases_that_were_run_are_served(release):
    assert check_release("{}.{}.1rc2+cpu".format(*release), []) is None


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", "0.27.0", "0.31.0"])
def test_older_releases_that_were_not_run_are_refused(version):
    with pytest.raises(ImportError, match=rf"flexmask was run with vLLM 0\.26, .*; got {version}, which it was not run with"):
        check_release(version, [])


@pytest.mark.parametrize("version", ["0.33.0", "0.40.1", "1.0.0"])
def test_newer_releases_are_served_with_a_warning_if_their_interfaces_fit(version):
    warning = check_release(version, [])
    assert warning is not None
    assert f"got {version}, which it was not run with. Its interfaces fit" in warning
    with pytest.raises(ImportError, match=f"got {version}, whose interfaces are others: one; two"):
        check_release(version, ["one", "two"])


def test_interfaces_that_are_others_are_named(monkeypatch):
    pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as Stock

    assert interface_faults(Stock) == []
    builder, impl = Stock.get_builder_cls(), Stock.get_impl_cls()

    class OtherBuilder(builder):
        def build(self, common_attn_metadata, fast_build=False):
            """Without common_prefix_len."""

    class OtherImpl(impl):
        def __init__(self, num_heads):
            """Without the others."""

    classes = {"get_builder_cls": lambda: OtherBuilder, "get_impl_cls": lambda: OtherImpl, "is_mla": lambda: False}
    faults = interface_faults(SimpleNamespace(**classes, forward_includes_kv_cache_update=True))
    wanted = ("builder.build must take common_prefix_len", "arguments must have alibi_slopes", "in the cache before forward")
    assert len(faults) == len(wanted)
    assert all(part in fault for part, fault in zip(wanted, faults, strict=True))
    from vllm.v1.worker import ubatch_utils

    monkeypatch.delattr(ubatch_utils, "split_attn_metadata")
    assert "split_attn_metadata" in interface_faults(Stock)[0]


def test_interfaces_of_latent_attention():
    pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend as Stock

    # its own arguments come as keywords, which it passes on
    assert interface_faults(Stock) == []
    builder, impl = Stock.get_builder_cls(), Stock.get_impl_cls()

    class OtherImpl(impl):
        def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype):
            """Without those of latent attention."""

        def forward_mha(self, q, kv_c_normed, k_pe, kv_cache):
            """With fewer arguments."""

    classes = {"get_builder_cls": lambda: builder, "get_impl_cls": lambda: OtherImpl, "is_mla": lambda: True}
    faults = interface_faults(SimpleNamespace(**classes))
    assert len(faults) == 2
    assert "forward_mha must take q" in faults[0] and "kv_b_proj, kv_lora_rank" in faults[1]


def test_entry_point_names_the_registration():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"flexmask": "flexmask.integrations.vllm.registration:register"}


def test_the_extra_installs_the_releases_that_are_served():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    requirements = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (written,) = project["optional-dependencies"]["vllm"]
    specifier = requirements.Requirement(written).specifier
    # the one after the last that was run is served with a warning
    newest = max(RUN)[1] + 1
    assert not specifier.contains(f"0.{newest + 1}.0")
    for minor in range(20, newest + 1):
        for patch in (0, 2):
            version = f"0.{minor}.{patch}"
            try:
                check_release(version, [])
            except ImportError:
                assert not specifier.contains(version)
            else:
                assert specifier.contains(version)
