# Needs Python 3.11 or later, make and a compiler. Each target installs what it needs, once.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
ifeq ($(strip $(PYTHON)),)
$(error Python 3.11 or later is needed: put it on PATH, or say make PYTHON=/its/path)
endif
export PYTHON
BIN := .venv/bin
SEED ?= 1

.PHONY: help install demo test test-all lint format oracles parity bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: ## .venv with all that development needs
	@$(PYTHON) scripts/setup_env.py --group demo --group dev

demo: ## train a small model on this machine; STEPS=3 for a short run, SEED=2 for other draws
	@bash scripts/demo.sh $(if $(STEPS),--steps $(STEPS)) --seed $(SEED)

test: install ## lint, types, unit, distributed, end to end, two hosts
	@bash scripts/test.sh

test-all: install ## the same with the slow tests and the cluster's
	@bash scripts/test.sh --all

lint: install ## style, import floors, types
	@bash scripts/test.sh --lint

format: install ## put the code into the style that lint asks for
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

oracles: install ## compare the numbers with other libraries', each in an environment of its own
	@bash scripts/oracles/run.sh

parity: install ## compare runs with the expected losses, and every family on every layout with one process
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parity -m ''
	@OMP_NUM_THREADS=1 $(BIN)/python -m scripts.parity

bench: install ## time this machine's runs
	@bash scripts/bench/run.sh

clean: ## remove caches and build products; .venv and outputs stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find verl scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
