# `make help` lists the targets. PYTHON=python3.12 chooses the interpreter; ARGS="-k name" goes to pytest.
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
UV     ?= uv
ARGS   ?=
LANES  ?= 4
# A process of the tests that dies ends the run, which names its test: xdist 3.8 would replace it, and then wait for ever.
LANE_OPTIONS := -n $(LANES) --max-worker-restart=0
SECTION ?=
AGAINST ?=
PYTHONS ?=
SPARK  ?= 4.2.0
MINUTES ?= 10
SEED   ?= 1
SEEDS  ?= 1000
HISTORIES ?= 500
MUTANTS ?= 60
WORLDS ?= 10000
FRAMES ?= 50000000

# Otherwise each process of the tests would compile every module that it imports: 0.4 s of CPU for a proxy.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-spark chaos storm sim sim-rules worlds own-histories mutants fuzz check budgets docs site screenshots kubernetes check-deploy deploy-tools try-compose try-image packages bench bench-quick lock lock-image audit-lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-13s %s\n' "$$name" "$$text"; done

install: $(STAMP)  ## make .venv with everything, from the lock files; does nothing where that is done

$(STAMP): pyproject.toml requirements.lock requirements-build.lock scripts/install.sh scripts/build_plain.py $(wildcard kproxy/plain/*.pyx kproxy/plain/*.pxi kproxy/plain/*.h)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" PYSPARK="$(PYSPARK)" sh scripts/install.sh
	@touch $@

demo: install  ## write 336,776 flights through the proxy with Spark, kill -9 an owner meanwhile, read them back, judge and audit it
	@$(BIN)/kproxy demo --kill-owner $(ARGS)

test: install  ## run the tests, four at a time; LANES=0 for one after the other
	@$(BIN)/python -m pytest $(LANE_OPTIONS) $(ARGS)

test-all: install  ## run these and the long tests: every client release, more seeds, every byte of a reset
	@KPROXY_TEST_ALL=1 $(BIN)/python -m pytest $(LANE_OPTIONS) $(ARGS)

test-spark:  ## run all tests of the Spark jobs, the long ones too, on another Spark: SPARK=4.2.0, which .venv-spark-4.2.0 has
	@$(MAKE) -s install VENV=.venv-spark-$(SPARK) PYSPARK=$(SPARK)
	@KPROXY_TEST_ALL=1 .venv-spark-$(SPARK)/bin/python -m pytest $(LANE_OPTIONS) -m spark \
		$(or $(ARGS),$$(grep -rl --include='test_*.py' pytest.mark.spark tests))

chaos: install  ## kill, stop and cut off members of etcd at random for MINUTES=10, from SEED=1, and judge the table
	@KPROXY_CHAOS_MINUTES=$(MINUTES) KPROXY_CHAOS_SEED=$(SEED) \
		$(BIN)/python -m pytest -s -q tests/integration/etcd/test_etcd_chaos.py $(ARGS)

storm: install  ## kill, stop, cut off and wipe replicated brokers at random for MINUTES=10, from SEED=1, and judge what is left
	@KPROXY_STORM_MINUTES=$(MINUTES) KPROXY_STORM_SEED=$(SEED) \
		$(BIN)/python -m pytest -s -q tests/integration/broker/test_replication_storm.py $(ARGS)

sim: install  ## put replication and groups through SEEDS=1000 random runs of brokers, links and time, from SEED=1; a second for ten
	@KPROXY_SIM_SEEDS=$(SEEDS) KPROXY_SIM_FIRST_SEED=$(SEED) \
		$(BIN)/python -m pytest -q --timeout=0 tests/property/test_replication_model.py tests/property/test_group_model.py -k random_events $(ARGS)

sim-rules: install  ## switch off each rule of replication and of consumer groups, one at a time, and see that the models find it
	@$(BIN)/python -m pytest -q tests/property/test_replication_model.py tests/property/test_group_model.py -k rule_is_needed $(ARGS)

worlds: install  ## put the proxy's own code through WORLDS=10000 simulated worlds of brokers, clients and time, from SEED=1
	@$(BIN)/python -m tests.simulation --worlds $(WORLDS) --seed $(SEED) $(ARGS)

own-histories: install  ## HISTORIES=500 random histories of claims, writes and deaths before reference brokers, from SEED=1, judged
	@KPROXY_OWN_HISTORIES=$(HISTORIES) KPROXY_OWN_SEED=$(SEED) \
		$(BIN)/python -m pytest -q tests/integration/claims/test_own_histories.py $(ARGS)

fuzz: install  ## put FRAMES=50000000 sound and broken frames through the compiled plain path's C under sanitizers; SEED=7 repeats them
	@$(BIN)/python -m scripts.fuzz $(FRAMES) $(if $(filter file,$(origin SEED)),,$(SEED))

# The default SEED is for the targets above; here there is a new one in each run.
mutants: install  ## put MUTANTS=60 small faults into each package of SET="routing trail", one at a time, and see which the tests notice; SEED=7 draws the same again
	@$(BIN)/python -m scripts.mutants --mutants $(MUTANTS) $(if $(SET),--set $(SET)) $(if $(filter file,$(origin SEED)),,--seed $(SEED)) $(ARGS)

check: install  ## lint, types, dependency direction, budgets of lines, generated files; runs no tests
	@echo "ruff";         $(BIN)/ruff check .
	@echo "ruff format";  $(BIN)/ruff format --check .
	@echo "mypy";         $(BIN)/mypy
	@echo "import-linter"; $(BIN)/lint-imports
	@echo "budgets";      $(BIN)/python scripts/budgets.py
	@echo "generated";    $(BIN)/python scripts/etcd_messages.py --check && $(BIN)/python scripts/man_pages.py --check && \
		$(BIN)/python scripts/protocol_support.py --check && $(BIN)/python scripts/chart.py --check && \
		$(BIN)/python scripts/figures.py --check

budgets: install  ## lower the numbers in budgets.toml to the sizes of today; none is raised
	@$(BIN)/python scripts/budgets.py --lower

docs: install  ## write the generated pages: docs/man, docs/protocol-support.md, figures of docs/deploy.md, the chart's table and schema
	@$(BIN)/python scripts/man_pages.py && $(BIN)/python scripts/protocol_support.py && $(BIN)/python scripts/chart.py && \
		$(BIN)/python scripts/figures.py

screenshots: install  ## write docs/images/page-light.png and page-dark.png: the page of kproxy dev with load, in Chromium
	@$(BIN)/python -m scripts.screenshots

site: install  ## build the documentation's site into build/site, for a browser from the file system; a warning is an error
	@$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/site && echo "$(CURDIR)/build/site/index.html"

kubernetes:  ## render the Helm chart into deploy/kubernetes (needs helm)
	@sh scripts/kubernetes.sh

check-deploy: install  ## check deploy/ with helm, kubernetes-validate, promtool, docker compose, systemd-analyze and shellcheck
	@sh scripts/check_deploy.sh

deploy-tools:  ## install what check-deploy needs beside Helm and Docker, on Debian and Ubuntu (needs sudo and pipx)
	@sudo apt-get update && sudo apt-get install --yes --no-install-recommends prometheus shellcheck
	@pipx install kubernetes-validate

try-compose:  ## start the reference brokers' Compose file, write and read through both proxies, and remove it all
	@sh scripts/try_compose.sh

try-image: install  ## run the container image's steps in root file systems of Debian packages (needs root, mmdebstrap)
	@$(BIN)/python scripts/try_image.py

packages: install  ## build the source distribution and the wheel into dist/, and try them: PYTHONS="python3.11 python3.12 python3.13"
	@rm -rf dist && $(BIN)/python -m build --no-isolation >/dev/null && ls dist
	@KPROXY_TEST_DIST=dist KPROXY_TEST_PYTHONS="$(PYTHONS)" $(BIN)/python -m pytest -q -rP tests/packaging $(ARGS)

bench: install  ## every measurement, or one: make bench SECTION=quick, SECTION=plain, SECTION=paths, SECTION=consume, SECTION=table, SECTION=partitions, SECTION=opening, SECTION=acks, SECTION=acks0, SECTION=own, SECTION=tls, SECTION=access, SECTION=floods, SECTION=pipeline, SECTION=trail, SECTION=sink, SECTION=jobs; or beside another checkout: SECTION=against AGAINST=path
	@$(BIN)/python -m bench $(SECTION) $(AGAINST) $(ARGS)

bench-quick: install  ## what the proxy costs in CPU, beside haproxy where it is installed; about a minute
	@$(BIN)/python -m bench quick

LOCK := pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
	--custom-compile-command "make lock"
LOCKS := requirements.lock requirements-build.lock deploy/docker/requirements.lock deploy/docker/requirements-sbom.lock
lock:  ## resolve the lock files anew from pyproject.toml (needs uv)
	@$(UV) $(LOCK) --all-extras pyproject.toml --output-file requirements.lock
	@$(UV) $(LOCK) --allow-unsafe --group build --output-file requirements-build.lock
	@$(MAKE) -s lock-image

lock-image:  ## resolve only the lock files of the container image anew, with the versions of requirements.lock (needs uv)
	@$(UV) $(LOCK) --constraint requirements.lock pyproject.toml --output-file deploy/docker/requirements.lock
	@$(UV) $(LOCK) --group sbom --output-file deploy/docker/requirements-sbom.lock
	@if grep -nE '://|^ *--?(index|extra-index|find-links|i |f )' $(LOCKS); then \
		echo "make lock: a lock file names an address; it must not." >&2; exit 1; fi

AUDIT ?= pip-audit
# --strict: a package that PyPI's data does not have is an error, and not a line in the table.
audit-lock:  ## look for known vulnerabilities in the packages of the lock files (needs pip-audit and PyPI)
	@command -v $(firstword $(AUDIT)) >/dev/null || { \
		echo "make audit-lock: $(firstword $(AUDIT)) is not installed: run pipx install pip-audit." >&2; exit 2; }
	@for lock in $(LOCKS); do \
		$(AUDIT) --strict --disable-pip --require-hashes --progress-spinner off --requirement $$lock || { \
		echo "make audit-lock: a package in $$lock has a known vulnerability, or PyPI's data cannot be read here:" \
		"see above, and run it where pypi.org answers." >&2; exit 1; }; done

clean:  ## remove .venv, .venv-spark-*, caches and build results; topics and records of kproxy dev stay
	rm -rf $(VENV) .venv-spark-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
