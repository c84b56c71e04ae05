# `make demo` and `make test` do all their own set-up: a virtual environment in .venv, nothing else needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned, because an open range takes the newest build with several GB of GPU libraries.
TORCH ?= torch==2.13.0

.PHONY: demo test lint test-torch-versions bench-slow-link clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[demo,test,bench,lint]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/overlap-inductor demo

# Single processes two at a time; then tests that start a process for every rank themselves.
test: $(VENV)/ready
	$(BIN)/python -m pytest tests/unit tests/compile -n 2
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest tests/numerics tests/models

lint: $(VENV)/ready
	$(BIN)/ruff check overlap_inductor tests bench tools
	$(BIN)/ruff format --check overlap_inductor tests bench tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_private_imports.py

test-torch-versions: $(VENV)/ready
	$(BIN)/python tools/test_torch_versions.py

bench-slow-link: $(VENV)/ready
	$(BIN)/python -m bench.slow_link

clean:
	rm -rf $(VENV) .torch-versions build
