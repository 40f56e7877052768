"""FlexAttention's FLASH kernel on a Hopper GPU: its check, and calls that it serves for each feature."""

import pytest
import torch

from flexmask import sparse_attention, sparse_attention_varlen
from flexmask.flex.backend import auto_checks, flash_available
from flexmask.flex.flash_check import LSE_FACTORS, FlashCall, flash_verdict
from tests.attention_calls import SINKS, call, padding
from tests.comparisons import assert_same_attention
from tests.expected import masked_attention

pytestmark = [
    pytest.mark.attention,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (flash_available() and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9),
        reason="needs flash-attn-4 and a Hopper GPU",
    ),
]
PLAIN = FlashCall(torch.bfloat16, 128, 128)


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


SERVED = {
    "plain": {}, "windows and chunks": {"captures": True}, "padding": {"padded": True}, "soft caps": {"softcap": True},
    "one mask for all heads": {"shared": True}, "float16": {"dtype": torch.float16}, "latent attention": {"head_dim": 192},
}  # fmt: skip


@pytest.mark.parametrize("changes", SERVED.values(), ids=SERVED)
def test_the_check_finds_flash_right(device, changes):
    kind = PLAIN._replace(**changes)
    found = flash_verdict(kind, device)
    assert found is not None and auto_checks(kind)
    assert (found.reason, found.lse_reason) == ("", "")
    assert found.lse_factor in LSE_FACTORS


# what some builds refuse, in their own words; flash-attn-4 4.0.0b36 takes 64 keys of wide heads at a time, 4.0.0b9 takes 80.
# The last block of keys of the first call has one tile
SOMETIMES = {
    "wide heads": (
        {"head_dim": 256, "v_head_dim": 256, "captures": True}, "80",
        {"q_len": 900, "kv_len": 2340, "head_dims": (256, 256), "block_size": 128, "scores": {"window": 800}},
    ),
    "blocks of 256": ({"block_size": 256}, "cannot run here", {"q_len": 1500, "head_dims": (128, 128), "block_size": 256}),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words", "given"), SOMETIMES.values(), ids=SOMETIMES)
def test_what_the_kernel_may_take_runs_or_is_refused_in_its_words(cuda, device, changes, words, given):
    found = flash_verdict(PLAIN._replace(**changes), device)
    assert found is not None
    it = call(**given, dtype=torch.bfloat16, gamma=0.3)
    if found.reason:
        with pytest.raises(ValueError, match=words):
            it.attend(cuda, backend="flash")
        return
    out, keep = it.attend(cuda, backend="flash"), it.to(cuda).search().keep
    expected, wanted = it.under(keep)
    assert_same_attention(out, expected)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, it.under(torch.ones_like(keep))[0])
    if "head_dim" in changes:
        lse = it.attend(cuda, backend="flash", return_lse=True)[1]
        torch.testing.assert_close(lse.cpu().double(), wanted, atol=1e-3, rtol=0)


CALLS = {
    "latent attention": ({"heads": (4, 4), "head_dims": (192, 128), "q_len": 1500}, None),
    "soft cap, sinks": ({"head_dims": (128, 128), "q_len": 1500, "scores": {"softcap": 5.0}}, SINKS),
    "sinks, window, chunk": ({"head_dims": (64, 64), "q_len": 900, "kv_len": 2400, "scores": {"window": 800}}, SINKS),
    "sinks, padding, float16": (
        {
            "head_dims": (64, 64), "q_len": 1500, "batch": 2, "dtype": torch.float16,
            "attention_mask": padding(1500, ("left", 300), ("right", 100)),
        },
        SINKS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "sinks"), CALLS.values(), ids=CALLS)
def test_output_sinks_and_log_sum_exp_are_those_of_kept_scores(cuda, given, sinks):
    it = call(**{"dtype": torch.bfloat16, "block_size": 128, "gamma": 0.3, **given})
    moved = None if sinks is None else sinks.to(cuda)
    out, lse = it.attend(cuda, sinks=moved, return_lse=True, backend="flash")
    expected, _ = it.under(it.to(cuda).search().keep, sinks)
    wanted = it.under(it.to(cuda).search().keep)[1]
    tolerance = 1e-2 if "softcap" in it.scores else 1e-3

    def close():
        assert_same_attention(out, expected)
        torch.testing.assert_close(lse.cpu().double(), wanted, atol=tolerance, rtol=0)

    close()
    # the same compiled code
    torch.testing.assert_close(it.attend(cuda, sinks=moved, return_lse=True), (out, lse), atol=0, rtol=0)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, it.under(torch.ones_like(it.to(cuda).search().keep), sinks)[0])
    # head by head
    out, lse = it.attend(cuda, sinks=moved, return_lse=True, backend="flash", max_mask_bytes=1)
    close()


def test_packed_sequences_have_them_too(cuda):
    lengths, softcap = (300, 1500, 40), 5.0
    it = call(sum(lengths), head_dims=(64, 64), dtype=torch.bfloat16)
    given = [x[0].transpose(0, 1).contiguous().to(cuda) for x in (it.query, it.key, it.value)]
    scores = {"sinks": SINKS.to(cuda), "softcap": softcap, "backend": "flash", "return_lse": True}
    options = {"method": "flexprefill", "gamma": 0.3, "min_budget": 0, "dense_below": 1000}
    with torch.no_grad():
        out, lse = sparse_attention_varlen(*given, [0, 300, 1800, 1840], **scores, **options)
        alone = sparse_attention(*(x[300:1800].transpose(0, 1)[None] for x in given), **scores, **options)
    torch.testing.assert_close(out[300:1800], alone[0][0].transpose(0, 1), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[:, 300:1800], alone[1][0], atol=1e-3, rtol=0)
    for start, stop in ((0, 300), (1800, 1840)):
        query, key, value = (x[None, :, start:stop] for x in (it.query[0], it.key[0], it.value[0]))
        causal = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        expected = masked_attention(query, key, value, causal, softcap=softcap, sinks=SINKS)
        assert_same_attention(out[start:stop].transpose(0, 1)[None], expected[0])
        wanted = masked_attention(query, key, value, causal, softcap=softcap)[1]
        torch.testing.assert_close(lse[None, :, start:stop].cpu().double(), wanted, atol=1e-2, rtol=0)


def test_later_calls_wait_for_nothing(cuda, nothing_waits):
    it, sinks = call(1500, head_dims=(64, 64), dtype=torch.bfloat16, block_size=128, gamma=0.3).to(cuda), SINKS.to(cuda)
    options = {"gamma": 0.3, "min_budget": 0, "dense_below": 0, "sinks": sinks, "return_lse": True}

    def attend():
        return sparse_attention(it.query, it.key, it.value, "flexprefill", **options)

    with torch.no_grad():
        expected = attend()
        attend()
        with nothing_waits():
            found = attend()
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
