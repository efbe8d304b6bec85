# `make` lists the targets. Two variables choose where things run:
#   make test PYTHON=python3.12       the interpreter that creates the environment, when there is none yet
#   make test VENV=../env             the environment itself; what it lacks is installed into it
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -q -c constraints.txt torch
# Tests that need the data folder beside the project may skip only where that folder is absent.
TEST_ENV := OMP_NUM_THREADS=1 $(if $(wildcard ../shared),CI_REQUIRE_SHARED=1)
# Stealing keeps the tests of a file together, which share what they build.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-peers test-torch test-gpu drills lint bench bench-check docs dist check-dist facts support golden-runs notebooks pictures clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

demo: $(VENV)/.installed-demo  ## SmolLM2 past the text that it was trained for; a cue 10,000 tokens later; GRC against its controls; a report
	model=smollm2; $(BIN)/cached fetch smollm2 || { echo "SmolLM2 cannot be fetched: the demo goes on with glass"; \
		model=glass; $(BIN)/cached fetch glass; } && \
	OMP_NUM_THREADS=2 $(BIN)/cached read $$model examples/moby_dick.txt \
		--tokens 9216 --keys 2048 --trials 2 --out runs/demo/read
	OMP_NUM_THREADS=1 $(BIN)/cached probe grc_stream --tasks latch latch.segment=16 latch.decoys=true \
		--train-distance 1..10 --far 10000 --steps 400 model.batch_size=16 \
		--seeds 3 --jobs 2 --out runs/demo/far
	OMP_NUM_THREADS=1 $(BIN)/cached compare recipes/demo_digits.yaml --with plain,grc:variant=released --control conv \
		--against control-conv --seeds 3 --jobs 2 --out runs/demo/digits
	$(BIN)/cached plot report runs/demo

test: $(VENV)/.installed-dev  ## everything that must hold before a commit: lint, docs, fast tests
	$(MAKE) -j 2 lint docs
	$(PYTEST)

test-slow: $(VENV)/.installed-dev  ## the tests that take more than a few seconds
	$(PYTEST) -m slow
	$(MAKE) test-gpu DEVICE=cpu

test-peers: $(VENV)/.installed-dev $(VENV)/.installed-peers $(VENV)/.installed-eval $(VENV)/.installed-language $(VENV)/.installed-trainers  ## compare with published implementations, and run inside lm-eval and the loops and data of others
	$(PYTEST) -m peers

# An old torch comes with gigabytes of CUDA; TORCHVISION must be the one that was built for it.
TORCH ?= 2.6.0
TORCHVISION ?= 0.21.0
test-torch:  ## the fast tests with another torch, in an environment of its own: TORCH=2.6.0 TORCHVISION=0.21.0; TORCH=newest for the newest of all packages
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	grep -vE '^torch(vision)?==' constraints.txt > .venv-torch-$(TORCH)/constraints.txt
	.venv-torch-$(TORCH)/bin/python -m pip install -q -e ".[dev]" $(if $(filter newest,$(TORCH)),torch torchvision,\
		-c .venv-torch-$(TORCH)/constraints.txt torch==$(TORCH) torchvision==$(TORCHVISION))
	$(TEST_ENV) .venv-torch-$(TORCH)/bin/python -m pytest -n 2 --dist worksteal

# Nothing is installed: a machine with a GPU has its own torch, and perhaps no network.
DEVICE ?= cuda
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
test-gpu:  ## the tests of devices on a GPU, in float32 and bfloat16, with the Python that is there: DEVICE=cpu tries them without one
	$(GPU_PYTHON) tests/devices/needs.py $(DEVICE)
	PYTHONPATH=src:tests OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -q -m device --device $(DEVICE) \
		$$(grep -rl --include='test_*.py' 'pytest.mark.device' tests)

drills: $(VENV)/.installed-dev  ## kills, full disks, damaged files and fuzzed input, by the thousand; writes their table into docs/results/reliability.md
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m drills --table docs/results/reliability.md


lint: $(VENV)/.installed-dev  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.installed-dev  ## measure speed and memory on this machine
	$(BIN)/cached benchmark grc

bench-check: $(VENV)/.installed-dev  ## repeat ten ratios of time, and fail with the names of those that have moved since the newest of benchmarks/records
	OMP_NUM_THREADS=1 $(BIN)/cached benchmark record --check

docs: $(VENV)/.installed-dev  ## build the documentation, into SITE=folder if given; warnings are errors
	site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
		NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir "$(or $(abspath $(SITE)),$$site)"

dist: $(BIN)/python  ## build the wheel and the source distribution
	rm -rf dist
	$(BIN)/python -m pip install -q build
	$(BIN)/python -m build -q

check-dist:  ## install the wheel of dist into an empty environment, and run README's first block: PYTHON=python3.13
	$(PYTHON) tools/check_dist.py dist

facts: $(VENV)/.installed-dev  ## write again what the command line, the README and the pages say of registered parts
	$(BIN)/python -m cached_lab.experiments.facts
	$(BIN)/python tools/docs_facts.py

support: $(VENV)/.installed-dev  ## try every family of models with memories of each kind, and write docs/support.md
	rm -rf build/support
	SUPPORT_CELLS=build/support $(PYTEST) -q -m slow tests/integrations/test_support.py -k a_family
	SUPPORT_CELLS=build/support SUPPORT_TABLE=write $(PYTEST) -q -m slow tests/integrations/test_support.py -k the_table

golden-runs: $(VENV)/.installed-dev  ## short trainings whose bits a rebuild must not change; valid on the recorded processor and torch
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden_runs/runs.py check

notebooks: $(VENV)/.installed-dev  ## carry out the notebooks of docs/notebooks, and write down what they print
	OMP_NUM_THREADS=1 $(BIN)/python tools/notebooks.py

pictures: $(VENV)/.installed-dev  ## draw the attentions of docs/attentions.md again, with the commands that stand there
	set -f; grep -h '^cached explain .* --plot' docs/attentions.md | while read -r command; do $(BIN)/$$command > /dev/null || exit 1; done

clean:  ## remove the environment, caches and build outputs (not runs/)
	rm -rf .venv build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp makes later runs instant until a dependency changes.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e ".[$*]"
	touch $@

# Stamps come from a pattern; without this make would delete them as intermediate files.
.PRECIOUS: $(VENV)/.installed-%

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
