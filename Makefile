# Every target creates its own environment first. The only requirement is Python 3.10 to 3.14.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# Other libraries that work with this one. Each has its own environment, with the versions of its requirements file.
NEIGHBOURS := lerobot rl_zoo3 sbx torchrl
# Tests that start Ray. `test-more` runs them without pytest-xdist.
CLUSTER_TESTS := tests/distributed/test_ray.py tests/cli/test_cluster_demo.py
INSTALL := $(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-more test-neighbours sb3-suites soak format bench docs clean

help: ## List all targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready ## Train DQN twice, with SB3's buffer and a compressed one, and compare
	$(RUN)/sb3-extra-buffers demo

# The test processes share the cores, so torch's threads must not spin while they wait.
test: export OMP_WAIT_POLICY := passive
test: $(VENV)/.ready ## Check lint, formatting and types, and run the tests
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/pytest -n auto -m "not slow" $(CLUSTER_TESTS:%=--ignore %) --ignore tests/neighbours

# The date is the seed of the histories, so every day tests new ones.
test-more: export OMP_WAIT_POLICY := passive
test-more: $(VENV)/.ready test-neighbours ## Run slow tests: killed processes, five minutes of long histories, whole trainings
	$(RUN)/pytest -n auto -m slow tests/gpu
	$(RUN)/pytest $(CLUSTER_TESTS)
	$(RUN)/python -m tests.soak.kill --kills 200
	$(RUN)/python -m tests.soak.collectors --kills 15
	$(RUN)/python -m tests.soak.collectors --kills 50 --shards 2
	$(RUN)/python -m tests.soak.namespaces
	$(RUN)/python -m tests.histories.soak --minutes 5 --seed $(or $(SEED),$(shell date +%Y%m%d))
	$(RUN)/python -m benchmarks.studies.training_exactness

test-neighbours: $(NEIGHBOURS:%=test-%) ## Test with the RL Zoo and other libraries, each in its own environment

test-%: export OMP_WAIT_POLICY := passive
test-%: .venv-%/.ready
	.venv-$*/bin/python -m pytest tests/neighbours/test_$**.py

# ARGS: see scripts/sb3_suites.py. ARGS="-n 2" uses two cores.
sb3-suites: .venv-suites/.ready ## Run the test suites of SB3 and sb3-contrib with compressed buffers
	.venv-suites/bin/python scripts/sb3_suites.py $(ARGS)

soak: export OMP_WAIT_POLICY := passive
soak: $(VENV)/.ready ## Compare with SB3's buffers over long random histories and real games; MINUTES=30 SEED=0
	$(RUN)/python -m tests.histories.soak --minutes $(or $(MINUTES),30) --seed $(or $(SEED),0) $(ARGS)

format: $(VENV)/.ready ## Format the code and apply lint fixes
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# ARGS: see `python -m benchmarks --help`. ARGS=--publish writes the results into docs/.
bench: $(VENV)/.ready ## Compare memory and speed with SB3 and other libraries; QUICK=1 takes about two minutes
	$(RUN)/python -m benchmarks $(if $(QUICK),--quick) $(ARGS)

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.ready ## Build the documentation into site/
	$(RUN)/mkdocs build --strict

clean: ## Remove all build outputs and environments; keep benchmark recordings
	rm -rf $(VENV) .venv-* build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV). The first time, this takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[fast,atari,vizdoom,video,contrib,minari,lerobot,plots,ray,docs,dev]"
	@touch $@

# LeRobot works with this torch but does not declare support for it. Its requirements file lists all dependencies.
.venv-lerobot/.ready: NO_DEPS := --no-deps

.PRECIOUS: .venv-%/.ready
.venv-%/.ready: tests/neighbours/requirements-%.txt pyproject.toml
	@echo "Setting up .venv-$*. The first time, this takes a few minutes."
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(NO_DEPS) --requirement $< --editable .
	@touch $@
