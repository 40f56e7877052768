#!/bin/sh
# Makes the environment that `make test-sglang` runs in: tests/sglang/environment.sh FOLDER [PYTHON [RELEASE]]
# SGLang's wheel asks for CUDA builds and kernels, 10 GB in all; this installs it without them: about 4 minutes and 2 GB. RELEASE
# is one of sglang, in the place of 0.5.23.
set -eu
folder=$1
tests=$(dirname "$0")
[ -x "$folder/bin/python" ] || "${2:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --disable-pip-version-check "$@"; }
pip -r "$tests/requirements.txt"
pip --no-deps "sglang==${3:-0.5.23}" torchvision==0.28.0
"$tests/../serving/fit_torchvision.sh" "$folder/bin/python"
# for its entry point, and these sources
pip setuptools
pip --no-deps --no-build-isolation -e "$tests/../.."
