# What a contributor calls; CI calls the same. `make help` lists it.
.DEFAULT_GOAL := help
.PHONY: help venv demo test accept check check-chart chart image images examples soak bench docs outputs gpu dist release-check clean

PYTHON ?= python3
TORCH ?= torch==2.13.0
CLUSTER ?= flk
HELM ?= helm
WORKERS ?= 4
BIN := .venv/bin
DEMO := .venv/demo-installed
INSTALLED := .venv/installed
# Set in many containers, it has each of thousands of processes compile flk anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | expand -t 15

# What training on this machine needs. Byte code is made of what is imported only, and before several ranks would make
# it at the same time. torch first and pinned, so that nothing after it brings another build of it.
$(DEMO): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed; set PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments: install Debian's package python3-venv, or set PYTHON= to another Python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $(PYTHON) is older than Python 3.10: set PYTHON= to another Python" >&2; exit 2; }
	$(PYTHON) -m venv .venv
ifeq ($(TORCH_INDEX),)
	@echo "make: installs $(TORCH), which may take a download of gigabytes with CUDA's libraries; TORCH_INDEX= names an index with torch's builds for CPUs" >&2
endif
	$(BIN)/pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	$(BIN)/pip install --quiet --no-compile --editable '.[runtime]'
	$(BIN)/python -c 'import torch.distributed.fsdp, flk_runtime'
	@touch $@

# The tools of contributors beside it. Byte code is made of what most ranks import, before the ranks of many tests would
# make it at the same time; that of all the tools would take as long as to install them.
$(INSTALLED): $(DEMO)
	$(BIN)/pip install --quiet --no-compile --editable '.[dev,docs,runtime,examples]'
	$(BIN)/python -m compileall -q -j 0 -x torch/testing/_internal .venv/lib/python3*/site-packages/torch .venv/lib/python3*/site-packages/sympy
	@touch $@

venv: $(INSTALLED) ## Everything into .venv; instant when it is there

demo: $(DEMO) ## Train the example as four processes on this machine, then resume
	@$(BIN)/python examples/demo.py

# Bare pytest neither installs launchers nor uses a cluster; `make test` does, unless these variables say otherwise.
test: export FLK_TEST_INSTALL ?= yes
test: export FLK_TEST_CLUSTER ?= create
test: $(INSTALLED) ## All tests, or TESTS='tests/unit …'; those with a cluster or another launcher where one can be had
	$(BIN)/pytest $(TESTS) -rs -n $(WORKERS) --dist loadgroup --durations=30

accept: $(INSTALLED) ## Accept what commands print now as what tests expect; read the difference before you commit it
	$(BIN)/pytest -q --snapshot-update tests/unit/flk/cli/outputs
	git diff --stat -- tests/unit/flk/cli/outputs

check: $(INSTALLED) $(if $(filter skip,$(HELM)),,check-chart) ## What a change must pass beside the tests; HELM=skip leaves the chart out
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/lint-imports --no-cache

check-chart: $(INSTALLED)
	@command -v $(HELM) >/dev/null || { echo "make check: helm is not installed, so charts/flk cannot be checked: install helm, or leave the chart out with HELM=skip" >&2; exit 2; }
	$(BIN)/python -m scripts.chart archive
	$(HELM) lint --strict charts/flk

chart: $(INSTALLED) ## The runtime and what is generated into charts/flk, which Helm can then install from this checkout
	$(BIN)/python -m scripts.chart

image: ## The CPU image, loaded into the kind cluster CLUSTER if there is one
	@if kind get clusters 2>/dev/null | grep -qx '$(CLUSTER)'; then docker/build cpu --kind '$(CLUSTER)'; else docker/build cpu; fi

images: ## Both images of flk, each tried as a user without rights
	docker/build cpu cuda
	docker/check cpu
	docker/check cuda

examples: $(INSTALLED) ## The manifests in k8s/examples, from the job files beside them
	@set -e; for job in k8s/examples/*.flk.yaml; do $(BIN)/flk render --file $$job >$${job%.flk.yaml}.yaml; done

soak: export FLK_TEST_INSTALL ?= yes
soak: $(INSTALLED) ## Tests that take long or repeat much, and those of the runtime with other releases of torch
	$(BIN)/pip install --quiet --editable '.[dev,docs,runtime,examples,soak]' '$(TORCH)'
	$(BIN)/pytest -m soak

bench: $(INSTALLED) ## All benchmarks on this machine, against their goals; PAGE=benchmarks/results.md keeps the tables
	$(BIN)/python benchmarks/run_all.py $(NAMES) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(PAGE),--write $(PAGE))

docs: $(INSTALLED) ## The documentation as a site, into site/; the reference pages anew from the code
	$(BIN)/python -m scripts.documentation.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

outputs: $(INSTALLED) ## The output that the documentation shows, anew from real runs, on this machine and in the cluster
	$(BIN)/python -m scripts.documentation.outputs

gpu: $(INSTALLED) ## What one NVIDIA GPU can show: tests, and figures for benchmarks/results.md
	@$(BIN)/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())' \
	  || { echo "make gpu: torch finds no CUDA device here: run this on a machine with an NVIDIA GPU and a CUDA build of torch" >&2; exit 2; }
	@failed=0; \
	$(BIN)/pytest -m gpu -rP -n 6 tests/gpu || failed=1; \
	$(BIN)/python benchmarks/start.py --ranks 1 --goal 0.7 || failed=1; \
	$(BIN)/python benchmarks/parallel.py --ranks 1 --rounds 20 --steps 50 || failed=1; \
	$(BIN)/python benchmarks/gpu.py || failed=1; \
	exit $$failed

dist: $(INSTALLED) ## The wheel, the source archive and the chart, into dist/
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/python -m scripts.chart archive
	$(HELM) package charts/flk --destination dist
	@ls -l dist

release-check: ## All that a release does, except publishing: checks, tests with a cluster, dist, both images, the site
	$(MAKE) check
	FLK_TEST_CLUSTER=required $(MAKE) test
	$(MAKE) dist docs images

clean: ## What make made, except images and clusters
	rm -rf .venv dist reports site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
