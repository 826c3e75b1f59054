# Everything runs in .venv, which is made on first use and made anew when pyproject.toml changes.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

SEEDS  ?= 200
STEPS  ?= 300
ARGS   ?=
JOBS   ?= 2000000
SECONDS ?= 30
BYTES ?= 1073741824
# The bin directories of the PostgreSQL that are installed here, each of another version.
PG_BINDIRS ?= $(wildcard /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin)

# Where tests write: in memory if 4 GB are free there. No test depends on fsync: power cuts are simulated.
SCRATCH ?= $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'END { print ($$4 > 4000000) }')" = 1 ] && echo /dev/shm || echo $${TMPDIR:-/tmp})

.DEFAULT_GOAL := help
.PHONY: help run test check pyright format bench bench-engine bench-postgres bench-churn bench-flow bench-plans bench-recovery bench-server rivals docs soak-memory soak-bodies soak-sqlite soak-postgres soak-server test-postgres-versions fuzz chaos reference clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

run: $(VENV)/.package ## the demonstration: real work on an embedded SQLite ledger in a temporary directory
	$(BIN)/towpath demo

test: check ## lint, types, and all tests (ARGS="-k name" to choose)
	$(BIN)/python -m compileall -q src
	PYTHONDONTWRITEBYTECODE= TMPDIR=$(SCRATCH) $(BIN)/python -m pytest -n auto --dist worksteal \
		-o tmp_path_retention_policy=failed $(ARGS)

check: $(VENV)/.dev ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

pyright: $(VENV)/.dev ## the public types as pyright sees them (fetches pyright with npm, so it is no part of the tests)
	$(BIN)/python -m pip install -q pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

reference: $(VENV)/.dev ## write the tables of docs/cli.md and docs/api.md
	$(BIN)/python -m tests.support.reference
	$(BIN)/python -m tests.support.api_reference

format: $(VENV)/.dev ## put the sources into house form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.package ## how fast the ledger is here, beside the raw limit of the disk
	$(BIN)/python bench/ledger.py --quick

bench-engine: $(VENV)/.bench ## how fast the engine is here, beside huey, litequeue, persist-queue and the raw limit
	$(BIN)/python bench/engine.py --quick

bench-postgres: $(VENV)/.bench ## how fast the engine is on PostgreSQL, beside pgqueuer, procrastinate and raw psycopg
	$(BIN)/python bench/postgres.py --quick

bench-churn: $(VENV)/.bench ## PostgreSQL beside 5,000,000 finished jobs, and beside a transaction that is open for long (10 GB, some minutes)
	$(BIN)/python bench/pg_churn.py

bench-flow: $(VENV)/.package ## what flow control costs and keeps (bench/flow.py without --quick: also bandwidth and memory)
	$(BIN)/python bench/flow.py --quick

bench-plans: $(VENV)/.dev ## how fast plans run and roll back, beside plain jobs
	$(BIN)/python bench/plans.py --quick

bench-recovery: $(VENV)/.bench ## how soon the jobs of a killed worker run again, on SQLite and PostgreSQL
	$(BIN)/python bench/recovery.py

bench-server: $(VENV)/.dev ## how fast the HTTP server is here, beside a bare route on the same stack
	$(BIN)/python bench/server.py --quick

rivals: $(VENV)/.rivals ## jobs per second beside huey, FlexiQ, DBOS, pgqueuer and Awa, in one run (some minutes)
	$(BIN)/python bench/rivals.py

docs: $(VENV)/.dev ## the documentation site, in site/ (strict: a broken link is an error)
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

soak-memory: $(VENV)/.package ## 2,000,000 waiting jobs and a slow worker within 150 MB (JOBS=)
	$(BIN)/python bench/soak.py $(JOBS)

soak-bodies: $(VENV)/.dev ## a payload of 1 GiB in and out of a server within 100 MB, on SQLite and PostgreSQL (BYTES=)
	TOWPATH_SOAK_BYTES=$(BYTES) $(BIN)/python -m pytest -s tests/http/test_large_payloads.py -k flat

soak-sqlite: $(VENV)/.dev ## four processes and 64 threads on one file, for 30 s each (SECONDS=)
	TOWPATH_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest tests/ledger/sqlite/test_processes.py

soak-postgres: $(VENV)/.dev ## eight processes on PostgreSQL for 30 s, outages of 30 s, transactions open for 10 s (SECONDS=)
	TOWPATH_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest tests/ledger/postgres/test_fleet.py tests/ledger/postgres/test_outages.py
	TOWPATH_HOLD_SECONDS=10 $(BIN)/python -m pytest tests/ledger/postgres/test_open_transactions.py

soak-server: $(VENV)/.dev ## subscriptions of the HTTP server for 30 s, or for hours (SECONDS=7200)
	TOWPATH_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest --timeout 0 tests/http/test_soak.py

test-postgres-versions: $(VENV)/.dev ## the tests on PostgreSQL, once with the wheel and once with each version that is installed (PG_BINDIRS=)
	$(BIN)/python -m pytest -n auto tests/ledger/postgres tests/app/test_on.py $(ARGS)
	@set -e; for found in $(PG_BINDIRS); do \
		$$found/postgres --version; \
		PG_BINDIR=$$found $(BIN)/python -m pytest -n auto tests/ledger/postgres tests/app/test_on.py $(ARGS); \
	done

chaos: $(VENV)/.dev ## kills, freezes, power cuts, full disks and damage on SQLite and PostgreSQL, audited (ARGS="--seconds 60 --backend sqlite --only kill")
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: $(VENV)/.package ## random histories, each ledger against the model (SEEDS=, STEPS=)
	$(BIN)/python -m towpath.testing.histories --seeds $(SEEDS) --steps $(STEPS)

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	@touch $@

# Dependency groups need pip 25.1 or newer, and a fresh environment may bring an older one.
$(VENV)/.dev: pyproject.toml | $(VENV)/.package
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q --group dev
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.package
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q --group bench
	@touch $@

$(VENV)/.rivals: pyproject.toml | $(VENV)/.package
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q --group rivals
	@touch $@
