"""Names registered with transformers, and the state after a block."""

import subprocess
import sys

import pytest

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.environment import check_release


def test_import_registers_nothing():
    code = """
import flexmask.integrations.huggingface as flexmask_hf
from transformers import AttentionInterface, AttentionMaskInterface
names = [{*AttentionInterface().valid_keys()}, {*AttentionMaskInterface().valid_keys()}]
assert not any("flexmask" in name for both in names for name in both)
flexmask_hf.register()
assert all("flexmask" in interface().valid_keys() for interface in (AttentionInterface, AttentionMaskInterface))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr


def test_name_alone_runs_with_the_defaults(model, tokens):
    expected = model(tokens).logits
    flexmask_hf.register()
    model.set_attn_implementation("flexmask")
    assert (model(tokens).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("release", ["4.53.3", "5.25.0", "6.0.0"])
def test_other_transformers_are_named(release):
    with pytest.raises(ImportError, match=rf"transformers 4\.54 to 5\.24; got {release}"):
        check_release(release)
