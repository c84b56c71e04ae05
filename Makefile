# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` set up all they need, in a virtual environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned: an open range would install the newest build, with several GB of GPU libraries.
TORCH ?= torch==2.13.0

# Set in some environments. Every process that imports the package would then compile it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-thorough lint docs test-torch-versions bench-slow-link bench-layers clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[demo,test,bench,lint]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/overlap-inductor demo

# Tests of kernels, numerics and models start a process for every rank. In the first two stages, tests whose processes are
# forked from a prepared process, or that start gloo ranks, run in one worker (--dist loadgroup). FORKED lists the tests
# of models that need the prepared process of the first stage. The second stage has three workers, because some of its
# tests only wait for a deadline. Long tests come first. A worker that has none left takes tests of another one.
FORKED := tests/models/test_docs_run.py tests/models/test_readme_script.py

test: $(VENV)/ready
	$(BIN)/python -m pytest tests/unit tests/compile $(FORKED) -n 2 --dist loadgroup -m "not thorough"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels -n 3 --dist loadgroup -m "not thorough"
	$(BIN)/python -m pytest tests/models tests/examples tests/numerics $(addprefix --ignore=,$(FORKED)) -n 2 --dist worksteal -m "not thorough"

# The tests that repeat others with other ranks, sizes, parameters or spellings, with more programs, or for more steps.
test-thorough: $(VENV)/ready
	$(BIN)/python -m pytest tests/unit tests/compile -n 2 --dist loadgroup -m thorough
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels -n 2 --dist loadgroup -m thorough
	$(BIN)/python -m pytest tests/models tests/examples tests/numerics -n 3 --dist worksteal -m thorough

lint: $(VENV)/ready
	$(BIN)/ruff check overlap_inductor tests bench tools examples
	$(BIN)/ruff format --check overlap_inductor tests bench tools examples
	! grep -rnE '^.{121,}' --include=*.py overlap_inductor tests bench tools examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_private_imports.py
	$(BIN)/python tools/check_test_imports.py
	$(BIN)/python tools/check_license_headers.py
	$(BIN)/python tools/check_sentences.py

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

# NO_MKDOCS_2_WARNING: mkdocs-material prints an announcement at each build.
docs: $(VENV)/docs-ready
	$(BIN)/python tools/make_docs.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-torch-versions: $(VENV)/ready
	$(BIN)/python tools/test_torch_versions.py

bench-slow-link: $(VENV)/ready
	$(BIN)/python -m bench.slow_link

bench-layers: $(VENV)/ready
	$(BIN)/python -m bench.layers

clean:
	rm -rf $(VENV) .torch-versions build
