# `make help` lists the targets. PYTHON=python3.12 chooses the interpreter; ARGS="-k name" goes to pytest.
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
UV     ?= uv
ARGS   ?=
LANES  ?= 2
SECTION ?=
MINUTES ?= 10
SEED   ?= 1
SEEDS  ?= 1000
HISTORIES ?= 500

.DEFAULT_GOAL := help
.PHONY: help install demo test chaos storm sim sim-rules own-histories check bench bench-quick lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-13s %s\n' "$$name" "$$text"; done

install: $(STAMP)  ## make .venv with everything, from the lock files; does nothing where that is done

$(STAMP): pyproject.toml requirements.lock requirements-build.lock scripts/install.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/install.sh
	@touch $@

demo: install  ## write 336,776 flights through the proxy with Spark, kill -9 an owner meanwhile, read them back, judge and audit it
	@$(BIN)/kproxy demo --kill-owner $(ARGS)

test: install  ## run every test, two at a time; LANES=0 for one after the other
	@$(BIN)/python -m pytest -n $(LANES) $(ARGS)

chaos: install  ## kill, stop and cut off members of etcd at random for MINUTES=10, from SEED=1, and judge the table
	@KPROXY_CHAOS_MINUTES=$(MINUTES) KPROXY_CHAOS_SEED=$(SEED) \
		$(BIN)/python -m pytest -s -q tests/integration/test_etcd_chaos.py $(ARGS)

storm: install  ## kill, stop, cut off and wipe replicated brokers at random for MINUTES=10, from SEED=1, and judge what is left
	@KPROXY_STORM_MINUTES=$(MINUTES) KPROXY_STORM_SEED=$(SEED) \
		$(BIN)/python -m pytest -s -q tests/integration/test_replication_storm.py $(ARGS)

sim: install  ## put replication through SEEDS=1000 random runs of brokers, links and time, from SEED=1; a second for ten
	@KPROXY_SIM_SEEDS=$(SEEDS) KPROXY_SIM_FIRST_SEED=$(SEED) \
		$(BIN)/python -m pytest -q --timeout=0 tests/property/test_replication_model.py -k befalls $(ARGS)

sim-rules: install  ## switch off every rule of replication, the rarest too, and have random runs from SEED=1 find each
	@KPROXY_SIM_RULES=all KPROXY_SIM_FIRST_SEED=$(SEED) \
		$(BIN)/python -m pytest -q --timeout=0 tests/property/test_replication_model.py -k random_runs_find $(ARGS)

own-histories: install  ## HISTORIES=500 random histories of claims, writes and deaths before reference brokers, from SEED=1, judged
	@KPROXY_OWN_HISTORIES=$(HISTORIES) KPROXY_OWN_SEED=$(SEED) \
		$(BIN)/python -m pytest -q tests/integration/test_own_histories.py $(ARGS)

check: install  ## lint, types, dependency direction, generated files; runs no tests
	@echo "ruff";         $(BIN)/ruff check .
	@echo "ruff format";  $(BIN)/ruff format --check .
	@echo "mypy";         $(BIN)/mypy
	@echo "import-linter"; $(BIN)/lint-imports
	@echo "generated";    $(BIN)/python -m kproxy.ownership.etcd.generate --check

bench: install  ## every measurement, or one: make bench SECTION=quick, SECTION=table, SECTION=acks, SECTION=acks0, SECTION=own, SECTION=pipeline
	@$(BIN)/python -m bench $(SECTION)

bench-quick: install  ## what the proxy costs in CPU, beside haproxy where it is installed; about a minute
	@$(BIN)/python -m bench quick

lock:  ## resolve the lock files anew from pyproject.toml (needs uv)
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--custom-compile-command "make lock" --all-extras pyproject.toml --output-file requirements.lock
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
		--allow-unsafe --custom-compile-command "make lock" --group build --output-file requirements-build.lock
	@if grep -nE '://|^ *--?(index|extra-index|find-links|i |f )' requirements.lock requirements-build.lock; then \
		echo "make lock: a lock file names an address; it must not." >&2; exit 1; fi

clean:  ## remove .venv, caches and build results; topics and records of kproxy dev stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
