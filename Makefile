# No activation is needed: every target uses $(VENV), which `make install` fills from constraints.txt.
# W=, gpu=, loader=, memory=, sweep= count on the command line only: a variable of the environment never changes a run.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Wheels run no code at an installation. antlr4-python3-runtime, which Hydra needs, is published as source alone: it is
# installed first, from whatever there is. WHEELS= allows other packages without a wheel.
WHEELS = --only-binary :all:
PIP = "$(BIN)/python" -m pip install --quiet --disable-pip-version-check $(WHEELS) -c constraints.txt
RUNS := $(VENV)/.installed
TESTS := $(VENV)/.installed-dev
GUESTS := $(VENV)/.installed-guests
PEERS := $(VENV)/.installed-peers

given = $(if $(filter command,$(origin $(1))),$($(1)))
chosen = $(if $(filter command,$(origin $(1))),$(2)=$($(1)))
OVERRIDES = $(strip $(call chosen,W,workload) $(call chosen,gpu,gpu) $(call chosen,loader,loader) \
  $(call chosen,memory,memory) $(ARGS))

# SIMULATED=24gb: on a machine with a simulated GPU; more words for tools/simulated.py may follow in quotes.
ON = $(if $(filter command,$(origin SIMULATED)),$(BIN)/python tools/simulated.py $(SIMULATED) -- )

# Three test processes with one thread each: torch would otherwise start a thread a core in all of them, and many tests
# wait. Bytecode is kept, also where the environment forbids it: tests start hundreds of processes, which would all
# compile the same files.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install train tune sweep test test-guests faults kills audit bench bench-gpu before-after test-all goldens check site pictures format doctor constraints clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo
	@echo 'make train W=recsys gpu=24gb loader=aggressive memory=cache ARGS="trainer.max_epochs=3 seed=2"'
	@echo 'make tune W=recsys gpu=24gb ARGS="tune.max_minutes=5"'
	@echo 'make sweep W=recsys sweep=quick ARGS="loader=balanced,aggressive"'
	@echo 'PYTHON=python3.12 chooses another Python (3.11 or newer).'

install: $(TESTS) ## make .venv and install all that runs, tests and checks need, once

train: $(RUNS) ## install if needed, then train: W= workload, gpu=, loader=, memory=, ARGS="any overrides"
	$(ON)$(BIN)/python src/train.py $(OVERRIDES)

tune: $(RUNS) ## install if needed, then find faster settings for this machine, and write them: W=, gpu=, ARGS= as above
	$(ON)$(BIN)/python src/tune.py $(OVERRIDES)

sweep: $(RUNS) ## install if needed, then measure combinations: sweep= throughput, quick, full; W=, gpu=, ARGS= as above
	$(BIN)/python src/train.py -m $(or $(call chosen,sweep,sweep),sweep=throughput) $(OVERRIDES)

test: $(TESTS) ## install if needed, then run the tests, without the slow ones
	$(PYTEST) $(ARGS)

test-guests: $(GUESTS) ## run the tests of code that people bring: installs other libraries first
	$(PYTEST) -m guests $(ARGS)

faults: $(TESTS) ## plant likely faults in real runs, and check what each run says of itself: ARGS="-k SIGTERM"
	$(PYTEST) -m "slow or not slow" tests/faults/test_faults.py $(ARGS)

kills: $(TESTS) ## kill runs at random moments, resume them, and compare the weights: N=200 SEED=1 ARGS="--only ranks"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.kills --kills $(or $(call given,N),20) $(ARGS) \
	  $(if $(call given,SEED),--seed $(SEED))

audit: $(GUESTS) ## look up known vulnerabilities of all pinned packages, and the licences of those that tests install
	$(PIP) "pip-audit>=2.7"
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict $(ARGS)
	$(BIN)/pip-licenses --summary

bench: $(PEERS) ## measure everything beside its peers in 20 minutes, on an idle machine: a record, and docs/benchmarks.md
	$(BIN)/python benchmarks/bench.py $(ARGS)
	$(if $(ARGS),,$(BIN)/python benchmarks/bench.py --page)

bench-gpu: $(RUNS) ## on a machine with a GPU: check what only a real one can show, and leave a record to send in
	$(BIN)/python benchmarks/gpu.py $(ARGS)

before-after: $(RUNS) ## from the start of a guide to where the findings lead: W=recsys; ARGS="--where cpu|simulated|gpu"
	$(BIN)/python benchmarks/before_after.py $(if $(filter command,$(origin W)),$(W),recsys) $(ARGS)

test-all: $(GUESTS) ## run the slow tests and those of guests too
	HYPOTHESIS_PROFILE=fresh $(PYTEST) -m "slow or not slow" $(ARGS)

goldens: $(TESTS) ## after a change that is meant: write docs/configuration.md, the committed plans and the texts of findings anew
	$(BIN)/python -m wellfed.config.files.knobs_page > docs/configuration.md
	WELLFED_UPDATE_GOLDEN=1 $(PYTEST) tests/plan tests/explain/test_texts_of_findings.py
	@echo 'Now read what changed: git diff'

check: $(TESTS) ## format, lint, types, layers, texts, workflows, links of the site: changes nothing
	@failed=; for tool in "ruff format --check ." "ruff check ." mypy \
	  "mypy --config-file benchmarks/mypy.ini -p benchmarks" lint-imports \
	  "python tools/size.py" "python tools/docstrings.py src" "python tools/sentences.py README.md CONTRIBUTING.md docs benchmarks src/workloads" "python tools/site.py" \
	  "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml"; do \
	  echo "$(BIN)/$$tool"; $(BIN)/$$tool || failed="$$failed [$$tool]"; done; \
	test -z "$$failed" || { echo "make check failed in:$$failed" >&2; exit 1; }

format: $(TESTS) ## format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

site: $(TESTS) ## build the pages of docs/ into build/site
	$(BIN)/python tools/site.py

pictures: $(TESTS) ## draw the pictures of README and docs/ anew, from a run on a simulated GPU: ARGS="<run folder>"
	$(BIN)/python tools/pictures.py $(ARGS)
	$(BIN)/python tools/pictures.py --boards

doctor: $(RUNS) ## what this machine offers, and what is missing
	$(BIN)/python -m wellfed doctor

constraints: ## resolve pyproject.toml afresh, all extras too, and write constraints.txt
	@$(CHECK_PYTHON)
	rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet --disable-pip-version-check antlr4-python3-runtime
	build/constraints/bin/python -m pip install --quiet --disable-pip-version-check $(WHEELS) -e '.[dev,guests,search,slurm,ray,bench]'
	build/constraints/bin/python -m pip install --quiet --disable-pip-version-check $(WHEELS) --no-deps $(ALONE)
	{ sed -n '/^#/p' constraints.txt; build/constraints/bin/python -m pip freeze --exclude-editable \
	  | sed 's/+[a-z0-9.]*$$//' | LC_ALL=C sort -f; } > build/constraints.txt
	mv build/constraints.txt constraints.txt && rm -rf build/constraints

clean: ## remove .venv, caches and builds; runs (logs/) and cached data (.cache/) stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

define CHECK_PYTHON
command -v "$(PYTHON)" >/dev/null 2>&1 || { \
  echo 'make: there is no "$(PYTHON)" here. Install Python 3.11 or newer, or name one: make PYTHON=python3.12 ...' >&2; \
  exit 2; }; \
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "make: $(PYTHON) is $$("$(PYTHON)" -V 2>&1); 3.11 or newer is needed. Name one: make PYTHON=python3.12 ..." >&2; \
  exit 2; }; \
"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
  echo 'make: $(PYTHON) comes without venv. On Debian or Ubuntu: apt-get install python3-venv' >&2; exit 2; }
endef

# A stamp is written last, so that an interrupted installation is done again. Tests and checks need more than runs do:
# the first run of a fresh clone does not wait for it.
$(RUNS): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	@rm -f "$@"
	@"$(BIN)/python" -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear "$(VENV)"
	@echo 'Installing into $(VENV); the first time downloads PyTorch, which takes minutes.'
	$(PIP) --only-binary :none: antlr4-python3-runtime
	$(PIP) -e '.[examples]'
	@touch "$@"

$(TESTS): $(RUNS)
	@rm -f "$@"
	$(PIP) -e '.[dev,search]'
	@touch "$@"

# A peer whose requirements exclude today's ray. What it imports of them is in the extra.
ALONE = recbole

# Without a stamp where something could not be installed: its rows then say so, and the next call tries again.
$(PEERS): $(TESTS)
	@rm -f "$@"
	@$(PIP) -e '.[bench]' && $(PIP) --no-deps $(ALONE) && touch "$@" || \
	  echo 'Not all peers could be installed: their rows say "not installed".' >&2

$(GUESTS): $(TESTS)
	@rm -f "$@"
	$(PIP) -e '.[dev,search,guests,slurm,ray]'
	@touch "$@"
