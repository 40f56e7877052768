"""The committed support table."""

import pytest

pytest.importorskip("transformers")

from tests.integrations.cells import ALL_CELLS
from tests.integrations.families import FAMILIES
from tests.integrations.support import PATH


def test_table_has_every_family_and_cell():
    text = PATH.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row[0].partition(":")[0] for row in rows] == list(FAMILIES)
    assert f"{len(ALL_CELLS)} cells" in text
    reasons = [line.partition(". ")[2] for line in text.splitlines() if line[:1].isdigit()]
    assert all(("refused" in column) <= bool(reasons) for row in rows for column in row)
