"""The harness's program, whose ``hf`` model then takes ``attn_implementation=flexmask``.

``--settings`` is flexmask's, a JSON file of `PrefillSettings` or the JSON; all other words are the harness's.
"""

from __future__ import annotations

import argparse
import sys

from lm_eval.__main__ import cli_evaluate

from flexmask.integrations.huggingface import PrefillSettings, register


def main() -> None:
    """Register the attention, then run the harness."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--settings")
    parser.add_argument("-b", "--batch_size", default="1")
    given, sys.argv[1:] = parser.parse_known_args()
    if given.batch_size != "1":
        parser.error(f"--batch_size must be 1, as the harness pads log-likelihoods without a mask; got {given.batch_size}")
    is_json = (given.settings or "").lstrip().startswith("{")
    register(settings=PrefillSettings.parse(given.settings, "--settings") if is_json else given.settings)
    cli_evaluate()


if __name__ == "__main__":
    main()
