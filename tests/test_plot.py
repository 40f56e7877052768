"""Pictures of block masks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexmask import flexprefill_mask
from flexmask.plot import block_kinds, plot_block_mask

HIDDEN, LEFT_OUT, PARTIAL, WHOLE = range(4)


def causal_mask(q_len, kv_len):
    return create_block_mask(lambda b, h, q, k: k <= q + kv_len - q_len, 1, 2, q_len, kv_len, device="cpu", BLOCK_SIZE=32)


@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 128), (100, 100), (64, 160), (70, 150)])
def test_kinds_of_a_causal_mask(q_len, kv_len):
    mask = causal_mask(q_len, kv_len)
    kinds = block_kinds(mask, 1)
    visible = torch.arange(kv_len) <= torch.arange(kv_len - q_len, kv_len)[:, None]
    for row, rows in enumerate(visible.split(32)):
        for column, block in enumerate(rows.split(32, dim=1)):
            exists_whole = block.shape == (32, 32) and block.all()
            expected = WHOLE if exists_whole else PARTIAL if block.any() else HIDDEN
            # whether a short block that is seen whole counts as whole is for the mask to say
            assert kinds[row, column] == expected or (block.all() and kinds[row, column] == WHOLE)


def test_kinds_of_a_sparse_mask():
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 320, 16), torch.randn(2, 2, 320, 16)
    mask = flexprefill_mask(3 * query, key, gamma=0.5, block_size=32, min_budget=0)
    kept = mask.to_dense().bool()
    causal = torch.ones(10, 10).tril().bool()
    for batch, head in ((0, 0), (1, 3)):
        kinds = block_kinds(mask, head, batch)
        assert torch.equal(kinds >= PARTIAL, kept[batch, head])
        assert torch.equal(kinds > HIDDEN, causal)
        assert torch.equal(kinds == PARTIAL, torch.eye(10).bool())
        assert (kinds == LEFT_OUT).any()


def test_default_device_changes_nothing():
    mask = causal_mask(70, 150)
    expected = block_kinds(mask, 1)
    with torch.device("meta"):
        found = block_kinds(mask, 1)
    assert torch.equal(found, expected)


def test_kinds_without_full_blocks_and_with_leftovers_in_the_lists():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32)
    assert block_kinds(mask, 0).tolist() == [[PARTIAL, HIDDEN], [PARTIAL, PARTIAL]]


def test_picture_shows_both_colours_and_every_block(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 512, 16), torch.randn(1, 2, 512, 16)
    mask = flexprefill_mask(3 * query, key, gamma=0.5, block_size=32, min_budget=0)
    path = plot_block_mask(mask, [0, 3], tmp_path / "new" / "masks.png", ["one", "two"])
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = (image.imread(path)[..., :3] * 255).round()
    assert pixels.shape[1] > 1.5 * pixels.shape[0]
    for colour in ((240, 160, 47), (31, 95, 168), (233, 233, 237)):
        assert (pixels == torch.tensor(colour).numpy()).all(-1).sum() > 2000


def test_draws_heads_of_several_masks(tmp_path):
    pytest.importorskip("matplotlib")
    masks = [causal_mask(128, 128), causal_mask(128, 128)]
    assert plot_block_mask(masks, [0, 1], tmp_path / "two.png").exists()
    with pytest.raises(ValueError, match="block_mask must have one"):
        plot_block_mask([masks[0], causal_mask(64, 128)], [0, 1], tmp_path / "not.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": []}, "heads must name at least one"),
        ({"heads": [2]}, r"head must be in \[0, 2\); got 2"),
        ({"heads": [-1]}, "head must be in"),
        ({"heads": [0], "batch": 1}, "batch must be in"),
        ({"heads": [0, 1], "titles": ["one"]}, r"titles must be one per head \(2\); got 1"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        plot_block_mask(causal_mask(64, 64), path=tmp_path / "not.png", **arguments)
    assert not (tmp_path / "not.png").exists()
