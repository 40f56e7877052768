"""`flexmask doctor`: self-test, backends, problems, layers."""

import math
import re
import sys
from importlib import metadata
from unittest.mock import Mock

import pytest
import torch

import flexmask.environment as environment
import flexmask.self_test as self_test
from flexmask import commands
from flexmask.flex import backend
from flexmask.flex.backend import Backend
from flexmask.flex.flash_case import FlashKind
from flexmask.flex.flash_check import Verdict
from tests.repository import python


@pytest.mark.attention
def test_self_test_passes_and_doctor_says_so(flexmask):
    found = flexmask("doctor", "--device", "cpu", "--json").json
    assert found["ok"]
    tests = found["self_test"]
    assert [each["method"] for each in tests] == ["hybrid", "flexprefill"]
    for each in tests:
        assert each["passed"]
        assert each["density"] < 0.9
        assert each["difference"] < each["tolerance"] < each["unmasked_difference"]
    assert found["flash"] == [] and "times" not in found
    assert [each["name"] for each in found["backends"] if each["chosen"]] == ["cpu"]
    assert "CUDA" in next(each["reason"] for each in found["backends"] if each["name"] == "flash")


def dense(query, key, value, method="hybrid", **options):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


raises = Mock(side_effect=RuntimeError("no compiler\nsecond line"))


@pytest.mark.parametrize("attention", [dense, raises])
def test_a_report_has_times_and_a_block_for_an_issue_also_where_attention_is_wrong(flexmask, monkeypatch, attention):
    monkeypatch.setattr(self_test, "sparse_attention", attention)
    monkeypatch.setattr(self_test, "_TIMED", {"cpu": [(640, 4, 2, 16)]})
    result = flexmask("doctor", "--device", "cpu", "--report", code=commands.PROBLEM)
    assert result.stdout.count("FAILED") == 2 and "A problem was found." in result.stdout
    table = result.stdout.partition("Self-test: ")[2].partition("Times of ")[0]
    assert table.count("RuntimeError: no compiler") == (2 if attention is raises else 0)
    assert len(re.findall(r" \d\d\.\d%  ", table)) == (0 if attention is raises else 2)
    assert "second line" not in result.output and "FLASH" not in result.stderr
    block = result.stdout.rpartition("```\n")[0].rpartition("```\n")[2].splitlines()
    assert "threads" in block[0] and "torch 2" in block[1]
    timed = next(line for line in block if line.startswith("times: tokens 640, heads 4 and 2, 16 wide, dtype float32"))
    assert "error RuntimeError: no compiler" in timed if attention is raises else re.search(r"dense \S+, sparse \d", timed)
    assert len([line for line in block if line.startswith("self_test: method ")]) == 2
    untested = flexmask("doctor", "--device", "cpu", "--report", "--skip-self-test").stdout
    assert "times: tokens 640" in untested and "self_test" not in untested


@pytest.mark.parametrize(
    ("difference", "unmasked_difference", "others", "passed"),
    [
        (1e-5, 0.5, 0.0, True), (1e-5, 1e-5, 0.0, False), (float("nan"), 0.5, 0.0, False), (1e-5, float("nan"), 0.0, False),
        (None, None, None, False), (1e-5, 0.5, 0.02, False),
    ],
)  # fmt: skip
def test_a_case_that_skips_nothing_or_has_a_nan_or_another_mask_fails(difference, unmasked_difference, others, passed):
    case = self_test.SelfTest("hybrid", "auto", "float32", 1.0, difference, unmasked_difference, others, 1e-4, 0.1)
    assert case.passed is passed
    # rounded scores move blocks
    assert case._replace(dtype="bfloat16").passed is (passed or others == 0.02)


def test_a_mask_with_other_blocks_fails_the_self_test(flexmask, monkeypatch):
    made, calls = self_test.hybrid_mask, iter([{}, {"gamma": 0.9}])
    wrong = lambda *inputs, **options: made(*inputs, **{**options, **next(calls)})  # noqa: E731
    monkeypatch.setattr(self_test, "sparse_attention", dense)
    monkeypatch.setitem(self_test.TESTED, "hybrid", (wrong, 0.6))
    first, second = flexmask("doctor", "--device", "cpu", "--json", code=commands.PROBLEM).json["self_test"]
    assert first["other_blocks"] > 0.02 and second["other_blocks"] == 0


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("HAS_CPU_KERNEL", False, "has FlexAttention on CUDA only"),
        ("CPU_TAKES_UNBACKED_SIZES", False, "may fail to compile FlexAttention on a CPU"),
        ("KNOWS_LENGTHS", False, "rounds lengths up"),
        ("TORCHDYNAMO_DISABLE", "1", "TORCHDYNAMO_DISABLE=1 switches torch.compile off"),
        ("CXX", "no-such-compiler -O3", "no C++ compiler (no-such-compiler -O3)"),
    ],
)
def test_releases_of_torch_and_surroundings_with_problems_are_known(flexmask, monkeypatch, name, value, what):
    assert not [each for each in environment.known_issues("cpu") if what in each.what]
    if isinstance(value, str):
        monkeypatch.setenv(name, value)
    else:
        for module in (environment, backend):
            monkeypatch.setattr(module, name, value, raising=False)
    found = [each for each in environment.known_issues("cpu") if what in each.what]
    assert len(found) == 1
    code = commands.PROBLEM if found[0].severity == "error" else 0
    result = flexmask("doctor", "--device", "cpu", "--skip-self-test", code=code)
    assert f"{found[0].severity}: {found[0].what}; {found[0].remedy}" in result.stdout


def test_what_flash_serves_is_listed(flexmask, monkeypatch):
    """With verdicts of this test, by the number of a feature."""
    kinds = []
    refused = Verdict("its check here raised ValueError: tile_n", seconds=0.3)
    verdicts = [Verdict(lse_factor=1 / math.log(2), seconds=12.4), Verdict(lse_reason="no log-sum-exp"), refused]

    def verdict(call, device):
        kinds.append(call)
        return verdicts[min(len(kinds) - 1, 2)] if call.block_size == 128 else Verdict()

    fakes = dict.fromkeys(("environment.flash_available", "environment.has_flash_kernels"), lambda *device: True)
    fakes |= {"environment.flash_verdict": verdict, "self_test.self_test": lambda device: iter(())}
    for name, fake in fakes.items():
        monkeypatch.setattr(f"flexmask.{name}", fake)
    found = environment.flash_features("cpu")
    assert kinds[:2] == [PLAIN := FlashKind(torch.bfloat16, 128, 128), PLAIN._replace(has_window_or_offset=True)]
    assert [each.feature for each in found] == list(environment.FLASH_FEATURES)
    assert len(set(kinds)) == len(kinds)
    assert found[0] == ("plain calls", "auto", 1 / math.log(2), "", 12.4)
    assert found[1] == ("windows and chunks", "auto", None, "no log-sum-exp", 0.0)
    assert found[2] == ("padding", "no", None, refused.reason, 0.3)
    assert [each.served for each in found if each.feature == "blocks of 64"] == ["by name"]
    kinds.clear()
    shown = flexmask("doctor", "--device", "cpu").stdout
    assert re.search(r"plain calls +auto +times 1\.443 +12 s *\n", shown)
    assert re.search(r"padding +no +0 s +its check here raised ValueError: tile_n\n", shown)
    assert "paste" not in shown
    assert "against float64" not in flexmask("doctor", "--device", "cpu", "--skip-self-test").stdout


def test_layers_are_forecast_from_the_config(flexmask, config):
    words = ("doctor", "--skip-self-test", config, "--device", "cpu", "--option", "dense_layers=[1]")
    found = flexmask(*words, "--json").json
    assert [each["outcome"] for each in found["layers"]] == ["sparse", "dense", "sparse"]
    assert [each["reason"] for each in found["layers"]] == ["", "in dense_layers", ""]
    assert (found["layers"][0]["heads"], found["layers"][0]["kv_heads"]) == (4, 2)
    short = flexmask(*words, "--tokens", 500, "--json").json
    assert {each["reason"] for each in short["layers"]} == {"500 tokens < dense_below 16384"}
    assert "2  " in flexmask(*words).stdout
    assert "'--option': dense_layers must hold layer indices" in flexmask(*words[:-1], "dense_layers=[7]", code=2).stderr


def test_a_refused_model_exits_with_a_problem(flexmask, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    result = flexmask("doctor", "--skip-self-test", tmp_path, code=commands.PROBLEM)
    assert re.search("is refused: .*must go through transformers' attention interface", result.stdout)


PROGRAM = """
import sys
from flexmask.__main__ import main

sys.stderr.write = lambda text: print(text.strip(), "torch" in sys.modules)
sys.argv[1:] = ["doctor", "--device", "cpu", "--skip-self-test"]
try:
    main()
finally:
    print("transformers" in sys.modules)
"""


def test_doctor_says_at_once_what_it_waits_for_and_loads_no_transformers():
    first, *_, last = python("-c", PROGRAM).splitlines()
    assert (first.split(), last) == (["loading", "torch", "False"], "False")


def test_a_missing_or_foreign_transformers_is_a_problem_only_with_a_model(flexmask, monkeypatch, folder):
    found, installed = "4.53.1", metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: found if name == "transformers" else installed(name))
    said = flexmask("doctor", "--skip-self-test").stdout
    assert "warning: flexmask supports transformers 4.54 to 5.24; got 4.53.1; pip install" in said
    found = None
    for name in [name for name in sys.modules if name.startswith("flexmask.integrations.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "warning: transformers is missing" in flexmask("doctor", "--skip-self-test").stdout
    result = flexmask("doctor", "--skip-self-test", folder, code=commands.MISSING)
    assert result.stderr.splitlines()[1:] == ["flexmask: this command needs transformers: pip install 'flexmask[hf]'"]


def test_reports_ask_for_the_backend_as_plain_calls_do(monkeypatch):
    asked = []
    for module in (environment, self_test):
        monkeypatch.setattr(module, "chosen_backend", lambda *given, has_mask_mod: asked.append(has_mask_mod) or Backend("cpu"))
    assert environment.backends("cpu", torch.float32)
    monkeypatch.setattr(self_test, "TESTED", {})
    assert list(self_test.self_test("cpu")) == [] and asked == [False] * 4
