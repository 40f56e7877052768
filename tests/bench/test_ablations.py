"""bench.answers.ablations and mean_correction, against what they are made of and slow twins."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from flexmask import flexprefill_mask, hybrid_mask
from flexmask.base.selection import kept_and_full
from flexmask.method import METHODS
from tests.cases import structured_inputs

OPTIONS = {"block_size": 32, "min_coverage": 0.3, "min_budget": 0, "last_rows_dense": False}


@pytest.fixture(scope="module")
def ablations():
    """Its import enters methods into the table, which is as before afterwards."""
    from bench.answers import ablations

    yield ablations
    for method in (ablations.union, ablations.noise_floor, ablations.shared):
        METHODS.pop(method.method.name, None)


def inputs(kv_heads=2):
    return structured_inputs(torch.Generator().manual_seed(3), 1, 4, kv_heads, 900, 900, 32, sharpness=4.0)


def kept(mask):
    return kept_and_full(mask, -(-mask.shape[3] // 32))[0]


@pytest.mark.parametrize("tau", [0.0, 0.3])
def test_the_union_has_the_blocks_of_both(tau, ablations):
    query, key = inputs()
    theirs = kept(flexprefill_mask(query, key, 0.6, tau, block_size=32, min_budget=256))
    hybrid = kept(hybrid_mask(query, key, gamma=0.8, **OPTIONS))
    found = kept(ablations.union(query, key, gamma=0.8, other=0.6, tau=tau, **OPTIONS))
    assert torch.equal(found, hybrid | theirs) and (found != hybrid).any() and (found != theirs).any()


def test_the_noise_floor_is_the_mean_without_the_sink(ablations):
    query, key = inputs()
    found = kept(ablations.noise_floor(query, key, gamma=0.001, times=1.5, **OPTIONS))[0]
    for head in range(4):
        for r in range(1, 28):
            rows = query[0, head, r * 32 : (r + 1) * 32 : 8]
            scores = torch.stack([key[0, head // 2, j * 32 : (j + 1) * 32].mean(0) for j in range(r + 1)])
            evidence = (rows @ scores.T * 32**-0.5).softmax(-1).square().mean(0).sqrt()
            least = 1.5 * evidence[1:].mean()
            expected = {j for j in range(r + 1) if evidence[j] >= least} | {0, r}
            assert set(found[head, r].nonzero()[:, 0].tolist()) == expected


def test_heads_of_a_key_head_share_what_one_head_alone_keeps(ablations):
    query, key = inputs()
    found = kept(ablations.shared(query, key, gamma=0.9, **OPTIONS))
    assert torch.equal(found[:, 0], found[:, 1]) and not torch.equal(found[:, 0], found[:, 2])
    # one query head a KV head: hybrid itself
    query, key = inputs(kv_heads=4)
    masks = [method(query, key, gamma=0.9, **OPTIONS) for method in (ablations.shared, hybrid_mask)]
    assert torch.equal(*map(kept, masks)) and masks[0].sparsity() > 20


def test_a_skipped_block_is_one_key_of_its_mean():
    from bench.answers import mean_correction

    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 1000, 32), torch.randn(1, 2, 1000, 32), torch.randn(1, 2, 1000, 32)
    keep = (torch.rand(1, 4, 8, 8) < 0.4) | torch.eye(8, dtype=torch.bool)
    outputs, sums, expected = torch.zeros(1, 4, 1000, 32), torch.zeros(1, 4, 1000), torch.zeros(1, 4, 1000, 32)
    for head in range(4):
        for row in range(0, 1000, 29):
            q_block, k, v = row // 128, key[0, head // 2], value[0, head // 2]
            parts = [slice(j * 128, min((j + 1) * 128, row + 1)) for j in range(q_block + 1)]
            of_kept = torch.cat([torch.arange(x.start, x.stop) for j, x in enumerate(parts) if keep[0, head, q_block, j]])
            scores = k[of_kept] @ query[0, head, row] * 0.2
            outputs[0, head, row], sums[0, head, row] = scores.softmax(0) @ v[of_kept], scores.logsumexp(0)
            means = [x for j, x in enumerate(parts) if not keep[0, head, q_block, j]]
            keys = torch.cat([k[of_kept], *(k[x].mean(0, True) for x in means)])
            values = torch.cat([v[of_kept], *(v[x].mean(0, True) for x in means)])
            weight = torch.cat([torch.zeros(len(of_kept)), torch.full((len(means),), math.log(128))])
            expected[0, head, row] = (keys @ query[0, head, row] * 0.2 + weight).softmax(0) @ values
    found = mean_correction.mean_corrected(query, key, value, keep, 0.2, outputs, sums)
    torch.testing.assert_close(found[:, :, ::29], expected[:, :, ::29], rtol=1e-5, atol=1e-5)
    assert (found[:, :, ::29] - outputs[:, :, ::29]).abs().max() > 0.1
