"""A vLLM server in its own process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from tests.repository import ROOT
from tests.vllm.engines import ENVIRONMENT, MODEL, MOST_TOKENS, PAGE

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
            except (urllib.error.URLError, ConnectionError):
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
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return reply.read().decode()

    def complete(self, tokens, max_tokens=4, timeout=300, **options):
        """Following tokens and their log-probabilities."""
        asked = {"model": MODEL, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **options}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps({**asked, "logprobs": 1, "return_tokens_as_token_ids": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            told = json.load(reply)["choices"][0]["logprobs"]
        return [int(token.removeprefix("token_id:")) for token in told["tokens"]], told["token_logprobs"]
