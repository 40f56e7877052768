"""lm-evaluation-harness with attn_implementation="flexmask". `make test-eval` runs it."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("lm_eval")

from tests.repository import ROOT

TASK = ["--include_path", "bench/tasks", "--tasks", "retriever_needles_likelihood", "--device", "cpu"]
METADATA = json.dumps({"max_seq_lengths": [640], "num_samples": 3, "num_needles": 8})
# which the window does not reach
NO_NEEDLES = {"method": "streaming_llm", "sink_blocks": 1, "window_blocks": 1, "block_size": 32, "dense_below": 0}


def run(*words):
    command = [sys.executable, "-m", "flexmask.integrations.lm_eval", "--model", "hf", *TASK, "--metadata", METADATA, *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def perplexity(folder, attention):
    """The harness's own words about the answers."""
    model = f"pretrained=bench/retriever/model,dtype=float32,attn_implementation={attention}"
    done = run("--model_args", model, "--settings", json.dumps(NO_NEEDLES), "--output_path", str(folder / attention))
    assert done.returncode == 0, done.stderr
    (path,) = (folder / attention).glob("**/results*.json")
    return json.loads(path.read_text())["results"]["retriever_needles_likelihood"]["perplexity,none"]


def test_the_harness_scores_with_the_given_settings(tmp_path):
    assert perplexity(tmp_path, "sdpa") < 1.1
    assert perplexity(tmp_path, "flexmask") > 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch_size", "4"], "--batch_size must be 1, as the harness pads log-likelihoods without a mask; got 4"),
        (["--settings", '{"gama": 1}'], "--settings: "),
    ],
)
def test_refuses(words, said):
    done = run("--model_args", "pretrained=nowhere", *words)
    assert done.returncode != 0 and said in done.stderr


@pytest.mark.parametrize("words", [["--config", "FILE"], ["run", "--config", "FILE"], ["--batch", "4"]], ids=str)
def test_batches_are_of_one_prompt_whatever_else_the_words_say(words, tmp_path, monkeypatch):
    from flexmask.integrations.lm_eval.__main__ import main

    asked, file = [], tmp_path / "harness.yaml"
    file.write_text("model: hf\nbatch_size: 4\n")
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **given: asked.append(int(given["batch_size"])))
    monkeypatch.setattr(sys, "argv", ["lm_eval", *(str(file) if word == "FILE" else word for word in words), *TASK])
    monkeypatch.chdir(ROOT)
    main()
    assert asked == [1]


@pytest.mark.parametrize("words", [["ls", "tasks"], ["validate", "--tasks", "none"], ["--help"]], ids=str)
def test_other_commands_of_the_harness_get_their_words(words, monkeypatch):
    from flexmask.integrations.lm_eval import __main__ as program

    got = []
    monkeypatch.setattr(program, "cli_evaluate", lambda: got.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    program.main()
    assert got == [words]


@pytest.mark.parametrize("page", ["docs/research.md", "docs/evaluation.md"])
def test_the_snippets_of_the_pages_run(page, monkeypatch):
    """As they stand, with the harness's evaluation replaced, which takes hours on their lengths."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import flexmask

    path, asked = str(ROOT / "bench/retriever/model"), []
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda model, **given: asked.append((type(model).__name__, given)))
    names = {"FOLDER": path, "path": path, "flexmask": flexmask}
    if page == "docs/research.md":
        names |= {"model": AutoModelForCausalLM.from_pretrained(path), "tokenizer": AutoTokenizer.from_pretrained(path)}
    text = (ROOT / page).read_text(encoding="utf-8")
    snippets = [textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)]
    snippets = [code for code in snippets if "lm_eval" in code]
    assert snippets
    for code in snippets:
        exec(compile(code, page, "exec"), dict(names))
    assert [name for name, _ in asked] == ["HFLM"] * len(snippets)
    assert all({"tasks", "metadata", "limit"} <= given.keys() for _, given in asked)
