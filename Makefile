# make demo     a trained model with dense attention and with FlexPrefill, side by side
# make help     everything else
#
# Every target installs what constraints.txt pins into VENV first, if need be. To use an environment that is already
# there and install nothing:  make test VENV= PYTHON=python3

VENV ?= .venv
PYTHON ?= python3
# what `make bench` measures for the report; none: the short benchmark
PART ?=
# more words for the command that a target runs, as in  make test ARGS="-k pooling"
ARGS ?=

ifeq ($(strip $(VENV)),)
  RUN := $(PYTHON)
  READY :=
else
  RUN := $(VENV)/bin/python
  READY := $(VENV)/.installed
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all style format bench bench-report test-versions clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'VENV=DIR     environment to use, made if need be (now: $(if $(strip $(VENV)),$(VENV),none))'
	@echo 'VENV=        install nothing, use PYTHON as it is'
	@echo 'PYTHON=EXE   interpreter to make VENV with, or to use without one (now: $(PYTHON))'
	@echo 'ARGS="..."   more arguments for the command behind a target'

install: $(READY) ## make VENV and install flexmask with what it is developed with

demo: $(READY) ## dense attention and FlexPrefill on a trained model: one table, one picture
	$(RUN) -m bench.demo $(ARGS)

# one pytest for the tests and for the examples in the docstrings; a module whose optional package is missing is skipped
test: $(READY) ## the tests and the docstrings' examples, on CPU without network
	$(RUN) -m pytest --doctest-modules --doctest-ignore-import-errors tests flexmask $(ARGS)

test-all: $(READY) ## every transformers model by cache, padding, prefill and call, on CPU; writes integrations/SUPPORT.md
	$(RUN) -m pytest --all-cells tests/integrations/test_matrix.py $(ARGS)

style: $(READY) ## ruff and mypy, changing nothing
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY) ## sort imports and format, in place
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(READY) ## speed in brief; PART=latency|breakeven|stages|memory|compile|long measures that for the report, on a GPU
	$(if $(PART),$(RUN) -m bench.parts $(PART) $(ARGS),$(RUN) -m pytest bench --benchmark-only $(ARGS))

bench-report: $(READY) ## bench/REPORT.md from what make bench PART=... has measured, without a GPU
	$(RUN) -m bench.report $(ARGS)

test-versions: $(READY) ## on older releases of torch and of transformers, and the newest (gigabytes)
	$(RUN) -m nox $(ARGS)

clean: ## remove what tools and builds leave behind; environments stay
	rm -rf build dist out *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find flexmask block_masks integrations tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(READY),)
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
endif
