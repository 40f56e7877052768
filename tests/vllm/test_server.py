"""The plug-in in vLLM's HTTP server: answers, refusals, a soak."""

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from tests.vllm.engine_run import prompt
from tests.vllm.engines import KEEP_ALL
from tests.vllm.server import Server

NEAR = 1e-3
# as good as every step
OPTIONS = {**KEEP_ALL, "log_every": 1e-9}


def served(text):
    """Prefill tokens sparse and dense, from the log."""
    found = re.findall(r"flexmask served (\d+) prefill tokens sparse in \d+ steps, (\d+) dense", text)
    assert found, text[-2000:]
    return int(found[-1][0]), int(found[-1][1])


def test_answers_over_http_are_the_stock_backend_s(tmp_path, written, monkeypatch):
    # metrics of all processes together
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    expected = written("engine_run", "stock")
    with Server(tmp_path / "log", OPTIONS) as server:
        for asked, length, seed in (("whole", 3001, 0), ("chunks", 5000, 2), ("odd_chunks", 3000, 3)):
            tokens, logprobs = server.complete(prompt(length, seed))
            right = expected[asked][0]
            assert tokens == right["tokens"]
            for token, logprob, likely in zip(tokens, logprobs, right["logprobs"], strict=True):
                assert abs(logprob - likely[str(token)]) < NEAR
        with pytest.raises(HTTPError):
            server.complete([0] * 9000)
        with pytest.raises(HTTPError, match="400"):
            server.complete(prompt(300), vllm_xargs={"flexmask_gamma": 2})
        assert server.complete(prompt(3001), vllm_xargs={"flexmask_dense": True})[0] == expected["whole"][0]["tokens"]
        assert 'flexmask:prefill_tokens_total{attention="sparse"} 11001.0' in server.get("/metrics")
    text = server.written()
    # every row of three prompts, whose last chunks are longer than a block, and of the one that asked for dense attention
    assert served(text) == (11001, 3001)


def test_wrong_options_end_the_start_by_name(tmp_path):
    server = Server(tmp_path / "log", {"gama": 0.9})
    server.start()
    try:
        assert server.process.wait(300) != 0
    finally:
        server.__exit__()
    assert "got 'gama'" in server.written()


@pytest.mark.slow
def test_soak_of_requests_of_any_length_with_hang_ups(tmp_path):
    """200 requests, four at a time, of which a quarter hang up."""
    drawn = random.Random(0)
    prompts = [prompt(length, seed=length) for length in (20, 70, 129, 500, 1000, 2047, 2049, 3100, 4500)]
    with Server(tmp_path / "log", OPTIONS, "--no-enable-prefix-caching") as server:
        right = [server.complete(each) for each in prompts]
        before = memory(server)

        def ask(number):
            chosen = drawn.randrange(len(prompts))
            if number % 4 == 3:
                server.drop(prompts[chosen], after=drawn.uniform(0.0, 0.6))
                return None
            tokens, logprobs = server.complete(prompts[chosen])
            near = all(abs(a - b) < NEAR for a, b in zip(logprobs, right[chosen][1], strict=True))
            return tokens == right[chosen][0] and near, len(prompts[chosen])

        with ThreadPoolExecutor(4) as pool:
            asked = [each for each in pool.map(ask, range(200)) if each is not None]
        assert len(asked) == 150
        assert all(is_right for is_right, _ in asked)
        deadline = time.monotonic() + 60
        while running(server) and time.monotonic() < deadline:
            time.sleep(1)
        # hang-ups leave no request and no page behind
        assert running(server) == 0
        assert value(server, "vllm:kv_cache_usage_perc") == 0
        assert memory(server) < before * 1.2
    sparse, dense = served(server.written())
    lengths = [len(each) for each in prompts] + [length for _, length in asked]
    # answered requests count once; dropped ones add to it
    assert sparse + dense >= sum(lengths)
    assert sparse + dense <= sum(lengths) + 50 * max(map(len, prompts))
    assert sparse > 0.9 * sum(lengths)


def value(server, metric):
    found = re.search(rf"^{metric}\{{[^}}]*\}} (\S+)$", server.get("/metrics"), re.MULTILINE)
    assert found, metric
    return float(found[1])


def running(server):
    return value(server, "vllm:num_requests_running") + value(server, "vllm:num_requests_waiting")


def memory(server):
    """Resident bytes of the server and its engine."""
    import psutil

    parent = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in [parent, *parent.children(recursive=True)])
