"""The harness's program with the model "flexmask": ``python -m flexmask.integrations.lm_eval --model flexmask``."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import flexmask.integrations.lm_eval  # noqa: F401  # registers the name

if __name__ == "__main__":
    cli_evaluate()
