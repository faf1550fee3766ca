# Loraplex: every target sets up what it needs, from a fresh clone on.
#
#   make up ARGS="--gateway-port 8010 --no-console"    flags of `loraplex up` (see `loraplex up --help`)
#   make test PYTEST_ARGS="tests/platform -k keys"     flags of pytest
#   make test PYTEST_WORKERS=0                         one process, one test after another
#   make bench ARGS="--workload mixed --rounds 1"      flags of the bench (see `make bench ARGS=--help`)
#   make venv TORCH_INDEX_URL=<url>                    take torch from another index, such as PyTorch's own
#                                                      index of CPU wheels ("Install" on pytorch.org shows
#                                                      its address); it saves gigabytes on Linux
#   make venv PIP_TORCH_ARGS="--find-links <dir>"      any other pip flags for that one download
#   make gpu-check GPU_PYTHON=<path>                   the Python whose torch sees the GPU

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Tests start a hundred processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2
GPU_PYTHON ?= python3
TORCH_INDEX_URL ?=
PIP_TORCH_ARGS ?= $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL),)

# The first Python in the supported range; 3.11 and 3.12 first, as the embedded Redis has wheels for those.
in_range = import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python3.13; do \
	if $$p -c '$(in_range)' 2>/dev/null; then echo $$p; break; fi; done)

# What takes the pictures that the docs show.
PICTURES := tests/e2e/test_console_story.py tests/e2e/test_console_pictures.py tests/admin_ui/test_fresh_platform.py
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

.PHONY: help up test test-all screenshots lint bench gpu-check venv model chromium clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

up: venv ## Run everything on this machine, with demo tenants, keys and adapters (Ctrl-C stops it)
	@exec $(BIN)/loraplex up --demo --model $(MODEL) $(ARGS)

test: venv model chromium ## Run the tests that CI runs
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(PYTEST_WORKERS) --dist loadgroup $(PYTEST_ARGS)

test-all: venv model chromium ## Run every test, the slow ones too
	$(BIN)/python -m pytest $(PYTEST_ARGS)

screenshots: venv model chromium ## Take the pictures in docs/screenshots anew, by the browser tests (minutes)
	rm -f docs/screenshots/*.png
	$(BIN)/python -m pytest -m browser --doc-screenshots $(PICTURES) $(PYTEST_ARGS)
	$(BIN)/python -m pytest -q tests/test_docs.py -k "link or picture"

lint: venv ## Check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv model ## Measure speed and memory beside llama.cpp, transformers + PEFT and vLLM (an hour; ARGS=--quick: does it work?)
	$(BIN)/python -m bench $(ARGS)

# No .venv: a machine with a GPU has its own torch, and often no network. It needs deploy/gpu-requirements.txt besides.
gpu-check: ## Check and measure the kernels on a GPU, in five minutes; without one it says so and succeeds
	@exec $(GPU_PYTHON) -m bench.gpu_check $(ARGS)

venv: $(STAMP) ## Make .venv with everything at the versions of constraints.txt

# Named by the checksum of what it was made from, so a second call is instant and a change is noticed.
$(STAMP):
	@if [ -z "$(PYTHON)" ]; then \
		echo "Loraplex needs Python 3.11, 3.12 or 3.13 with the venv module. Found: $$(python3 --version 2>&1 || true)." >&2; \
		echo "On Debian or Ubuntu: apt-get install python3 python3-venv. Or name one: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi
	@[ -x $(BIN)/python ] || { echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@rm -f $(VENV)/.stamp-*
	@echo "Installing (some minutes the first time)"
	@# torch alone and first: what is installed next must keep the build that was asked for.
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt $(PIP_TORCH_ARGS) torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

model: venv ## Pull the base model into the cache, once
	@$(BIN)/loraplex models pull $(MODEL)

chromium: ## Install Debian's chromium for the browser tests, where that is allowed
	@if command -v chromium chromium-browser google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing chromium for the browser tests"; \
		apt-get update -qq >/dev/null \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null \
		|| echo "chromium could not be installed: see above" >&2; \
	else \
		echo "Browser tests will be skipped: no chromium. To get it: sudo apt-get install chromium"; \
	fi

clean: ## Remove .venv and caches (not .loraplex, your data)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
