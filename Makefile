# One command each; `make help` lists them. LANE=gpu selects the GPU lock.
# the lane that .venv has, so that a bare `make test` on a GPU machine does not replace it
LANE ?= $(shell cat .venv/.hybridflow-lane 2>/dev/null || echo cpu)
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
TESTS := $(PY) tests/run.py
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-slurm demo check test test-fast test-full gpu gpu-wheels faults kills lint type arch schema hooks bench clean \
  distclean docs

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1|/' | awk -F'|' '{printf "%-14s%s\n", $$1, $$2}'

setup: ## create .venv and install the lane's lock; does nothing when it is up to date
	@requirements/setup.sh $(LANE)

setup-dev: ## setup, and the tools for tests and lint
	@requirements/setup.sh $(LANE) dev

setup-slurm: ## Debian's Slurm for tests/slurm, where root can install it; SLURM=no leaves it out
	@SLURM=$(SLURM) requirements/slurm.sh

demo: setup ## train the tiny mixture of experts with GRPO; ARGS="key=value ..." overrides settings
	@.venv/bin/hybridflow train --config-name tiny-moe-grpo $(ARGS)

check: setup-dev setup-slurm ## lint, types, advisories, the site and the tests of `make test`, with one summary at the end
	@$(TESTS) --check -m "not full" $(ARGS)

test: setup-dev setup-slurm ## all tests but those marked full; ARGS="..." goes to pytest
	@$(TESTS) -m "not full" $(ARGS)

test-fast: setup-dev ## tests that start no engine and no cluster (about 2 minutes on 2 cores)
	@$(PYTEST) tests/arch tests/unit -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not full" $(ARGS)

test-full: setup-dev setup-slurm ## every test
	@$(TESTS) $(ARGS)

# on a machine without an index: its own Python, and the wheels that were brought along
BROUGHT := $(and $(wildcard wheels/device/*/*.whl),$(if $(wildcard $(PY)),,yes))
gpu: $(if $(BROUGHT),,setup-dev) ## what only a GPU can show, in 8 minutes on one GPU; ARGS="--part 2", ARGS=--rehearse on a CPU
	@$(if $(BROUGHT),python3,$(PY)) -m tests.gpu $(ARGS)

gpu-wheels: ## wheels for `make gpu` on a machine without a package index, in pieces of at most 58 MiB
	@python3 requirements/device_wheels.py $(ARGS)

faults: setup-dev ## disturb whole runs at seeded moments; ARGS="--campaigns 15 --seed 1", then ARGS="--table"
	@$(PY) -m tests.faults $(ARGS)

kills: setup-dev ## kill processes of conversations at seeded moments; ARGS="--seed 2", then ARGS="--table"
	@$(PY) -m tests.faults.kills $(ARGS)

docs: setup-dev ## write the generated pages and build the site into build/site, without a network
	@$(PY) -m website build

lint: setup-dev ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

type: setup-dev ## mypy over the package
	@$(PY) -m mypy hybridflow

arch: setup-dev ## import contracts, cycles, size budgets
	@.venv/bin/lint-imports --no-cache
	@$(PYTEST) tests/arch

schema: setup ## write configs/schema.json again, after a change of hybridflow/config/schema.py
	@.venv/bin/hybridflow config schema > configs/schema.json

hooks: setup-dev ## let git run lint, types and import contracts before each commit (needs pre-commit)
	@pre-commit install

bench: setup-dev ## run one benchmark: make bench NAME=... ARGS="key=value ..."; without NAME, list them
	@.venv/bin/hybridflow bench $(if $(NAME),run $(NAME) $(ARGS),list)

clean: ## remove caches and build output; keeps .venv, data and runs
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find hybridflow tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	@rm -rf .venv
