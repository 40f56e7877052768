"""Pictures: the Axes hold what they were given."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from flexmask.plot import plot_attention, plot_density

MASS = torch.eye(2)


@pytest.fixture
def pyplot():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")  # of other tests
    yield plt
    plt.close("all")


def head_rows():
    """Two calls: layer 5 ran dense, head 1 of layer 0 in one call."""
    rows = []
    for call, layer, head in itertools.product(range(2), (0, 1, 5), range(4)):
        dense = layer == 5 or (layer, head, call) == (0, 1, 1)
        values = {"pattern": "dense" if dense else "hybrid", "density": 1.0 if dense else 0.1 * (head + 1) + 0.02 * call}
        rows.append({"layer": layer, "head": head, "call": call, **values})
    return rows


def shown(axes):
    return torch.from_numpy(axes.get_images()[0].get_array().filled(math.nan))


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
    result = SimpleNamespace(rows=lambda: [{"layer": 0, "head": 0, "density": 0.25}])
    assert shown(plot_density(result)).tolist() == [[0.25]]
    # as from a generator, which is read once
    assert shown(plot_density(iter(head_rows())))[1, 0] == pytest.approx(0.11)


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
