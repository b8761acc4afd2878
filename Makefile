# The commands of the project. `make run` and `make test` set everything up by themselves in .venv;
# the gpu-* targets use the Python that is there, without any network.
PYTHON ?= python3
VENV ?= .venv
VENV_PYTHON := $(VENV)/bin/python
JOBS ?= 2
# Generations that `make wheel` compiles the default kernels for; TARGETS=: none, a wheel of sources.
TARGETS ?= 80 86 89 90
# Which of their kernels, by the names that docs/installing.md lists; none: all.
SETS ?=
TORCH_VERSIONS ?= 2.5.1 2.13.0
# Lists may be written with spaces or with commas.
COMMA := ,
SPACE := $(subst ,, )
# Where the gpu-* targets write their JSON.
OUT ?= benchmarks/results

.PHONY: help run test test-compile test-install test-perf test-all attack lint format gpu-build gpu-test gpu-bench \
	gpu-compat wheel docs clean

help:
	@echo "make run          attention on the device that is there, beside PyTorch's own: what was chosen, and why"
	@echo "make test         the tests of layer unit, in minutes (no GPU needed)"
	@echo "make test-all     every layer that needs no GPU: unit, compile, install, perf"
	@echo "make attack       kill, damage and fuzz; prints what was tried and what went wrong (minutes)"
	@echo "make lint         formatter, linter and type checker"
	@echo "make docs         build the documentation site"
	@echo "make wheel        build a wheel with the usual kernels for sm_80, 86, 89 and 90, or for those of"
	@echo "                  TARGETS=\"80 90\"; TARGETS= makes one of sources alone, in seconds;"
	@echo "                  SETS=decode,paged only some of them"
	@echo "make gpu-test     build every kernel and run the GPU tests, offline, with the Python that is there"
	@echo "make gpu-compat   run FlashAttention's own forward tests, TESTS=…/test_flash_attn.py, on this library"
	@echo "make gpu-bench    time the kernels beside their peers, offline, with the Python that is there"

# What each command needs is installed when it is first asked for, and no more: tools/environment.py says so,
# and refuses a Python that the project can't use before pip starts.
SOURCES := pyproject.toml setup.py constraints.txt tools/environment.py requirements/cuda-compiler.txt \
	src/flash_attention.cpp src/include/flash_attention.cuh $(wildcard src/binding/*.hpp) \
	$(wildcard py/flash_helpers/kernels/*.py py/flash_helpers/kernels/*/*/config.py)

$(VENV)/.base: $(SOURCES)
	@$(PYTHON) tools/environment.py $(VENV)
	@touch $@

$(VENV)/.test: $(VENV)/.base
	@$(PYTHON) tools/environment.py $(VENV) test models
	@touch $@

$(VENV)/.lint: $(VENV)/.base
	@$(PYTHON) tools/environment.py $(VENV) lint
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	@$(PYTHON) tools/environment.py $(VENV) docs
	@touch $@

# A compiler, and what reads machine code: where none is found, pip's are installed into the environment.
$(VENV)/.compiler: $(VENV)/.base
	@$(VENV_PYTHON) -m flash_helpers.build.check_compiler \
		|| $(PYTHON) tools/environment.py $(VENV) requirements/cuda-compiler.txt
	@$(VENV_PYTHON) -m flash_helpers.build.check_compiler
	@touch $@

# Only where there is a GPU is a kernel compiled.
run: $(VENV)/.base $(if $(wildcard /proc/driver/nvidia/version),$(VENV)/.compiler)
	@$(VENV_PYTHON) -m flash_helpers.run

PYTEST := $(VENV_PYTHON) -m pytest

test: $(VENV)/.test $(VENV)/.compiler
	$(PYTEST) -n $(JOBS) -m unit

test-compile: $(VENV)/.test $(VENV)/.compiler
	$(PYTEST) -n $(JOBS) -m compile

# Clean environments: installs the wheel beside each of several torch versions and computes with it.
test-install: $(VENV)/.test $(VENV)/.compiler
	$(PYTEST) -m install --torch-versions "$(TORCH_VERSIONS)"

# Times depend on what else runs: alone, one after the other.
test-perf: $(VENV)/.test $(VENV)/.compiler
	$(PYTEST) -m perf

test-all: test test-compile test-install test-perf

lint: $(VENV)/.lint
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.hpp' | xargs $(VENV)/bin/clang-format --dry-run --Werror

format: $(VENV)/.lint
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	git ls-files '*.cu' '*.cuh' '*.cpp' '*.hpp' | xargs $(VENV)/bin/clang-format -i

gpu-test gpu-bench gpu-compat: export PYTHONPATH := $(CURDIR):$(CURDIR)/py:$(PYTHONPATH)

gpu-build:
	$(PYTHON) setup.py --quiet build_ext --inplace

gpu-test: gpu-build
	$(PYTHON) -m pytest -q --gpu-run $(OUT)/gpu-tests.json tests/gpu tests/contract tests/models tests/integrations \
		tests/distributed

# ATTACK="--kills 39 --corruptions 1400 --calls 40000" asks for other counts.
attack: $(VENV)/.test $(VENV)/.compiler
	$(VENV_PYTHON) tests/attack/run.py $(ATTACK)

# FlashAttention's own tests, which its source distribution holds: make gpu-compat TESTS=…/test_flash_attn.py
gpu-compat: gpu-build
	$(PYTHON) tests/compat/run_flash_attn_tests.py $(TESTS)

gpu-bench: gpu-build
	$(PYTHON) -m flash_helpers.benchmark.milestone --out $(OUT)

wheel: $(VENV)/.test $(if $(strip $(TARGETS)),$(VENV)/.compiler)
	$(VENV_PYTHON) -m flash_helpers.packaging.wheel --out dist \
		$(addprefix --target ,$(subst $(COMMA), ,$(TARGETS))) \
		$(addprefix --sets ,$(subst $(SPACE),$(COMMA),$(strip $(SETS))))

docs: $(VENV)/.docs
	$(VENV_PYTHON) -m mkdocs build --strict --site-dir build/site

clean:
	rm -rf $(VENV) build dist *.egg-info
