"""Keeps the results of the table's cells, and writes them down when all have run."""

import pytest

_RESULTS = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[_RESULTS] = {}


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
