# Two commands on a fresh machine: `make demo` and `make test`. Both set up all they need under .venv and .cache.
PYTHON ?= python3
VENV := .venv
# PyTorch's compiler does not quote paths: from a path with a space, Python is started through a link elsewhere.
ifneq ($(words $(CURDIR)),1)
VENV := $(shell link="/tmp/scoremode-$$(id -u)-$$(pwd | cksum | cut -d ' ' -f 1)"; \
	mkdir -p .venv && ln -sfn "$$(pwd)/.venv" "$$link" && echo "$$link")
endif
BIN := $(VENV)/bin
export SCOREMODE_CACHE ?= $(CURDIR)/.cache
export HF_HUB_DISABLE_TELEMETRY = 1
# A server is several processes that import vLLM: without kept bytecode each compiles all of it, for some 20 seconds.
unexport PYTHONDONTWRITEBYTECODE

# An NVIDIA driver that answers gets the CUDA engine, any other machine the CPU one. ENGINE=cpu overrides.
ENGINE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
INSTALLED := $(VENV)/installed-$(ENGINE)

.DEFAULT_GOAL := help
.PHONY: help install demo serve check lint test test-interpreter coverage test-slow test-avx2 test-gpu test-gpu-drafts test-gpu-lanes test-gpu-layers test-gpu-matrix openapi sync-client dist docs clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Serve a small real model and a 4-bit copy, print perplexity and KL divergence
	@$(BIN)/python scripts/demo.py

serve: $(INSTALLED) ## Serve a model: make serve MODEL=path-or-name [ARGS="--max-model-len 4096"]
	@test -n "$(MODEL)" || { echo 'usage: make serve MODEL=path-or-name [ARGS="vllm serve flags"]' >&2; exit 2; }
	$(if $(filter cpu,$(ENGINE)),VLLM_CPU_OMP_THREADS_BIND=$${VLLM_CPU_OMP_THREADS_BIND:-nobind}) $(BIN)/scoremode serve $(MODEL) $(ARGS)

# Two workers, and a core for each.
PYTEST := $(BIN)/python -m pytest
IN_PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) --numprocesses 2
USUAL := not slow and not interpreter

# Without the tests that start processes of their own: engines, servers, browsers, clients that are killed.
check: lint ## For every save: style, types and unit tests
	$(IN_PARALLEL) --dist worksteal -m "$(USUAL) and not processes" tests/unit

lint: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/write_sync_client.py --check
	$(BIN)/python scripts/check_docstrings.py client server tests bench scripts docs README.md CONTRIBUTING.md

# What `check` has run is not run again. Tests that share servers run in one worker (tests/conftest.py).
test: check ## Run make check, then engines, servers, clients and browsers
	@scripts/install_browser.sh
	$(IN_PARALLEL) --dist loadgroup -m "$(USUAL) and processes"
	@scripts/install_browser.sh --left-out

test-interpreter: $(INSTALLED) ## Run GPU kernels in Triton's interpreter on the CPU, and compare them with torch
	$(IN_PARALLEL) --dist worksteal -m interpreter tests/unit/server

coverage: $(INSTALLED) ## See what unit tests cover
	$(IN_PARALLEL) --dist worksteal -m "not slow" tests/unit --cov

test-slow: $(INSTALLED) ## Run what is too long for every run: large models, and thousands of seeds
	$(IN_PARALLEL) --dist loadgroup -m slow

test-avx2: $(INSTALLED) ## Run every test as on a CPU that has AVX2 and nothing newer
	PYTHONPATH="$(CURDIR)/tests/avx2" $(IN_PARALLEL) --dist loadgroup

# On a machine whose Python has Scoremode, vLLM for CUDA and pytest: make test-gpu INSTALLED= PYTEST="python3 -m pytest"
# Its PyTorch may have other warnings than those that pyproject.toml lists.
ON_GPU := $(PYTEST) -W default
test-gpu: $(INSTALLED) ## Run what needs an NVIDIA GPU: compiled kernels, both model runners, families of models
	$(ON_GPU) --numprocesses 8 -m interpreter tests/unit/server
	$(ON_GPU) --capture=no -m "not matrix" tests/gpu/test_families.py tests/gpu/test_served.py

test-gpu-drafts: $(INSTALLED) ## Score on an NVIDIA GPU next to n-grams, a draft model and EAGLE, on both model runners
	$(ON_GPU) --capture=no tests/gpu/test_drafts.py

test-gpu-lanes: $(INSTALLED) ## Compare the decode lane on an NVIDIA GPU with what vLLM generates, and plant faults
	$(ON_GPU) --capture=no tests/gpu/test_lanes.py

test-gpu-layers: $(INSTALLED) ## Resume families of models on an NVIDIA GPU, and force their experts, on both model runners
	$(ON_GPU) --capture=no tests/gpu/test_resuming.py tests/gpu/test_forced_routes.py

PART ?= v1-eager
test-gpu-matrix: $(INSTALLED) ## Run families in another way: PART=v1-eager, v1-graphs or v2-eager
	$(ON_GPU) --capture=no -m matrix -k "$(PART)" tests/gpu/test_families.py

openapi: $(INSTALLED) ## Write openapi/openapi.json anew from the app
	$(BIN)/python scripts/write_openapi.py

sync-client: $(INSTALLED) ## Write ScoreClient anew from AsyncScoreClient
	$(BIN)/python scripts/write_sync_client.py

dist: $(INSTALLED) ## Build sdist and wheel, check them, and try the wheel in a new environment
	scripts/dist.sh $(BIN)/python

# Files that pages link to are copied too, so that links work in the site as they do in the repository.
SITE := .cache/site
docs: .venv-docs/installed ## Build the documentation into site/, and check every link and anchor
	rm -rf site $(SITE) && mkdir -p $(SITE)/pages
	cp zensical.toml $(SITE)
	cp --parents -t $(SITE)/pages *.md LICENSE pyproject.toml docs/*.md docs/images/* bench/*.md bench/results/*.json \
		bench/results/llama_cpp/* client/scoremode/runs/categories/*.md docker/* openapi/*.json \
		tests/data/*.md
	.venv-docs/bin/zensical build --strict --config-file $(SITE)/zensical.toml
	mv $(SITE)/site site
	$(PYTHON) scripts/check_site.py site

# Without the engine: this takes seconds.
.venv-docs/installed: pyproject.toml
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-docs/bin/python -m pip install --quiet --group docs
	@touch $@

install: $(INSTALLED) ## Set up .venv

$(INSTALLED): pyproject.toml scripts/install.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Scoremode needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	scripts/install.sh "$(if $(filter /%,$(BIN)),$(BIN),$(CURDIR)/$(BIN))/python" $(ENGINE) dev
	@touch $@

clean: ## Remove .venv, .venv-docs, .cache and site
	rm -rf .venv $(VENV) .venv-docs .cache site
