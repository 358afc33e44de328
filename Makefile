# What people and CI run. ARGS reaches the command: `make demo ARGS="--epochs 1"`, `make test ARGS="unit parity"`.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test matrix chaos fuzz lint proto cases constraints package-test bench clean

BIN := .venv/bin
# protoc finds its plugins on PATH.
WITH_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"

help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## makes .venv ready: system checks, dependencies, the C++ extension, the demo's data
	@scripts/setup.sh

demo: setup ## trains the demo model on a cluster of its own, beside a local baseline
	@$(BIN)/shardam demo $(ARGS)

test: setup ## runs all tests, or the stages named in ARGS
	@scripts/system.sh tests || { [ "$$CI" != true ] && echo "going on without: the tests that need it will be skipped"; }
	@$(BIN)/python scripts/run_tests.py $(ARGS)

matrix: setup ## runs all tests, or the stages named in ARGS, for 1 and 4 threads and chunks of 64 KiB to 4 MiB
	@$(BIN)/python scripts/run_matrix.py $(ARGS)

SECONDS ?= 60
SEED ?= 1
chaos: setup ## kills, stops and cuts at random for SECONDS, with plans from SEED, and compares every bit afterwards
	@$(BIN)/python scripts/chaos.py $(SECONDS) $(SEED)

fuzz: setup ## plays groups of workers under lost messages, and broken messages on shards, at random for SECONDS, from SEED
	@$(BIN)/python scripts/fuzz.py $(SECONDS) $(SEED) $(TARGETS)

lint: setup ## ruff, mypy --strict and buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint

proto: setup ## regenerates the protobuf code and its stubs
	$(WITH_VENV) $(BIN)/python proto/generate.py

cases: setup ## checks that every case of the field log is tested, or says why not
	$(BIN)/python scripts/check_cases.py

constraints: setup ## writes constraints.txt anew from pyproject.toml, keeping pins that still fit
	$(BIN)/python scripts/pin_constraints.py

package-test: setup ## builds sdist and wheel in a temporary folder, checks what they hold, runs the demo from the wheel
	$(WITH_VENV) $(BIN)/python scripts/check_package.py

BENCHMARKS := kernels service train scale
bench: setup ## measures kernels, service, train and scale beside their peers and compares with the goals (wants an idle machine)
	@status=0; for name in $(BENCHMARKS); do \
	  echo "benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py --check $(ARGS) || status=1; \
	done; exit $$status

clean: ## removes build results and caches, keeps .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
