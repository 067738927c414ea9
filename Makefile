# `make quickstart`, `make test` and `make lint` each create the environment they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch goes in first and pinned, so that the project's own range never pulls another build of it.
TORCH := torch==2.13.0
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test lint clean

quickstart: $(READY)
	$(BIN)/entrain fit --config recipes/quickstart.yaml

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs build .pytest_cache .mypy_cache .ruff_cache entrain_opt/__pycache__/compiled-*
