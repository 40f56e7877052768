"""The pooled map of query-aware heads against its formula."""

import math

import pytest
import torch

from flexmask.base.inputs import attention_inputs
from flexmask.base.visibility import block_visibility, token_validity, valid_keys
from flexmask.plain.pooling import block_means
from flexmask.plain.query_aware import pooled_map

BLOCK = 16


@pytest.mark.parametrize("scores", [{}, {"softcap": 1.5}, {"scale": 2.0}, {"softcap": 0.5, "window": 40}], ids=str)
def test_is_the_softmax_of_capped_scores_between_block_means(scores):
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, heads, 90, 32, generator=generator) * 2 for heads in (4, 2))
    inputs = attention_inputs(query, key, **scores)
    tokens = token_validity(90, 90, None, None, key)
    seen = block_visibility(tokens, BLOCK, inputs.window)
    values = pooled_map(inputs, block_means(key, None, BLOCK), valid_keys(tokens, BLOCK), tokens, seen, BLOCK)

    means = [torch.stack([part.mean(2) for part in x.double().split(BLOCK, 2)], 2) for x in (query, key)]
    wanted = means[0] @ means[1].repeat_interleave(2, 1).mT * scores.get("scale", 32**-0.5)
    if "softcap" in scores:
        wanted = scores["softcap"] * torch.tanh(wanted / scores["softcap"])
    wanted[..., -1] += math.log(90 % BLOCK)
    wanted[..., :-1] += math.log(BLOCK)
    wanted = wanted.masked_fill(~seen.visible, -math.inf).softmax(-1)
    torch.testing.assert_close(values.double(), wanted, atol=1e-6, rtol=1e-5)
