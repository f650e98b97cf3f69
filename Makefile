# Needs only python3, pip and make; everything else goes into .venv.
PYTHON ?= python3
# pytest workers; 0 is none, for a debugger.
JOBS ?= 2

BIN := .venv/bin
READY := .venv/.ready
# Without bytecode: most of what is installed is never imported, and the rest is compiled when it is.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: demo test check gauntlet bench zoo clean browser

demo: $(READY)
	@$(BIN)/holter demo

test: $(READY) browser
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

check: $(READY)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m pytest -q tests/test_architecture.py

gauntlet: $(READY)
	@$(BIN)/python -m pytest -q -m gauntlet --timeout 3600

# Pages are tested in Debian's chromium; where apt is not, or may not, those tests say so and are skipped.
browser:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null || { \
		echo "Installing chromium for the tests of pages"; \
		export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1; } || true

bench: $(READY)
	@$(BIN)/python -m benchmarks.overhead

# Real trainings through packages of others, in an environment of their own (gigabytes; then six to ten minutes on two cores).
zoo: .venv-zoo/.ready
	@.venv-zoo/bin/python -m zoo --jobs $(JOBS) --into docs/zoo.md

.venv-zoo/.ready: pyproject.toml zoo/requirements.txt
	@echo "Setting up .venv-zoo"
	@test -x .venv-zoo/bin/pip || $(PYTHON) -m venv .venv-zoo
	@.venv-zoo/bin/python -m pip install -qq --disable-pip-version-check --no-compile torch==2.13.0
	@.venv-zoo/bin/python -m pip install -qq --disable-pip-version-check --no-compile -r zoo/requirements.txt
	@.venv-zoo/bin/python -m pip install -qq --disable-pip-version-check --no-compile -e .
	@touch $@

# Keeps runs/ (the user's data) and .venv, .venv-zoo (long downloads).
clean:
	@rm -rf build dist benchmarks/scratch .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find holter tests benchmarks zoo -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# torch first and alone: the constraint keeps later lines from pulling another, much larger build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Holter needs Python 3.10 or newer; name one: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@echo "Setting up .venv (minutes the first time: torch is large)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || $(PYTHON) -m venv --without-pip .venv
	@test -x $(BIN)/pip || $(PYTHON) -m pip --python $(BIN)/python install -qq pip
	@$(INSTALL) torch==2.13.0
	@$(INSTALL) -e ".[dev]"
	@touch $@
