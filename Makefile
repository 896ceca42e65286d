PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Tests start hundreds of Python processes: without cached bytecode each takes three times as long.
export PYTHONDONTWRITEBYTECODE :=

# Five worker processes on two cores: most tests wait for other processes. One that dies ends the
# run: xdist waits for ever for what it had been given. After five minutes a test shows where it is.
PYTEST := $(BIN)/pytest -n 5 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
	-o faulthandler_timeout=300
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-annotate --custom-compile-command 'make lock' $(UPGRADE)

.PHONY: setup demo check test test-all test-nightly lint lock bench instructions soak chaos disks test-containers
.PHONY: test-programs audit release-check

setup: $(INSTALLED)
ifneq ($(filter setup,$(MAKECMDGOALS)),)
	@echo "Installed in $(VENV). Next:"
	@echo "  . $(BIN)/activate    # the command gateway"
	@echo "  gateway up           # or make demo: Redis, Triton and the gateway, and what to open then:"
	@echo "  http://127.0.0.1:9000/           the playground"
	@echo "  http://127.0.0.1:9000/operators  the operators' page, with the key in .state/admin_key"
endif

demo: setup
	$(BIN)/gateway up

test: setup
	$(PYTEST) -m 'not slow and not nightly' $(ARGS)

test-all: setup
	$(PYTEST) -m 'not nightly' --durations=30 $(ARGS)

# One after the other, so that benchmarks have the machine to themselves.
test-nightly: setup
	$(BIN)/pytest -m nightly $(ARGS)

# Before a tag. An engine of Docker and each Python from 3.11 to 3.14 should be there.
release-check: lint test-all test-containers
	$(BIN)/python -m tests.release

# For while you work: the tests that start no server, half of all.
check: lint
	$(BIN)/pytest -q -n 2 --dist loadfile --in-process --hypothesis-profile=check $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for model in triton_repo/*/1; do MYPYPATH=$$model:triton_repo $(BIN)/mypy $$model/*.py || exit; done
	MYPYPATH=triton_repo/tensorrt_llm/1:triton_repo $(BIN)/mypy triton_repo/gpt/tensorrt_llm/1/model.py
	MYPYPATH=triton_repo/llmapi/tensorrt_llm/1 $(BIN)/mypy triton_repo/llmapi/tensorrt_llm/1/model.py

bench: setup
	$(BIN)/python -m bench $(ARGS)

instructions: setup
	$(BIN)/python -m bench.bounds $(ARGS)

soak: setup
	$(BIN)/python -m bench.soak $(ARGS)

chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)
	$(BIN)/python -m tests.chaos.moved

disks: setup
	$(BIN)/python -m tests.disks $(ARGS)

# As root on Debian; says why where no engine can be had. Images and layers stay in build/containers.
test-containers: setup
	$(BIN)/python -m tests.containers $(ARGS)

# Programs of package registries against the real stack; ARGS=--newest takes their newest versions.
test-programs: setup
	$(BIN)/python -m tests.programs $(ARGS)

# Known weaknesses of all that is installed, by PyPI's advisories. --strict: a package that cannot
# be looked up is a failure, not a pass. An environment of its own, so that it audits no tool of its.
audit: setup
	$(BIN)/pip check
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install --quiet --disable-pip-version-check 'pip-audit>=2.10,<3'
	$(BIN)/pip freeze --exclude-editable > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off \
		--requirement $(VENV)/audit/installed.txt $(ARGS)

# Versions stay where they are unless pyproject.toml asks for others; `make lock UPGRADE=--upgrade`
# takes the newest.
lock: setup
	$(LOCK) --group tools --output-file requirements/tools.txt
	$(LOCK) pyproject.toml --all-extras --output-file requirements/dev.txt
	$(LOCK) --group sbom --constraint requirements/dev.txt --output-file requirements/sbom.txt
	$(LOCK) pyproject.toml --extra local --constraint requirements/dev.txt \
		--output-file requirements/local.txt
	$(LOCK) pyproject.toml --excludes requirements/excluded.txt \
		--output-file requirements/gateway.txt

# uv takes a tenth of pip's CPU time. It does not read pip's configuration: where that is what leads
# to a registry, pip installs.
$(INSTALLED): pyproject.toml requirements/tools.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes --requirement requirements/tools.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes \
		--requirement requirements/dev.txt \
		|| $(PIP_INSTALL) --require-hashes --requirement requirements/dev.txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@
