"""The environments of the engines' tests, as make plans them."""

import shutil
import subprocess

import pytest

from tests.repository import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_another_release_makes_the_environment_again(engine, tmp_path):
    def planned(release):
        given = [f"{engine.upper()}_VENV={tmp_path}", f"{engine.upper()}_RELEASE={release}"]
        return subprocess.run(
            ["make", "-n", f"test-{engine}", *given], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    (tmp_path / ".installed-0.29.0").touch()
    made = f"tests/{engine}/environment.sh {tmp_path}"
    assert made not in planned("0.29.0")
    assert made in planned("0.32.0")
    # and the first one, after the second
    assert f"rm -f {tmp_path}/.installed-*" in planned("0.32.0")
