"""Settings for all tests: hypothesis, GPU tests and random numbers."""

import contextlib
import os
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # read before the first import of flexmask
    os.environ["TRITON_INTERPRET"] = "1"

# at -O3 Inductor's C++ compiler would take most of the tests' time; read at the first import of Inductor
_COMPILER = str(Path(__file__).parent / "compiler" / "g++")
if sys.platform == "linux" and shutil.which("g++") and os.access(_COMPILER, os.X_OK) and shlex.quote(_COMPILER) == _COMPILER:
    os.environ.setdefault("CXX", _COMPILER)

settings.register_profile(
    "flexmask", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("flexmask")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device in turn; the GPU's turn carries the mark `gpu`."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_no_settings():
    """Settings that a test gives `register` and leaves would hold in all later tests of its process."""
    yield
    adapter = sys.modules.get("flexmask.integrations.huggingface.model_config")
    if adapter is not None:
        left, adapter._process_override = adapter._process_override, {}
        assert left == {}


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def without_kernel(monkeypatch):
    """Replace FlexAttention's output by zeros, so that nothing is compiled; gives the shapes of the queries."""
    shapes = []

    def zeros(inputs, *rest):
        shapes.append(tuple(inputs.query.shape))
        return inputs.value.new_zeros(*inputs.query.shape[:3], inputs.value.shape[3]), None

    monkeypatch.setattr("flexmask.attend.run_flex_attention", zeros)
    return shapes


@pytest.fixture
def matmul_precision():
    """Switch TF32 for float32 matmuls and read it; the settings are put back.

    Once both of torch's ways to set it were used, torch refuses the older one: tests use the newer one where there is one.
    """
    matmul = torch.backends.cuda.matmul
    newer = hasattr(matmul, "fp32_precision")
    name, on = ("fp32_precision", "tf32") if newer else ("allow_tf32", True)
    holders = [torch.backends, matmul] if newer else [matmul]  # the second may inherit from the first
    before = [getattr(holder, name) for holder in holders]
    if newer and before[0] == before[1]:
        before[1] = "none"  # inherited, or it might as well be
    yield SimpleNamespace(newer=newer, use_tf32=lambda: setattr(matmul, name, on), is_tf32=lambda: getattr(matmul, name) == on)
    for holder, value in zip(holders, before, strict=True):
        setattr(holder, name, value)


@pytest.fixture
def cuda():
    return torch.device("cuda")


@pytest.fixture
def nothing_waits(cuda):
    """A context in which whatever makes the host wait for the GPU raises."""

    @contextlib.contextmanager
    def context():
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                # torch warns once per process that this mode is a prototype
                warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    return context
