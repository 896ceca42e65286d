PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: setup demo test lint bench

setup: $(INSTALLED)

demo: setup
	$(BIN)/gateway up

test: setup
	$(BIN)/pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for file in triton_repo/*/1/*.py; do MYPYPATH=$$(dirname $$file) $(BIN)/mypy $$file || exit; done

bench: setup
	$(BIN)/python bench/run.py
	$(BIN)/python bench/lora.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[local,test]'
	touch $@
