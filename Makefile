# Tasks of this repository; `make help` lists them.
PYTHON ?= python3
VENV := .venv/bin
CLUSTER ?= own
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-down test test-fast check format crd images prepare prepare-fast clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## bring up a 3-node Kubernetes, serve the tiny model, rebalance, lose a worker (CLUSTER=current: yours)
	@if [ "$(CLUSTER)" = current ]; then $(PYTHON) tools/prepare.py --no-cluster; else $(PYTHON) tools/prepare.py && $(VENV)/python -m devcluster.kernels; fi
	@$(VENV)/python -m examples.demo --cluster $(CLUSTER)

demo-down: ## end what the demo left running
	@$(PYTHON) -m devcluster down --name demo

test: prepare ## everything that this machine can run, the cluster tests included
	@$(VENV)/moe-worker warm-up
	@$(VENV)/python -m devcluster.kernels
	@$(VENV)/python -m pytest $(PYTEST_ARGS)

test-fast: prepare-fast ## no cluster, no root, under 3 minutes
	@$(VENV)/python -m pytest -m "not cluster and not apiserver and not processes" tests/architecture tests/unit $(PYTEST_ARGS)

check: prepare-fast ## format, lint, types, layers, generated files
	@$(VENV)/ruff format --check .
	@$(VENV)/ruff check .
	@$(VENV)/mypy
	@$(VENV)/lint-imports
	@$(VENV)/python -m moe_api.crd --check

format: prepare-fast ## rewrite the sources in the project's format
	@$(VENV)/ruff format .
	@$(VENV)/ruff check --fix .

crd: prepare-fast ## generate crds/ and the chart's copy from the models
	@$(VENV)/python -m moe_api.crd --write

images: ## build both images with docker (operator, worker with the tiny model inside)
	docker build -f docker/operator.Dockerfile -t moe-operator:dev .
	docker build -f docker/worker.Dockerfile -t moe-worker:dev .

prepare: ## set up .venv and the cluster's programs
	@$(PYTHON) tools/prepare.py

prepare-fast: ## set up .venv only
	@$(PYTHON) tools/prepare.py --no-cluster

clean: ## remove .venv and .state (the cluster's programs stay in the user's cache)
	rm -rf .venv .state
