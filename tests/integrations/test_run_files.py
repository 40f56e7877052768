"""A run is saved and read back, whatever it holds and whoever records meanwhile."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from flexmask.integrations.prefill_calls import CallSize
from flexmask.integrations.recorded_run import FlexPrefillRun
from flexmask.integrations.settings import PrefillSettings
from tests.integrations.recorded_calls import HEADS, recorded, stats_of, without_nan


def test_a_saved_run_comes_back(tmp_path):
    run = recorded(10, max_calls=4)
    path = run.save(tmp_path / "new" / "run.json")
    assert not list(path.parent.glob("*.part"))
    found = FlexPrefillRun.load(path)
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
    run = FlexPrefillRun(max_calls=1)
    for _ in range(2):
        run.record(0, replace(stats_of(0), coverage=torch.full((1, HEADS), math.nan)), None, None, 0, CallSize(1, 100, 100))
    found = FlexPrefillRun.load(run.save(tmp_path / "run.json")).summary()
    assert found.dropped_calls == 1
    assert math.isnan(found.layers[0].coverage)
    assert found.layers[0].density == pytest.approx(run.summary().layers[0].density)


def test_calls_of_other_threads_wait_while_the_record_is_read(tmp_path, monkeypatch):
    run, kept = recorded(10, max_calls=4), FlexPrefillRun._kept
    read, threads = [], []

    def watched(self):
        found = kept(self)
        thread = threading.Thread(target=self.record, args=(0, stats_of(7), None, None, 99, CallSize(1, 50, 50)))
        thread.start()
        thread.join(0.05)
        read.append(thread.is_alive())
        threads.append(thread)
        return found

    monkeypatch.setattr(FlexPrefillRun, "_kept", watched)
    path = tmp_path / "run.json"
    for look in (run.rows, run.summary, lambda: run.save(path)):
        look()
        threads[-1].join()
    assert read == [True] * 3
    # what was dropped meanwhile is in the file once
    found = FlexPrefillRun.load(path)
    monkeypatch.undo()
    calls = {layer: each.calls for layer, each in found._dropped.items()}
    assert calls == {0: 6 + 2, 1: 6, 2: 6}


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"format": "flexmask tune 1"}', '{"format": "flexmask run 1", "calls": {"0": [{}]}}']
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"must be a file that run\.save wrote; got .*other\.json"):
        FlexPrefillRun.load(path)


def test_a_function_as_method_cannot_be_saved(tmp_path):
    from flexmask.block_masks import causal_mask

    with pytest.raises(ValueError, match="method must be a name"):
        FlexPrefillRun(PrefillSettings(method=causal_mask)).save(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())
