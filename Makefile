# Needs GNU make and Python 3.11 or newer, nothing else: every target makes its own environment in .venv.
#
#   make demo      train on real text over two processes, then generate          make lint   ruff, mypy, import direction
#   make test      lint, then every test                                         make fmt    sort imports, format
#   make proof     what each issue must show (ISSUE=NAME for one)                make wheel  build into dist/
#   make bench     a training step beside PyTorch's DDP                          make clean  caches and dist/ (distclean: .venv too)
#
# PYTHON=/path/to/python picks the interpreter, V=1 shows pip's output.

.SHELLFLAGS := -euc
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-complete
BUSY := $(VENV)/.pip-at-work
QUIET := $(if $(V),,-qq)
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test proof bench lint fmt wheel clean distclean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(STAMP)

# The stamp is written last and moved into place, so a setup that was interrupted is done again; if pip was killed at work,
# in a new .venv, since a package may be torn. Bytecode is compiled on all cores (pip uses one), ahead of time, because
# ranks may run where PYTHONDONTWRITEBYTECODE is set; a library's template that is no valid Python is no reason to stop.
$(STAMP): requirements.lock pyproject.toml
	@rm -f $(STAMP) $(STAMP).part
	@found=; \
	for candidate in $(PYTHON); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "shardwright needs Python 3.11 or newer; none of these is: $(PYTHON)" \
	         "(python3 is $$(python3 --version 2>&1 || true)). Install one, or say where it is: make PYTHON=/path/to/python3.11" >&2; \
	    exit 2; \
	fi; \
	if [ ! -e $(BUSY) ] && $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Bringing $(VENV) up to date with requirements.lock"; \
	else \
	    echo "Setting up $(VENV) with $$("$$found" --version): $$(grep -c == requirements.lock) pinned packages," \
	         "a minute or two (more where PyTorch's CUDA build is downloaded)"; \
	    "$$found" -m venv --clear $(VENV); \
	fi
	@touch $(BUSY); $(PY) -m pip install $(QUIET) --no-compile -r requirements.lock || { rm -f $(BUSY); exit 1; }
	@rm -f $(BUSY)
	@$(PY) -m compileall -q -j 0 -x '/(transformers/models|tests?)/' $(VENV)/lib >/dev/null 2>&1 || true
	@$(PY) -m pip install $(QUIET) --no-deps --no-build-isolation -e .
	@cp requirements.lock $(STAMP).part && mv $(STAMP).part $(STAMP)

demo: setup
	@$(PY) -m shardwright.demo

# One thread per process, and OpenMP threads that sleep when they wait: the ranks of a test share the cores.
test: export OMP_NUM_THREADS := 1
test: export GOMP_SPINCOUNT := 0

test: lint
	$(PY) -m pytest -q --durations=15 tests/rules tests/unit tests/ranks tests/e2e

proof: setup
	@$(PY) benchmarks/proof.py $(if $(ISSUE),--issue '$(ISSUE)')

bench: setup
	@$(PY) -m shardwright bench train --layout dp=2 --peer ddp

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

fmt: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: setup
	$(PY) -m build --wheel --no-isolation --outdir dist

clean:
	rm -rf dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
