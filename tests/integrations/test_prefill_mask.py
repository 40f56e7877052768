"""The mask that transformers carries to attention."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from flexmask.integrations.huggingface.mask import PrefillMask, prefill_mask


def test_rows_and_heads_are_sliced():
    padding = torch.arange(40)[None] > 3
    mask = PrefillMask((1, 1, 30, 40), 10, padding, 7)
    for rows, shape, offset in (
        (mask[:, :, -5:, :], (1, 1, 5, 40), 35),
        (mask[:, :, 4], (1, 1, 1, 40), 14),
        (mask[..., 2:9, :], (1, 1, 7, 40), 12),
        (mask[:, 0], (1, 1, 30, 40), 10),
        (mask[:, 0, :, :40], (1, 1, 30, 40), 10),
    ):
        assert (rows.shape, rows.offset, rows.window, rows.tokens) == (shape, offset, 7, 40)
        assert rows.prefill == mask.prefill
        assert rows.attention_mask is padding


@pytest.mark.parametrize("index", [(slice(None), 0, slice(None), slice(20)), (0,), (..., [1, 3], slice(None)), torch.ones(1)])
def test_other_slices_are_refused_by_name(index):
    with pytest.raises(NotImplementedError, match=r"does not serve .* its mask's \["):
        PrefillMask((2, 1, 30, 40), 10)[index]


@pytest.mark.parametrize("name", ["dtype", "kv_num_blocks", "masked_fill", "sum"])
def test_other_attributes_are_refused_by_name(name):
    mask = PrefillMask((1, 1, 30, 40), 10)
    with pytest.raises(NotImplementedError, match=rf"does not serve .* its mask's \.{name}, as one"):
        getattr(mask, name)
    with pytest.raises(NotImplementedError, match="kv_num_blocks"):
        mask.to_dense()
    assert not hasattr(mask, name)
    assert copy.deepcopy(mask).shape == mask.shape


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({"q_offset": 0}, 200),
        ({"q_offset": 300}, 500),
        ({"q_offset": torch.tensor(300)}, 500),
        ({"q_offset": torch.tensor(300, device="meta")}, 200),
    ],
)
def test_tokens_so_far_are_those_that_the_host_knows(arguments, tokens):
    if "q_length" not in arguments:
        arguments = {"q_length": 200, **arguments}
    mask = prefill_mask(batch_size=1, kv_length=20000, **arguments)
    assert mask.tokens == tokens


def test_tokens_so_far_are_those_of_a_mask_of_the_prompt():
    mask = PrefillMask((1, 1, 200, 20000), torch.tensor(300, device="meta"), tokens=500)
    assert (mask.tokens, mask[:, :, -1:].tokens) == (500, 500)


def test_a_cache_that_begins_later_has_the_padding_of_its_own_keys():
    """As a sliding layer's, which keeps the last keys alone."""
    tokens = torch.ones(2, 450, dtype=torch.int64)
    tokens[1, :130] = 0
    mask = prefill_mask(
        batch_size=2, q_length=200, q_offset=torch.tensor(250, device="meta"), kv_length=500, kv_offset=100, attention_mask=tokens
    )
    assert mask.attention_mask.sum(-1).tolist() == [350, 320]
    assert mask.attention_mask[1, 30:350].all() and not mask.attention_mask[:, 350:].any()
    assert mask.tokens == 350


@pytest.mark.parametrize(
    "compute", [lambda m, x: m + x, lambda m, x: x + m, lambda m, x: x * m, lambda m, x: ~m, lambda m, x: m & x]
)
def test_models_that_compute_with_their_mask_are_refused_by_name(compute):
    with pytest.raises(NotImplementedError, match="reads its mask's numbers, to compute with"):
        compute(PrefillMask((1, 1, 4, 4), 0), torch.zeros(1, 1, 4, 4))
