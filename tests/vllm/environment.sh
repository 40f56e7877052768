#!/bin/sh
# Makes the environment that `make test-vllm` runs in: tests/vllm/environment.sh FOLDER [PYTHON]
# vLLM's CPU build needs one of its own, since it pins older releases than constraints.txt. About 3 minutes and 3.4 GB.
set -eu
folder=$1
"${2:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --disable-pip-version-check -r "$(dirname "$0")/requirements.txt"
# builds for pictures and sound, which need not fit torch's CPU build, and which text does without
"$folder/bin/python" -m pip uninstall --yes torchaudio torchcodec torchvision
# for its entry point, and these sources
"$folder/bin/python" -m pip install --no-deps --no-build-isolation -e "$(dirname "$0")/../.."
