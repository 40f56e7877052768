"""The plug-in in vLLM's HTTP server: answers and refusals."""

import re
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
