# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone with Python, pip and make.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check format bench harden coverage lock docs clean

demo: .venv/.demo
	$(BIN)/dropmax demo

test: .venv/.dev
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.dev
	$(BIN)/python -m benchmarks

harden: .venv/.dev
	$(BIN)/python -m hardening

# Branches of src that the whole test suite takes; every run starts afresh.
coverage: .venv/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 2 --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Renews the hashes and licences of the versions in constraints.txt: after every change there.
lock: .venv/.dev
	$(BIN)/python -m hardening.lock

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html"

clean:
	rm -rf .venv

# A stamp is newer than what it was made from, so nothing is installed twice.
.venv/bin/python:
	@echo "Setting up .venv (once, about a minute) ..."
	@$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	@$(PIP_INSTALL) -e '.[figures]'
	@touch $@

# HASHES=1 takes only files whose hashes are known, for the platform that constraints-hashed.txt names.
.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
ifdef HASHES
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints-hashed.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
else
	@$(PIP_INSTALL) -e '.[dev]'
endif
	@touch .venv/.demo $@
