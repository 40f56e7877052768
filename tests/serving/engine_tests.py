"""Tests that every engine must pass, against its stock backend and the adapter, in float32 on a CPU."""

from typing import Any, ClassVar

from tests.serving.programs import WRONG_OPTIONS
from tests.vllm.agreement import answers, apart, distance, summary

NEAR = 1e-3


def assert_same_answers(stock: list[Any], ours: list[Any], near: float = NEAR) -> None:
    assert [each["tokens"] for each in answers(stock)] == [each["tokens"] for each in answers(ours)]
    assert distance(stock, ours) < near


def assert_the_adapter_s(stock: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Sparse answers to the questions that both were asked are the adapter's, with the same chunks."""
    both = ours.keys() & theirs.keys()
    assert both
    for asked in both:
        (answer, *_), wanted = ours[asked], theirs[asked]
        found = summary(apart(answer, wanted))
        assert found["mean"] < 1e-4 and found["p99"] < 2e-4
        # half a unit in the last place of the weights moves one token's log-probability by 0.6e-3 to 3.3e-3
        assert found["most"] < 5e-3
        assert answer["tokens"][0] == wanted["token"]
        assert distance(stock[asked], ours[asked]) > 1


def assert_a_mixture_s(stock: Any, ours: Any, dense: Any, half: Any) -> None:
    """Two programs of the same model differ by rounding, and sparse ones by blocks near a threshold too."""

    def mean(one: Any, other: Any) -> float:
        return summary(apart(one, other))["mean"]

    assert mean(stock, dense) < 0.05
    assert mean(ours, half) < mean(ours, dense) / 3
    assert mean(ours, half) < 5 * mean(stock, dense)


class EngineTests:
    """The fixture `run` gives what an engine wrote, by its name in the engine's table; `adapter` gives what the adapter wrote."""

    same: ClassVar[tuple[str, ...]]  # questions
    stock: ClassVar[str]  # the kernel
    source: ClassVar[str]  # of the options

    def test_gamma_one_gives_the_stock_backend_s_answers(self, run):
        for asked in self.same:
            assert_same_answers(run("stock")[asked], run("keep_all")[asked])

    def test_sparse_prefill_is_the_adapter_s_with_the_same_chunks(self, run, adapter):
        assert_the_adapter_s(run("stock"), run("sparse"), adapter["sparse"])

    def test_requests_choose_gamma_or_dense_attention(self, run):
        """Requests 0 to 3 have the server's gamma, gamma 1, dense attention and gamma 0.5."""
        stock, ours = (run(name)["beside_each_other"] for name in ("stock", "sparse"))
        # in the same chunks, by a server with that gamma
        half = run("half")["beside_each_other_plainly"]
        for number, wanted in ((1, stock), (2, stock), (3, half)):
            assert_same_answers([wanted[number]], [ours[number]])
        assert all(distance([stock[each]], [ours[each]]) > 1 for each in (0, 3))
        assert distance([half[0]], [ours[0]]) > 1

    def test_requests_share_prefixes_where_their_options_are_equal(self, run):
        """Without the plug-in the first of three kinds of requests serves all."""
        ours, stock = (run(name)["behind_one_prefix"] for name in ("sparse", "stock"))
        cached = [each["cached"] for each in ours]
        assert cached[:3] == [0, 0, 0]
        assert min(cached[3:]) > 2400
        assert min(each["cached"] for each in stock[1:]) > 2400
        for dense in (stock[4], ours[1], ours[4]):
            assert_same_answers([stock[1]], [dense])

    def test_wrong_options_of_a_request_are_refused_and_the_server_goes_on(self, run):
        *refused, answer = run("sparse")["wrongly"]
        assert [each["refused"] for each in refused] == [
            "flexmask_gamma must be in (0, 1]; got 2",
            "a request takes flexmask_gamma and flexmask_dense; got 'flexmask_gama'",
            "a request takes flexmask_gamma and flexmask_dense; got 'flexmask_read'",
        ]
        assert answer["tokens"]
        # a stock server takes anything
        assert len(answers(run("stock")["wrongly"])) == len(WRONG_OPTIONS) + 1

    def test_two_ranks_share_heads_and_gammas(self, run):
        one, two, stock = (run(name)["odd_chunks"] for name in ("by_head", "two_ranks", "stock"))
        assert_same_answers(one, two, 5 * NEAR)
        assert distance(one, stock) > 1

    def test_the_log_says_what_runs(self, run):
        log = run("sparse")["log"]
        assert "4 of 4 attention layers prefill sparse (hybrid, gamma 0.9, min_budget 128) from 0 tokens on" in log
        assert f"{self.stock} runs the other rows and layers. Settings: {self.source}." in log

    def test_an_answer_follows_a_grammar(self, run):
        """The grammar allows text of three words."""
        stock, ours = (run(name)["by_a_grammar"] for name in ("stock", "sparse"))
        assert_same_answers(stock[1:], ours[1:])
        assert distance(stock[:1], ours[:1]) > 1
        for each in (*stock, *ours):
            assert {*each["tokens"]} <= {20, 23, 24}
