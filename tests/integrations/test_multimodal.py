"""Multimodal models: a text is served, images whose tokens see one another are refused."""

import pytest
import torch
import transformers

from flexmask.integrations.huggingface import sparse_prefill
from flexmask.integrations.huggingface.compat import group_function
from tests.integrations.common import LENGTH, SPARSE, padded

pytestmark = [
    pytest.mark.attention,
    pytest.mark.skipif(group_function is None, reason="this release marks images by other functions"),
]

TOKENS = torch.randint(0, 100, (2, LENGTH), generator=torch.Generator().manual_seed(7))
TEXT = torch.zeros_like(TOKENS)


def multimodal():
    """A Gemma 3 with layers of both kinds."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, **heads, **layers},
        vision_config={**sizes, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=127,
        boi_token_id=126,
        eoi_token_id=125,
    )
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    "arguments", [{}, {"attention_mask": padded(TOKENS)}, {"use_cache": False}], ids=["plain", "padded", "without a cache"]
)
def test_a_text_with_types_of_tokens_is_served_as_one_without(arguments):
    model = multimodal()
    with sparse_prefill(model, **SPARSE) as run:
        found = model(TOKENS, token_type_ids=TEXT, **arguments).logits
        expected = model(TOKENS, **arguments).logits
    assert torch.equal(found, expected)
    assert [call.density.mean() < 1 for calls in run.stats.values() for call in calls] == [True] * 4
    with sparse_prefill(model, dense_below=LENGTH + 1):
        dense = model(TOKENS, token_type_ids=TEXT, **arguments).logits
    assert (found - dense).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 200}], ids=str)
def test_generation_from_a_text_with_types_of_tokens(options):
    model, length = (
        multimodal(),
        {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True},
    )
    own = model.generate(TOKENS, token_type_ids=TEXT, **length, **options)
    with sparse_prefill(model, dense_below=0, gamma=1.0, method="flexprefill", block_size=32):
        found = model.generate(TOKENS, token_type_ids=TEXT, **length, **options)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(own.logits), atol=1e-4, rtol=1e-4)


def test_an_image_among_the_tokens_is_refused():
    model, types = multimodal(), TEXT.clone()
    types[1, 200:204] = 1
    with sparse_prefill(model, **SPARSE), pytest.raises(NotImplementedError, match="a bidirectional part"):
        model(TOKENS, token_type_ids=types)
