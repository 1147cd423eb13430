# Every target does the set-up that it needs; nothing but python3.11 or later, make and gcc is
# expected of the machine. Set-up is redone when the files that it depends on change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODELS := build/models/.made
SMOLLM2 := build/models/smollm2/.made

# vLLM must neither look for a model on the network nor report home, and block hashes must be the
# same in every process.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PYTHONHASHSEED := 0
# Packages come uncompiled, and without files of byte code each process compiles them again: half a
# minute for each process of an engine.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test core e2e exhaustive faults chaos compat lint type docs layouts bench check-dist check
.DELETE_ON_ERROR:

setup: $(INSTALLED)

demo: $(SMOLLM2) ; $(BIN)/python -m tests.e2e.demo

# The simulated driver of a GPU must not meet what looks for a real one: it has a process of its own.
test: $(INSTALLED)
	$(BIN)/pytest -m "not e2e and not slow and not exhaustive and not compat" --ignore=tests/typing --ignore=tests/test_dist.py --ignore=tests/cuda
	$(BIN)/pytest tests/cuda

e2e: $(MODELS) ; $(BIN)/pytest -m "(e2e or slow) and not exhaustive" --ignore=tests/typing --ignore=tests/test_dist.py --ignore=tests/cuda

# Every engine, hand-over of pages and fault of which the other runs take samples.
exhaustive: $(MODELS) ; $(BIN)/pytest -m exhaustive --ignore=tests/typing --ignore=tests/test_dist.py --ignore=tests/cuda

# Fifty rounds of everything that can happen to a peer, some ten minutes.
faults: $(INSTALLED) ; $(BIN)/pytest tests/backends/test_nixl_faults.py

# Engines over tiers of host, files and peers, and all that can happen to them: `make chaos SECONDS=60 SEED=7
# WITHOUT=kill-worker,gc`. Ends at most three minutes after that.
SECONDS ?= 600
chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos.run --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) --without "$(WITHOUT)"

# Downloads the other releases of vLLM that the adapter supports, some 3 GB on disk.
compat: $(MODELS) ; $(BIN)/pytest -m compat --ignore=tests/typing --ignore=tests/test_dist.py --ignore=tests/cuda

# The core with another Python, without engines: vLLM has no wheel for it. `make core PYTHON_VERSION=3.12`.
PYTHON_VERSION ?= 3.13
CORE := build/python-$(PYTHON_VERSION)
CORE_PYTHON = $(shell command -v $$HOME/.pyenv/versions/$(PYTHON_VERSION)*/bin/python python$(PYTHON_VERSION) | head -n 1)
core: $(CORE)/.installed
	$(CORE)/bin/python -m pytest -m "not e2e and not slow and not exhaustive and not compat" --ignore=tests/typing --ignore=tests/test_dist.py --ignore=tests/cuda --ignore=tests/e2e --ignore=tests/chaos

# The pinned versions, without those that are pinned for one Python: builds of torch and of its kernels.
$(CORE)/.installed: constraints.txt pyproject.toml
	test -x $(CORE)/bin/python || $(CORE_PYTHON) -m venv $(CORE)
	grep -vE "^(torch|triton|vllm|cuda|nvidia|setuptools)" constraints.txt > $(CORE)/constraints.txt
	$(CORE)/bin/python -m pip install --quiet --no-compile -c $(CORE)/constraints.txt -e '.[cuda,keyed,testing]' $(shell grep '^torch==' constraints.txt) cryptography packaging pytest-timeout rich safetensors
	touch $@

lint: $(INSTALLED) ; $(BIN)/ruff check . && $(BIN)/ruff format --check .

type: $(INSTALLED) ; $(BIN)/mypy && $(BIN)/pytest tests/typing

docs: $(INSTALLED) ; $(BIN)/mkdocs build --strict

layouts: $(INSTALLED) ; $(BIN)/python -m tests.kvcache.layout_page

bench: $(SMOLLM2) ; for name in describe layout copy mapping file nixl vllm; do $(BIN)/kvxfer bench $$name --check || exit 1; done

check-dist: $(INSTALLED) ; $(BIN)/pytest tests/test_dist.py

check: lint type test check-dist docs e2e

# `--no-compile`: a small part of these packages is ever imported. `-e .` comes second because its
# build needs hatchling from the list.
$(INSTALLED): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --progress-bar off --no-compile --no-deps -r constraints.txt
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	touch $@

$(SMOLLM2): tests/e2e/models.py $(INSTALLED)
	$(BIN)/python -m tests.e2e.models build/models smollm2
	touch $@

$(MODELS): tests/e2e/models.py $(INSTALLED)
	$(BIN)/python -m tests.e2e.models
	touch $@
