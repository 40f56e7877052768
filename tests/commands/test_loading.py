"""Inputs of commands: models, their weights, texts byte by byte, prompts that a model can read, transformers' own words."""

import io
import json
import re
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from flexmask import commands
from flexmask.commands import loading
from flexmask.commands.loading import load_model, prompt_ids, read_text
from flexmask.commands.output import Output

GAIN = ("gain", "--device", "cpu")
Q_PROJ, HEAD = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"


@pytest.fixture
def path(folder, tmp_path):
    """A copy of the model's folder, to change."""
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.fixture
def copy(path):
    """Change its weights by a function."""

    def changed(change):
        weights = load_file(path / "model.safetensors")
        save_file(change(weights), path / "model.safetensors", metadata={"format": "pt"})
        return path

    return changed


def in_a_module(weights):
    return {f"module.{key}": value for key, value in weights.items()}


def without(name):
    return lambda weights: {key: value for key, value in weights.items() if key != name}


def cut(weights):
    return {**weights, Q_PROJ: weights[Q_PROJ][:8].clone()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_a_module, rf"lacks {HEAD}, .* more of LlamaForCausalLM; such .*; it has module\.{HEAD}, .* more, which .*"),
        (without(Q_PROJ), f"lacks {Q_PROJ} of LlamaForCausalLM; such weights would be random"),
        (without(HEAD), f"lacks {HEAD} of LlamaForCausalLM; such weights would be random"),
        (cut, f"has the wrong shape for {Q_PROJ} of LlamaForCausalLM; such weights would be random"),
    ],
    ids=["ddp", "q_proj", "lm_head", "shape"],
)
def test_weights_that_would_be_random_are_named(flexmask, copy, prompt, change, said):
    path = copy(change)
    result = flexmask(*GAIN, path, "--prompt", prompt, code=commands.PROBLEM)
    assert result.stdout == ""
    assert re.fullmatch(f"loading .*\nflexmask: cannot load {path}: the checkpoint {said}\n", result.stderr)


def test_weights_without_a_place_are_a_remark(copy, capsys):
    path = copy(lambda weights: {**weights, "extra.weight": torch.zeros(2)})
    load_model(str(path), Output(), "cpu")
    assert f"{path}: it has extra.weight, which LlamaForCausalLM does not use\n" in capsys.readouterr().err


def test_a_whole_model_loads_silently_and_warnings_are_shown_once(folder, capsys):
    load_model(str(folder), Output(), "cpu")
    assert capsys.readouterr().err == f"loading {folder}\n"
    for _ in range(2):
        transformers_logging.get_logger("transformers.tokens").warning("\x1b[1mlonger\x1b[0m\n than   allowed")
    assert capsys.readouterr().err == "transformers: longer than allowed\n"


class Words:
    """A tokenizer whose tokens are a text's characters."""

    def __call__(self, text, return_tensors):
        return {"input_ids": torch.tensor([[ord(x) for x in text]])}


@pytest.mark.parametrize("by", ["path", "stdin"])
@pytest.mark.parametrize(
    ("data", "text", "remark"),
    [
        (b"one\r\ntwo\rthree\n", "one\r\ntwo\rthree\n", ""),
        ("\ufeffé\u2028".encode(), "é\u2028", "begins with a byte order mark, which is left out\n"),
        ("a\ufeffb".encode(), "a\ufeffb", ""),
    ],
)
def test_texts_are_read_as_they_are(tmp_path, capsys, monkeypatch, by, data, text, remark):
    path = tmp_path / "text"
    path.write_bytes(data)
    if by == "stdin":
        # an encoding of its own, and line ends in any form
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="latin-1"))
    assert read_text(str(path) if by == "path" else "-", Output()) == text
    name = path if by == "path" else "stdin"
    assert capsys.readouterr().err == (f"{name} {remark}" if remark else "")


def test_standard_input_that_is_not_utf8_is_wrong_usage(flexmask, folder, tmp_path):
    result = flexmask("inspect", folder, "--prompt", "-", "--out", tmp_path / "out", input=b"w1 \xe9", code=2)
    assert "'--prompt': cannot read stdin: not UTF-8 text" in " ".join(result.stderr.split())


def test_a_prompt_beyond_learned_positions_is_refused(flexmask, path, prompt, tmp_path):
    (path / "model.safetensors").unlink()
    config = GPT2Config(vocab_size=96, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(path)
    beyond = "tokens exceed the 128 positions that the model has learned"
    for words in ("gain", f"inspect --out {tmp_path / 'out'}"):
        result = flexmask(*words.split(), path, "--prompt", prompt, "--device", "cpu", code=2)
        assert f"'--prompt': 530 {beyond}" in " ".join(result.stderr.split())
    result = flexmask("doctor", path, "--skip-self-test", "--device", "cpu", code=commands.PROBLEM)
    assert f"32,768 {beyond}" in result.stdout and "A problem was found." in result.stdout
    # all of them may be taken
    assert flexmask("doctor", path, "--skip-self-test", "--tokens", 128, "--device", "cpu", "--json").json["ok"]
    assert prompt_ids(load_model(str(path), Output(), "cpu")[0], Words(), "\x01" * 128).shape == (1, 128)


def test_a_tokenizer_larger_than_the_model_is_told(flexmask, folder, path, tmp_path):
    words = json.loads((path / "tokenizer.json").read_text())
    words["model"]["vocab"]["w96"] = 96
    (path / "tokenizer.json").write_text(json.dumps(words))
    prompt = tmp_path / "prompt"
    prompt.write_text("w1 w95 w96")
    said = flexmask(*GAIN, path, "--prompt", prompt, code=2).stderr
    assert "'--prompt': contains token 96; the model embeds only tokens below 96" in " ".join(said.split())
    found = flexmask("doctor", path, "--skip-self-test", "--device", "cpu")
    assert "warning: the tokenizer has tokens up to 96; the model embeds those below 96" in found.stdout
    assert flexmask("doctor", folder, "--skip-self-test", "--device", "cpu", "--json").json["model"]["tokenizer"] is None


def test_a_broken_model_is_one_line(flexmask, path, prompt):
    (path / "model.safetensors").write_bytes(b"nothing of the kind")
    loading, error = flexmask(*GAIN, path, "--prompt", prompt, code=commands.PROBLEM).stderr.splitlines()
    assert (loading, error.startswith(f"flexmask: cannot load {path}: ")) == (f"loading {path}", True)


def test_a_mistyped_name_asks_the_hub_once(flexmask, prompt, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    metadata = Mock(side_effect=OSError("no such repository"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    *_, said = flexmask("gain", "no-such-model-anywhere", "--prompt", prompt, code=commands.PROBLEM).stderr.splitlines()
    assert said == "flexmask: cannot load no-such-model-anywhere: no folder here, and on the hub: no such repository"
    assert metadata.call_count == 1 and metadata.call_args.kwargs["timeout"] <= 10


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gemma12", "does not recognize this architecture.* with the command `pip install git"),
        ("t5", r"AutoModelForCausalLM. Model type should be one of \w+Config, .* \(--traceback shows all\)$"),
    ],
)
def test_errors_of_many_lines_are_told_whole(flexmask, path, prompt, kind, said):
    (path / "config.json").write_text(json.dumps({"model_type": kind}))
    result = flexmask(*GAIN, path, "--prompt", prompt, code=commands.PROBLEM)
    last = result.stderr.splitlines()[-1]
    assert re.search(said, last) and len(last) < 1200


@pytest.mark.parametrize("words", ["doctor", "gain --prompt {prompt}", "inspect --prompt {prompt} --out x"])
def test_a_model_with_code_of_its_own_is_refused_without_a_question(flexmask, tmp_path, prompt, words, monkeypatch):
    path = tmp_path / "own"
    path.mkdir()
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (path / "own.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    words = (*words.format(prompt=prompt).split(), path, "--device", "cpu", "--json")
    result = flexmask(*words, code=commands.PROBLEM, input="y\n")
    assert result.stdout == ""
    assert result.stderr.endswith(f"cannot load {path}: it needs code of its own (auto_map), which this program does not run\n")


def test_a_report_that_an_error_points_to_is_told(folder, monkeypatch):
    monkeypatch.setattr(loading._REMARKS, "report", "")
    loading._REMARKS.emit(SimpleNamespace(getMessage=lambda: "Llama LOAD REPORT\nCONVERSION lm_head"))
    error = loading._not_a_model(str(folder), RuntimeError("issues.\nFor details look at the above report!"))
    assert str(error).endswith(": issues. For details look at the above report! Llama LOAD REPORT CONVERSION lm_head")


def test_options_go_over_those_saved_in_the_model(flexmask, path):
    saved = {"method": "flexprefill", "tau": 0.2, "dense_layers": [0], "dense_below": 0}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"flexmask_config": saved}))
    words = ("doctor", path, "--skip-self-test", "--device", "cpu", "--tokens", "512", "--json")
    assert [each["outcome"] for each in flexmask(*words, "--gamma", ".5").json["layers"]] == ["dense", "sparse"]
    # an option of the saved method
    assert flexmask(*words, "--option", "tau=0.1").json["ok"]
    assert flexmask(*words, "--method", "hybrid").json["ok"]


def test_a_settings_file_holds_gammas_by_layer_and_head(flexmask, folder, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{"layers": {"0": {"gamma": [0.5, 0.9, 1, 1]}, "1": {"gamma": [1, 1, 1, 1]}}}')
    report = flexmask("doctor", folder, "--skip-self-test", "--settings", path, "--device", "cpu", "--json").json
    assert [each["outcome"] for each in report["layers"]] == ["sparse", "dense"]


def test_a_placement_by_transformers_has_the_dtype_of_its_device(monkeypatch):
    for has_gpu, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        assert loading.chosen_dtype(None, "auto") == dtype
