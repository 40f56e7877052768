"""Fixtures of the adapter's tests."""

from importlib.util import find_spec

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


@pytest.fixture(autouse=True)
def no_gradients(no_grad):
    """Tests that differentiate enable gradients."""
