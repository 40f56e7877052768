"""The adapter's settings: for each layer, saved with the model, and refused where they are wrong."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM

import flexmask.integrations.huggingface as flexmask_hf
import flexmask.integrations.route as route_module
from flexmask import FlexPrefillConfig
from flexmask.integrations.settings import PrefillSettings, use_in_process
from flexmask.plot import block_kinds
from tests.integrations.common import MARKS, SPARSE, make_model, padded

pytestmark = MARKS


def enter(block):
    with block:
        pytest.fail("entered")


def test_layers_have_options_of_their_own(model, tokens):
    with flexmask_hf.flexprefill(model, **SPARSE, layers={1: {"gamma": 1.0}}) as run:
        model(tokens)
    assert run.stats[0][0].density.max() < 1
    assert run.stats[1][0].density.min() == 1
    assert not run.stats[1][0].dense


def test_heads_have_gammas_of_their_own(model, tokens):
    by_head, options = [1.0, 0.3, 0.6, 0.6], {**SPARSE, "tau": 0.0}
    with flexmask_hf.flexprefill(model, **options, layers={1: {"gamma": by_head}}) as run:
        model(tokens)
    layer = run.stats[1][0]
    assert torch.equal(layer.density[:, 0], torch.ones(len(tokens)))
    alone = []
    for gamma in (0.3, 0.6):
        with flexmask_hf.flexprefill(model, **options, layers={1: {"gamma": gamma}}) as run:
            model(tokens)
        alone.append(run.stats[1][0].density)
    assert torch.equal(layer.density[:, 1], alone[0][:, 1])
    assert torch.equal(layer.density[:, 2:], alone[1][:, 2:])
    assert (alone[0] < alone[1]).any()


def test_heads_at_gamma_one_are_dense_above_the_break_even(model, tokens):
    settings = {**SPARSE, "dense_below": 100, "tau": 0.0}
    with flexmask_hf.flexprefill(model, **settings, layers={0: {"gamma": 1.0}, 1: {"gamma": [0.2, 0.2, 1.0, 1.0]}}) as run:
        model(tokens)
    assert run.reasons[0] == ["gamma 1 in every head"]
    assert run.stats[0][0].dense
    assert run.reasons[1] == [None]
    assert run.stats[1][0].is_dense.tolist() == [[False, False, True, True]] * 2
    assert [row["reason"] is None for row in run.rows() if row["layer"] == 1] == [True, True, False, False] * 2
    assert {row["pattern"] for row in run.rows() if row["layer"] == 1} == {"vertical-slash"}


def test_a_gamma_for_another_number_of_heads_is_refused(model, tokens):
    message = "gamma must hold one number for each of query's 4 heads; got 8 numbers"
    with flexmask_hf.flexprefill(model, **{**SPARSE, "gamma": [0.5] * 8}), pytest.raises(ValueError, match=message):
        model(tokens)


def test_gammas_by_head_are_saved_with_the_model(model, tmp_path):
    layers = {0: {"gamma": [0.9, 0.5, 1.0, 0.7]}, 1: {"tau": 0.3}}
    settings = flexmask_hf.configure(model, gamma=(0.25, 0.5, 0.75, 1.0), layers=layers, dense_below=0)
    layers[0]["gamma"][0] = 0.1  # what was checked, whatever becomes of the caller's list
    assert model.config.flexprefill_config["gamma"] == [0.25, 0.5, 0.75, 1.0]
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert PrefillSettings.from_dict(loaded.config.flexprefill_config) == settings
    assert settings.of_layer(0).gamma == (0.9, 0.5, 1.0, 0.7)
    assert settings.of_layer(1).gamma == (0.25, 0.5, 0.75, 1.0)
    assert hash(settings.of_layer(0)) == hash(FlexPrefillConfig(gamma=[0.9, 0.5, 1.0, 0.7]))


@pytest.mark.parametrize("attention_mask", [None, padded], ids=["unpadded", "padded"])
def test_dense_layers_are_dense(model, tokens, attention_mask):
    mask = None if attention_mask is None else attention_mask(tokens)
    expected = model(tokens, attention_mask=mask).logits
    with flexmask_hf.flexprefill(model, **SPARSE, dense_layers=(0, 1)) as run:
        logits = model(tokens, attention_mask=mask).logits
    assert (logits - expected)[torch.ones_like(tokens) != 0 if mask is None else mask != 0].abs().max() < 1e-4
    assert [calls[0].dense for calls in run.stats.values()] == [True, True]


def test_windows_below_the_break_even_stay_exact(tokens):
    model = make_model("Gemma3")
    with flexmask_hf.flexprefill(model, **{**SPARSE, "dense_below": 300}) as run:
        model(tokens)
    assert run.stats[0][0].dense  # a window of 200
    assert not run.stats[1][0].dense
    assert run.stats[1][0].density.max() < 1


@pytest.mark.slow  # a kernel for heads that come alone, as for the head groups of the core
def test_masks_too_large_go_through_head_groups(model, tokens):
    mask = padded(tokens)
    with flexmask_hf.flexprefill(model, **SPARSE, collect_masks=True) as whole:
        expected = model(tokens, attention_mask=mask).logits
    with flexmask_hf.flexprefill(model, **SPARSE, max_mask_bytes=1, collect_masks=True) as parts:
        logits = model(tokens, attention_mask=mask).logits
    assert (logits - expected).abs().max() < 1e-5
    assert torch.equal(whole.stats[1][0].density, parts.stats[1][0].density)
    for layer in (0, 1):
        (mask,), (joined,) = whole.masks[layer], parts.masks[layer]
        assert joined.shape == mask.shape
        assert torch.equal(joined.to_dense(), mask.to_dense())
        maps = [create_mask(each.mask_mod, *each.shape, device="cpu") for each in (mask, joined)]
        assert torch.equal(*maps)
        assert not maps[0].all()
        picture = [block_kinds(each, 3, 1) for each in (mask, joined)]
        assert torch.equal(*picture)


def test_options_are_saved_with_the_model(model, tokens, tmp_path):
    settings = flexmask_hf.configure(model, **SPARSE, layers={1: {"gamma": 0.7}}, dense_layers=[0])
    assert settings.of_layer(1).gamma == 0.7
    model.save_pretrained(tmp_path)
    flexmask_hf.register()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="flexprefill")
    assert PrefillSettings.from_dict(loaded.config.flexprefill_config) == settings
    by_name = loaded(tokens).logits
    with flexmask_hf.flexprefill(model) as run:  # no options: the model's own
        assert torch.equal(model(tokens).logits, by_name)
    assert run.settings == settings
    assert [calls[0].dense for calls in run.stats.values()] == [True, False]
    assert run.stats[1][0].density.max() < 1


@pytest.mark.parametrize("method", [lambda: flexmask_hf.configure, lambda: flexmask_hf.flexprefill])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gamma": 1.5}, ValueError, "gamma"),
        ({"gamma": [0.5, 1.5]}, ValueError, r"gamma\[1\] must be in"),
        ({"gamma": torch.tensor([0.5, 0.5])}, TypeError, "gamma must be a number or a sequence.* got a tensor"),
        ({"layers": {0: {"gamma": [0.5, float("nan")]}}}, ValueError, r"gamma\[1\] must be finite; got nan"),
        ({"config": FlexPrefillConfig(), "gamma": 0.9}, ValueError, "config"),
        ({"config": {"gamma": 0.9}}, TypeError, "config"),
        ({"gama": 0.9}, TypeError, "gama"),
        ({"dense_layers": (2,)}, ValueError, "dense_layers.* below 2.* got 2"),
        ({"dense_layers": (-1,)}, ValueError, "dense_layers"),
        ({"dense_layers": 0}, TypeError, "dense_layers must be a tuple.* got int"),
        ({"dense_layers": ("0", 1)}, TypeError, "dense_layers must be an int"),
        ({"layers": {7: {"gamma": 0.9}}}, ValueError, "layers.* got 7"),
        ({"layers": {0: {"dense_below": 9}}}, TypeError, "dense_below"),
        ({"layers": {0: {"tau": 3}}}, ValueError, "tau"),
        ({"layers": [0]}, TypeError, "layers"),
        ({"dense_below": -1}, ValueError, "dense_below"),
        ({"backend": "cudnn"}, ValueError, "backend"),
        ({"max_mask_bytes": 0}, ValueError, "max_mask_bytes"),
        ({"method": "dense"}, ValueError, "method"),
    ],
)
def test_wrong_options_change_nothing(model, method, options, error, message):
    with pytest.raises(error, match=message):
        enter(method()(model, **options))
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "flexprefill_config")


def test_settings_are_saved_to_a_file_and_read_back(model, tmp_path):
    settings = PrefillSettings.from_options(gamma=0.9, selection="hybrid", layers={1: {"gamma": [0.5, 1.0, 0.5, 1.0]}})
    settings.save(tmp_path / "settings.json")
    assert PrefillSettings.load(tmp_path / "settings.json") == settings
    for path in (str(tmp_path / "settings.json"), tmp_path / "settings.json"):
        with flexmask_hf.flexprefill(model, config=path) as run:
            assert run.settings == settings
    # a model's config.json has them too
    flexmask_hf.configure(model, config=tmp_path / "settings.json")
    model.config.save_pretrained(tmp_path)
    assert PrefillSettings.load(tmp_path / "config.json") == settings
    with pytest.raises(ValueError, match="config must come without options of its own"):
        flexmask_hf.flexprefill(model, config=str(tmp_path / "settings.json"), tau=0.5)
    with pytest.raises(FileNotFoundError):
        PrefillSettings.load(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"settings must be a JSON object of FlexPrefill's options; .*list\.json: got a list"):
        PrefillSettings.load(tmp_path / "list.json")


@pytest.fixture
def _own_process():
    """Settings of the process, and what stands behind "flex_attention", are put back."""
    before = [interface()["flex_attention"] for interface in (AttentionInterface, AttentionMaskInterface)]
    yield
    use_in_process(None)
    for interface, function in zip((AttentionInterface, AttentionMaskInterface), before, strict=True):
        interface.register("flex_attention", function)


@pytest.mark.usefixtures("_own_process")
def test_settings_of_the_process_go_before_those_of_the_config(model, tokens):
    flexmask_hf.configure(model, gamma=0.3)
    flexmask_hf.register(gamma=0.4, dense_below=0)
    flexmask_hf.register()  # says nothing about them
    assert flexmask_hf.flexprefill(model)._model is model
    with flexmask_hf.flexprefill(model) as run:
        assert run.settings.config.gamma == 0.4
    with flexmask_hf.flexprefill(model, tau=0.2) as run:
        assert run.settings.config.gamma == 0.95
    seen = []
    run = route_module.by_flexprefill
    model.set_attn_implementation("flexprefill")
    try:
        route_module.by_flexprefill = lambda call: seen.append(call.config.gamma) or torch.zeros_like(call.inputs.query)
        model(tokens)
        use_in_process(None)
        flexmask_hf.configure(model, gamma=0.3, dense_below=0)
        model(tokens)
    finally:
        route_module.by_flexprefill = run
    assert seen == [0.4, 0.4, 0.3, 0.3]
    with pytest.raises(ValueError, match="gamma must be in"):
        flexmask_hf.register(gamma=4)


@pytest.mark.usefixtures("_own_process")
def test_another_name_to_stand_behind(model, tokens):
    flexmask_hf.register(name="flex_attention", dense_below=1000)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        out = model(tokens).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(out, model(tokens).logits, atol=1e-4, rtol=1e-4)
    assert AttentionInterface()["flex_attention"] is AttentionInterface()["flexprefill"]
    with pytest.raises(ValueError, match="name must be one of"):
        flexmask_hf.register(name="sdpa")
