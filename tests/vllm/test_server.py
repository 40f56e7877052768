"""The plug-in in vLLM's HTTP server, in its own process: answers and refusals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from tests.repository import ROOT
from tests.vllm.engine_run import prompt
from tests.vllm.engines import ENVIRONMENT, KEEP_ALL, MODEL, MOST_TOKENS, PAGE

NEAR = 1e-3
_SECONDS = 400  # to start, on a machine that does other things


class Server:
    """``with Server(log, options) as server``: an OpenAI server of the retriever."""

    def __init__(self, log, options):
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        given = {"dtype": "float32", "max-model-len": MOST_TOKENS, "max-num-batched-tokens": 2048, "block-size": PAGE}
        given |= {"port": self.port, "host": "127.0.0.1", "max-logprobs": 8, "max-num-seqs": 8}
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--enforce-eager"]
        self.command += [str(part) for name, value in given.items() for part in (f"--{name}", value)]
        self.command += ["--additional-config", json.dumps({"flexmask": options})]
        self.process: Any = None

    def start(self):
        environment = {**os.environ, **ENVIRONMENT, "FLEXMASK_VLLM_CPU": "1", "PYTHONPATH": str(ROOT)}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
            )

    def __enter__(self):
        self.start()
        end = time.monotonic() + _SECONDS
        while True:
            try:
                self.get("/health")
                return self
            except (URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > end:
                    self.__exit__()
                    raise RuntimeError(f"the server did not start: {self.written()[-3000:]}") from None
                time.sleep(1)

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def written(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def get(self, path):
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return reply.read().decode()

    def complete(self, tokens, max_tokens=4, timeout=300, **options):
        """Following tokens and their log-probabilities."""
        asked = {"model": MODEL, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **options}
        request = Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps({**asked, "logprobs": 1, "return_tokens_as_token_ids": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=timeout) as reply:
            told = json.load(reply)["choices"][0]["logprobs"]
        return [int(token.removeprefix("token_id:")) for token in told["tokens"]], told["token_logprobs"]


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
