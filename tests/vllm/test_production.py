"""Features that servers turn on, in vLLM on a CPU: separate servers for prefill and decoding, guessed tokens."""

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from tests.serving.engine_tests import NEAR, assert_same_answers
from tests.vllm.agreement import distance


@pytest.fixture
def run(written):
    return lambda name: written("engine_run", name)


@pytest.mark.parametrize("kind", ["keep_all", "sparse"])
def test_a_stock_server_decodes_from_the_pages_that_another_prefilled(kind, run):
    """It computes the last page of each prompt, dense as the last rows of a sparse prefill, and reads the others."""
    prefilled, decoded = run(f"{kind}_prefills"), run(f"{kind}_decodes")
    hits = [told["log"].count("External Cache Hit!") for told in (prefilled, decoded)]
    assert hits == [0, 2] and "SparseCPUAttention" not in decoded["backends"]
    assert_same_answers(prefilled["handed"], decoded["handed"])
    # from what a dense prefill leaves
    far = distance(decoded["handed"], [{**each, "prompt_logprobs": []} for each in run("stock")["whole"]])
    assert far < NEAR if kind == "keep_all" else far > 10 * NEAR


def test_tokens_guessed_by_ngrams_change_no_answer(run):
    stock, ours = run("stock"), run("guessed")
    for asked in ("odd_chunks", "mixed"):
        assert_same_answers(stock[asked], ours[asked])
    assert_same_answers(run("sparse")["odd_chunks"], run("guessed_sparse")["odd_chunks"])
    assert ours["counters"]["sparse"] > 3000 + 2500 + 1300
