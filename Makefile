# `make demo` and `make test` work on a fresh machine: they make .venv/ and install what they need.
PYTHON ?= python3
# On this line because plain `torch` may be several gigabytes; pip's own settings decide where it comes from.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint format cluster-up cluster-down clean

help:            ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

demo: $(VENV)/.train       ## The whole chain on this machine, in a few minutes
	$(BIN)/bridge-rl demo

test: $(VENV)/.dev         ## Every check: lint, types, tests, the real Slurm of slurm/devcluster
	$(MAKE) --no-print-directory lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slurm"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile -m slurm   # they mostly wait

lint: $(VENV)/.dev         ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev       ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

cluster-up:                ## A real Slurm on this machine (docs/devcluster.md)
	slurm/devcluster/cluster.sh up

cluster-down:              ## Stop it and remove its files
	slurm/devcluster/cluster.sh down

clean:                     ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is older than 3.10; name a newer one: make PYTHON=python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 2; }

$(VENV)/.train: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet -e '.[train]'
	@$(BIN)/python -m compileall -q bridge   # as pip does for what is not editable; some environments never write it
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.train
	$(BIN)/pip install --quiet -e '.[train,dev]'
	@touch $@
