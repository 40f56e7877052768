"""The harness's program, whose ``hf`` model accepts ``attn_implementation=flexmask``."""

from __future__ import annotations

import argparse
import sys

from lm_eval.__main__ import cli_evaluate

from flexmask.integrations.huggingface import PrefillSettings, register


def main() -> None:
    """Register the attention, then run the harness."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # ours: a JSON file of `PrefillSettings`, or the JSON itself; all other words go to the harness
    parser.add_argument("--settings")
    parser.add_argument("-b", "--batch_size", default="1")
    given, words = parser.parse_known_args()
    if given.batch_size != "1":
        parser.error(f"--batch_size must be 1, as the harness pads log-likelihoods without a mask; got {given.batch_size}")
    # overrides a --config file and abbreviations; the harness takes no batch size where it lists or checks tasks, or prints help
    runs = len(words) > 1 and words[0] not in ("ls", "validate")
    sys.argv[1:] = [*words, "--batch_size", "1"] if runs else words
    is_json = (given.settings or "").lstrip().startswith("{")
    register(settings=PrefillSettings.parse(given.settings, "--settings") if is_json else given.settings)
    cli_evaluate()


if __name__ == "__main__":
    main()
