"""Models and texts that commands read, `flexmask tune` on a tiny model, and refusals."""

from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")

from flexmask import commands
from flexmask.integrations.huggingface import PrefillSettings
from tests.repository import ROOT

QUICK = ("--option", "block_size=32", "--tokens", "100")
TUNE = ("--option", "block_size=32", "--min-budget", "0", "--json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "nowhere/at/all", "--prompt", "{prompt}"), "'MODEL': no folder nowhere/at/all"),
        (("--model", "{empty}", "--prompt", "{prompt}"), "is not a model: it has no config.json"),
        (("--model", "{folder}", "--prompt", "{empty}/none.txt"), "none.txt: No such file"),
        (("--model", "{folder}", "--prompt", "{blank}"), "'--prompt': {blank} is empty"),
        (("--model", "{folder}", "--prompt", "{binary}"), "not UTF-8 text"),
        (("--model", "{folder}", "--prompt", "{prompt}", "--option", "dense_layers=[99]"), "'--option': dense_layers must hold"),
        (("--model", "{folder}", "--prompt", "{prompt}", "--chat"), "'--chat': the model's tokenizer has no chat template"),
    ],
)
def test_a_model_or_a_text_is_refused(flexmask, folder, prompt, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(ROOT)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00")
    places = {"prompt": prompt, "folder": folder, "empty": tmp_path / "empty"}
    places |= {"blank": tmp_path / "blank.txt", "binary": tmp_path / "binary.bin"}
    result = flexmask("gain", *(word.format(**places) for word in words), code=2)
    assert said.format(**places) in result.stderr


@pytest.mark.parametrize("words", ["doctor", "gain", "inspect --prompt {} --out x", "tune --text {} --out x --density .5"])
def test_the_model_may_be_an_argument_or_an_option(flexmask, prompt, words):
    for given in ("nowhere/at/all", "--model nowhere/at/all"):
        said = flexmask(*f"{words} {given}".format(prompt).split(), code=2).stderr
        assert "no folder nowhere/at/all" in said


def test_a_mistyped_name_asks_the_hub_once(flexmask, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def metadata(url, **options):
        asked.append((url, options["timeout"]))
        raise OSError("no such repository")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    result = flexmask("gain", "no-such-model-anywhere", code=commands.PROBLEM)
    assert result.stderr == "flexmask: cannot load no-such-model-anywhere: no folder here, and on the hub: no such repository\n"
    assert len(asked) == 1 and asked[0][1] <= 10


def test_a_broken_model_is_one_line(flexmask, folder, prompt, tmp_path):
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    result = flexmask("gain", "--model", tmp_path, "--prompt", prompt, code=commands.PROBLEM)
    loading, error = result.stderr.splitlines()
    assert (loading, error.startswith(f"flexmask: cannot load {tmp_path}: ")) == (f"loading {tmp_path}", True)


def test_tune_writes_settings_that_are_read_back(flexmask, folder, prompt, tmp_path):
    out = tmp_path / "settings.json"
    words = ("tune", "-m", folder, "-t", prompt, "-t", prompt, "--tokens", "150", "--method", "flexprefill", "-o", out, *TUNE)
    found = flexmask(*words, "--density", ".9").json
    assert found["prompt_tokens"] == [150, 150]
    assert found["density"] <= 0.9 + 1e-9
    settings = PrefillSettings.load(out)
    assert settings.to_dict() == found["settings"] == PrefillSettings.load(out).to_dict()
    assert [settings.selector(row["layer"]).options["gamma"][row["head"]] for row in found["heads"]] == [
        row["gamma"] for row in found["heads"]
    ]
    assert len(found["heads"]) == 8
    lower = flexmask(*words, "--error", ".01").json
    assert lower["error"] <= 0.01
    assert lower["uniform"] == found["uniform"]
    plan = flexmask("doctor", "--skip-self-test", "--model", folder, "--settings", out, "--device", "cpu", "--json").json
    assert [each["plan"] for each in plan["layers"]] == ["sparse", "sparse"]


def test_an_interrupted_tune_goes_on(flexmask, folder, prompt, tmp_path, monkeypatch):
    import flexmask.integrations.tune.probe as module

    out = tmp_path / "settings.json"
    measure = Mock(side_effect=[module.head_errors, KeyboardInterrupt, *[module.head_errors] * 3])
    monkeypatch.setattr(module, "head_errors", lambda *given: measure()(*given))
    words = ("tune", "-m", folder, "-t", prompt, "--tokens", "100", "-o", out, *TUNE, "--density", "1")
    result = flexmask(*words, code=commands.INTERRUPTED)
    assert "settings.json.measured: the same command continues from there" in result.stderr.replace("\n", " ")
    assert result.stdout == ""
    assert not out.exists()
    flexmask(*words)
    assert measure.call_count == 3  # one before, one broken off, one after
    assert out.exists()
    # another text is refused, until told to start over
    prompt.write_text("w5 " + prompt.read_text())
    said = flexmask(*words, code=2).stderr
    assert "'--resume': resume must be a file of the same" in said
    # a wrong option costs no measurement
    flexmask(*words, "--no-resume", "--density", "7", code=2)
    assert any(tmp_path.glob("*.measured*"))
    flexmask(*words, "--no-resume")
    assert measure.call_count == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give one of --density and --error"),
        (("--density", "1.5"), "'--density': density must be"),
        ((*QUICK, "--density", ".001"), "'--density': density must be at least"),
        (("--error", "-1"), "'--error': error must be"),
        (("--density", ".5", "--method", "best"), "'--method': method must be one of"),
        (("--density", ".5", "--tokens", "20"), "'--text': input_ids must hold more than block_size (128) tokens"),
        (("--density", ".5", "--out", "no/such/folder/x.json"), "'--out': no folder no/such/folder"),
        (("--density", ".5", "--out", "{folder}/config.json"), "'--out': config.json is a model's; name another file"),
    ],
)
def test_tune_refuses(flexmask, folder, prompt, tmp_path, words, said):
    words = tuple(word.format(folder=folder) for word in words)
    out = () if "--out" in words else ("--out", tmp_path / "settings.json")
    result = flexmask("tune", "-m", folder, "-t", prompt, *out, *words, code=2)
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "settings.json").exists()
