# `make demo` and `make test` do everything on a fresh Debian or Ubuntu machine, installation
# included; see README.md and CONTRIBUTING.md.
PYTHON := .venv/bin/python
# The lab is made of namespaces, which only root may make.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -E)

.PHONY: bench demo demo-down test test-extended test-long chaos test-fast lint setup setup-test venv

demo: setup
	$(SUDO) $(PYTHON) -m tests.lab.demo up

demo-down: venv
	$(SUDO) $(PYTHON) -m tests.lab.demo down

test: setup-test lint
	$(SUDO) $(PYTHON) -m pytest -m 'not extended and not long and not gpu'

# Longer trials on the lab, on a Prefect server, and in a browser: 40 minutes on two cores.
test-extended: setup-test
	$(SUDO) $(PYTHON) -m pytest -m 'extended and not long' $(PYTEST_FLAGS)

# Trials of many minutes each: rollbacks one after the other.
test-long: setup-test
	$(SUDO) $(PYTHON) -m pytest -m long

# Every fault at every step of a deploy, on a lab of its own: some hours on two cores.
chaos: setup-test
	$(SUDO) $(PYTHON) -m tests.lab.chaos

test-fast: venv
	$(PYTHON) -m pytest -m 'not extended and not long' tests/unit tests/flows tests/ssh

bench: setup-test
	$(SUDO) $(PYTHON) -m tests.bench

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

setup:
	.ci/setup

setup-test:
	.ci/setup test

venv:
	.ci/setup venv
