"""Settings for all tests: hypothesis without deadlines (a first call may compile), GPU tests only where there is a GPU."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # read when flexmask's Triton kernels are defined, that is before its first import
    os.environ["TRITON_INTERPRET"] = "1"

# fresh cases in every run; a failure prints the blob that brings its case back
settings.register_profile(
    "flexmask", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("flexmask")


def pytest_addoption(parser):
    parser.addoption("--all-cells", action="store_true", help="every cell of the table of transformers' models, not a choice")


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


@pytest.fixture
def cuda():
    """The GPU, for tests marked `gpu`."""
    return torch.device("cuda")
