# Every target builds the virtual environment it needs; nothing to install by hand but Python.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Where Python is told to write no bytecode, it is kept apart from the sources: without any, each process of an
# engine would compile torch and transformers anew, ten seconds of work.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode
endif

# Torch exactly, and with all that needs it or before it: what follows would otherwise bring the version it likes
# best, and with it gigabytes for GPUs that may not be there.
TORCH := torch==2.13.0
BASE_EXTRAS := plan,serve,fabric
DEMO_EXTRAS := engine,components,$(BASE_EXTRAS)
# All that developers need comes with the engine where both are asked for: each run of pip looks at every package anew.
test test-changed test-full test-real bench bench-quick screenshots lint: MORE_EXTRAS := ,components,dev
DEVELOP := $(VENV)/engine $(VENV)/components $(VENV)/dev

# Pip is quiet when it succeeds and shows all it said when it fails. It compiles nothing: Python does so for what
# it imports, a fifth of the files, and the rest would take 250 MB.
quiet_pip = $(1)/bin/python -m pip install --no-compile --disable-pip-version-check --no-input $(2) \
	>$(1)/pip.log 2>&1 || { grep -v 'Location .* is ignored' $(1)/pip.log >&2; \
	echo "error: pip failed, see above" >&2; exit 1; }
pip_install = $(call quiet_pip,$(VENV),$(1))

# Compiles the numeric kernels of planner and simulator, once a machine; without it the first plan does.
warm_up = $(BIN)/python -m atoll.prove.warm

# Comparisons with AIConfigurator are worth having, never worth failing for.
try_aic = $(MAKE) $(VENV)/aic || echo "skipped: everything that needs the extra 'aic' (not installed)"

# So are solvers to check against.
try_reference = $(MAKE) $(VENV)/reference || echo "skipped: CP-SAT and Gurobi (extra 'reference' not installed)"

# And llama.cpp, which nodes of the end-to-end test run.
try_llamacpp = $(MAKE) $(VENV)/llamacpp || echo "skipped: everything that needs the extra 'llamacpp' (not installed)"

# And Ray, of which tests start a cluster on this machine.
try_ray = $(MAKE) $(VENV)/ray || echo "skipped: a real Ray (extra 'ray' not installed)"

# And engines of others, in environments of their own that are kept (tools/real_engines.py says where).
try_engines = $(BIN)/python tools/real_engines.py || echo "skipped: engines of others"

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What speech needs is installed after the first answers, where it is not there yet.
.PHONY: demo
demo: $(VENV)/engine ## Plan, simulate, serve small real models, kill processes mid-answer, change a plan under load, speak (uses a GPU if there is one, needs none)
	@$(BIN)/atoll demo
	@test -e $(VENV)/components || { $(MAKE) $(VENV)/components; $(BIN)/atoll demo --speech; }

.PHONY: test
test: $(DEVELOP) ## Lint, types, import rules and the fast tests
	@$(BIN)/python tools/check.py

SINCE ?= HEAD
.PHONY: test-changed
test-changed: $(DEVELOP) ## Lint, types, and of the fast tests those that can see what changed since SINCE (HEAD)
	@$(BIN)/python tools/check.py --since $(SINCE)

.PHONY: test-full
test-full: $(DEVELOP) $(VENV)/notebook ## The same with the slow tests and those that need extras
	@$(try_aic)
	@$(try_reference)
	@$(try_llamacpp)
	@$(try_ray)
	@$(try_engines)
	@$(BIN)/python tools/check.py --full

.PHONY: test-real
test-real: $(DEVELOP) ## Of these only the tests with real engines (vLLM on the CPU, llama.cpp)
	@$(try_llamacpp)
	@$(try_engines)
	@$(BIN)/python tools/check.py --real

.PHONY: bench
bench: $(DEVELOP) ## All benchmarks, in full (about three hours); goes on where one fails
	@$(try_aic)
	@$(try_reference)
	@$(BIN)/python -m benchmarks

.PHONY: bench-quick
bench-quick: $(DEVELOP) ## What fits into 20 minutes, small, and the rows of docs/benchmarks.md that it measures
	@code=0; $(BIN)/python -m benchmarks --within 20 --keep || code=$$?; \
		$(BIN)/python tools/docs_output.py --write docs/benchmarks.md; exit $$code

.PHONY: screenshots
screenshots: $(DEVELOP) ## Pictures of the dashboard's pages, into docs/img (needs chromium)
	@ATOLL_SCREENSHOTS=docs/img $(BIN)/pytest -q tests/dashboard/browser/test_pictures.py

.PHONY: lint
lint: $(DEVELOP) ## Lint, types and import rules only
	@$(BIN)/python tools/check.py --no-tests

.PHONY: docs
docs: $(VENV)/docs ## The documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site
	@echo "wrote build/site/index.html"

# The wheel is built from the sdist, so that both are whole, and the demo runs where no checkout is.
.PHONY: wheel
wheel: $(VENV)/dev ## Build wheel and sdist into dist/, install the wheel elsewhere and run the demo from it
	@rm -rf dist
	@echo "wheel: building"
	@$(BIN)/python -m build >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log >&2; exit 1; }
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; wheel=$$(ls "$$PWD"/dist/*.whl); \
		echo "wheel: installing $$(basename "$$wheel") into a new environment (torch, several minutes)"; \
		$(PYTHON) -m venv "$$folder/venv"; \
		$(call quiet_pip,"$$folder/venv",$(TORCH)); \
		$(call quiet_pip,"$$folder/venv","$$wheel[$(DEMO_EXTRAS)]"); \
		cd "$$folder"; venv/bin/atoll init --example quickstart; venv/bin/atoll demo
	@ls dist

.PHONY: clean
clean: ## Remove the virtual environment and every cache
	@rm -rf $(VENV) build dist .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	@find src tests tools benchmarks research -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The environment and what planning, simulating and serving need; all else is added to it. The pip that Python
# brings takes twice the time of a new one to choose versions, but does.
$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: Atoll needs Python 3.11 or newer, and '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>/dev/null || echo not there) (fix: make PYTHON=python3.12 ...)" >&2; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || { \
		echo "setup: creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); \
		$(BIN)/python -m pip install --no-compile --disable-pip-version-check --no-input --upgrade pip >$(VENV)/pip.log 2>&1 || true; }
	@echo "setup: installing Atoll into $(VENV) (about a minute the first time)"
	@$(call pip_install,-e '.[$(BASE_EXTRAS)]')
	@touch $@

# Nothing downloads faster for being watched: the kernels are compiled meanwhile.
$(VENV)/engine: $(VENV)/ready
	@echo "setup: installing the extra 'engine' into $(VENV) (torch, several minutes)"
	@echo "setup: compiling planner and simulator beside it (once)"
	@$(warm_up) >$(VENV)/warm_up.log 2>&1 & warming=$$!; \
		$(call pip_install,$(TORCH) -e '.[engine$(MORE_EXTRAS)]'); \
		wait $$warming || { cat $(VENV)/warm_up.log >&2; echo "setup: not compiled, see above; the first plan will" >&2; }
	@$(BIN)/python -c 'from transformers import LlamaForCausalLM' 2>>$(VENV)/warm_up.log || true
	@touch $@ $(if $(MORE_EXTRAS),$(VENV)/components $(VENV)/dev)

$(VENV)/dev: $(VENV)/ready
	@echo "setup: installing the tools of developers into $(VENV)"
	@$(call pip_install,-e '.[dev]')
	@touch $@

# Extras that few targets need.
define extra
$(VENV)/$(1): $(VENV)/ready
	@echo "setup: installing the extra '$(1)' into $(VENV)"
	@$$(call pip_install,-e '.[$(1)]')
	@touch $$@
endef
$(foreach name,aic components docs llamacpp notebook ray reference,$(eval $(call extra,$(name))))
