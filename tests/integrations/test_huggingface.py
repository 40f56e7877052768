"""The adapter for transformers, on tiny random models: what users do with it. test_matrix.py has the families and caches."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask

pytest.importorskip("transformers")

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaForCausalLM,
)

import flexmask.integrations.huggingface as flexmask_hf
from flexmask import FlexPrefillConfig, flexprefill_mask
from flexmask.block_masks import MASKS, causal_mask
from flexmask.integrations import versions
from flexmask.integrations.attention_call import HOOKS, RUNS
from flexmask.integrations.prefill_mask import PrefillMask, prefill_mask
from flexmask.integrations.settings import PrefillSettings
from tests.integrations.cells import RELEASE, dynamic_cache, static_cache
from tests.integrations.families import FAMILIES, VOCABULARY

# transformers calls torch's create_block_mask in a way that torch deprecates, and that compiles with a warning of torch's own
pytestmark = pytest.mark.filterwarnings(
    "ignore:_compile flag on create_block_mask:DeprecationWarning",
    "ignore:.*torch.autograd.function.Function.*should not be instantiated:DeprecationWarning",
)

# one shape for all that runs compiled: each further one costs a compilation
BATCH, LENGTH = 2, 530
KEEP_ALL: dict[str, Any] = {"gamma": 1.0, "block_size": 32, "min_budget": 0, "dense_below": 0}
SPARSE: dict[str, Any] = {"gamma": 0.6, "tau": 0.12, "block_size": 32, "min_budget": 0, "dense_below": 0}


def make_model(family="Llama", seed=0, **options):
    return FAMILIES[family].make(seed, **options)


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def tokens():
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def padded(tokens, number=70):
    mask = torch.ones_like(tokens)
    mask[1, :number] = 0
    return mask


def enter(block):
    with block:
        pytest.fail("entered")


def masked_attention(masks):
    """An attention function of transformers: SDPA under the expanded masks, one per layer."""

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        mask = masks[module.layer_idx]
        mask = create_mask(mask.mask_mod, *mask.shape, device="cpu")
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    return attention


# What it computes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_equals_sdpa_at_gamma_one(model, tokens, mode):
    expected = model(tokens).logits
    with mode(), flexmask_hf.flexprefill(model, **KEEP_ALL) as run:
        logits = model(tokens).logits
    assert (logits - expected).abs().max() < 1e-4
    assert [stats.dense for layer in run.stats.values() for stats in layer] == [False, False]


def test_equals_dense_attention_under_its_masks(model, tokens):
    dense = model(tokens).logits
    with flexmask_hf.flexprefill(model, **SPARSE, collect_masks=True) as run:
        logits = model(tokens).logits
    density = torch.stack([run.stats[layer][0].density for layer in (0, 1)])
    query_aware = torch.stack([run.stats[layer][0].is_query_aware for layer in (0, 1)])
    assert density.mean() < 0.7
    assert query_aware.any()
    assert not query_aware.all()
    assert (logits - dense).abs().max() > 1e-2
    rows = run.rows()
    assert len(rows) == query_aware.numel()
    assert {row["pattern"] for row in rows} == {"query-aware", "vertical-slash"}
    assert torch.tensor([row["density"] for row in rows]).equal(density.flatten())

    AttentionInterface.register("masked", masked_attention({layer: run.masks[layer][0] for layer in (0, 1)}))
    model.set_attn_implementation("masked")
    assert (model(tokens).logits - logits).abs().max() < 1e-4


def test_selects_on_the_queries_and_keys_of_the_layer(model, tokens):
    seen = {}

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen[module.layer_idx] = (query, key, scaling)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("recording", attention)
    model.set_attn_implementation("recording")
    model(tokens)
    options = {name: value for name, value in SPARSE.items() if name != "dense_below"}
    query, key, scale = seen[0]
    mask, stats = flexprefill_mask(query, key, **options, scale=scale, return_stats=True)

    with flexmask_hf.flexprefill(model, **SPARSE, collect_masks=True) as run:
        model(tokens)
    assert torch.equal(run.masks[0][0].to_dense(), mask.to_dense())
    assert torch.equal(run.stats[0][0].density, stats.density)


def test_generates_as_sdpa_does_at_gamma_one(model, tokens):
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, **options)
    with flexmask_hf.flexprefill(model, **KEEP_ALL) as run:
        assert torch.equal(model.generate(tokens, **options), expected)
        assert torch.equal(model.generate(tokens, **options), expected)
    # a row per prefill, none for the decoding steps
    assert {layer: len(stats) for layer, stats in run.stats.items()} == {0: 2, 1: 2}


def test_rows_that_do_not_fill_a_block_run_dense(model, tokens):
    expected = model(tokens).logits
    cache = dynamic_cache(model)
    model(tokens[:, :500], past_key_values=cache)
    with flexmask_hf.flexprefill(model, **SPARSE) as run:
        logits = model(tokens[:, 500:], past_key_values=cache).logits
    assert (logits - expected[:, 500:]).abs().max() < 1e-4
    assert run.stats[0][0].dense


@pytest.mark.parametrize("collected", [(False, False), (False, True), (True, False)])
def test_collects_what_is_asked_for(model, tokens, collected):
    stats, masks = collected
    with flexmask_hf.flexprefill(model, **SPARSE, collect_stats=stats, collect_masks=masks) as run:
        model(tokens)
    assert (len(run.stats), len(run.masks)) == (2 * stats, 2 * masks)


def test_short_prompt_runs_dense(model, tokens):
    with flexmask_hf.flexprefill(model, collect_masks=True) as run:
        model(tokens)
    assert run.stats[1][0].dense
    assert run.masks[1] == [None]


# What it leaves behind


def test_import_registers_nothing():
    code = """
import flexmask.integrations.huggingface as flexmask_hf
from transformers import AttentionInterface, AttentionMaskInterface
names = [{*AttentionInterface().valid_keys()}, {*AttentionMaskInterface().valid_keys()}]
assert not any("flexprefill" in name for both in names for name in both)
flexmask_hf.register()
assert all("flexprefill" in interface().valid_keys() for interface in (AttentionInterface, AttentionMaskInterface))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("error", [None, KeyError])
def test_is_undone_on_exit(model, tokens, error):
    expected = model(tokens).logits
    with pytest.raises(error) if error else nullcontext(), flexmask_hf.flexprefill(model, **SPARSE):
        model(tokens)
        assert model.config._attn_implementation == "flexprefill"
        if error:
            raise error
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(tokens).logits, expected)
    assert not any(module in RUNS for module in model.modules())


def test_inner_block_gives_back_the_outer_settings(model, tokens):
    with flexmask_hf.flexprefill(model, **SPARSE) as outer:
        with flexmask_hf.flexprefill(model, **KEEP_ALL) as inner:
            model(tokens)
        model(tokens)
    assert [len(run.stats[0]) for run in (outer, inner)] == [1, 1]
    assert outer.stats[0][0].density.max() < 1
    assert inner.stats[0][0].density.min() == 1


@pytest.mark.parametrize("shares_config", [False, True])
def test_two_models_do_not_mix(model, tokens, shares_config):
    other = make_model(seed=1)
    if shares_config:
        other = LlamaForCausalLM(model.config).eval()
    expected = model(tokens).logits
    with flexmask_hf.flexprefill(model, **KEEP_ALL) as run, flexmask_hf.flexprefill(other, **SPARSE) as other_run:
        other(tokens)
        logits = model(tokens).logits
    assert (logits - expected).abs().max() < 1e-4
    assert run.stats[0][0].density.min() == 1
    assert other_run.stats[0][0].density.max() < 1
    assert [len(each.stats[0]) for each in (run, other_run)] == [1, 1]
    assert model.config._attn_implementation == other.config._attn_implementation == "sdpa"


def test_name_alone_runs_with_the_defaults(model, tokens):
    expected = model(tokens).logits
    flexmask_hf.register()
    model.set_attn_implementation("flexprefill")
    assert (model(tokens).logits - expected).abs().max() < 1e-4


# Options


def test_layers_have_options_of_their_own(model, tokens):
    with flexmask_hf.flexprefill(model, **SPARSE, layers={1: {"gamma": 1.0}}) as run:
        model(tokens)
    assert run.stats[0][0].density.max() < 1
    assert run.stats[1][0].density.min() == 1
    assert not run.stats[1][0].dense


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


@pytest.mark.parametrize("method", ["causal", causal_mask])
@pytest.mark.parametrize("family", ["Llama", "GptOss"])
def test_takes_another_method(tokens, family, method):
    if not FAMILIES[family].available:
        pytest.skip("no such family in this release")
    model = make_model(family)
    model.set_attn_implementation(FAMILIES[family].dense)
    mask = padded(tokens)
    expected = model(tokens, attention_mask=mask).logits
    with flexmask_hf.flexprefill(model, method=method, block_size=32, dense_below=0, collect_masks=True) as run:
        logits = model(tokens, attention_mask=mask).logits
    assert (logits - expected)[mask != 0].abs().max() < 1e-4
    assert run.stats == {}
    assert [len(run.masks[layer]) for layer in (0, 1)] == [1, 1]


def test_method_that_gives_other_blocks_is_refused(model, tokens):
    def method(query, key, *, block_size, **visibility):
        return causal_mask(query, key, block_size=2 * block_size, **visibility)

    with (
        flexmask_hf.flexprefill(model, method=method, block_size=32, dense_below=0),
        pytest.raises(ValueError, match=r"in blocks of 32 tokens, as it is told to; got \(64, 64\)"),
    ):
        model(tokens)


def test_method_gets_its_own_options_and_the_scores(model, tokens):
    seen = []

    def method(query, key, *, block_size, keep, scale=None, **visibility):
        seen.append((query.shape, block_size, keep, scale, set(visibility)))
        return causal_mask(query, key, block_size=block_size, **visibility)

    one_head = 14 * 17 * 17 + 16 * 32 * 17  # bytes of a mask: so that heads come one by one
    with flexmask_hf.flexprefill(model, method=partial(method, keep=3), block_size=32, dense_below=0, max_mask_bytes=one_head):
        model(tokens)
    assert seen == [((1, 1, LENGTH, 16), 32, 3, 0.25, {"window", "attention_mask", "q_offset"})] * 16


def test_masks_too_large_go_through_head_groups(model, tokens):
    mask = padded(tokens)
    with flexmask_hf.flexprefill(model, **SPARSE) as whole:
        expected = model(tokens, attention_mask=mask).logits
    with flexmask_hf.flexprefill(model, **SPARSE, max_mask_bytes=1) as parts:
        logits = model(tokens, attention_mask=mask).logits
    assert (logits - expected).abs().max() < 1e-5
    assert torch.equal(whole.stats[1][0].density, parts.stats[1][0].density)


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


def test_function_cannot_be_saved(model):
    with pytest.raises(ValueError, match="method must be a name"):
        flexmask_hf.configure(model, method=causal_mask)


# What users do next


def test_settings_of_two_generations(model, tokens):
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens[:, :500])}
    expected = model.generate(tokens[:, :500], **options)
    short = model.generate(tokens[:, :310], **{**options, "attention_mask": None})
    with flexmask_hf.flexprefill(model, **SPARSE) as sparse:
        model.generate(tokens[:, :500], **options)
    with flexmask_hf.flexprefill(model, **KEEP_ALL) as whole:
        assert torch.equal(model.generate(tokens[:, :500], **options), expected)
        assert torch.equal(model.generate(tokens[:, :310], **{**options, "attention_mask": None}), short)
    assert sparse.stats[0][0].density.max() < 1
    assert [len(whole.stats[0]), len(sparse.stats[0])] == [2, 1]


def test_ragged_batch_is_its_prompts_one_by_one(model, tokens):
    lengths = (530, 341)
    mask = torch.stack([torch.arange(LENGTH) >= LENGTH - length for length in lengths]).long()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with flexmask_hf.flexprefill(model, **SPARSE):
        together = model.generate(tokens * mask, attention_mask=mask, **options)[:, -4:]
        alone = [
            model.generate(tokens[row : row + 1, LENGTH - length :], **options)[0, -4:] for row, length in enumerate(lengths)
        ]
    assert torch.equal(together[0], alone[0])
    # blocks lie elsewhere in a padded prompt, so that what is kept may differ: at gamma 1 it may not
    with flexmask_hf.flexprefill(model, **KEEP_ALL):
        together = model.generate(tokens * mask, attention_mask=mask, **options)[:, -4:]
        alone = [
            model.generate(tokens[row : row + 1, LENGTH - length :], **options)[0, -4:] for row, length in enumerate(lengths)
        ]
    assert torch.equal(together, torch.stack(alone))


def test_pipeline(model):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", padding_side="left")
    pipe = pipeline("text-generation", model=model, tokenizer=wrapped)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        " ".join(f"w{number}" for number in torch.randint(2, VOCABULARY, (length,), generator=generator)) for length in (400, 300)
    ]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "batch_size": 2, "return_full_text": False}
    expected = pipe(prompts, **options)
    with flexmask_hf.flexprefill(model, **KEEP_ALL) as run:
        assert pipe(prompts, **options) == expected
    assert not run.stats[0][0].dense


def test_model_is_pickled_and_copied_inside_the_block(model, tokens):
    flexmask_hf.configure(model, **SPARSE)
    with flexmask_hf.flexprefill(model):
        expected = model(tokens).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(tokens).logits, expected)  # by its name and its config


def test_two_models_generate_in_two_threads(tokens):
    models = [make_model(seed=seed) for seed in (0, 1)]
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    settings = ({**SPARSE, "gamma": 0.4}, KEEP_ALL)

    def one_by_one(number):
        with flexmask_hf.flexprefill(models[number], **settings[number]) as run:
            return models[number].generate(tokens, **options), run.stats[1][0].density

    expected = [one_by_one(number) for number in (0, 1)]
    results: dict[int, list[Any]] = {0: [], 1: []}
    threads = [threading.Thread(target=lambda n=n: results[n].extend(one_by_one(n) for _ in range(3))) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (sequence, density) in enumerate(expected):
        assert len(results[number]) == 3
        assert all(torch.equal(each[0], sequence) and torch.equal(each[1], density) for each in results[number])


def test_static_decode_compiles_whole(model, tokens):
    """A decoding step over a static cache is one graph, without breaks, and right."""
    expected = model(tokens).logits[:, -1]
    cache = static_cache(model, LENGTH + 8)
    last = {"position_ids": torch.full((BATCH, 1), LENGTH - 1)}
    if RELEASE < (5, 4):
        last["cache_position"] = torch.tensor([LENGTH - 1])
    with flexmask_hf.flexprefill(model, **KEEP_ALL):
        model(tokens[:, :-1], past_key_values=cache, attention_mask=torch.ones_like(tokens[:, :-1]))
        step = torch.compile(model, fullgraph=True, backend="eager")
        logits = step(tokens[:, -1:], past_key_values=cache, **last).logits[:, -1]
    assert (logits - expected).abs().max() < 1e-4


def test_mask_moves_with_the_model():
    padding = torch.ones(1, 4, dtype=torch.bool)
    moved = PrefillMask((1, 1, 4, 4), torch.tensor(0), padding, 3).to("meta", non_blocking=True)
    assert moved.offset.device.type == moved.attention_mask.device.type == "meta"
    assert (moved.window, moved.shape) == (3, (1, 1, 4, 4))


def test_layers_on_other_devices(model, tokens, tmp_path):
    """With a layer kept on disk, accelerate moves what each layer is called with, masks too."""
    pytest.importorskip("accelerate")
    model.save_pretrained(tmp_path / "model")
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    parts |= {"model.norm": "cpu", "lm_head": "cpu"}
    spread = LlamaForCausalLM.from_pretrained(tmp_path / "model", device_map=parts, offload_folder=tmp_path / "disk").eval()
    mask = padded(tokens)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with flexmask_hf.flexprefill(model, **SPARSE):
        expected = model.generate(tokens, **options)
    with flexmask_hf.flexprefill(spread, **SPARSE) as run:
        assert torch.equal(spread.generate(tokens, **options), expected)
    assert run.stats[1][0].density.max() < 1


# Models loaded with "flex_attention"


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_hooked_model_selects_and_others_do_not(tokens, family):
    model, other = (make_model(family, attn_implementation=name) for name in ("sdpa", "flex_attention"))
    stock_runs = RELEASE >= (4, 57)  # before, it asks for a log-sum-exp, which CPUs have not
    mask = padded(tokens)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    expected, generated = model(tokens).logits, model.generate(tokens, **options)
    model.set_attn_implementation("flex_attention")
    before = other(tokens).logits if stock_runs else None
    run = flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    try:
        assert model.config._attn_implementation == "flex_attention"
        assert (model(tokens).logits - expected).abs().max() < 1e-4
        assert torch.equal(model.generate(tokens, **options), generated)
        # transformers' own path cannot: its mask has no contiguous()
        assert torch.equal(model.generate(tokens, cache_implementation="static", **options), generated)
        assert [len(run.stats[layer]) for layer in (0, 1)] == [3, 3]
        run.settings = PrefillSettings.from_options(**SPARSE)
        assert (model(tokens).logits - expected).abs().max() > 1e-2
        assert not stock_runs or torch.equal(other(tokens).logits, before)
        assert len(run.stats[0]) == 4
    finally:
        flexmask_hf.unhook_flex_attention(model)
    if stock_runs:
        assert (model(tokens).logits - expected).abs().max() < 1e-4
    assert len(run.stats[0]) == 4


def test_hooked_model_keeps_the_mask_of_hugging_face(tokens):
    model = make_model("Llama", attn_implementation="flex_attention")
    flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    seen = []
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    model(tokens, attention_mask=padded(tokens))
    handle.remove()
    flexmask_hf.unhook_flex_attention(model)
    rows = torch.arange(LENGTH)
    visible = (rows[:, None] >= rows) & (padded(tokens)[:, None, None] != 0)
    assert torch.equal(create_mask(seen[0].mask_mod, BATCH, 1, LENGTH, LENGTH, device="cpu"), visible)
    assert seen[0].kv_num_blocks.shape[:2] == (BATCH, 1)


@pytest.fixture
def former():
    """What the former functions behind "flex_attention" were called with: masks by attention, which CPUs cannot run them on."""
    attention, mask = AttentionInterface()["flex_attention"], AttentionMaskInterface()["flex_attention"]
    seen = []

    def recording(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return torch.zeros_like(query).transpose(1, 2).contiguous(), None

    AttentionInterface.register("flex_attention", recording)
    yield seen
    AttentionInterface.register("flex_attention", attention)
    AttentionMaskInterface.register("flex_attention", mask)


def test_model_that_shares_its_config_with_a_hooked_one_runs_as_before(tokens, former):
    model = make_model(attn_implementation="flex_attention")
    other = LlamaForCausalLM(model.config).eval()
    mask = padded(tokens)
    flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    cache = dynamic_cache(model)
    other(tokens, attention_mask=mask, past_key_values=cache)
    assert former[0].kv_num_blocks.shape[:2] == (BATCH, 1)
    other(tokens[:, :1], attention_mask=F.pad(mask, (0, 1), value=1), past_key_values=cache)
    assert torch.equal(former[2][:, 0, 0] == 0, F.pad(mask, (0, 1), value=1) != 0)
    assert former[2].min() == -torch.inf  # added to the scores
    # packed sequences, which a hooked model refuses
    other(tokens, position_ids=torch.arange(LENGTH)[None] % 265, use_cache=False)
    assert not create_mask(former[4].mask_mod, BATCH, 1, LENGTH, LENGTH, device="cpu")[0, 0, 265:, :265].any()
    assert len(former) == 6


def test_unhooking_ends_one_hook_and_nothing_else(model, tokens):
    model.config._attn_implementation = "flex_attention"
    other = LlamaForCausalLM(model.config).eval()
    run = flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
    other_run = flexmask_hf.hook_flex_attention(other, **KEEP_ALL)
    with flexmask_hf.flexprefill(model, **KEEP_ALL) as block:
        flexmask_hf.unhook_flex_attention(model)
        model(tokens)
    assert [len(each.stats) for each in (block, run)] == [2, 0]
    assert not any(module in RUNS or module in HOOKS for module in model.modules())
    other(tokens)
    assert len(other_run.stats) == 2
    flexmask_hf.unhook_flex_attention(other)
    assert not flexmask_hf._HOOKED


def test_only_flex_attention_is_hooked(model):
    with pytest.raises(ValueError, match=r'flex_attention.*got "sdpa"'):
        flexmask_hf.hook_flex_attention(model)


# What it refuses


FORWARD_REFUSALS = {
    "4-D": lambda model, tokens: {"attention_mask": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
    "packed": lambda model, tokens: {"position_ids": torch.arange(LENGTH)[None] % 265, "use_cache": False},
    "output_attentions": lambda model, tokens: {"output_attentions": True},
    "position_bias": lambda model, tokens: {"position_bias": torch.zeros(1)},
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("what", FORWARD_REFUSALS)
def test_forward_refuses(tokens, what, hooked):
    model = make_model(attn_implementation="flex_attention" if hooked else "sdpa")
    with nullcontext() if hooked else flexmask_hf.flexprefill(model, **KEEP_ALL):
        if hooked:
            flexmask_hf.hook_flex_attention(model, **KEEP_ALL)
        with pytest.raises(NotImplementedError, match=f"does not serve .*{what}.*; use "):
            model(tokens, **FORWARD_REFUSALS[what](model, tokens))


def test_bidirectional_attention_is_refused(tokens):
    model = make_model()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with flexmask_hf.flexprefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match="bidirectional"):
        model(tokens)


def test_encoder_is_refused(tokens):
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
    encoder = BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)).eval()
    # before release 5 it does not go through the attention interface
    errors, message = (NotImplementedError, ValueError), r"bidirectional|attention interface"
    with pytest.raises(errors, match=message), flexmask_hf.flexprefill(encoder, **KEEP_ALL):
        encoder(tokens)


def test_cross_attention_is_refused(tokens):
    from transformers import BartConfig, BartModel

    sizes = {f"{part}_{what}": number for part in ("encoder", "decoder") for what, number in (("layers", 1), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 64, "dropout": 0.0}
    config = BartConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH + 8, **sizes, **heads)
    model = BartModel(config).eval()
    with flexmask_hf.flexprefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match=r"bidirectional|cross"):
        model(tokens)


def test_config_that_asks_for_attentions_is_refused(tokens):
    model = make_model(attn_implementation="eager", output_attentions=True)
    with flexmask_hf.flexprefill(model), pytest.raises(NotImplementedError, match=r"config with output_attentions; use "):
        model(tokens)


def test_mask_of_the_new_tokens_alone_is_refused(model, tokens):
    cache = dynamic_cache(model)
    model(tokens[:, :400], past_key_values=cache)
    mask = torch.ones_like(tokens[:, 400:])
    with (
        flexmask_hf.flexprefill(model, **KEEP_ALL),
        pytest.raises(ValueError, match=r"attention_mask .*\(2, 530\); got \(2, 130\)"),
    ):
        model(tokens[:, 400:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(
    ("family", "arguments"), [("Llama", {"num_items_in_batch": torch.tensor(7)}), ("Qwen3Moe", {"output_router_logits": True})]
)
def test_arguments_of_training_are_served(tokens, family, arguments):
    model = make_model(family)
    expected = model(tokens, **arguments).logits
    with flexmask_hf.flexprefill(model):
        assert (model(tokens, **arguments).logits - expected).abs().max() < 1e-4


def test_dropout_is_refused(tokens):
    model = make_model(attention_dropout=0.1).train()
    with flexmask_hf.flexprefill(model, **KEEP_ALL), pytest.raises(NotImplementedError, match="dropout"):
        model(tokens)


def test_gradients_on_a_cpu_are_refused(model, tokens):
    with flexmask_hf.flexprefill(model, **KEEP_ALL), torch.enable_grad(), pytest.raises(ValueError, match="no_grad"):
        model(tokens)


def test_continuous_batching_is_refused(model, tokens):
    flexmask_hf.register()
    model.set_attn_implementation("flexprefill")
    if RELEASE < (5, 0):  # its thread dies before attention on a CPU
        assert model.generate_batch([[1, 2, 3]]) == {}
        return
    with pytest.raises((ValueError, NotImplementedError), match=r"not supported|does not serve"):
        model.generate_batch([[1, 2, 3]])


def test_model_must_be_one():
    with pytest.raises(TypeError, match="PreTrainedModel"), flexmask_hf.flexprefill(torch.nn.Linear(2, 2)):
        pytest.fail("entered")


@pytest.mark.parametrize("release", ["4.53.3", "5.24.0", "6.0.0"])
def test_other_transformers_are_named(monkeypatch, release):
    monkeypatch.setattr(versions.transformers, "__version__", release)
    with pytest.raises(ImportError, match=rf"transformers 4\.54 to 5\.23; got {release}"):
        flexmask_hf.register()


def test_mask_interface_is_registered_too():
    flexmask_hf.register()
    # without a mask function transformers would hand over None, padding or not
    assert AttentionMaskInterface()["flexprefill"] is prefill_mask


def test_every_method_of_the_gallery_has_the_signature_that_the_adapter_calls():
    query = key = torch.randn(1, 1, 64, 16)
    for method in MASKS.values():
        method(query, key, block_size=32, window=None, attention_mask=None, q_offset=None)
