# One command per job; each sets up what it needs first and is safe to repeat.
.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all check verify mutants bench build clean

PRESET ?= local
PORT ?= 8000

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

setup:           ## virtual environment, torch and the default model
	@scripts/setup

serve: setup     ## serve the default model on 127.0.0.1:$(PORT)
	@exec .venv/bin/baton serve $(PRESET) --port $(PORT)

test:            ## everything CI runs: lint, types, contracts, unit to end-to-end tests
	@scripts/setup --dev
	@scripts/check
	@scripts/test

test-all:        ## test, with every parity case rather than a seeded sample
	@scripts/setup --dev
	@scripts/check
	@BATON_TEST_ALL=1 scripts/test

check:           ## lint, types and import contracts only
	@scripts/setup --dev
	@scripts/check

verify:          ## every state of the hand-off's model; installs spin where it may
	@scripts/verify

mutants:         ## plant mistakes, one by one, and show the test that sees each
	@scripts/setup --dev
	@scripts/mutants

build:           ## wheel and sdist in dist/
	@scripts/setup --dev
	@.venv/bin/python -m build --outdir dist .
	@.venv/bin/check-wheel-contents dist/*.whl

clean:           ## remove the virtual environment and build outputs (not the model cache)
	@rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
