"""Servers' features in vLLM on a CPU: separate servers for prefill and decoding, guesses, stages, adapters, pictures."""

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from tests.serving.engine_tests import NEAR, assert_same_answers
from tests.vllm.agreement import distance


def unscored(found):
    """Answers without what they say of the prompt."""
    return [{**each, "prompt_logprobs": []} for each in found]


@pytest.mark.parametrize("kind", ["keep_all", "sparse"])
def test_a_stock_server_decodes_from_the_pages_that_another_prefilled(kind, run):
    """It computes the last page of each prompt, dense as the last rows of a sparse prefill, and reads the others."""
    prefilled, decoded = run(f"{kind}_prefills"), run(f"{kind}_decodes")
    hits = [told["log"].count("External Cache Hit!") for told in (prefilled, decoded)]
    assert hits == [0, 2] and "SparseCPUAttention" not in decoded["backends"]
    assert_same_answers(prefilled["handed"], decoded["handed"])
    # the answers from pages that a dense prefill leaves
    far = distance(decoded["handed"], unscored(run("stock")["whole"]))
    assert far < NEAR if kind == "keep_all" else far > 10 * NEAR


def test_a_stock_server_decodes_from_pages_that_nixl_moves(written):
    """At gamma 1 of a request as after its own prefill, at the server's gamma as the server that prefilled."""
    pytest.importorskip("nixl", reason="tests/vllm/environment.sh installs it")
    found = written("nixl_run")
    assert_same_answers(found["stock"], found["handed_at_one"])
    assert_same_answers(found["prefills"], found["handed"])
    assert distance(found["stock"], found["handed"]) > 100 * NEAR
    assert distance(found["prefills"], found["handed_wrong"]) > 100 * NEAR


@pytest.mark.parametrize("name", ["guessed", "drafted", "two_stages"])
def test_a_feature_changes_no_answer(name, run):
    """At gamma 1 answers are the stock engine's, below it the plain server's, which has the same chunks of a lone request."""
    ours, plain = run(name), run("sparse")["odd_chunks"]
    assert_same_answers(run("stock")["mixed"], ours["mixed_at_one"])
    assert_same_answers(plain, ours["odd_chunks"])
    wrong = run("two_stages_wrong")["odd_chunks"] if name == "two_stages" else ours["faults"]["offset_off_by_one"]
    assert distance(plain, wrong) > 100 * NEAR


@pytest.mark.parametrize(("name", "of_draft"), [("guessed", 0), ("drafted", 4)])
def test_guesses_are_made_and_taken_and_a_draft_runs_stock(name, of_draft, run):
    ours = run(name)
    drafted, accepted = ours["guesses"]
    assert drafted >= accepted > 0
    reasons = [role for role in ours["roles"].values() if isinstance(role, str)]
    assert (reasons, len(ours["roles"])) == (["a draft model's"] * of_draft, 4 + of_draft)
    # all prompts of `mixed` are, but 40 and 90 tokens, where a block has 64
    assert ours["counters"]["sparse"] > 3000 + 2500 + 1300


def test_adapters_are_served_side_by_side(run):
    """Three requests of one prompt in one step: the model, two adapters; then at gamma 1."""
    stock, ours = run("adapters_stock")["adapters"], run("adapters")["adapters"]
    assert_same_answers(stock[3:], ours[3:])
    assert all(each["cached"] == 0 for each in ours)
    for number, alone in ((0, run("sparse")["whole"][1:]), (2, run("merged")["alone"])):
        assert_same_answers(unscored(alone), [ours[number]])
        # answers of the other adapter, and of dense attention
        for other in (ours[1], stock[number]):
            assert distance([other], [ours[number]]) > 100 * NEAR


def test_text_around_a_picture_runs_sparse(run):
    stock, (ours, *at_one), plain = run("seeing_stock")["pictured"], run("seeing")["pictured"], run("sparse")["odd_chunks"]
    assert_same_answers(stock[1:], at_one)
    assert distance(stock[:1], [ours]) > 1 < distance(*([each] for each in at_one))
    # a text without a picture gets the plain server's answer
    assert_same_answers(plain, run("seeing")["odd_chunks"])
    assert distance(plain, run("seeing")["faults"]["offset_off_by_one"]) > 100 * NEAR
    assert run("seeing")["counters"]["sparse"] >= 3 * (1700 + 16) + 3000
