PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: setup demo test lint bench audit

setup: $(INSTALLED)

demo: setup
	$(BIN)/gateway up

test: setup
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for file in triton_repo/*/1/*.py; do MYPYPATH=$$(dirname $$file) $(BIN)/mypy $$file || exit; done

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[local,bench]'
	$(BIN)/python -m bench $(ARGS)

# Known weaknesses of all that is installed, by PyPI's advisories. --strict: a package that cannot
# be looked up is a failure, not a pass. An environment of its own, so that it audits no tool of its.
audit: setup
	$(BIN)/pip check
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install --quiet --disable-pip-version-check 'pip-audit>=2.10,<3'
	$(BIN)/pip freeze --exclude-editable > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off \
		--requirement $(VENV)/audit/installed.txt $(ARGS)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --editable '.[local,test]'
	touch $@
