"""The demo's lines, the order of its prefills, and a run on a model that answers nothing."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from transformers import LlamaConfig, LlamaForCausalLM

from bench.demo import METHODS, Measured, line, main, python, to_try
from bench.retriever.vocabulary import TOKENS

RIGHT = torch.arange(12).view(3, 4)
DENSE = Measured(2.0, RIGHT, 1.0)


def other(*numbers):
    """Answers of which these are wrong."""
    answers = RIGHT.clone()
    answers[list(numbers), 0] += 1
    return answers


@pytest.mark.parametrize(
    ("seconds", "answers", "said"),
    [
        (1.0, RIGHT, "2.0x faster, the same 3 answers, 25% of the blocks"),
        (5.0, RIGHT, "2.5x slower, the same 3 answers"),
        (2.01, RIGHT, "as fast, the same 3 answers"),
        (2.08, RIGHT, "as fast, the same 3 answers"),
        (1.0, other(1), "2 of 3 answers right, 2 as with dense attention"),
    ],
)
def test_a_line_says_it_in_plain_words(seconds, answers, said):
    written = line("hybrid", Measured(seconds, answers, 0.25), DENSE, RIGHT)
    assert written.startswith("hybrid ") and said in written
    assert line("", Measured(2.0, other(0), 1.0), DENSE, RIGHT).endswith("2 of 3 answers right")


def test_a_short_prompt_says_that_it_runs_dense(tmp_path, capsys):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), eos_token_id=None, **shape)).save_pretrained(tmp_path)
    main(["--model", str(tmp_path), "--device", "cpu", "--prompt-tokens", "100", "--needles", "3"])
    printed = capsys.readouterr().out
    assert "reads 100 tokens with 3 needles in them" in printed
    assert "Shorter than 16,384 tokens: the sparse prefills run dense" in printed
    lines = printed.split("\n\n")[-2].splitlines()
    assert [each.startswith(name) for each, name in zip(lines, METHODS.values(), strict=True)] == [True] * 3
    assert all("the same 3 answers, 100% of the blocks" in each for each in lines[1:])
    assert printed.endswith(to_try(python()) + "\n")
