"""A run is saved and read back."""

import json
import math
import os
import threading
from dataclasses import replace

import pytest
import torch

from flexmask.integrations.record import PrefillRun
from flexmask.integrations.record.calls import CallSize, LayerTotals
from tests.integrations.recorded_calls import HEADS, recorded, stats_of, without_nan


def test_a_saved_run_comes_back(tmp_path):
    run = recorded(10, max_calls=4)
    path = run.save(tmp_path / "new" / "run.json")
    assert not list(path.parent.glob("*.part"))
    found = PrefillRun.load(path)
    assert found.settings == run.settings
    assert without_nan(found.rows()) == without_nan(run.rows())
    assert found.summary() == run.summary()
    assert repr(found) == repr(run)
    # strict JSON: other readers know no NaN
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    # and it goes on counting
    for each in (run, found):
        each.record(0, stats_of(99), None, None, 99, CallSize(1, 50, 50))
    assert found.summary().prefills == run.summary().prefills == 11
    assert found.summary().tokens == run.summary().tokens


def test_a_dropped_call_that_is_not_finite_is_saved(tmp_path):
    run = PrefillRun(max_calls=1)
    for _ in range(2):
        run.record(0, replace(stats_of(0), coverage=torch.full((1, HEADS), math.nan)), None, None, 0, CallSize(1, 100, 100))
    found = PrefillRun.load(run.save(tmp_path / "run.json")).summary()
    assert found.dropped_calls == 1
    assert found.layers[0].coverage is None
    assert found.layers[0].density == pytest.approx(run.summary().layers[0].density)


def test_calls_of_other_threads_wait_while_the_record_is_read(tmp_path, monkeypatch):
    run, copied = recorded(10, max_calls=4), LayerTotals.with_calls
    read, threads = [], []

    def watched(totals, calls):
        if calls == () and totals is run._dropped[0]:  # the record is read
            thread = threading.Thread(target=run.record, args=(0, stats_of(7), None, None, 99, CallSize(1, 50, 50)))
            thread.start()
            thread.join(0.05)
            read.append(thread.is_alive())
            threads.append(thread)
        return copied(totals, calls)

    monkeypatch.setattr(LayerTotals, "with_calls", watched)
    path = tmp_path / "run.json"
    for look in (run.rows, run.summary, lambda: run.save(path)):
        look()
        threads[-1].join()
    assert read == [True] * 3
    monkeypatch.undo()
    found = PrefillRun.load(path)
    calls = {layer: each.calls for layer, each in found._dropped.items()}
    assert calls == {0: 6 + 2, 1: 6, 2: 6}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"[1]", b'{"format": "flexmask tune 1"}', b'{"format": "flexmask run 5", "calls": {"0": [{}]}}'),
        *(b"[" * 100_000, '{"format": "flexmask run 5"}'.encode("utf-16"), b"\xff\xfe"),
    ],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"must be a file that run\.save wrote; got .*other\.json"):
        PrefillRun.load(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("calls", "0", 0, "density"), [[]]),
        (("calls", "0", 0, "density", 0), [0.5]),  # of one head, where there are four
        (("calls", "0", 0, "coverage", 0, 0), 10**400),
        (("calls", "0", 0, "num_slash_blocks", 0, 0), None),
        (("calls", "0", 0, "reason"), ["short"]),
        (("calls", "0", 0, "size", 2), 10**400),
        (("calls", "0", 0, "prefill"), -1),
        (("dropped", "0", "sums"), {"pairs": 0.5}),
        (("dropped", "0", "calls"), "6"),
        (("dropped", "0", "pairs"), math.inf),
        (("dropped", "0", "reasons"), {"short": None}),
        (("tokens", "0"), 0.5),
    ],
)
def test_files_with_wrong_values_are_refused(tmp_path, place, value):
    path = recorded(10, max_calls=4).save(tmp_path / "run.json")
    saved = json.loads(path.read_text())
    part = saved
    for key in place[:-1]:
        part = part[key]
    assert place[-1] in part if isinstance(part, dict) else place[-1] < len(part)
    part[place[-1]] = value
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"must be a file that run\.save wrote"):
        PrefillRun.load(path)


def test_what_is_no_regular_file_is_refused(tmp_path):
    """A FIFO would be waited for."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs named pipes")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="path must be a regular file"):
            PrefillRun.load(path)
