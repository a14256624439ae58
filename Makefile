# Every target builds the virtual environment it needs; nothing to install by hand but Python.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Pip is quiet when it succeeds and shows all it said when it fails.
define pip_install
$(BIN)/python -m pip install --disable-pip-version-check --no-input $(1) >$(VENV)/pip.log 2>&1 \
	|| { grep -v 'Location .* is ignored' $(VENV)/pip.log >&2; echo "error: pip failed, see above" >&2; exit 1; }
endef

# Comparisons with AIConfigurator are worth having, never worth failing for.
try_aic = $(MAKE) $(VENV)/aic || echo "skipped: everything that needs the extra 'aic' (not installed)"

# So are solvers to check against.
try_reference = $(MAKE) $(VENV)/reference || echo "skipped: CP-SAT and Gurobi (extra 'reference' not installed)"

# And llama.cpp, which nodes of the end-to-end test run.
try_llamacpp = $(MAKE) $(VENV)/llamacpp || echo "skipped: everything that needs the extra 'llamacpp' (not installed)"

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/ready $(VENV)/engine ## Plan, simulate, then serve a small real model and kill a node mid-answer (no GPU needed)
	@$(BIN)/atoll demo

.PHONY: test
test: $(VENV)/ready $(VENV)/engine ## Lint, types, import rules and the fast tests
	@$(BIN)/python tools/check.py

.PHONY: test-full
test-full: $(VENV)/ready $(VENV)/engine ## The same with the slow tests and those that need extras
	@$(try_aic)
	@$(try_reference)
	@$(try_llamacpp)
	@$(BIN)/python tools/check.py --full

.PHONY: bench
bench: $(VENV)/ready $(VENV)/engine ## All benchmarks, in full (about two hours)
	@$(try_aic)
	@$(try_reference)
	@for name in perf_accuracy perf_speed h200_fidelity templates template_sensitivity allocation coral_costs \
		flow workload_speed sim_speed helix_figures sustained gateway engine_cpu chaos sim_vs_real \
		fabric tunnel churn; do \
		echo; echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

.PHONY: lint
lint: $(VENV)/ready ## Lint, types and import rules only
	@$(BIN)/python tools/check.py --no-tests

.PHONY: clean
clean: ## Remove the virtual environment and every cache
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: Atoll needs Python 3.11 or newer, and '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>/dev/null || echo not there) (fix: make PYTHON=python3.12 ...)" >&2; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || { \
		echo "setup: creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "setup: installing Atoll and its tools into $(VENV) (about a minute the first time)"
	@$(call pip_install,-e '.[dev]')
	@touch $@

# AIConfigurator brings packages of its own, so only what compares against it installs it.
$(VENV)/aic: $(VENV)/ready
	@echo "setup: installing the extra 'aic' into $(VENV)"
	@$(call pip_install,-e '.[aic]')
	@touch $@

$(VENV)/reference: $(VENV)/ready
	@echo "setup: installing the extra 'reference' into $(VENV)"
	@$(call pip_install,-e '.[reference]')
	@touch $@

$(VENV)/llamacpp: $(VENV)/ready
	@echo "setup: installing the extra 'llamacpp' into $(VENV)"
	@$(call pip_install,-e '.[llamacpp]')
	@touch $@

# Torch first and exactly: what follows would otherwise bring the version it likes best.
$(VENV)/engine: $(VENV)/ready
	@echo "setup: installing the extra 'engine' into $(VENV) (torch, several minutes)"
	@$(call pip_install,torch==2.13.0)
	@$(call pip_install,-e '.[engine]')
	@touch $@
