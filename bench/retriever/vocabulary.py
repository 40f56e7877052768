"""Words, keys and values of the retriever, and its tokenizer."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

NUM_KEYS = 1024
NUM_VALUES = 4096

SENTENCES = (
    "the grass is green and the sky is blue in summer .",
    "the sun is yellow and the moon is white over water .",
    "here we go along the river and there and back again .",
    "a small boat waits near the bridge for the morning wind .",
    "the baker opens early and the street smells of warm bread .",
    "children walk to school past the mill and the old church .",
    "the train to the coast leaves from the second platform today .",
    "in autumn the leaves fall slowly on the road to town .",
    "two dogs sleep by the door of the house with lamps .",
    "the farmer counts his sheep and closes the gate at night .",
    "rain falls on the roof while the kettle sings for tea .",
    "the clock on the tower is slow but nobody minds it .",
    "a letter came from the north with news of deep snow .",
    "the garden behind the wall is full of apples and bees .",
    "she reads by the window until the light is quite gone .",
    "he mends the net and hums a tune about the sea .",
    "the market is loud on friday and quiet after the noon .",
    "birds gather on the wire before they fly to the south .",
    "the road over the hill is long but the view good .",
    "at the inn they serve soup and fish with brown bread .",
    "the miller and the smith play chess on sunday after church .",
    "stars shine over the field and the fox crosses the path .",
    "the old map shows a well where the three roads meet .",
    "nothing much happens here and that is how we like it .",
)
"""Haystack sentences, 12 tokens each."""

SHORT_SENTENCES = (
    "the day is long now .",
    "we walk along the river .",
    "the wind turns north again .",
    "nobody minds the old clock .",
    "the light slowly fades here .",
    "they serve soup and bread .",
    "a dog sleeps by lamps .",
    "the boat waits for wind .",
)
"""Haystack sentences of 6 tokens, as long as a needle."""

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
WORDS = tuple(sorted({word for sentence in SENTENCES + SHORT_SENTENCES for word in sentence.split()}))
TOKENS = (
    *SPECIAL_TOKENS,
    "KEY",
    "QUERY",
    *WORDS,
    *(f"k{number}" for number in range(NUM_KEYS)),
    *(f"v{number}" for number in range(NUM_VALUES)),
)
"""Every token, in the order of its id."""

TOKEN_IDS = {token: token_id for token_id, token in enumerate(TOKENS)}
FIRST_KEY = TOKEN_IDS["k0"]
FIRST_VALUE = TOKEN_IDS["v0"]


def make_tokenizer() -> Tokenizer:
    """One token per word, split at white space and punctuation; adds no ``<bos>``.

    Example
    -------
    >>> make_tokenizer().encode("<bos> KEY k17 v301 v4 v4095 v12 .").tokens
    ['<bos>', 'KEY', 'k17', 'v301', 'v4', 'v4095', 'v12', '.']
    """
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def save_tokenizer(folder: Path, max_tokens: int) -> None:
    """Write the files that ``AutoTokenizer`` reads to an existing folder; `max_tokens` is the longest prompt."""
    make_tokenizer().save(str(folder / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(options, indent=2) + "\n")
