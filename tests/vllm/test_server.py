"""The plug-in in vLLM's HTTP server, in its own process: answers and refusals."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` has it in an environment of its own")

from tests.repository import ROOT
from tests.serving.programs import prompt
from tests.vllm.engines import ENVIRONMENT, KEEP_ALL, MAX_TOKENS, MODEL, PAGE, PYTHONPATH

openai = pytest.importorskip("openai")  # vLLM brings it
NEAR = 1e-3
_SECONDS = 400  # to start, on a machine that does other things


def started(options, log, **environment):
    """The process of an OpenAI server of the retriever, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"dtype": "float32", "max-model-len": MAX_TOKENS, "max-num-batched-tokens": 2048, "block-size": PAGE, "port": port}
    given |= {"host": "127.0.0.1", "max-logprobs": 8, "max-num-seqs": 8, "additional-config": json.dumps({"flexmask": options})}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--enforce-eager"]
    command += [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    environment |= {**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHONPATH}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
    return process, f"http://127.0.0.1:{port}"


@pytest.fixture
def server(tmp_path):
    """A client of a server that answers."""
    log = tmp_path / "log"
    # metrics of all processes together
    process, address = started(KEEP_ALL, log, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300, max_retries=0)
    end = time.monotonic() + _SECONDS
    try:
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(openai.APIConnectionError):
                client.models.list()
                break
            time.sleep(1)
        else:
            pytest.fail(log.read_text(errors="replace")[-3000:])
        yield client
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def complete(client, tokens, **options):
    """Following tokens and their log-probabilities."""
    given = {"ignore_eos": True, "return_tokens_as_token_ids": True, **options}
    asked = {"model": MODEL, "prompt": tokens, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    told = client.completions.create(**asked, extra_body=given).choices[0].logprobs
    return [int(token.removeprefix("token_id:")) for token in told.tokens], told.token_logprobs


def test_answers_over_http_are_the_stock_backend_s(written, server):
    expected = written("engine_run", "stock")
    for asked, length, seed in (("whole", 3001, 0), ("chunks", 5000, 2), ("odd_chunks", 3000, 3)):
        tokens, logprobs = complete(server, prompt(length, seed))
        right = expected[asked][0]
        assert tokens == right["tokens"]
        for token, logprob, likely in zip(tokens, logprobs, right["logprobs"], strict=True):
            assert abs(logprob - likely[str(token)]) < NEAR
    with pytest.raises(openai.BadRequestError):
        complete(server, [0] * 9000)
    with pytest.raises(openai.BadRequestError):
        complete(server, prompt(300), vllm_xargs={"flexmask_gamma": 2})
    assert complete(server, prompt(3001), vllm_xargs={"flexmask_dense": True})[0] == expected["whole"][0]["tokens"]
    # every row of three prompts, whose last chunks are longer than a block, and of the one that asked for dense attention
    told = urlopen(str(server.base_url).replace("/v1/", "/metrics")).read().decode()
    assert 'flexmask:prefill_tokens_total{attention="sparse"} 11001.0' in told
    assert 'flexmask:prefill_tokens_total{attention="dense"} 3001.0' in told


def test_wrong_options_end_the_start_by_name(tmp_path):
    log = tmp_path / "log"
    process, _ = started({"gama": 0.9}, log)
    assert process.wait(300) != 0
    assert "got 'gama'" in log.read_text(errors="replace")
