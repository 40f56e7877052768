"""Fixtures of the adapter's tests."""

import contextlib
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]


@pytest.fixture
def model():
    from tests.integrations.common import make_model

    return make_model()


@pytest.fixture
def tokens():
    from tests.integrations.common import BATCH, LENGTH
    from tests.integrations.families import VOCABULARY

    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def prompt(tokens):
    return tokens[:1]


@pytest.fixture
def fresh_process(monkeypatch):
    """Registered functions and settings as in a process that has imported neither library, and back."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from flexmask.integrations.huggingface import model_config

    monkeypatch.setattr(model_config, "_process_override", {})
    with contextlib.ExitStack() as stack:
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            for mapping in (functions._local_mapping, functions._global_mapping):
                stack.enter_context(patch.dict(mapping))
                mapping.pop("flexmask", None)
        yield


@pytest.fixture(autouse=True)
def no_gradients(no_grad):
    """Tests that differentiate enable gradients."""
