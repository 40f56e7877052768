"""What other threads compile or export reaches no call of this one."""

import pytest
import torch

from tests.held_open import HELD, STRICT_EXPORT, held_open
from tests.public_calls import COMPILED, UNCOMPILED, assert_same_results, attention, results
from tests.public_calls import expected as expected


@pytest.mark.attention
@pytest.mark.parametrize("work", HELD.values(), ids=HELD)
def test_every_call_runs_while_another_thread_compiles(work, expected):
    with torch.no_grad(), held_open(work):
        found = results({**UNCOMPILED, **COMPILED})
    assert_same_results(found, expected)


def test_calls_that_need_no_kernel_run_during_a_strict_export():
    expected = results(UNCOMPILED)
    with held_open(STRICT_EXPORT):
        found = results(UNCOMPILED)
    assert_same_results(found, expected)


@pytest.mark.attention
@pytest.mark.filterwarnings("ignore:torch.compile is ignored when called inside torch.export region:UserWarning")
def test_what_torch_does_not_compile_during_an_export_is_compiled_after_it():
    def first_call():
        return attention(softcap=7.0)

    with torch.no_grad():
        with held_open(HELD["torch.export"]), pytest.raises(RuntimeError, match="again after the export"):
            first_call()
        torch.testing.assert_close(first_call(), first_call())
