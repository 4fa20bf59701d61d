# Two commands do all the set-up on a fresh machine that has Python 3.11 or later, make and a package registry:
#   make serve     run the server with the embedded model        make test     run the tests
# What was installed is remembered by the stamp files in .venv; `make clean` forgets it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
ARGS ?=
SIZE_serve := ; about 420 MB on disk
SIZE_dev := ; about 630 MB on disk

.PHONY: help setup serve test test-quick check fmt bench lock clean

help:  ## What can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /	/' | expand -t 14

setup: $(VENV)/dev.stamp  ## Create .venv with everything that development needs

serve: $(VENV)/serve.stamp  ## Run the server (ARGS="--port 9000" adds flags)
	$(BIN)/headrace serve $(ARGS)

test: $(VENV)/dev.stamp  ## Run all tests
	$(BIN)/python -m pytest $(ARGS)

test-quick: $(VENV)/dev.stamp  ## Run the tests that start no process and load no model
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

check: $(VENV)/dev.stamp  ## What CI runs: format, lint, types, import rules, size guide, tests
	$(BIN)/ruff format --check src tests tools bench
	$(BIN)/ruff check src tests tools bench
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/size_guide.py
	$(MAKE) test

fmt: $(VENV)/dev.stamp  ## Format, and mend what the linter can
	$(BIN)/ruff format src tests tools bench
	$(BIN)/ruff check --fix src tests tools bench

bench: $(VENV)/bench.stamp  ## Run the benchmarks (docs/lab.md names each)
	$(BIN)/python bench/all.py $(ARGS)

lock: $(UV)  ## Resolve the dependencies anew into requirements/*.txt
	@for set in serve:model dev:dev bench:bench; do \
	  $(UV) pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --upgrade -q \
	    pyproject.toml --group $${set#*:} -o requirements/$${set%%:*}.txt && echo "requirements/$${set%%:*}.txt"; done

clean:  ## Remove .venv and caches of tools (prepared models stay in the cache folder)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(UV):
	@echo "Creating $(VENV) (once) ..."
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Headrace needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.8"

$(VENV)/%.stamp: requirements/%.txt pyproject.toml | $(UV)
	@echo "Installing requirements/$*.txt into $(VENV) ($(if $(wildcard $(VENV)/*.stamp),what is not there yet,once$(SIZE_$*))) ..."
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements/$*.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@
