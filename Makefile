# make demo       trains a small Mask R-CNN on generated images on the CPU, in a few minutes
# make test       runs lint, type checks and the tests that CI runs, in 22 minutes on two busy cores
# make test-fast  runs the fast tests, in 7 minutes on two busy cores
# make test-all   runs all tests, including every config and every documented command, in more than an hour
# Each of them first creates an environment in .venv. To use an existing one: make test PYTHON=/path/to/python

VENV := .venv
ifdef PYTHON
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
CREATE_WITH ?= python3

.PHONY: install demo lint test test-fast test-all

install: $(READY)

$(VENV)/.ready: requirements/*.* setup.py
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
	$(PYTHON) -m pytest -n 2 -m 'not exhaustive' tests

test-fast: $(READY)
	$(PYTHON) -m pytest -n 2 -m 'not slow and not exhaustive' tests

test-all: lint
	$(PYTHON) -m pytest -n 2 -m 'not exhaustive' tests
	$(PYTHON) -m pytest -n 0 -v -m exhaustive tests
