# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone with Python, pip and make.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := $(if $(filter Windows_NT,$(OS)),.venv/Scripts,.venv/bin)
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal
# --no-compile: Python compiles what it imports; compiling all of 100 packages takes longer than the tests that need it.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# Python keeps what it compiles, and keeps it in .venv: else every process that a test starts compiles torch once more.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/pycache

.PHONY: demo test test-all test-portable check format bench coverage docs tables clean

demo: .venv/.demo
	$(BIN)/dropmax demo

# The product's own tests, with the extras they need.
test: .venv/.test
	$(PYTEST) -m "not heavy and not slow"

# The rest: integrations with heavy third parties, the site, the notebook, packaging, and short slow campaigns.
test-all: .venv/.dev
	$(PYTEST) -m "heavy or slow"

# The numerical tests again, as other processors compute: old instruction sets, two threads, misaligned memory.
PORTABLE := HYPOTHESIS_PROFILE=portable $(PYTEST) -m "numerical and not heavy and not slow" tests
test-portable: .venv/.test
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 $(PORTABLE)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 OMP_NUM_THREADS=2 $(PORTABLE)
	DROPMAX_TEST_MISALIGNED=1 OMP_NUM_THREADS=1 $(PORTABLE)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.dev
	$(BIN)/python -m benchmarks

# Branches of src that the whole test suite takes; every run starts afresh.
coverage: .venv/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 2 --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Writes the tables of README, docs and results/tables.md from the runs, and says which numbers in sentences are not true.
tables: .venv/.dev
	$(BIN)/python tools/docs_tables.py

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html"

clean:
	rm -rf .venv

# A stamp is newer than what it was made from, so nothing is installed twice.
.venv/pyvenv.cfg:
	@echo "Setting up .venv (once, about a minute) ..."
	@$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml $(CONSTRAINTS) | .venv/pyvenv.cfg
	@$(PIP_INSTALL) -e '.[figures]'
	@touch $@

.venv/.test: pyproject.toml $(CONSTRAINTS) | .venv/pyvenv.cfg
	@$(PIP_INSTALL) -e '.[test]'
	@touch .venv/.demo $@

.venv/.dev: pyproject.toml $(CONSTRAINTS) | .venv/pyvenv.cfg
	@$(PIP_INSTALL) -e '.[dev]'
	@touch .venv/.demo .venv/.test $@
