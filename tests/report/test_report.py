"""The report of an inspection: numbers, pictures and a page that stands alone."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from flexmask import FlexPrefillStats
from flexmask.integrations.inspection import Inspection, ShownHead
from flexmask.integrations.inspection_calls import LayerTime, StageTimes
from flexmask.integrations.inspection_heads import ASKED, RULE
from flexmask.integrations.prefill_calls import CallSize
from flexmask.integrations.recorded_run import FlexPrefillRun
from flexmask.report.images import Image, head_images
from flexmask.report.page import page
from flexmask.report.write import write_report
from flexmask.stats import empty_stats

HOSTILE = "</title><script>alert('x')</script> & <img src=http://example.com/a.png> \"quoted\""
HEADS = 3


def stats_of(layer, hybrid):
    shape = (1, HEADS)
    nan, some = torch.full(shape, math.nan), torch.full(shape, 0.9)
    density = torch.tensor([[0.125, 0.25, 0.5]]) + layer / 16
    counts = torch.ones(shape, dtype=torch.int64)
    query_aware = torch.tensor([[not hybrid, False, False]])
    distance = nan if hybrid else torch.tensor([[0.05, 0.2, 0.3]])
    is_dense = torch.tensor([[False, False, layer == 1]])
    return FlexPrefillStats(query_aware, distance, density, counts, counts, some, some if hybrid else nan, is_dense)


def inspection(hybrid=False, dense=False, why="lowest density"):
    run = FlexPrefillRun()
    size = CallSize(1, 96, 96)
    for layer in range(3):
        sparse = layer < 2 and not dense
        stats = stats_of(layer, hybrid) if sparse else empty_stats(torch.zeros(1, HEADS, 1, 1), dense=True)
        run.record(layer, stats, None, None if sparse else "in <dense_layers>", 0, size)
    mass = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.6, 0.3, 0.1]])
    kept = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    row = next(row for row in run.rows() if (row["layer"], row["head"]) == (1, 2))
    heads = () if dense else (ShownHead(1, 2, why, mass, kept, row, 32),)
    times = StageTimes(2.5, tuple(LayerTime(layer, 0.5, 0.125 if layer < 2 else 0.0) for layer in range(3)))
    about = {"model": "Model", "tokens": 96, "device": "1 CPU thread", "dtype": "float32", "torch": "2", "transformers": "5"}
    return Inspection(run, times, heads, about)


class Page(HTMLParser):
    """Tags of a page, its text, and what it opens without closing."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.tags, self.text = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(path):
    page = Page(path.read_text(encoding="utf-8"))
    assert (page.open, page.wrong) == ([], [])
    return page


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """An inspection, the folder of its report, and the page; model and prompt have markup for names."""
    found = inspection()
    path = write_report(found, tmp_path_factory.mktemp("report"), model=HOSTILE, prompt=HOSTILE)
    return found, path.parent, page_of(path)


def text_of(found):
    """The text of a page whose pictures are not drawn."""
    blank = Image("density", "None.", bytes(24))
    parsed = Page(page(found, [blank], [[blank] * 3 for _ in found.heads], "model", "prompt"))
    assert (parsed.open, parsed.wrong) == ([], [])
    return " ".join("".join(parsed.text).split())


def test_page_loads_nothing(written):
    _, folder, page = written
    assert not page.of("script")
    for attribute in ("src", "href", "action", "data", "srcset"):
        for tag, attributes in page.tags:
            assert attributes.get(attribute, "data:").startswith("data:"), (tag, attribute)
    assert not re.search(r"@import|url\(", (folder / "report.html").read_text(encoding="utf-8"))
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.of("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")


def test_texts_of_others_are_escaped(written):
    text = "".join(written[2].text)
    assert text.count(HOSTILE) == 3  # title, heading, prompt
    assert "in <dense_layers>" in text


def test_pictures_in_the_page_are_the_files(written):
    _, folder, page = written
    images = page.of("img")
    inside = [base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) for image in images]
    assert set(inside) == {file.read_bytes() for file in folder.glob("*.png")}
    assert len(set(inside)) == 4 + 3
    assert all(image["alt"].endswith(".") for image in images)
    assert {file.name for file in folder.iterdir()} >= {"report.html", "inspection.json", "density.png", "layer1-head2-kept.png"}


def test_page_says_the_numbers(written):
    found = written[0]
    text = text_of(found)
    kept = found.heads[0].attention_kept
    assert kept == pytest.approx(2.2 / 3)
    assert f"Kept are {kept:.1%} of all rows' attention, 90.0% of the last rows'" in text
    assert f"{found.summary.density:.3f}" in text
    assert "2 of 3" in text
    # 2 * .125 s of selection, 3 * .5 s of calls, 2.5 s in all
    for stage in ("selection250.0 ms10.0%", "attention1.25 s50.0%", "rest1.00 s40.0%"):
        assert stage in text
    assert "This head's mask was not used: dense attention is faster" in text
    assert RULE in text
    assert RULE not in text_of(inspection(why=ASKED))


def test_numbers_are_json(written):
    found, folder, _ = written
    text = (folder / "inspection.json").read_text(encoding="utf-8")
    saved = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert saved == found.to_dict()
    assert saved["seconds"]["total"] == 2.5
    assert saved["shown"][0]["attention_kept"] == found.heads[0].attention_kept
    assert None in [row["distance"] for row in saved["rows"]]


def test_hybrid_selection_has_no_picture_of_distances(written):
    names = {"density", "patterns", "distances", "coverage"}
    assert {path.stem for path in written[1].glob("*.png") if "head" not in path.stem} == names
    found = inspection(hybrid=True)
    assert {image.name for image in head_images(found)} == names - {"distances"}
    assert "No Jensen-Shannon distances: hybrid selection takes none" in text_of(found)
    assert "Jensen-Shannon" not in text_of(written[0])


def test_dense_prompt_says_so():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    found = inspection(dense=True)
    assert {image.name for image in head_images(found)} == {"density", "patterns"}
    assert plt.get_fignums() == before  # no figure stays open
    text = text_of(found)
    assert "The layers to show ran dense: there is no mask." in text
    assert "hybrid selection takes none" not in text
