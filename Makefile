# What a contributor calls; CI calls the same. `make help` lists it.
.DEFAULT_GOAL := help
.PHONY: help venv demo test check image examples soak bench gpu clean

PYTHON ?= python3
TORCH ?= torch==2.13.0
CLUSTER ?= flk
BIN := .venv/bin
INSTALLED := .venv/installed

help: ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */\1\t/' | expand -t 10

# torch first and pinned, so that nothing after it brings another build of it.
$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed; set PYTHON=" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev,runtime,examples]'
	@touch $@

venv: $(INSTALLED) ## Everything into .venv; instant when it is there

demo: $(INSTALLED) ## Train the example as four processes on this machine, then resume
	@$(BIN)/python examples/demo.py

test: $(INSTALLED) ## All tests; those with a cluster where one can be had
	@failed=0; \
	$(BIN)/pytest tests/unit tests/local || failed=1; \
	$(BIN)/pytest tests/launchers || failed=1; \
	$(BIN)/pytest -n 2 tests/cluster || failed=1; \
	exit $$failed

check: $(INSTALLED) ## What a change must pass beside the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@if command -v helm >/dev/null; then helm lint --strict charts/flk; else echo "helm is not installed: charts/flk is not checked" >&2; fi

image: ## The CPU image, loaded into the kind cluster CLUSTER if there is one
	@if kind get clusters 2>/dev/null | grep -qx '$(CLUSTER)'; then docker/build cpu --kind '$(CLUSTER)'; else docker/build cpu; fi

examples: $(INSTALLED) ## The manifests in k8s/examples, from the job files beside them
	@set -e; for job in k8s/examples/*.flk.yaml; do $(BIN)/flk render --file $$job >$${job%.flk.yaml}.yaml; done

soak: $(INSTALLED) ## Tests that take long or repeat much
	$(BIN)/pytest -m soak

bench: $(INSTALLED) ## Benchmarks on this machine; each prints its goal and what it measured
	@set -e; for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(BIN)/python $$benchmark; done

gpu: $(INSTALLED) ## What one NVIDIA GPU can show: tests, and figures for docs/gpu.md
	@$(BIN)/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())' \
	  || { echo "make gpu: torch finds no CUDA device here: run this on a machine with an NVIDIA GPU and a CUDA build of torch" >&2; exit 2; }
	$(BIN)/pytest -m gpu -rP tests/gpu
	$(BIN)/python benchmarks/start.py --ranks 1
	$(BIN)/python benchmarks/parallel.py --ranks 1 --rounds 20 --steps 50

clean: ## What make made, except images and clusters
	rm -rf .venv dist reports .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
