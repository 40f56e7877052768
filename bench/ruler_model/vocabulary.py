"""The retriever's vocabulary, followed by markers, so its embeddings can start this model's."""

from bench.retriever.vocabulary import FIRST_KEY, FIRST_VALUE, NUM_KEYS, NUM_VALUES
from bench.retriever.vocabulary import TOKENS as RETRIEVER_TOKENS

MARKERS = ("MANY", "ALL", "SET", "TRACK", "FACT", "WHO", "ASK", "COMMON", "FREQUENT")
TOKENS = (*RETRIEVER_TOKENS, *MARKERS)
"""Every token, in the order of its id."""

TOKEN_IDS = {token: token_id for token_id, token in enumerate(TOKENS)}
END_OF_VALUES = FIRST_VALUE + NUM_VALUES

__all__ = ["END_OF_VALUES", "FIRST_KEY", "FIRST_VALUE", "NUM_KEYS", "NUM_VALUES", "TOKENS", "TOKEN_IDS"]
