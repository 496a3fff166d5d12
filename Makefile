# Every target makes `.venv` first when it is not there, and needs only Python 3.11 or newer, a C++ compiler and pip.
# `make setup PYTHON=python3.12` chooses the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --quiet --disable-pip-version-check
CPU_WHEELS := https://download.pytorch.org/whl/cpu
# Without an NVIDIA driver the CPU build does, at a tenth of the download; where its index is out of reach, pip's own.
TORCH_INDEX := command -v nvidia-smi >/dev/null || $(BIN)/python -c \
  'import urllib.request as u; u.urlopen("$(CPU_WHEELS)/torch/", timeout=5); print("--index-url $(CPU_WHEELS)")' 2>/dev/null
SEES_GPU := import numpy, rich, safetensors, sys, tokenizers, torch, xxhash; sys.exit(not torch.cuda.is_available())
# What is built is built again when it changes: the C++ engine, too.
BUILT_FROM := pyproject.toml constraints.txt setup.py $(wildcard src/weft/comm/shared_memory/*.[ch]pp) \
  src/weft/comm/shared_memory/_sources.py
STAMP := $(VENV)/.weft-$(firstword $(shell cat $(BUILT_FROM) | cksum))

.PHONY: help setup demo test slow alterations parity check lint bench bench-comm families docs gpu chaos clean

help:
	@echo "make demo     train a small language model on Python's own source, 8 processes in 3 dimensions"
	@echo "make test     the test suite (48 minutes on 2 slow cores; quick ones take a third)"
	@echo "make slow     what 'make test' leaves out because a shorter test stands for it (hours)"
	@echo "make alterations  10,000 altered checkpoints of each tier: all found (an hour)"
	@echo "make parity   every plan against one process: gradients and 20 optimizer steps (hours on 2 cores);"
	@echo "              BACKEND=cpu:weft for ranks that share memory"
	@echo "make check    ruff, pyright, import-linter and the rules of the house"
	@echo "make bench    the benchmarks; writes benchmarks/results"
	@echo "make bench-comm  those of communication alone (half an hour)"
	@echo "make families  drawn families of models under every plan; writes docs/models.md (hours on 2 cores)"
	@echo "make chaos    200 seeded faults in real runs under six plans, sessions included, each judged (half an hour;"
	@echo "              NUM=1000, SEED=7)"
	@echo "make docs     the documentation: its examples run, its links checked, its site built in build/site"
	@echo "make gpu      the suite for one CUDA device: parity, speed, memory (9 minutes)"

setup: $(STAMP)

# pip says nothing for minutes while it unpacks torch; a line before and after says what is going on.
# A torch that is installed already stays as it is.  Weft is compiled here, as pip compiles what it copies: where
# PYTHONDONTWRITEBYTECODE is set every rank would do so again.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Weft needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12"; exit 2; }
	@test -x $(BIN)/python || { echo "setup     making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "setup     installing torch (once, some minutes)"; \
	  $(PIP) 'torch>=2.11,<2.14' $$($(TORCH_INDEX)); }
	@echo "setup     installing Weft and its tools"
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
	  > $(VENV)/torch-constraint.txt
	@$(PIP) --constraint $(VENV)/torch-constraint.txt --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m compileall -q src
	@rm -f $(VENV)/.weft-* && touch $@
	@echo "setup     done"

demo: setup
	@$(BIN)/weft train examples/demo/recipe.toml --plan examples/demo/plan.toml

test: setup
	@$(BIN)/python tests/suite.py

slow: setup
	@$(BIN)/python -m pytest -q -m slow

alterations: setup
	@$(BIN)/python tests/run/checkpoint/altered.py --number 10000 --report benchmarks/results/alterations.json

parity: setup
	@$(BIN)/python -m pytest -q -m parity tests/parity $(if $(BACKEND),--parity-backend=$(BACKEND))

check: lint
	@$(BIN)/python -m pytest -q tests/house

lint: setup
	@$(BIN)/ruff check src tests examples docs benchmarks
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/pyright

bench: setup
	@$(BIN)/python -m benchmarks

bench-comm: setup
	@$(BIN)/python -m benchmarks communication selector

# Goes on where it was left; `$(BIN)/python -m benchmarks.families --help` says how to run some again.
families: setup
	@$(BIN)/python -m benchmarks.families

# Writes benchmarks/results/chaos.json.  What goes wrong prints the command that replays it.
chaos: setup
	@$(BIN)/python -m benchmarks.chaos --num $(or $(NUM),200) --seed $(or $(SEED),0)

# Sphinx is installed when it is first needed: nothing else wants it.
docs: setup $(VENV)/.docs
	@$(BIN)/python docs/make_reference.py
	@$(BIN)/python -m pytest -q tests/docs tests/house/test_documentation.py tests/house/test_quoted_figures.py
	@$(BIN)/sphinx-build -q -W --keep-going -c docs . build/site
	@echo "docs      build/site/index.html"

$(VENV)/.docs: pyproject.toml | setup
	@echo "docs      installing Sphinx"
	@$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  print(*extras["docs"], sep="\n")' > $(VENV)/docs-requirements.txt
	@$(PIP) --requirement $(VENV)/docs-requirements.txt
	@touch $@

# Installs nothing where $(PYTHON) already has a torch that sees a CUDA device and what Weft imports: such machines
# often have no network.  The same tests under pytest, cell by cell: `python -m pytest -m gpu tests/gpu`.
gpu:
	@if $(PYTHON) -c '$(SEES_GPU)' 2>/dev/null; then $(PYTHON) tests/gpu; \
	else $(MAKE) --no-print-directory setup && $(BIN)/python tests/gpu; fi

clean:
	@rm -rf build dist .pytest_cache .ruff_cache .import_linter_cache
