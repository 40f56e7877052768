"""A run's rows, summary and bounds, on recorded calls."""

import json
import math
import threading
from dataclasses import replace

import pytest
import torch

from flexmask import SelectionStats
from flexmask.integrations.record import MAX_CALLS, PrefillRun
from flexmask.integrations.record.calls import MAX_REASONS, OTHER_REASONS, CallSize, LayerTotals
from flexmask.settings import PrefillSettings
from flexmask.stats import dense_stats as dense_stats_of

HEADS = 4


def stats_of(seed, batch=1, hybrid=False):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS)
    names = ("density", "coverage", "row_coverage", "min_row_coverage", "js_distance")
    own = {name: torch.rand(shape, generator=generator) for name in names}
    own |= {name: own["density"] < most for name, most in (("is_query_aware", 0.4), ("dense_heads", 0.2))}
    unknown = ("js_distance",) if hybrid else ("row_coverage", "min_row_coverage")
    own |= {name: torch.full(shape, math.nan) for name in unknown}
    return replace(dense_stats(batch), **own, dense=False)


def holding(hybrid=True, **shares):
    """Of a call all of whose heads ran sparse, statistics by head."""
    shares = {name: torch.tensor([share]) for name, share in shares.items()}
    return replace(stats_of(0, hybrid=hybrid), dense_heads=torch.zeros(1, HEADS, dtype=torch.bool), **shares)


def dense_stats(batch=1):
    return dense_stats_of(torch.zeros(batch, HEADS, 1, 1))


def recorded(calls=6, max_calls=None, **options):
    """Layer 0 sparse; layer 1 dense in every third call; layer 2 dense."""
    run = PrefillRun(PrefillSettings(method="flexprefill", gamma=0.9, tau=0.2), max_calls=max_calls, **options)
    for call in range(calls):
        batch, q_len = 1 + call % 2, 100 + 10 * call
        size = CallSize(batch, q_len, q_len + 64 * (call % 2))
        run.record(0, stats_of(call, batch), call, None, 10 + call, size)
        of_two = (dense_stats(batch), None, "short") if call % 3 == 0 else (stats_of(50 + call, batch), None, None)
        run.record(1, *of_two, 10 + call, size)
        run.record(2, dense_stats(batch), None, "in dense_layers", 10 + call, size)
    return run


def rounded(summary):
    return json.loads(json.dumps(summary.to_dict()), parse_float=lambda number: round(float(number), 6))


def test_rows_are_the_statistics():
    run = recorded(2)
    rows = run.rows()
    assert len(rows) == 3 * (1 + 2) * HEADS
    for row in rows:
        stats = run.stats[row["layer"]][row["call"]]
        assert row["density"] == float(stats.density[row["batch"], row["head"]])
        assert row["coverage"] == float(stats.coverage[row["batch"], row["head"]])
        assert (row["q_len"], row["seq_len"]) == [(100, 100), (110, 174)][row["call"]]
        assert (row["pattern"] == "dense") == stats.dense


def test_summary_adds_up_the_rows():
    pandas = pytest.importorskip("pandas")
    run = recorded()
    summary, rows = run.summary(), pandas.DataFrame(run.rows())
    assert summary.prefills == 6
    assert summary.tokens == sum((1 + call % 2) * (100 + 10 * call) for call in range(6))
    for layer in summary.layers:
        of_layer = rows[rows.layer == layer.layer]
        pairs = of_layer.q_len * of_layer.seq_len - of_layer.q_len * (of_layer.q_len - 1) / 2
        assert layer.density == pytest.approx((pairs * of_layer.density).sum() / pairs.sum(), rel=1e-6)
        sparse = of_layer[of_layer.pattern != "dense"]
        assert layer.coverage == (pytest.approx(sparse.coverage.mean(), rel=1e-6) if len(sparse) else None)
        assert layer.patterns == pytest.approx(sparse.pattern.value_counts(normalize=True).to_dict())
        assert layer.dense_heads == pytest.approx(sparse.reason.notna().mean() if len(sparse) else 0)
    assert [layer.ran for layer in summary.layers] == ["sparse", "both", "dense"]
    assert [layer.dense_calls for layer in summary.layers] == [0, 2, 6]
    assert summary.layers[1].reasons == {"short": 2}
    assert json.loads(json.dumps(summary.to_dict()))["layers"][2]["ran"] == "dense"


def test_summary_is_short_and_prints_a_line_a_layer():
    run = recorded()
    summary = run.summary()
    said = f"6 prefills of 9 sequences, 1,140 tokens in all, density {summary.density:.1%}, "
    assert repr(summary).startswith(f"<RunSummary: {said}") and repr(summary).endswith("2 of 3 layers sparse>")
    lines = str(summary).splitlines()
    assert len(lines) == 6
    shares = (summary.layers[0].density, summary.layers[0].coverage, summary.layers[0].lowest)
    assert lines[2].split()[:5] == ["0", "sparse", *(f"{share:.1%}" for share in shares)]
    assert "both (2 of 6 calls dense)" in lines[3]
    assert lines[4].endswith("in dense_layers")
    assert lines[5].startswith("heads that keep less than 25% of some rows' attention: layer ")
    assert len(repr(run)) < 100
    assert "2 of 3 layers sparse" in repr(run)


def test_heads_that_keep_little_of_some_rows_are_named_in_one_line():
    run = PrefillRun()
    for layer, held in ((0, [0.9, 0.12, 0.3, 0.9]), (1, [0.9, 0.9, 0.9, 0.06]), (2, [0.9, 0.9, 0.9, 0.9])):
        for _ in range(2):
            run.record(layer, holding(coverage=held, min_row_coverage=held), None, None, None, CallSize(1, 100, 100))
    assert [(each.layer, each.head) for each in run.summary().low_heads] == [(1, 3), (0, 1)]
    assert run.summary().layers[0].patterns == {"hybrid": 1.0}
    assert {row["pattern"] for row in run.rows()} == {"hybrid"}
    line = "heads that keep less than 25% of some rows' attention: layer 1 head 3 6%, layer 0 head 1 12%"
    assert str(run.summary()).splitlines()[-1] == run.summary().warning == line


def test_a_row_of_padding_alone_changes_no_coverage_and_names_no_head():
    runs = PrefillRun(), PrefillRun()
    alone = holding()
    # such a row keeps nothing of nothing
    tensors = {name: x for name, x in vars(alone).items() if name != "dense"}
    empty = {name: torch.full_like(x, math.nan if name == "js_distance" else 0) for name, x in tensors.items()}
    padded = replace(alone, **{name: torch.cat([x, empty[name]]) for name, x in tensors.items()})
    for run, stats in zip(runs, (alone, padded), strict=True):
        run.record(0, stats, None, None, None, CallSize(len(stats.density), 100, 100))
    expected, found = (rounded(run.summary()) for run in runs)
    assert found["low_heads"] == expected["low_heads"]
    for name in ("coverage", "row_coverage", "lowest"):
        assert found["layers"][0][name] == expected["layers"][0][name]


def test_calls_beyond_the_cap_are_dropped_but_counted():
    whole, capped = (recorded(20, max_calls=most, collect_masks=True) for most in (None, 4))
    assert (whole.masks[0][-4:], len(whole.masks[0])) == (capped.masks[0], 20)
    for layer in range(3):
        assert len(capped.calls[layer]) == 4
        assert capped.stats[layer][0].density.tolist() == whole.stats[layer][16].density.tolist()
    assert str(capped.rows()) == str([row for row in whole.rows() if row["call"] >= 16])
    assert rounded(capped.summary()) == {**rounded(whole.summary()), "dropped_calls": 3 * 16}


def test_runs_are_bounded_by_default():
    assert PrefillRun().max_calls == MAX_CALLS == 512
    run = PrefillRun(max_calls=3)
    for length in range(100):
        run.record(0, dense_stats(), None, f"{length} tokens", length, CallSize(1, length, length))
    reasons = run.summary().layers[0].reasons
    assert sum(reasons.values()) == 100
    assert len(reasons) <= MAX_REASONS + 1
    assert reasons[OTHER_REASONS] > 80


@pytest.mark.parametrize(("max_calls", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_cap_that_is_none_is_refused(max_calls, error):
    with pytest.raises(error, match="max_calls must be"):
        PrefillRun(max_calls=max_calls)


PACK = [(5, CallSize(1, tokens, tokens, sequence)) for sequence, tokens in enumerate((100, 50, 20))]


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        # a layer may call attention twice
        ([(prefill, CallSize(1, 100, 100)) for prefill in (5, 5, 6)], "2 prefills, 200 tokens"),
        ([(5, CallSize(2, 100, 100))], "1 prefill of 2 sequences, 200 tokens"),
        ([*PACK, *PACK], "1 prefill of 3 sequences, 170 tokens"),
    ],
    ids=["prompts", "a batch", "a pack"],
)
def test_tokens_of_a_prefill_count_once(calls, said):
    run = PrefillRun()
    for prefill, size in calls:
        run.record(0, stats_of(prefill, size.batch), None, None, prefill, size)
    assert [call.prefill for call in run.calls[0]] == [prefill - 5 for prefill, _ in calls]
    assert repr(run.summary()).startswith(f"<RunSummary: {said} in all, ")


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_layer_shows_what_all_its_rows_keep_where_the_method_knows(by_rows):
    # the last rows of hybrid are dense, and keep all
    shares = {"coverage": [1.0] * 4, "row_coverage": [0.6, 0.7, 0.8, 0.9], "min_row_coverage": [0.38, 0.5, 0.6, 0.7]}
    given, run = shares if by_rows else {"coverage": shares["row_coverage"]}, PrefillRun()
    run.record(0, holding(hybrid=False, **given), None, None, 0, CallSize(1, 9, 9))
    run.record(1, dense_stats(), None, "short", 0, CallSize(1, 9, 9))
    sparse, dense = run.summary().layers
    assert sparse.coverage == pytest.approx(1.0 if by_rows else 0.75)
    assert sparse.row_coverage == (pytest.approx(0.75) if by_rows else None)
    assert (dense.coverage, dense.row_coverage, dense.lowest) == (None, None, None)
    lines = [line.split()[3:5] for line in str(run.summary()).splitlines()[1:]]
    expected = ["row_coverage", "38.0%"] if by_rows else ["coverage", "60.0%"]
    assert lines == [[expected[0], "lowest"], ["75.0%", expected[1]], ["-", "-"]]


def test_reset_forgets_all_calls():
    run = recorded(8, max_calls=2)
    run.reset()
    assert (run.rows(), run.summary().density, run.dense_summary()) == ([], None, None)
    assert str(run.summary()) == "<RunSummary: 0 prefills, 0 tokens in all, 0 of 0 layers sparse>"
    run.record(0, stats_of(1), None, None, 30, CallSize(1, 7, 7))
    assert (run.summary().prefills, run.summary().tokens, run.max_calls) == (1, 7, 2)


def test_calls_of_other_threads_wait_while_the_record_is_read(monkeypatch):
    run, copied = recorded(10, max_calls=4), LayerTotals.with_calls
    read, threads = [], []

    def watched(totals, calls):
        if calls == () and totals is run._dropped_totals[0]:  # the record is read
            thread = threading.Thread(target=run.record, args=(0, stats_of(7), None, None, 99, CallSize(1, 50, 50)))
            thread.start()
            thread.join(0.05)
            read.append(thread.is_alive())
            threads.append(thread)
        return copied(totals, calls)

    monkeypatch.setattr(LayerTotals, "with_calls", watched)
    for look in (run.rows, run.summary):
        look()
        threads[-1].join()
    assert read == [True] * 2


@pytest.mark.gpu
def test_statistics_on_a_gpu(nothing_waits):
    run = PrefillRun(max_calls=2)
    names = [name for name in vars(stats_of(0)) if name != "dense"]
    host = PrefillRun(max_calls=2)
    for call in range(5):
        stats = stats_of(call)
        with torch.cuda.device(0):
            torch.cuda.synchronize()
            on_gpu = SelectionStats(**{name: getattr(stats, name).cuda() for name in names})
            with nothing_waits():
                run.record(0, on_gpu, None, None, call, CallSize(1, 100, 100))
        host.record(0, stats, None, None, call, CallSize(1, 100, 100))
    assert str(run.rows()) == str(host.rows())
    assert run.summary().density == pytest.approx(host.summary().density)
