"""Pictures: the Axes hold what they were given."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexmask import flexprefill_mask
from flexmask.plot import block_kinds, plot_attention, plot_block_mask, plot_density, plot_frontier

MASS = torch.eye(2)
HIDDEN, LEFT_OUT, PARTIAL, WHOLE = range(4)


@pytest.fixture
def pyplot():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")  # of other tests
    yield plt
    plt.close("all")


def causal_mask(q_len, kv_len):
    return create_block_mask(lambda b, h, q, k: k <= q + kv_len - q_len, 1, 2, q_len, kv_len, device="cpu", BLOCK_SIZE=32)


def sparse_mask():
    query, key = torch.randn(1, 4, 512, 16), torch.randn(1, 2, 512, 16)
    return flexprefill_mask(3 * query, key, gamma=0.5, block_size=32, min_budget=0)


def head_rows(layers=(0, 1, 5), heads=4):
    """Two calls: layer 5 ran dense, head 1 of layer 0 in one call."""
    rows = []
    for call in range(2):
        for layer in layers:
            for head in range(heads):
                dense = layer == 5 or (layer, head, call) == (0, 1, 1)
                distance = math.nan if dense else 0.05 + 0.1 * head + 0.01 * call
                pattern = "dense" if dense else "query-aware" if distance < 0.1 else "vertical-slash"
                density = 1.0 if dense else 0.1 * (head + 1) + 0.02 * call
                values = {"density": density, "coverage": 1.0 if dense else 0.95, "js_distance": distance, "pattern": pattern}
                rows.append({"layer": layer, "head": head, "call": call, **values})
    return rows


def shown(axes):
    return torch.from_numpy(axes.get_images()[0].get_array().filled(math.nan))


@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 128), (100, 100), (64, 160), (70, 150)])
def test_kinds_of_a_causal_mask(q_len, kv_len):
    mask = causal_mask(q_len, kv_len)
    kinds = block_kinds(mask, 1)
    with torch.device("meta"):  # the default device changes nothing
        assert torch.equal(block_kinds(mask, 1), kinds)
    visible = torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None]
    for row, rows in enumerate(visible.split(32)):
        for column, block in enumerate(rows.split(32, dim=1)):
            exists_whole = block.shape == (32, 32) and block.all()
            expected = WHOLE if exists_whole else PARTIAL if block.any() else HIDDEN
            # whether a short block counts as whole is for the mask to say
            assert kinds[row, column] == expected or (block.all() and kinds[row, column] == WHOLE)


def test_kinds_of_a_sparse_mask():
    query, key = torch.randn(2, 4, 320, 16), torch.randn(2, 2, 320, 16)
    mask = flexprefill_mask(3 * query, key, gamma=0.5, block_size=32, min_budget=0)
    kept = mask.to_dense().bool()
    causal = torch.ones(10, 10).tril().bool()
    for batch, head in ((0, 0), (1, 3)):
        kinds = block_kinds(mask, head, batch)
        assert torch.equal(kinds >= PARTIAL, kept[batch, head]) and torch.equal(kinds > HIDDEN, causal)
        assert torch.equal(kinds == PARTIAL, torch.eye(10).bool()) and (kinds == LEFT_OUT).any()


def test_kinds_without_full_blocks_and_with_leftovers_in_the_lists():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32)
    assert block_kinds(mask, 0).tolist() == [[PARTIAL, HIDDEN], [PARTIAL, PARTIAL]]


def test_block_mask_shows_its_kinds_and_both_colours(pyplot, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    mask = sparse_mask()
    axes, kinds = plot_block_mask(mask, 3, "mine"), block_kinds(mask, 3)
    assert torch.equal(torch.from_numpy(axes.get_images()[0].get_array().data), kinds)
    assert axes.get_title() == f"mine, density {(kinds >= 2).sum() / (kinds >= 1).sum():.1%}"
    axes.figure.savefig(tmp_path / "mask.png")
    pixels = (image.imread(tmp_path / "mask.png")[..., :3] * 255).round()
    for colour in ((240, 160, 47), (31, 95, 168), (233, 233, 237)):
        assert (pixels == torch.tensor(colour).numpy()).all(-1).sum() > 1000


def test_block_mask_draws_on_the_axes_it_is_given(pyplot):
    mine = pyplot.subplots()[1]
    assert plot_block_mask(causal_mask(128, 128), 1, axes=mine) is mine
    assert mine.get_title() == "head 1, density 100.0%" and len(pyplot.get_fignums()) == 1


def test_density_is_the_mean_of_the_sparse_calls(pyplot):
    axes = plot_density(head_rows())
    found = shown(axes)
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4]) + 0.01
    assert found[1].tolist() == pytest.approx(expected.tolist())
    assert found[0, 1] == pytest.approx(0.2)  # the call that ran dense apart
    assert found[2].isnan().all()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "5"]
    assert len(axes.patches) == 4  # hatched: layer 5
    assert axes.get_xlabel() == "head (hatched: ran dense)"
    assert {text.get_text() for text in axes.texts} >= {"0.11", "0.20", "0.41"}


def test_heat_maps_take_what_has_rows(pyplot):
    class Result:
        def rows(self):
            return [{"layer": 0, "head": 0, "density": 0.25}]

    assert shown(plot_density(Result())).tolist() == [[0.25]]
    # as from a generator, which is read once
    assert shown(plot_density(iter(head_rows())))[1, 0] == pytest.approx(0.11)


def test_frontier_lines_are_the_methods_by_density(pyplot):
    axes = plot_frontier({"a": [(0.3, 0.02), (0.2, 0.05)], "b": [(0.4, 0.01)]}, error="loss")
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"a": [[0.2, 0.05], [0.3, 0.02]], "b": [[0.4, 0.01]]}
    assert (axes.get_xlabel(), axes.xaxis.get_major_formatter()(0.3)) == ("density, %", "30")
    assert axes.get_ylabel() == "loss"
    styles = {(line.get_marker(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(styles) == 2


def test_attention_is_drawn_whole_through_the_mask_and_left_out(pyplot):
    mass = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.6, 0.3, 0.1]])
    kept = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    pictures = {part: plot_attention(mass, 32, kept, part) for part in ("all", "kept", "left out")}
    values = {part: torch.from_numpy(axes.get_images()[-1].get_array().filled(-1)).float() for part, axes in pictures.items()}
    causal = torch.ones(3, 3).tril().bool()
    assert torch.equal(values["all"], torch.where(causal, mass, -1))
    assert torch.equal(values["kept"], torch.where(kept, mass, -1))
    assert torch.equal(values["left out"], torch.where(causal & ~kept, mass, -1))
    titles = [axes.get_title() for axes in pictures.values()]
    assert titles == ["True attention", "Kept: 73.3% of it", "Left out: 26.7% of it"]


@pytest.mark.parametrize(
    ("draw", "given", "keywords", "error", "message"),
    [
        (plot_block_mask, causal_mask(64, 64), {"head": 2}, ValueError, r"head must be in \[0, 2\); got 2"),
        (plot_block_mask, causal_mask(64, 64), {"head": 0, "batch": 1}, ValueError, "batch must be in"),
        (plot_frontier, [(0.1, 0.2)], {}, TypeError, "methods must be a dict"),
        (plot_frontier, {}, {}, ValueError, "at least one"),
        (plot_frontier, {"a": []}, {}, ValueError, r"methods\['a'\] must hold"),
        (plot_frontier, {"a": [(0.1, 0.2, 0.3)]}, {}, ValueError, "pairs"),
        (plot_density, [], {}, ValueError, "at least one prefill call"),
        (plot_density, {"layer": 0}, {}, TypeError, r"must have rows\(\)"),
        (plot_density, [{"layer": 0}], {}, TypeError, "dicts with layer and head"),
        (plot_density, [{"layer": 0, "head": 0}], {}, ValueError, "must have density in every row; got layer, head"),
        (plot_attention, MASS, {"part": "rest"}, ValueError, "part must be one of all, kept, left out; got 'rest'"),
        (plot_attention, MASS, {"part": "kept"}, ValueError, "kept must be given"),
        (plot_attention, MASS, {"kept": torch.ones(2, 3)}, ValueError, r"both be .* got \[\(2, 2\), \(2, 3\)\]"),
    ],
)
def test_wrong_arguments_are_refused(pyplot, draw, given, keywords, error, message):
    with pytest.raises(error, match=message):
        draw(given, **keywords, **({"block_size": 32} if draw is plot_attention else {}))
    assert not pyplot.get_fignums()
