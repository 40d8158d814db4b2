# make demo       the environment, then data, training and pictures of a small Mask R-CNN on the CPU: minutes
# make test       the environment, lint, types and the whole test suite
# make test-fast  the part to run every few minutes
# make test-docs  every command of README and docs, most of an hour
# An existing environment: make test PYTHON=/path/to/python

VENV := .venv
ifdef PYTHON
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
CREATE_WITH ?= python3

.PHONY: install demo test test-fast test-docs lint

install: $(READY)

$(VENV)/.ready: requirements/*.txt requirements/install.sh setup.py
	@test -x $(VENV)/bin/python || $(CREATE_WITH) -m venv $(VENV)
	@requirements/install.sh $(VENV)/bin/python
	@touch $@

demo: $(READY)
	$(PYTHON) -m mmdtn.doctor
	$(PYTHON) tools/demo.py

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy mmdtn

test: lint
	$(PYTHON) -m pytest -n 2 -m 'not docs' tests

test-fast: $(READY)
	$(PYTHON) -m pytest -n 2 -m 'not slow and not docs' tests

test-docs: $(READY)
	$(PYTHON) -m pytest -n 0 -v tests/test_docs.py tests/test_workflows/test_documented_commands.py
