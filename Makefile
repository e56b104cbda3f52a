# Every target makes its own environment first: a Python of 3.10 to 3.14 is all that a machine needs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# Packages that work with ours. Each has an environment of its own, with the versions of its requirements file.
NEIGHBOURS := lerobot rl_zoo3 sbx torchrl
# Tests that start Ray.
CLUSTER_TESTS := tests/distributed/test_ray.py tests/cli/test_cluster_demo.py
INSTALL := $(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-more test-neighbours sb3-suites soak format bench docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready ## Train DQN twice, with SB3's buffer and a compressed one, and compare
	$(RUN)/sb3-extra-buffers demo

# Workers share the cores: torch's threads must not keep them busy while they wait.
test: export OMP_WAIT_POLICY := passive
test: $(VENV)/.ready ## Lint, check formatting and types, run the tests
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/pytest -n auto -m "not slow" $(CLUSTER_TESTS:%=--ignore %) --ignore tests/neighbours

# The seed of the histories is the day, so that every day adds some.
test-more: export OMP_WAIT_POLICY := passive
test-more: $(VENV)/.ready test-neighbours ## What takes longer: killed processes, five minutes of long histories, whole trainings
	$(RUN)/pytest -n auto -m slow tests/gpu
	$(RUN)/pytest $(CLUSTER_TESTS)
	$(RUN)/python -m tests.soak.kill --kills 200
	$(RUN)/python -m tests.soak.collectors --kills 15
	$(RUN)/python -m tests.soak.collectors --kills 50 --shards 2
	$(RUN)/python -m tests.soak.namespaces
	$(RUN)/python -m tests.histories.soak --minutes 5 --seed $(or $(SEED),$(shell date +%Y%m%d))
	$(RUN)/python -m benchmarks.studies.training_exactness

test-neighbours: $(NEIGHBOURS:%=test-%) ## Train with the RL Zoo and others, each in an environment of its own

test-%: export OMP_WAIT_POLICY := passive
test-%: .venv-%/.ready
	.venv-$*/bin/python -m pytest tests/neighbours/test_$**.py

# ARGS: see scripts/sb3_suites.py; -n 2 uses two cores.
sb3-suites: .venv-suites/.ready ## Run SB3's and sb3-contrib's own tests with our buffers
	.venv-suites/bin/python scripts/sb3_suites.py $(ARGS)

soak: export OMP_WAIT_POLICY := passive
soak: $(VENV)/.ready ## Compare with SB3's buffers over long histories and real games; MINUTES=30 SEED=0
	$(RUN)/python -m tests.histories.soak --minutes $(or $(MINUTES),30) --seed $(or $(SEED),0) $(ARGS)

format: $(VENV)/.ready ## Fix what the linter can, and format
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# ARGS: see `python -m benchmarks --help`; --publish writes the results into docs/.
bench: $(VENV)/.ready ## Compare memory and speed with SB3 and other libraries; QUICK=1 in about two minutes
	$(RUN)/python -m benchmarks $(if $(QUICK),--quick) $(ARGS)

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.ready ## Build the documentation into site/
	$(RUN)/mkdocs build --strict

clean: ## Remove what was built, the environment included; recordings stay
	rm -rf $(VENV) .venv-* build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV), which takes a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[fast,atari,vizdoom,video,contrib,minari,lerobot,plots,ray,docs,dev]"
	@touch $@

# LeRobot works with this torch, but does not say so. Its file lists everything that it needs.
.venv-lerobot/.ready: NO_DEPS := --no-deps

.PRECIOUS: .venv-%/.ready
.venv-%/.ready: tests/neighbours/requirements-%.txt pyproject.toml
	@echo "Setting up .venv-$*, which takes a few minutes the first time"
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(NO_DEPS) --requirement $< --editable .
	@touch $@
