# Two commands for a fresh machine: `make quickstart` and `make test`. Each sets up .venv by itself; re-runs are instant.
# No GPU and no compiler are needed. Once installed, everything works offline.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0

.PHONY: quickstart test lint types tests clean integrations

quickstart: $(STAMP)
	rm -rf runs/quickstart # of the last time
	$(BIN)/tlt train recipes/quickstart.toml

test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# torch goes first and alone, so that nothing installed after it can choose another one.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tlt needs Python 3.11 or newer, found: $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Other people's packages against ours, each in an environment of its own. INTEGRATIONS="openai trl" takes some of them.
INTEGRATIONS ?= openai lm_eval verifiers trl verl
PACKAGES_openai := openai
PACKAGES_lm_eval := 'lm-eval[api]' accelerate
PACKAGES_verifiers := verifiers renderers
PACKAGES_trl := trl accelerate datasets peft
PACKAGES_verl := verl ray
TESTS_trl := tests/test_trl.py
TESTS_verl := tests/test_verl.py

integrations: $(INTEGRATIONS:%=integration-%)

integration-%: pyproject.toml
	test -d .venv-$* || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet $(TORCH)
	.venv-$*/bin/python -m pip install --quiet -e '.[serve]' pytest hypothesis httpx $(PACKAGES_$*)
	rm -rf .venv-$*/lib/python*/site-packages/tests # verl's wheel brings a package of that name
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -q $(or $(TESTS_$*),tests/test_client_$*.py)
