"""FlexAttention's FLASH kernel on a Hopper GPU: its check, and calls that it serves for each feature."""

import pytest
import torch

from flexmask import attend, sparse_attention, sparse_attention_varlen
from flexmask.base.inputs import AttentionInputs
from flexmask.base.selection import BlockLists, Selection, block_lists
from flexmask.base.visibility import block_visibility, visible_keys
from flexmask.flex.backend import auto_takes_flash, flash_available
from flexmask.flex.block_mask import block_mask
from flexmask.flex.flash import flash_attention
from flexmask.flex.flash_case import FlashKind, exact_attention, normal_numbers
from flexmask.flex.flash_check import LSE_FACTORS, flash_verdict
from flexmask.flex.last_rows import last_rows_in_parts
from flexmask.flex.run import run_flex_attention
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
PLAIN = FlashKind(torch.bfloat16, 128, 128)


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


SERVED = {
    "plain": {}, "windows and chunks": {"has_window_or_offset": True}, "padding": {"has_padding": True},
    "soft caps": {"has_softcap": True},
    "one mask for all heads": {"shares_lists": True}, "float16": {"dtype": torch.float16}, "latent attention": {"head_dim": 192},
    "direct": {"is_direct": True}, "direct, window": {"is_direct": True, "has_window_or_offset": True},
    "direct, latent attention": {"is_direct": True, "head_dim": 192, "queries_per_kv": 1},
    "direct, one mask of seven heads, float16": {
        "is_direct": True, "shares_lists": True, "queries_per_kv": 7, "dtype": torch.float16,
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", SERVED.values(), ids=SERVED)
def test_the_check_finds_flash_right(device, changes):
    kind = PLAIN._replace(**changes)
    found = flash_verdict(kind, device)
    assert found is not None and auto_takes_flash(kind)
    assert (found.reason, found.lse_reason) == ("", "")
    assert found.lse_factor in LSE_FACTORS


def poisoned(lists):
    """The lists with an index that no key has behind each count."""

    def behind_the_count(counts, indices):
        entry = torch.arange(indices.shape[-1], device=indices.device)
        return torch.where(entry < counts[..., None], indices, 2**30)

    return BlockLists(lists[0], behind_the_count(*lists[:2]), lists[2], behind_the_count(*lists[2:]))


LENGTHS = [(129, 129), (1000, 1000), (4200, 4200), (129, 1300), (700, 4300), (1, 500)]
HEADS = [(1, 128), (2, 64), (6, 128), (7, 64)]  # query heads per KV head, head_dim


@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("shared", [False, True], ids=["", "one list"])
@pytest.mark.parametrize(("queries_per_kv", "head_dim"), HEADS)
def test_a_direct_call_is_attention_to_the_listed_blocks(cuda, queries_per_kv, head_dim, shared, window):
    for q_len, kv_len in LENGTHS:
        sizes = ((2 * queries_per_kv, q_len), (2, kv_len), (2, kv_len))
        query, key, value = (
            normal_numbers((1, heads, n, head_dim), seed, torch.bfloat16, cuda) for seed, (heads, n) in enumerate(sizes)
        )
        plain = AttentionInputs(3 * query, key, value, head_dim**-0.5, window=window)
        inputs = plain.with_offset()
        tokens = inputs.tokens()
        seen = block_visibility(tokens, 128, window)
        shape = (1, 1 if shared else 2 * queries_per_kv, *seen.visible.shape[1:])
        keep = (torch.rand(shape, generator=torch.Generator().manual_seed(q_len)) < 0.5).to(cuda) & seen.visible[:, None]
        lists = block_lists(keep, seen.full)
        visible = visible_keys(tokens.position, tokens.row_valid, tokens, window)[:, None]
        pairs = keep.repeat_interleave(128, 2)[:, :, :q_len].repeat_interleave(128, 3)[..., :kv_len] & visible
        expected, wanted = exact_attention(inputs, pairs)

        out, lse = flash_attention(plain, poisoned(lists), 128, return_lse=True)
        assert lse is not None
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.double(), wanted, atol=1e-3, rtol=0)
        doubled = flash_attention(plain, lists, 128, return_lse=True, lse_factor=2.0)
        torch.testing.assert_close(doubled, (out, 2 * lse), atol=0, rtol=0)
        # another kernel, without a log-sum-exp
        torch.testing.assert_close(flash_attention(plain, lists, 128)[0], out, atol=1e-2, rtol=1e-2)
        if (q_len, kv_len) == (700, 4300):
            through = run_flex_attention(inputs, block_mask(inputs, Selection(lists, None, {}, 128)), "flash")[0]
            torch.testing.assert_close(out, through, atol=2e-2, rtol=2e-2)
            with pytest.raises(AssertionError, match="not close"):
                torch.testing.assert_close(out.double(), exact_attention(inputs, visible)[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("heads", "head_dims"), [((12, 2), (128, 128)), ((7, 1), (64, 64)), ((16, 16), (192, 128))])
def test_last_rows_in_parts_are_those_of_one_call(cuda, heads, head_dims):
    for q_len, kv_len in [(4096, 4096), (4200, 4200), (1025, 9001), (1000, 20000), (8192, 32768)]:
        sizes = ((heads[0], q_len, head_dims[0]), (heads[1], kv_len, head_dims[0]), (heads[1], kv_len, head_dims[1]))
        tensors = [normal_numbers((1, *size), seed, torch.bfloat16, cuda) for seed, size in enumerate(sizes)]
        inputs = AttentionInputs(3 * tensors[0], *tensors[1:], head_dims[0] ** -0.5)
        seen = block_visibility(inputs.with_offset().tokens(), 128, None)
        last = last_rows_in_parts(inputs, 128)
        assert last is not None and last.parts > 1
        keep = torch.rand((1, heads[0], *seen.visible.shape[1:]), device=cuda) < 0.3
        keep[:, :, last.is_sparse == 0] = True
        lists = block_lists(keep & seen.visible[:, None], seen.full)
        expected, wanted = flash_attention(inputs, lists, 128, return_lse=True)
        for of_parts in (last, last._replace(lists=poisoned(last.lists))):
            out, lse = flash_attention(inputs, lists, 128, True, 1.0, of_parts)
            torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(lse, wanted, atol=1e-3, rtol=0)
            torch.testing.assert_close(flash_attention(inputs, lists, 128, last_rows=of_parts)[0], expected, atol=1e-2, rtol=1e-2)
        wrong = last._replace(lists=last.lists._replace(full_kv_num_blocks=last.lists.full_kv_num_blocks - 1))
        assert not torch.allclose(flash_attention(inputs, lists, 128, True, 1.0, wrong)[1], wanted, atol=1e-3, rtol=0)


def test_eager_calls_are_direct_and_others_go_through_flex_attention(cuda, monkeypatch):
    direct = []
    monkeypatch.setattr(attend, "flash_attention", lambda *given: direct.append(True) or flash_attention(*given))
    plain = {"head_dims": (128, 128), "q_len": 900, "kv_len": 2400, "block_size": 128, "dtype": torch.bfloat16, "gamma": 0.3}
    one_map = {"method": "streaming_llm", "sink_blocks": 1, "window_blocks": 3}
    calls = {"chunk": {}, "window": {"scores": {"window": 800}}, "whole": {"q_len": 2400}, "one map": one_map}
    for name, given in calls.items():
        case = call(**{**plain, **given})
        direct.clear()
        out = case.attend(cuda)
        assert direct, name
        assert_same_attention(out, case.under(case.to(cuda).select().keep)[0])
    others = {"offset": {"q_offset": 700}, "soft cap": {"scores": {"softcap": 5.0}}}
    for name, given in others.items():
        direct.clear()
        call(**{**plain, **given}).attend(cuda)
        assert not direct, name


# what some builds refuse, in their own words; flash-attn-4 4.0.0b36 takes 64 keys of wide heads at a time, 4.0.0b9 takes 80.
# The last block of keys of the first call has one tile
SOMETIMES = {
    "wide heads": (
        {"head_dim": 256, "v_head_dim": 256, "has_window_or_offset": True}, "80",
        {"q_len": 900, "kv_len": 2340, "head_dims": (256, 256), "block_size": 128, "scores": {"window": 800}},
    ),
    "blocks of 256": ({"block_size": 256}, "cannot run here", {"q_len": 1500, "head_dims": (128, 128), "block_size": 256}),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words", "given"), SOMETIMES.values(), ids=SOMETIMES)
def test_calls_that_some_builds_refuse_run_or_are_refused_in_the_kernels_words(cuda, device, changes, words, given):
    found = flash_verdict(PLAIN._replace(**changes), device)
    assert found is not None
    case = call(**given, dtype=torch.bfloat16, gamma=0.3)
    if found.reason:
        with pytest.raises(ValueError, match=words):
            case.attend(cuda, backend="flash")
        return
    out, keep = case.attend(cuda, backend="flash"), case.to(cuda).select().keep
    expected, wanted = case.under(keep)
    assert_same_attention(out, expected)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, case.under(torch.ones_like(keep))[0])
    if "head_dim" in changes:
        lse = case.attend(cuda, backend="flash", return_lse=True)[1]
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
    case = call(**{"dtype": torch.bfloat16, "block_size": 128, "gamma": 0.3, **given})
    moved = None if sinks is None else sinks.to(cuda)
    out, lse = case.attend(cuda, sinks=moved, return_lse=True, backend="flash")
    expected, _ = case.under(case.to(cuda).select().keep, sinks)
    wanted = case.under(case.to(cuda).select().keep)[1]
    tolerance = 1e-2 if "softcap" in case.scores else 1e-3

    def close():
        assert_same_attention(out, expected)
        torch.testing.assert_close(lse.cpu().double(), wanted, atol=tolerance, rtol=0)

    close()
    # the same compiled code
    torch.testing.assert_close(case.attend(cuda, sinks=moved, return_lse=True), (out, lse), atol=0, rtol=0)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_attention(out, case.under(torch.ones_like(case.to(cuda).select().keep), sinks)[0])
    # head by head
    out, lse = case.attend(cuda, sinks=moved, return_lse=True, backend="flash", max_mask_bytes=1)
    close()


def test_packed_sequences_have_sinks_and_log_sum_exp(cuda):
    lengths, softcap = (300, 1500, 40), 5.0
    case = call(sum(lengths), head_dims=(64, 64), dtype=torch.bfloat16)
    given = [x[0].transpose(0, 1).contiguous().to(cuda) for x in (case.query, case.key, case.value)]
    scores = {"sinks": SINKS.to(cuda), "softcap": softcap, "backend": "flash", "return_lse": True}
    options = {"method": "flexprefill", "gamma": 0.3, "min_budget": 0, "dense_below": 1000}
    with torch.no_grad():
        out, lse = sparse_attention_varlen(*given, [0, 300, 1800, 1840], **scores, **options)
        alone = sparse_attention(*(x[300:1800].transpose(0, 1)[None] for x in given), **scores, **options)
    torch.testing.assert_close(out[300:1800], alone[0][0].transpose(0, 1), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[:, 300:1800], alone[1][0], atol=1e-3, rtol=0)
    for start, stop in ((0, 300), (1800, 1840)):
        query, key, value = (x[None, :, start:stop] for x in (case.query[0], case.key[0], case.value[0]))
        causal = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        expected = masked_attention(query, key, value, causal, softcap=softcap, sinks=SINKS)
        assert_same_attention(out[start:stop].transpose(0, 1)[None], expected[0])
        wanted = masked_attention(query, key, value, causal, softcap=softcap)[1]
        torch.testing.assert_close(lse[None, :, start:stop].cpu().double(), wanted, atol=1e-2, rtol=0)


def test_later_calls_wait_for_nothing(cuda, nothing_waits):
    case, sinks = call(1500, head_dims=(64, 64), dtype=torch.bfloat16, block_size=128, gamma=0.3).to(cuda), SINKS.to(cuda)
    options = {"gamma": 0.3, "min_budget": 0, "dense_below": 0, "sinks": sinks, "return_lse": True}

    def attend():
        return sparse_attention(case.query, case.key, case.value, "flexprefill", **options)

    with torch.no_grad():
        expected = attend()
        attend()
        with nothing_waits():
            found = attend()
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
