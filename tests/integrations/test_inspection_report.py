"""The report of an inspection: a self-contained page, pictures and numbers."""

import base64
import html
import json
import math
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib")

from flexmask.integrations.huggingface import PrefillSettings
from flexmask.integrations.inspect import Inspection, ShownHead, write_report
from flexmask.integrations.inspect.page import page
from flexmask.integrations.record import CallSize, PrefillRun
from flexmask.stats import dense_stats

HOSTILE = "</title><script>alert('x')</script> & <img src=http://example.com/a.png> \"quoted\""
DENSE = dense_stats(torch.zeros(1, 3, 1, 1))


def stats_of(method, layer):
    """Statistics of three heads; the third of layer 1 ran dense."""
    unknown = [math.nan] * 3
    own = {
        "density": [share + layer / 16 for share in (0.125, 0.25, 0.5)],
        "is_query_aware": [True, False, False],
        "js_distance": [0.05, 0.2, 0.3] if method == "flexprefill" else unknown,
        "coverage": unknown if method == "streaming_llm" else [0.9] * 3,
        "row_coverage": [0.6] * 3 if method == "hybrid" else unknown,
        "dense_heads": [False, False, layer == 1],
    }
    return replace(DENSE, **{name: torch.tensor([values]) for name, values in own.items()}, dense=False)


def inspection(method="flexprefill", dense=False, coverage=(0.9, 0.8, 0.8, 0.85)):
    """An inspection of three layers, of which the last, or all, ran dense."""
    run = PrefillRun(PrefillSettings(method))
    for layer in range(3):
        sparse = layer < 2 and not dense
        stats = stats_of(method, layer) if sparse else DENSE
        run.record(layer, stats, None, None if sparse else "in <dense_layers>", 0, CallSize(1, 96, 96))
    mass = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.6, 0.3, 0.1]])
    kept = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    row = next(row for row in run.rows() if (row["layer"], row["head"]) == (1, 2))
    heads = () if dense else (ShownHead(1, 2, "lowest density", mass, kept, row, 32),)
    about = {"model": "Model", "tokens": 96, "device": "1 CPU thread", "dtype": "float32", "torch": "2", "transformers": "5"}
    return Inspection(run, heads, {} if dense else {0: coverage, 1: coverage[::-1]}, about)


def words(text):
    """The text of a page, whose elements are closed."""
    for tag in set(re.findall(r"<([a-z]\w*)", text)) - {"meta", "link", "img", "br"}:
        assert len(re.findall(rf"<{tag}\b", text)) == text.count(f"</{tag}>"), tag
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", text)).split())


def test_a_report_is_one_page_that_loads_nothing(tmp_path):
    path = write_report(inspection(), tmp_path / "new" / "page.html", model=HOSTILE, prompt=HOSTILE)
    text = path.read_text(encoding="utf-8")
    loads = re.compile(r"^<script|\son\w+=|\s(src|href|action|data|srcset)=(?!\"data:)")
    assert not any(map(loads.search, re.findall(r"<[^>]*>", text)))
    assert not re.search(r"@import|url\(", text)
    # title, heading and prompt
    assert words(text).count(" ".join(HOSTILE.split())) == 3
    assert "in <dense_layers>" in words(text)
    images = re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)"', text)
    assert len({base64.b64decode(image) for image in images}) == 2  # density, and one head
    assert len(re.findall(r'<img [^>]*alt="[^"]+\."', text)) == len(images)
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]


def test_the_page_holds_the_numbers():
    said = words(page(inspection(), "model", "prompt"))
    for part in (
        "2 of 3 layers sparse",
        "Layer 1, head 2 Shown for: lowest density. Vertical-slash, density 56.2%.",
        "This head's mask was not used: dense attention is faster",
        "layerfirst quartersecondthirdlast090.0%80.0%80.0%85.0%185.0%80.0%80.0%90.0%",
        '{"method": "flexprefill", "gamma": 0.95, ',
    ):
        assert part in said


@pytest.mark.parametrize("method", ["hybrid", "streaming_llm"])
def test_what_a_method_does_not_compute_is_left_out(method):
    found = inspection(method)
    said = words(page(found, "model", "prompt"))
    assert "nan" not in said
    assert ("By hybrid's estimate its query blocks keep 60.0% of their attention." in said) == (method == "hybrid")
    assert f'"method": "{method}"' in said
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_dense_prompt_is_reported_as_one(tmp_path):
    import matplotlib.pyplot as plt

    before, found = plt.get_fignums(), inspection(dense=True)
    text = write_report(found, tmp_path / "page.html", model="\udc80", prompt="a \ud83d b").read_text(encoding="utf-8")
    assert r"a \ud83d b" in words(text)  # halves of character pairs
    assert text.count("<img ") == 1
    assert plt.get_fignums() == before  # no figure stays open
    assert "Every layer ran dense: there is no mask." in words(text)
    assert "Coverage by position" not in words(text)


def test_nothing_is_written_where_a_picture_cannot_be_drawn(tmp_path):
    found = inspection()
    found = replace(found, heads=(replace(found.heads[0], kept=torch.ones(2, 2)),))
    with pytest.raises(ValueError, match="mass and kept must both be"):
        write_report(found, tmp_path / "new" / "page.html")
    assert not (tmp_path / "new").exists()
