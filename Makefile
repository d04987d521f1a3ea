# Everything a person or a machine runs here. `make help` lists it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.run-installed
DEV_STAMP := $(VENV)/.dev-installed
UV ?= uv
TRAINERS := .venv-trainers
TORCH ?= torch==2.13.0
STEPS := $(addprefix tests/,records tokens prepare generate warm_up aggregate export)

.DEFAULT_GOAL := help
.PHONY: help demo hub test fuzz test-live test-profiles test-trainers test-ui failures chaos check unit bench bench-quick sglang-flags lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(RUN_STAMP) ## Install, then make training data with a small real model on this machine's CPU
	$(BIN)/draftmill run --param-file demo/params.yaml

hub: $(RUN_STAMP) ## Install what reads datasets from the Hub (source: hub:ORG/NAME)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/hub.txt

test: check ## Lint, types, contracts and the tests that run anywhere (about 10 minutes on 2 cores)
	$(BIN)/python -m pytest

check: $(DEV_STAMP) ## Lint, types and import contracts only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-live: $(DEV_STAMP) ## Tests on a real SGLang server: SGLANG_URL=http://..., or SGLANG_COMMAND="... --port {port}"
	SGLANG_URL="$(SGLANG_URL)" SGLANG_COMMAND="$(SGLANG_COMMAND)" $(BIN)/python -m pytest tests/live -m live

test-profiles: $(DEV_STAMP) ## The profiles on a real SGLang: SGLANG_PYTHON=/path/to/python SGLANG_MODEL=/path/to/tiny/model
	SGLANG_PYTHON="$(SGLANG_PYTHON)" SGLANG_MODEL="$(SGLANG_MODEL)" $(BIN)/python -m pytest \
	  tests/live/test_profiles.py -m live

test-trainers: $(DEV_STAMP) $(TRAINERS)/specforge/.installed $(TRAINERS)/speculators/.installed ## SpecForge and speculators load an export (5 GB each: TORCH="torch==2.13.0 --index-url ..." for a CPU one)
	SPECFORGE_PYTHON=$(TRAINERS)/specforge/bin/python SPECULATORS_PYTHON=$(TRAINERS)/speculators/bin/python \
	  $(BIN)/python -m pytest tests/trainers -m trainers

chaos: $(DEV_STAMP) ## Kill a run 50 times on a failing server, count every prompt: make chaos DRAFTMILL_KILL_SEED=2
	$(BIN)/python -m pytest tests/flows/test_kill.py -m chaos

failures: $(DEV_STAMP) ## What may break under a deployed run and must lose nothing (about 15 minutes)
	$(BIN)/python -m pytest tests/flows -m failures

test-ui: $(DEV_STAMP) ## Drive the Prefect UI, and open a report, in headless Chromium (CHROMIUM=/usr/bin/chromium)
	$(BIN)/python -m pytest tests/ui -m ui

unit: $(DEV_STAMP) ## The tests of the steps only, without Prefect and flows
	$(BIN)/python -m pytest $(STEPS) -q

fuzz: $(DEV_STAMP) ## The property tests of the steps with new random examples, 5,000 each
	$(BIN)/python -m pytest $(STEPS) -q --hypothesis-profile=fuzz -m hypothesis

bench: $(DEV_STAMP) ## All benchmarks (one of them for 10 minutes, two with 7 to 12 GB in the temp folder)
	$(BIN)/python benchmarks/bench_budget.py
	$(BIN)/python benchmarks/bench_client.py
	$(BIN)/python benchmarks/bench_overlap.py
	$(BIN)/python benchmarks/bench_prepare.py --odd
	$(BIN)/python benchmarks/bench_resume.py
	$(BIN)/python benchmarks/bench_memory.py
	$(BIN)/python benchmarks/bench_export.py

bench-quick: $(DEV_STAMP) ## A short version of the benchmarks
	$(BIN)/python benchmarks/bench_budget.py --quick
	$(BIN)/python benchmarks/bench_client.py --quick
	$(BIN)/python benchmarks/bench_overlap.py --quick
	$(BIN)/python benchmarks/bench_prepare.py --quick
	$(BIN)/python benchmarks/bench_resume.py --quick
	$(BIN)/python benchmarks/bench_memory.py --quick
	$(BIN)/python benchmarks/bench_export.py --quick

sglang-flags: ## The table of SGLang's flags, from its own parser: make sglang-flags SGLANG_PYTHON=/path/to/python
	$(SGLANG_PYTHON) scripts/dump_sglang_flags.py > serving/launch/sglang_flags.json.new
	mv serving/launch/sglang_flags.json.new serving/launch/sglang_flags.json

lock: ## Compile the locks from pyproject.toml (needs uv)
	$(UV) pip compile pyproject.toml --extra embedded --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-emit-index-url -o requirements/run.txt
	$(UV) pip compile pyproject.toml --extra embedded --extra hub --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-emit-index-url -c requirements/run.txt -o requirements/hub.txt
	$(UV) pip compile pyproject.toml --extra embedded --extra hub --extra dev --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-emit-index-url -c requirements/hub.txt -o requirements/dev.txt
	for trainer in specforge==0.2.0 speculators==0.9.0; do echo $$trainer | $(UV) pip compile - \
	  --config-file requirements/trainers.toml --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-emit-index-url -o requirements/$${trainer%%=*}.txt || exit 1; done

clean: ## Remove the virtual environments (generated data in data/ is kept)
	rm -rf $(VENV) $(TRAINERS)

$(RUN_STAMP): requirements/run.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/run.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

$(DEV_STAMP): requirements/dev.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@ $(RUN_STAMP)

$(TRAINERS)/%/.installed: requirements/%.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(TORCH)
	$(@D)/bin/python -m pip install --quiet --no-deps --require-hashes -r $<
	@touch $@
