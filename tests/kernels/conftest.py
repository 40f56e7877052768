"""A kernel whose launches are noted instead of run."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def launched(monkeypatch):
    """A kernel as on a GPU, with `Launches` in the place of Triton's."""
    triton = pytest.importorskip("triton")
    from flexmask.kernels import launch
    from tests.kernels.launches import Launches, add

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip("launches go through this Triton")
    launches = Launches()
    monkeypatch.setattr(launch.triton, "jit", lambda function, do_not_specialize: launches.function)
    monkeypatch.setattr(launch.driver, "_active", SimpleNamespace(get_current_stream=lambda device: f"stream {device}"))
    run = launch.kernel(add)
    run.jit = launches
    return run, launches
