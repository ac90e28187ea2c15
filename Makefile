# Two commands on a fresh machine: `make demo` and `make test`. Both set up all they need under .venv and .cache.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export SCOREMODE_CACHE ?= $(CURDIR)/.cache
export HF_HUB_DISABLE_TELEMETRY = 1
# A server is several processes that import vLLM: without kept bytecode each compiles all of it, for some 20 seconds.
unexport PYTHONDONTWRITEBYTECODE

# An NVIDIA driver that answers gets the CUDA engine, any other machine the CPU one. ENGINE=cpu overrides.
ENGINE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
INSTALLED := $(VENV)/installed-$(ENGINE)

.DEFAULT_GOAL := help
.PHONY: help install demo serve check lint test test-slow test-avx2 errors openapi clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Serve a small real model and a 4-bit copy, print perplexity and KL divergence
	@$(BIN)/python scripts/demo.py

serve: $(INSTALLED) ## Serve a model: make serve MODEL=path-or-name [ARGS="--max-model-len 4096"]
	@test -n "$(MODEL)" || { echo 'usage: make serve MODEL=path-or-name [ARGS="vllm serve flags"]' >&2; exit 2; }
	$(if $(filter cpu,$(ENGINE)),VLLM_CPU_OMP_THREADS_BIND=$${VLLM_CPU_OMP_THREADS_BIND:-nobind}) $(BIN)/scoremode serve $(MODEL) $(ARGS)

# Two processes, and a core for each.
IN_PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Without the tests that start processes of their own: Triton's interpreter, ranks, servers and clients that are killed.
check: lint ## For every save: style, types and unit tests
	$(IN_PARALLEL) -m "not slow and not processes" tests/unit

lint: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(INSTALLED) ## Run every test, real engines included, and see what unit tests cover
	$(IN_PARALLEL) tests/standalone tests/unit --cov
	$(BIN)/python -m pytest tests/engine tests/e2e

test-slow: $(INSTALLED) ## Run what is too long for every run: large models, and thousands of seeds
	$(BIN)/python -m pytest --numprocesses 2 -m slow

test-avx2: $(INSTALLED) ## Run every test as on a CPU that has AVX2 and nothing newer
	PYTHONPATH=$(CURDIR)/tests/avx2 $(BIN)/python -m pytest

errors: $(INSTALLED) ## Write docs/errors.md anew from tests/bad_inputs.py
	$(BIN)/python -m tests.bad_inputs

openapi: $(INSTALLED) ## Write openapi/openapi.json anew from the app
	$(BIN)/python scripts/write_openapi.py

install: $(INSTALLED) ## Set up .venv

$(INSTALLED): pyproject.toml scripts/install.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Scoremode needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	scripts/install.sh $(CURDIR)/$(BIN)/python $(ENGINE) dev
	@touch $@

clean: ## Remove .venv and .cache
	rm -rf $(VENV) .cache
