"""Models of several parts, with layers that differ, with weights elsewhere, with learned positions."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPTJConfig, OPTConfig, PreTrainedModel, RobertaConfig

import flexmask.integrations.huggingface as flexmask_hf
from flexmask.integrations.huggingface.compat import input_device, learned_positions, text_config
from flexmask.integrations.huggingface.layer_forecast import layer_forecast
from flexmask.integrations.inspect import inspect_prefill
from flexmask.settings import PrefillSettings
from tests.integrations.common import made, make_model
from tests.integrations.families import SIZES

_TEXT = {name: value for name, value in SIZES.items() if name != "head_dim"}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SOUND = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64}
_IMAGE = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}


def laguna():
    """4, 6 and 2 heads by layer."""
    heads = {"num_hidden_layers": 3, "num_attention_heads_per_layer": [4, 6, 2], "layer_types": ["full_attention"] * 3}
    sizes = {**SIZES, **_EXPERTS, **heads, "num_experts": 4, "shared_expert_intermediate_size": 32}
    return made("LagunaForCausalLM", "LagunaConfig", **sizes)


def step():
    """4, 6 and 4 heads by layer, of which its config refuses to say how many."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    layers = {"num_hidden_layers": 3, "num_sliding_attention_heads": 6, "layer_types": kinds, "sliding_window": 200}
    experts = {**_EXPERTS, "n_routed_experts": 4, "share_expert_dim": 32, "moe_layers_enum": ""}
    model = made("Step3p7TextModel", "Step3p7TextConfig", **{**SIZES, **layers, **experts})
    with pytest.raises(RuntimeError, match="num_attention_heads"):
        _ = model.config.num_attention_heads
    return model


def own_layers():
    """A model whose modules have other heads than its config."""
    model = make_model(num_hidden_layers=3)
    for layer, heads in zip(model.model.layers, (4, 6, 2), strict=True):
        layer.self_attn.num_heads = heads
    return model


@pytest.mark.parametrize(("make", "heads"), [(laguna, (4, 6, 2)), (step, (4, 6, 4)), (own_layers, (4, 6, 2))])
def test_options_per_head_fit_the_heads_of_each_layer(make, heads, tmp_path):
    model = make()
    layers = {layer: {"gamma": [0.5] * number} for layer, number in enumerate(heads)}
    settings = PrefillSettings(layers=layers)
    path = tmp_path / "settings.json"
    settings.save(path)
    for named in ({"layers": layers}, {"settings": settings}, {"settings": path}, {"settings": str(path)}):
        with flexmask_hf.sparse_prefill(model, **named) as run:
            assert run.settings == settings
    assert flexmask_hf.configure(model, layers=layers) == settings
    with flexmask_hf.sparse_prefill(model) as run:
        assert run.settings == settings
    for wrong, layer, got in (
        ({"gamma": [0.5] * 4, "layers": {}}, 1, 4),
        ({"layers": {**layers, 2: {"gamma": [0.5] * 3}}}, 2, 3),
        ({"settings": PrefillSettings(layers={1: {"gamma": [0.5] * 4}})}, 1, 4),
    ):
        for use in (flexmask_hf.sparse_prefill, flexmask_hf.configure):
            with pytest.raises(ValueError, match=f"layer {layer}: gamma must hold .* {heads[layer]} heads; got {got}"):
                use(model, **wrong)


def test_a_forecast_takes_options_of_the_heads_of_each_layer():
    config, layers = laguna().config, {1: {"gamma": [0.5] * 6}, 2: {"gamma": [0.5] * 2}}
    assert [each.heads for each in layer_forecast(config, gamma=[0.5] * 4, layers=layers)] == [4, 6, 2]
    with pytest.raises(ValueError, match=r"layer 1: gamma must hold .* 6 heads; got 4"):
        layer_forecast(config, gamma=[0.5] * 4)


def phi4():
    image = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    image |= {"image_size": 28, "patch_size": 14, "crop_size": 28, "num_img_tokens": 4}
    sound = {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2, "nemo_conv_channels": 8}
    sizes = {**_TEXT, "vision_config": image, "audio_config": sound}
    return made("Phi4MultimodalForCausalLM", "Phi4MultimodalConfig", **sizes)


def omni():
    thinker = {"text_config": _TEXT, "audio_config": _SOUND, "vision_config": _IMAGE}
    name = "Qwen2_5Omni"
    return made(f"{name}ForConditionalGeneration", f"{name}Config", thinker_config=thinker, enable_audio_output=False)


def test_settings_in_a_part_of_a_config_are_loaded_from_its_file(tmp_path):
    model = omni()
    settings = flexmask_hf.configure(model, gamma=0.8, layers={1: {"gamma": 0.9}})
    model.config.save_pretrained(tmp_path)
    assert PrefillSettings.load(tmp_path / "config.json") == settings


@pytest.mark.parametrize("make", [phi4, omni])
def test_only_the_text_model_is_switched(make):
    model = make()
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    names = {key: config._attn_implementation for key, config in configs.items()}
    text = text_config(model)
    with flexmask_hf.sparse_prefill(model, gamma=0.5):
        assert text._attn_implementation == "flexmask:SDPA"
        assert not hasattr(text, "flexmask_config")
        assert all(config is text or config._attn_implementation == names[key] for key, config in configs.items())
    assert {key: config._attn_implementation for key, config in configs.items()} == names
    for wrong in ({"layers": {40: {"gamma": 0.5}}}, {"dense_layers": [40]}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must hold layer indices below 2, .* got 40"):
            flexmask_hf.sparse_prefill(model, **wrong)


def test_images_run_in_a_block_as_outside():
    model = phi4()
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    encoder = next(part for part in model.modules() if part.__class__.__name__ == "Phi4MultimodalVisionModel")
    mask = torch.ones(1, 2, 2, dtype=torch.bool)
    with torch.no_grad():
        expected = encoder(pixels, patch_attention_mask=mask).last_hidden_state
        with flexmask_hf.sparse_prefill(model):
            assert torch.equal(encoder(pixels, patch_attention_mask=mask).last_hidden_state, expected)


def test_a_config_of_an_encoder_and_a_decoder_is_the_model_s_own():
    def several():
        raise ValueError("Multiple valid text configs were found")

    config = SimpleNamespace(get_text_config=several)
    assert text_config(SimpleNamespace(config=config)) is config


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_inputs_go_where_offloaded_weights_run(model, tokens, offload, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = inspect_prefill(model, tokens[0])
    assert input_device(model) == torch.device("cpu")
    where = {"offload_dir": tmp_path} if offload == "disk_offload" else {}
    offloaded = getattr(accelerate, offload)(model, execution_device=torch.device("cpu"), **where)
    assert offloaded.device.type == "meta"
    assert input_device(offloaded) == torch.device("cpu")
    assert inspect_prefill(offloaded, tokens[0]).about == expected.about


def test_learned_positions_are_counted():
    """Those of tables; positions of rotary embeddings have no end."""
    with torch.device("meta"):
        sizes = {"vocab_size": 96, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
        models = [GPT2LMHeadModel(GPT2Config(**sizes)), transformers.GPTJForCausalLM(GPTJConfig(**sizes, rotary_dim=8))]
        sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        opt = OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=32, max_position_embeddings=128)
        roberta = RobertaConfig(**sizes, intermediate_size=32, max_position_embeddings=130, pad_token_id=1, is_decoder=True)
        models += [transformers.OPTForCausalLM(opt), transformers.RobertaForCausalLM(roberta)]
    assert [learned_positions(each) for each in models] == [128] * 4
    assert learned_positions(make_model()) is None
    assert learned_positions(phi4()) is None  # an encoder's positions are its own


def test_a_forecast_beyond_learned_positions_refuses_every_layer():
    config = GPT2Config(vocab_size=96, n_positions=1024, n_embd=32, n_layer=2, n_head=2)
    forecasts = layer_forecast(config, tokens=1025)
    assert [(each.outcome, each.reason) for each in forecasts] == [
        ("refused", "1,025 tokens exceed the 1,024 positions that the model has learned")
    ] * 2
    assert {each.outcome for each in layer_forecast(config, tokens=1024, dense_below=0)} == {"sparse"}


def test_embeddings_may_have_several_hooks():
    model = nn.Module()
    embeddings = nn.Embedding(2, 2, device="meta")
    embeddings._hf_hook = SimpleNamespace(hooks=[SimpleNamespace(), SimpleNamespace(execution_device="cpu")])
    model.get_input_embeddings = lambda: embeddings
    assert input_device(model) == torch.device("cpu")
