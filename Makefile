# make train   set up, then train the bundled demo          make test    set up, then the whole test suite
# make lint    style and types of every language            make format  rewrite the files in that style
# make bench   every script in benchmarks/                  make doctor  what is installed, what is missing and what it is for
# make test-load  the suite five times beside 8 busy processes: hours, outside make test
# make mutants plants bugs one at a time and runs the tests that should notice them: hours, outside make test; it resumes
# make docs    the documentation as a site, in build/site   make clean   remove the environment and what was built
# make gpu-acceptance   proves megarl on this machine's GPUs within 20 minutes; ARGS="--dry-run --gpus 8" shows the steps
# make gpu-env   the environment of docs/install_gpu.md in build/gpu-env, about half an hour; needs nvcc and no GPU
#
# Set-up lands in .venv and goes by stages. A stage leaves a stamp and runs again only when what it read changed.
# Variables: PYTHON (3.11 to 3.13), ARGS (more for the command: make train ARGS="total_train_steps=20"; make test
# ARGS="tests/unit -k batch"), WORKERS (processes that share the tests, 4, which keep two cores busy;
# 0 runs them in one, as a debugger needs it).

PYTHON ?= python3
VENV := .venv
STAMPS := $(VENV)/stamps
BIN := $(VENV)/bin
WORKERS ?= 4
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint requirements/lock.txt

# The version that pyproject.toml pins, as name==version.
pinned = $(shell sed -n 's/^ *"\($(1)==[^"]*\)".*/\1/p' pyproject.toml | head -n 1)

# Every process would compile again what the one before it has compiled.
unexport PYTHONDONTWRITEBYTECODE
# Tests and benchmarks share few cores with real servers: more threads a process, or spinning ones, slow all of them.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

# Megatron and SGLang decorate functions for torch's compiler, whose import costs every process 3 s. On the CPU none of
# them is called in a run (no frame is traced), and what a GPU compiles is tested as it is written.
test test-long test-unit test-load mutants: export TORCHDYNAMO_DISABLE := 1

GPU_BRANCHES := $(addprefix tests/unit/,actor parallel launcher $(addprefix rollout/test_,rank0_rollouts.py gpu_placement.py))
NATIVE := $(shell find csrc -type f 2>/dev/null) $(wildcard CMakeLists.txt setup.py)
SCRIPTS := $(shell git ls-files 2>/dev/null | xargs -r grep -lE '^\#!.*\b(ba)?sh\b' 2>/dev/null)
CSOURCES := $(filter %.cpp %.h %.cu %.cuh,$(NATIVE) $(wildcard tests/simt/*.cu tests/simt/emulator/* tests/fake_cuda/*.cpp))

.DELETE_ON_ERROR:
.PHONY: setup gpu-env doctor train test test-long test-load test-unit test-asan test-gpu mutants gpu-acceptance lint
.PHONY: format bench docs lock clean

setup: $(STAMPS)/package

# With what is there: the environment of `make setup`, or on a GPU machine the one that is active.
doctor:
	@python=$(if $(wildcard $(STAMPS)/package),$(BIN)/python,$(PYTHON)); \
	  $$python -c "import psutil, rich" 2>/dev/null || \
	  { echo "make: nothing is installed for $$python yet: make setup, or docs/install_gpu.md where there are GPUs"; exit 1; }; \
	  exec $$python -m megarl.doctor

train: setup
	@exec $(BIN)/python -m megarl.train +experiment=gsm8k_grpo $(ARGS)

# Without ARGS, tests of the code that has branches for GPUs run once more on these branches.
test: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder $(if $(ARGS),$(ARGS),-m "not long")
	@$(if $(ARGS),,$(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder -m "not long" --gpu-options $(GPU_BRANCHES))

# Tests that take minutes and rarely fail.
test-long: setup
	@exec $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder -m long $(ARGS)

test-unit: setup
	@exec $(BIN)/python -m pytest tests/unit $(ARGS)

# Outside `make test`, whose checks of Transformer Engine's own model take this environment where it was made.
GPU_ENV ?= build/gpu-env
gpu-env:
	@bash requirements/gpu_env.sh $(GPU_ENV) $(if $(filter file,$(origin PYTHON)),,$(PYTHON))

# A single benchmark with arguments of its own: .venv/bin/python benchmarks/logprob.py --help
bench: setup
	@set -e; for script in $(filter-out %/timing.py %/pipeline_simulator.py %/gpu_acceptance.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; OMP_NUM_THREADS=2 $(BIN)/python "$$script"; done

test-asan: setup
	@exec $(BIN)/python tests/kernels/run_sanitized.py

# In the active environment, which docs/install_gpu.md makes; .venv has another torch. Cases of the emulator, which
# `make test` runs everywhere, are left out.
test-gpu:
	@$(PYTHON) -c "import pytest, torch; raise SystemExit(not torch.cuda.is_available())" 2>/dev/null || \
	  { echo "make: $(PYTHON) has no pytest, or no torch that sees a GPU: activate the environment of docs/install_gpu.md"; exit 2; }
	@$(PYTHON) -m pytest tests/gpu -k "not emulat"
	@compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest tests/gpu -k "not emulat and not 2_to_the"

# Results are kept in build/mutants. ARGS="--table" prints them, ARGS="--again" runs the survivors again.
mutants: setup
	@exec nice -n 15 $(BIN)/python -W ignore tests/mutants/run_mutants.py $(ARGS)

# The suite five times in a row beside 8 busy processes: hours. ARGS="--rounds 1 tests/unit -k batch" for some of it.
test-load: setup
	@exec $(BIN)/python tests/run_under_load.py $(ARGS)

# In the active environment, which docs/install_gpu.md makes.
gpu-acceptance:
	@exec $(PYTHON) benchmarks/gpu_acceptance.py $(ARGS)

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/vulture
	@$(if $(CSOURCES),$(BIN)/clang-format --dry-run --Werror $(CSOURCES))
	@$(if $(SCRIPTS),$(BIN)/shellcheck $(SCRIPTS))

format: setup
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(if $(CSOURCES),$(BIN)/clang-format -i $(CSOURCES))

# Strict: a broken link or anchor, or a page outside the navigation, ends the build; --quiet would switch that off.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

lock: setup
	@$(BIN)/python requirements/write_lock.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info megarl/_C*.so

# --- set-up, one stamp a stage -----------------------------------------------------------------------------------

# say: one line a stage, as each takes seconds to minutes.
say = printf '[setup %s/6] %s\n' $(1) '$(2)'

$(STAMPS)/venv:
	@$(call say,1,virtual environment in $(VENV))
	@command -v $(PYTHON) >/dev/null || { echo "make: PYTHON=$(PYTHON) is not a command: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) requirements/check_python.py
	@command -v $${CXX:-g++} >/dev/null || \
	  { echo "make: no C++ compiler ($${CXX:-g++}) found; csrc/ is built here: install g++ or set CXX"; exit 2; }
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) $(call pinned,pip)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: pyproject.toml | $(STAMPS)/venv
	@$(call say,2,$(call pinned,torch))
	@$(PIP) $(call pinned,torch)
	@touch $@

$(STAMPS)/groups: pyproject.toml requirements/lock.txt | $(STAMPS)/torch
	@$(call say,3,build and development tools and what SGLang imports)
	@$(PIP) --group build --group dev --group sglang
	@touch $@

# Python 3.11 gets Megatron-core from source, as its wheels begin at 3.12; pip then finds its pin fulfilled.
$(STAMPS)/dependencies: pyproject.toml $(wildcard requirements/*.txt) | $(STAMPS)/groups
	@$(call say,4,what megarl imports)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then \
	  $(PIP) --no-build-isolation --no-deps --ignore-requires-python --no-binary megatron-core \
	    --require-hashes --requirement requirements/megatron_on_python_3_11.txt; fi
	@$(PIP) --no-build-isolation --only-deps .
	@touch $@

$(STAMPS)/sglang: pyproject.toml | $(STAMPS)/dependencies
	@$(call say,5,$(call pinned,sglang) without its CUDA requirements)
	@$(PIP) --no-deps --group sglang-no-deps
	@touch $@

$(STAMPS)/package: $(NATIVE) | $(STAMPS)/sglang
	@$(call say,6,the C++ kernels and megarl itself (editable))
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@
