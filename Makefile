# One command per task. `make help` lists them.
.DEFAULT_GOAL := help
SETUP := ./scripts/setup.sh
BIN := .venv/bin
PYTEST_ARGS ?=
# Tests that need no engine wait most of the time: more run side by side than there are cores.
SIDE_BY_SIDE := -n 3 --dist worksteal
# The first test that needs the images makes them, which is longer than any test may hang elsewhere.
IMAGES_TIME := -o faulthandler_timeout=7200
BENCH_ARGS ?=
MINUTES ?= 30
BENCH_OUT ?= bench/policy
SIM_ARGS ?=

# Where this is set, each of the many processes that tests start compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo up down test test-fast test-docker test-all sim fuzz lint type check-protos proto lock bench-lease bench-router bench-local bench-policy bench-engine clean

help: ## List the tasks
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/' | expand -t 16

setup: ## Prepare everything inside the checkout (.venv, .envs, the small model)
	@$(SETUP) test

setup-demo:
	@$(SETUP) demo

setup-fast:
	@$(SETUP) fast

demo: setup-demo ## Hold a scripted conversation on the real stack and compare TTFT with a baseline
	@$(BIN)/kvturn demo

up: setup-demo ## Run the whole system on this machine until Ctrl-C
	@$(BIN)/kvturn up

down: ## Stop what `kvturn up --detach` started
	@$(BIN)/kvturn down

test: setup lint type check-protos ## Run every check and test, the real stack included
	$(BIN)/pytest -m "not stack and not fault and not docker" $(SIDE_BY_SIDE) $(PYTEST_ARGS)
	$(BIN)/pytest -m "stack and not older and not fault" $(PYTEST_ARGS)

test-fast: setup-fast lint type check-protos ## Run every check and test that needs no vLLM
	$(BIN)/pytest -m "not stack and not fault and not docker" $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-docker: setup-fast ## Run the compose stack in a Docker engine (half an hour at first; installs one with apt as root)
	@$(SETUP) docker
	$(BIN)/pytest --verbose --durations 10 $(IMAGES_TIME) tests/docker $(PYTEST_ARGS)

test-all: test sim ## Run make test, older vLLM, the full simulation, the fault matrix and the compose stack
	$(BIN)/pytest -m "older or fault" $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory test-docker

sim: setup-fast ## Simulate the lease rules: 20,000 seeds, then every mutant (SEED=n replays one)
	PYTHONPATH=tests $(BIN)/python -m sim $(if $(SEED),--seed $(SEED)) $(SIM_ARGS)

fuzz: setup-fast ## Throw broken requests at the router's fronts for MINUTES of CPU time (30)
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES)

lint: setup-fast ## Check style and formatting of Python, protos and shell
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/buf lint
	$(BIN)/shellcheck -x scripts/*.sh .ci/run deploy/baremetal/*.sh deploy/compose/*.sh deploy/compose/images/engine deploy/compose/images/is-healthy deploy/compose/images/make-secrets deploy/compose/images/with-index

type: setup-fast ## Check types (mypy --strict)
	$(BIN)/mypy

check-protos: setup-fast ## Check that the generated code is what the protos give
	@scripts/check_protos.sh

proto: setup-fast ## Generate code from protos/kvturn/**/*.proto, and docs/api/*.md
	@scripts/gen_protos.sh .envs/protoc/bin/python
	@$(BIN)/python scripts/gen_http_docs.py docs/api/http.md

lock: setup-fast ## Pin every requirement anew (requirements/*.txt)
	@scripts/lock.sh

bench-lease: setup-fast ## Measure what the lease service costs (minutes, on a quiet machine)
	$(BIN)/python -m bench.lease $(BENCH_ARGS)

bench-router: setup-fast ## Measure what the router costs beside other routers (half an hour, on a quiet machine)
	@$(SETUP) vllm-router
	@$(SETUP) smg
	@$(SETUP) example-proxy
	$(BIN)/python -m bench.router $(BENCH_ARGS)

bench-local: setup ## Measure when decode alone beats a read, and how well the router picks (needs a quiet machine)
	@$(BIN)/python -m bench.local $(BENCH_ARGS)

bench-engine: setup ## Measure idle and pressed engines beside stock ones (minutes, on a quiet machine)
	@$(BIN)/python -m bench.engine $(BENCH_ARGS)

bench-policy: setup-fast ## Replay real traffic under several policies (needs a trace: bench/policy/README.md)
	@$(SETUP) plots
	$(BIN)/python -m bench.policy --out $(BENCH_OUT) $(BENCH_ARGS)
	.envs/plots/bin/python bench/policy/plots.py $(BENCH_OUT)

clean: ## Remove all that setup, tests and demos made
	rm -rf .venv .envs build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
