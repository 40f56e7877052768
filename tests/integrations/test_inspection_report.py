"""The report of an inspection: a self-contained page, pictures and numbers."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

pytest.importorskip("matplotlib")

from flexmask.integrations.huggingface import PrefillSettings
from flexmask.integrations.inspect import Inspection, ShownHead, write_report
from flexmask.integrations.inspect.page import NAMED, RULE, page
from flexmask.integrations.record import CallSize, PrefillRun
from flexmask.stats import dense_stats

HOSTILE = "</title><script>alert('x')</script> & <img src=http://example.com/a.png> \"quoted\""
HEADS = torch.zeros(1, 3)


def stats_of(method, layer):
    """Statistics of three heads; the third of layer 1 ran dense."""
    nan, some, counts = HEADS + torch.nan, HEADS + 0.9, torch.ones(1, 3, dtype=torch.int64)
    distance = torch.tensor([[0.05, 0.2, 0.3]]) if method == "flexprefill" else nan
    coverage = nan if method == "streaming_llm" else some
    density = torch.tensor([[0.125, 0.25, 0.5]]) + layer / 16
    is_dense = torch.tensor([[False, False, layer == 1]])
    own = {"is_query_aware": distance < 0.1, "js_distance": distance, "coverage": coverage, "row_coverage": nan}
    own |= {"density": density, "num_vertical_blocks": counts, "num_slash_blocks": counts, "is_dense": is_dense}
    return replace(dense_stats(HEADS[..., None, None]), **own, dense=False)


def inspection(method="flexprefill", dense=False, why="lowest density", held=(0.9, 0.8, 0.8, 0.85)):
    """An inspection of three layers, of which the last, or all, ran dense."""
    run = PrefillRun(PrefillSettings(method))
    for layer in range(3):
        sparse = layer < 2 and not dense
        stats = stats_of(method, layer) if sparse else dense_stats(torch.zeros(1, 3, 1, 1))
        run.record(layer, stats, None, None if sparse else "in <dense_layers>", 0, CallSize(1, 96, 96))
    mass = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.6, 0.3, 0.1]])
    kept = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    row = next(row for row in run.rows() if (row["layer"], row["head"]) == (1, 2))
    heads = () if dense else (ShownHead(1, 2, why, mass, kept, row, 32),)
    about = {"model": "Model", "tokens": 96, "device": "1 CPU thread", "dtype": "float32", "torch": "2", "transformers": "5"}
    return Inspection(run, heads, {} if dense else {0: held, 1: held}, about)


class Page(HTMLParser):
    """Tags, text and open elements of a page."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())


def words_of(found, prompt="prompt"):
    return Page(page(found, "model", prompt)).words


def test_a_report_is_one_page_that_loads_nothing_and_one_file_of_figures(tmp_path):
    found = inspection()
    path = write_report(found, tmp_path / "new", model=HOSTILE, prompt=HOSTILE)
    text = path.read_text(encoding="utf-8")
    parsed = Page(text)
    for tag, attributes in parsed.tags:
        assert tag != "script"
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "action", "data", "srcset"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, name)
    assert not re.search(r"@import|url\(", text)
    # title, heading and prompt
    assert "".join(parsed.text).count(HOSTILE) == 3
    assert "in <dense_layers>" in parsed.words
    images = [attributes for tag, attributes in parsed.tags if tag == "img"]
    inside = {base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) for image in images}
    assert len(inside) == 4  # density; attention, kept and left out
    assert all(image["alt"].endswith(".") for image in images)
    assert {file.name for file in path.parent.iterdir()} == {"report.html", "inspection.json"}
    saved = json.loads((path.parent / "inspection.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert saved == json.loads(json.dumps(found.to_dict()))


def test_the_page_holds_the_numbers():
    words = words_of(inspection())
    # 2.2 of 3 rows' attention
    assert "The mask holds 73.3% of all rows' attention, 90.0% of the last rows'" in words
    assert "2 of 3 layers sparse" in words
    assert "Vertical-slash, density 56.2%." in words
    assert "This head's mask was not used: dense attention is faster" in words
    assert RULE in words
    assert "layerfirst quartersecondthirdlastall90.0%80.0%80.0%85.0%090.0%" in words
    assert "Raise gamma" not in words
    words = words_of(inspection(why=NAMED, held=(0.9, 0.8, 0.7, 0.6)))
    assert RULE not in words
    assert "The mask holds 60.0% of the attention of the prompt's last quarter" in words


@pytest.mark.parametrize("method", ["hybrid", "streaming_llm"])
def test_what_a_method_does_not_compute_is_left_out(method):
    found = inspection(method)
    words = words_of(found)
    assert "nan" not in words
    assert f"method {method}: " in words
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_dense_prompt_is_reported_as_one(tmp_path):
    import matplotlib.pyplot as plt

    before, found = plt.get_fignums(), inspection(dense=True)
    text = write_report(found, tmp_path).read_text(encoding="utf-8")
    words = Page(text).words
    assert text.count("<img ") == 1
    assert plt.get_fignums() == before  # no figure stays open
    assert "The layers to show ran dense: there is no mask." in words
    assert "Attention held" not in words


def test_half_of_a_character_pair_in_the_prompt_is_written_out(tmp_path):
    path = write_report(inspection(dense=True), tmp_path, model="\udc80", prompt="a \ud83d b")
    assert r"a \ud83d b" in Page(path.read_text(encoding="utf-8")).words
    assert (tmp_path / "inspection.json").exists()


def test_nothing_is_written_where_a_picture_cannot_be_drawn(tmp_path):
    found = inspection()
    found = replace(found, heads=(replace(found.heads[0], kept=torch.ones(2, 2)),))
    with pytest.raises(RuntimeError, match="must match the size"):
        write_report(found, tmp_path / "new")
    assert not (tmp_path / "new").exists()
