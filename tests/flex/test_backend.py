"""The choice of FlexAttention's backend by GPU and by FLASH's verdicts."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flexmask.base.inputs import AttentionInputs
from flexmask.flex import backend, flash
from flexmask.flex.backend import Backend, chosen_backend
from flexmask.flex.flash_case import FlashKind
from flexmask.flex.flash_check import LSE_FACTORS, Verdict

RIGHT = Verdict(lse_factor=LSE_FACTORS[1])
WRONG = Verdict("its check here found block lists ignored: outputs off by 1.1 (0.02 is allowed)")
NO_LSE = Verdict(lse_reason="its check here found the log-sum-exp off by 1.5 (0.001 is allowed)")


@pytest.fixture
def chosen(monkeypatch):
    """The choice on a GPU of some capability, with flash-attn-4 installed and a verdict on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "_HAS_FLASH", True)
    # fake tensors stand for those of a GPU
    monkeypatch.setattr(flash, "is_fake", lambda tensor: False)

    def choose(
        name, capability=9, *, head_dim=128, v_head_dim=None, kv_len=256, dtype=torch.bfloat16, verdict=RIGHT, block_size=128,
        return_lse=False, is_dense=False, shares_lists=False, direct=False, has_sinks=False, padded=False, **given,
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability, 0))
        with FakeTensorMode():
            lengths_and_dims = ((256, head_dim), (kv_len, head_dim), (kv_len, v_head_dim or head_dim))
            tensors = [torch.empty(1, 2, *sizes, dtype=dtype, device="cuda") for sizes in lengths_and_dims]
            if has_sinks:
                given["sinks"] = torch.empty(2, device="cuda")
            if padded:
                given["attention_mask"] = torch.empty(1, kv_len, dtype=torch.bool, device="cuda")
        choose.asked = []

        def asked_verdict(kind, device):
            choose.asked.append(kind)
            return verdict(kind) if callable(verdict) else verdict

        inputs = AttentionInputs(*tensors, 1.0, **given)
        return chosen_backend(
            name, inputs, block_size, return_lse, is_dense, shares_lists, asked_verdict, has_mask_mod=not direct
        )

    return choose


@pytest.mark.parametrize("capability", [7, 8, 9, 10, 11, 12])
def test_auto_takes_flash_only_where_it_was_seen_to_work(chosen, capability):
    assert chosen("auto", capability).name == ("flash" if capability == 9 else "triton")
    assert len(chosen.asked) == (capability == 9)
    assert chosen("triton", capability) == Backend("triton") and chosen.asked == []


PLAIN = FlashKind(torch.bfloat16, 128, 128, queries_per_kv=1)
# kinds of calls that auto checks, by what they ask
CHECKED = {
    "plain": ({}, PLAIN), "float16": ({"dtype": torch.float16}, PLAIN._replace(dtype=torch.float16)),
    "latent attention": ({"head_dim": 192, "v_head_dim": 128}, PLAIN._replace(head_dim=192)),
    "wide": ({"head_dim": 256, "v_head_dim": 256}, PLAIN._replace(head_dim=256, v_head_dim=256)),
    "narrow": ({"head_dim": 64, "v_head_dim": 72}, PLAIN._replace(head_dim=64, v_head_dim=72)),
    "soft cap": ({"softcap": 30.0}, PLAIN._replace(has_softcap=True)), "log-sum-exp": ({"return_lse": True}, PLAIN),
    "sinks": ({"has_sinks": True}, PLAIN), "window": ({"window": 100}, PLAIN._replace(has_window_or_offset=True)),
    "chunk": ({"kv_len": 300}, PLAIN._replace(has_window_or_offset=True)),
    "padding": ({"padded": True}, PLAIN._replace(has_padding=True)),
    "one list": ({"shares_lists": True}, PLAIN._replace(shares_lists=True)),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kind"), CHECKED.values(), ids=CHECKED)
def test_a_call_is_served_as_the_check_of_its_kind_says(chosen, given, kind):
    assert chosen("auto", **given) == chosen("flash", **given) == Backend("flash", RIGHT.lse_factor)
    assert chosen.asked == [kind] and chosen("auto", **given, verdict=WRONG) == Backend("triton")
    with pytest.raises(ValueError, match=f'^backend="flash" cannot run here: {re.escape(WRONG.reason)}$'):
        chosen("flash", **given, verdict=WRONG)


DIRECT = {"plain": {}, "window": {"window": 100}, "chunk": {"kv_len": 300}, "both": {"window": 100, "kv_len": 300}}


@pytest.mark.parametrize("given", DIRECT.values(), ids=DIRECT)
def test_a_call_without_a_mask_mod_is_direct_where_that_is_right(chosen, given):
    directly = PLAIN._replace(has_window_or_offset="window" in given, is_direct=True)
    through = PLAIN._replace(has_window_or_offset=bool(given))
    right = Backend("flash", RIGHT.lse_factor)
    for name in ("auto", "flash"):
        assert chosen(name, **given, direct=True) == right._replace(is_direct=True)
        assert chosen.asked == [directly]
        for wrong in (WRONG, None):
            assert chosen(name, **given, direct=True, verdict={directly: wrong, through: RIGHT}.get) == right
            assert chosen.asked == [directly, through]
        # a mask_mod of its own
        assert chosen(name, **given) == right and chosen.asked == [through]
    assert chosen("auto", **given, direct=True, verdict=WRONG) == Backend("triton")
    no_lse = {directly: NO_LSE, through: RIGHT}.get
    assert chosen("auto", **given, direct=True, verdict=no_lse).is_direct
    assert chosen("auto", **given, direct=True, verdict=no_lse, return_lse=True) == right


LATENT, WIDE = {"head_dim": 192, "v_head_dim": 128}, {"head_dim": 256, "v_head_dim": 128}
HIDDEN_BY_THE_KERNEL = {"has_sinks": True}, LATENT, {"head_dim": 64}
# also where the kernel's tile is smaller
HIDDEN_BY_A_MASK_MOD = (
    {"softcap": 30.0}, {"padded": True}, {"offset": torch.zeros(1).int()}, {"needs_grad": True}, WIDE, {**WIDE, "block_size": 64},
    {**LATENT, "window": 3}, {"v_head_dim": 256}, {"block_size": 64}, {"block_size": 256},
)  # fmt: skip
BY_WHAT_HIDES = [(given, True) for given in HIDDEN_BY_THE_KERNEL] + [(given, False) for given in HIDDEN_BY_A_MASK_MOD]


@pytest.mark.parametrize(("given", "direct"), BY_WHAT_HIDES)
def test_calls_are_direct_unless_they_need_a_mask_mod(chosen, given, direct):
    assert chosen("flash", **given, direct=True) == Backend("flash", RIGHT.lse_factor, direct)
    assert [kind.is_direct for kind in chosen.asked] == [direct]


@pytest.mark.parametrize("state", ["in_dispatch_mode", "is_traced", "is_fake"])
def test_no_call_is_direct_where_tensors_are_not_plain(chosen, monkeypatch, state):
    monkeypatch.setattr(flash, state, lambda *given: True)
    assert not chosen("flash", direct=True).is_direct


@pytest.mark.parametrize("given", [{"return_lse": True}, {"has_sinks": True}])
def test_a_wrong_log_sum_exp_spares_calls_that_do_not_need_it(chosen, given):
    assert chosen("auto", verdict=NO_LSE).name == chosen("flash", verdict=NO_LSE).name == "flash"
    assert chosen("auto", **given, verdict=NO_LSE) == Backend("triton")
    with pytest.raises(ValueError, match=re.escape(NO_LSE.lse_reason)):
        chosen("flash", **given, verdict=NO_LSE)


# what flash-attn-4 is known to refuse, or was not timed in: not worth a check, unless by name
UNCHECKED = {
    "block_size": {"block_size": 64}, "head_dim": {"head_dim": 224},
    "v_head_dim of wide heads": {"head_dim": 256, "v_head_dim": 128}, "v_head_dim": {"head_dim": 128, "v_head_dim": 192},
    "odd head_dim": {"head_dim": 100}, "gradients": {"needs_grad": True},
}  # fmt: skip


@pytest.mark.parametrize("given", UNCHECKED.values(), ids=UNCHECKED)
def test_auto_checks_nothing_that_flash_is_known_to_refuse(chosen, given):
    assert chosen("auto", **given) == Backend("triton") and chosen.asked == []
    raised = Verdict("its check here raised ValueError: Block sparsity requires sparse_block_size[1]=80 to match tile_n.")
    with pytest.raises(ValueError, match=r"cannot run here: its check here raised ValueError: .*=80 to match tile_n\.$"):
        chosen("flash", **given, verdict=raised)
    # a later release may serve it
    assert chosen("flash", **given).name == "flash"


def test_where_nothing_is_known_auto_takes_triton_and_flash_raises(chosen):
    assert chosen("auto", verdict=None) == Backend("triton")
    with pytest.raises(ValueError, match='backend="flash" has not been checked for calls of this kind'):
        chosen("flash", verdict=None)


def test_dense_calls_check_flash_by_name_only(chosen):
    assert chosen("auto", is_dense=True) == Backend("triton") and chosen.asked == []
    with pytest.raises(ValueError, match="block lists ignored"):
        chosen("flash", is_dense=True, verdict=WRONG)
    assert chosen("flash", is_dense=True, verdict=None).name == "flash"


NO_LSE_GRADIENT = "does not differentiate its log-sum-exp, which return_lse and sinks need"
OTHER_GPU = "it needs a Hopper or Blackwell GPU of compute capability 9, 10 or 11 (got {})"
NEVER = [
    *(({"needs_grad": True, wanted: True}, NO_LSE_GRADIENT) for wanted in ("return_lse", "has_sinks")),
    ({"dtype": torch.float32}, "it needs float16 or bfloat16 (got float32)"),
    *(({"capability": capability}, OTHER_GPU.format(capability)) for capability in (7, 8)),
    ({"capability": 12}, "flash-attn-4 refuses block sparsity on compute capability 12"),
]


@pytest.mark.parametrize(("given", "reason"), NEVER)
def test_what_flash_never_takes_is_refused_unchecked(chosen, given, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        chosen("flash", **given)
    assert chosen.asked == [] and chosen("auto", **given) == Backend("triton") and chosen.asked == []


@pytest.mark.parametrize("capability", [10, 11])
def test_flash_by_name_is_untested_on_blackwell(chosen, capability):
    with pytest.warns(UserWarning, match=rf'backend="flash" is untested on compute capability {capability}: .* blocks of 256'):
        assert chosen("flash", capability).name == "flash"
    with pytest.warns(UserWarning, match="untested"), pytest.raises(ValueError, match="block lists ignored"):
        chosen("flash", capability, verdict=WRONG)
