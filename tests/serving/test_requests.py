"""What one request may choose."""

import pytest

from flexmask.integrations.serving.options import RequestOptions, request_options
from flexmask.settings import PrefillSettings

HYBRID = PrefillSettings()


def test_a_request_chooses_a_gamma_or_dense_attention():
    for given in (None, {}, {"another": 1}, {"flexmask_dense": False}, {"flexmask_dense": 0}):
        assert request_options(given, HYBRID) is None
    assert request_options({"flexmask_gamma": 0.5, "another": 1}, HYBRID) == RequestOptions(gamma=0.5)
    assert request_options({"flexmask_gamma": 1, "flexmask_dense": 0}, HYBRID) == RequestOptions(gamma=1.0)
    for true in (True, 1, 1.0):
        assert request_options({"flexmask_dense": true}, HYBRID) == RequestOptions(dense=True)


def test_different_options_have_different_salts():
    chosen = [RequestOptions(gamma=0.5), RequestOptions(gamma=0.55), RequestOptions(gamma=1.0), RequestOptions(dense=True)]
    assert len({each.salt for each in chosen}) == 4
    assert request_options({"flexmask_gamma": 1}, HYBRID).salt == RequestOptions(gamma=1.0).salt


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"flexmask_gama": 0.5}, "a request takes flexmask_gamma and flexmask_dense; got 'flexmask_gama'"),
        ({"flexmask_gamma": 2}, r"flexmask_gamma must be in \(0, 1\]; got 2"),
        ({"flexmask_gamma": 0}, r"flexmask_gamma must be in \(0, 1\]; got 0"),
        ({"flexmask_gamma": float("nan")}, "flexmask_gamma must be finite; got nan"),
        ({"flexmask_gamma": "0.5"}, "flexmask_gamma must be a number; got str"),
        ({"flexmask_gamma": True}, "flexmask_gamma must be a number; got bool"),
        ({"flexmask_gamma": [0.5, 0.6]}, "flexmask_gamma must be a number; got list"),
        ({"flexmask_dense": "yes"}, "flexmask_dense must be true or false; got 'yes'"),
        ({"flexmask_dense": [1]}, r"flexmask_dense must be true or false; got \[1\]"),
        ({"flexmask_dense": True, "flexmask_gamma": 0.9}, "flexmask_gamma must come without flexmask_dense"),
    ],
)
def test_bad_options_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        request_options(given, HYBRID)


def test_a_method_without_gamma_takes_none():
    with pytest.raises(ValueError, match="flexmask_gamma needs a method with gamma; this server runs 'causal'"):
        request_options({"flexmask_gamma": 0.5}, PrefillSettings("causal"))
    assert request_options({"flexmask_dense": True}, PrefillSettings("causal")) == RequestOptions(dense=True)
