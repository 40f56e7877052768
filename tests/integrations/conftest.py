"""Fixtures of the adapter's tests; the results of the table's cells are kept, and written down when all have run."""

import pytest
import torch

_RESULTS = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[_RESULTS] = {}


@pytest.fixture
def model():
    from tests.integrations.common import make_model

    return make_model()


@pytest.fixture
def tokens():
    from tests.integrations.common import BATCH, LENGTH
    from tests.integrations.families import VOCABULARY

    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def keep_result(request, cell):
    """Note the result of the cell under test; it counts if the test passes."""

    def keep(result):
        request.node.stash[_RESULTS] = {cell: result}

    return keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[_RESULTS].update(item.stash.get(_RESULTS, {}))
    return report


def pytest_sessionfinish(session):
    results = session.config.stash[_RESULTS]
    if not (results and session.config.getoption("all_cells")):
        return
    from tests.integrations import cells, support

    if results.keys() == set(cells.ALL_CELLS):
        support.PATH.write_text(support.support_table(results), encoding="utf-8")
