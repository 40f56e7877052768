"""Pictures: the Axes hold what they were given."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from flexmask.plot import plot_attention, plot_density


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


def shown(axes, image=0):
    return torch.from_numpy(axes.get_images()[image].get_array().filled(math.nan))


def test_density_is_the_mean_of_the_sparse_calls(pyplot):
    axes = plot_density(head_rows())
    found = shown(axes)
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4]) + 0.01
    assert found[1].tolist() == pytest.approx(expected.tolist())
    assert found[0, 1] == pytest.approx(0.2)  # the call that ran dense apart
    assert found[2].isnan().all()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "5"]
    # hatched: layer 5
    assert [(patch.get_x(), patch.get_y()) for patch in axes.patches] == [(head / 4, 1.5) for head in range(4)]
    assert axes.get_xlabel() == "head (hatched: ran dense)"


def test_heat_maps_take_what_has_rows(pyplot):
    result = SimpleNamespace(rows=lambda: [{"layer": 0, "head": 0, "density": 0.25}])
    axes = plot_density(result)
    assert shown(axes).tolist() == [[0.25]]
    assert axes.get_xlabel() == "head"
    # as from a generator, which is read once
    assert shown(plot_density(iter(head_rows())))[1, 0] == pytest.approx(0.11)


def test_attention_is_drawn_by_what_the_mask_keeps_of_it(pyplot):
    mass = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.6, 0.3, 0.1]])
    kept = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    axes = plot_attention(mass, 32, kept)
    causal = torch.ones(3, 3).tril().bool()
    for image, part in enumerate((kept, ~kept)):
        assert torch.equal(shown(axes, image).nan_to_num(-1).float(), torch.where(causal & part, mass, -1))
    assert axes.get_title() == "Attention; the mask holds 73.3%"
    # a chunk of 40 rows after 24 tokens: its last block is partial
    axes = plot_attention(mass, 32, kept, lengths=(72, 96))
    assert not shown(axes)[2, 2].isnan() and not shown(axes, 1)[0, 1].isnan()
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 96), (72, 0))


def test_colours_of_what_is_kept_are_darker_in_grey(pyplot):
    axes = plot_attention(torch.eye(2), 32, torch.eye(2).bool())
    kept, left_out = (image.cmap([0.0, 0.5, 1.0])[:, :3] @ [0.299, 0.587, 0.114] for image in axes.get_images())
    assert kept.max() < left_out.min() - 0.1
    assert sorted(kept, reverse=True) == list(kept) and sorted(left_out, reverse=True) == list(left_out)


@pytest.mark.parametrize(
    ("draw", "given", "message"),
    [
        (plot_density, ([],), "got none"),
        (plot_density, ({"layer": 0},), "layer, head and density; got "),
        (plot_density, ([{"layer": 0, "head": 0}],), r"got \[\{'layer': 0, 'head': 0\}\]"),
        (plot_attention, (torch.eye(2), 32, torch.ones(2, 3)), r"both be .* got \(2, 2\) and \(2, 3\)"),
    ],
)
def test_wrong_arguments_are_refused(pyplot, draw, given, message):
    with pytest.raises(ValueError, match=message):
        draw(*given)
    assert not pyplot.get_fignums()
