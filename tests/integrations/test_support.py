"""The committed support table, and the cells that run by default."""

import itertools

import pytest

pytest.importorskip("transformers")

from tests.integrations.cells import ALL_CELLS, FEWER_CELLS
from tests.integrations.families import FAMILIES
from tests.integrations.support import PATH


def test_table_has_every_family_and_cell():
    text = PATH.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0].partition(":")[0] for row in rows] == list(FAMILIES)
    assert f"{len(ALL_CELLS)} cells" in text
    reasons = [line.partition(". ")[2] for line in text.splitlines() if line[:1].isdigit()]
    assert all(("refused" in column) <= bool(reasons) for row in rows for column in row)


def test_fewer_cells_have_every_pair_of_choices():
    def pairs(cells):
        return {pair for cell in cells for pair in itertools.combinations(cell, 2)}

    assert len(FEWER_CELLS) < len(ALL_CELLS) / 4
    assert pairs(FEWER_CELLS) == pairs(ALL_CELLS)
    for family in FAMILIES:
        kinds = {cell[1:4] for cell in FEWER_CELLS if cell.family == family}
        assert kinds >= {("dynamic", "unpadded", "one-shot"), ("dynamic", "left", "one-shot"), ("static", "unpadded", "one-shot")}
