# Everything a user or a developer runs. `make` alone lists it.
# Variables: PYTHON (interpreter for setup), ARGS (passed on to the command run).

SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

VENV ?= .venv
# -P: the repository root must not be on sys.path, where its folder "kernels" would
# stand in for Hugging Face's library of that name.
PY := $(VENV)/bin/python -P
ARGS ?=
export PYTHON VENV

.PHONY: help
help: ## List the targets
	@printf 'Octavo. Start with: make demo\n\n'
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | \
		awk -F ':.*## ' '{ printf "  make %-15s %s\n", $$1, $$2 }'
	@printf '\nPass arguments with ARGS, as in: make serve ARGS="--help"\n'

.PHONY: setup
setup: ## Make .venv and fetch the default model (again: does nothing, quickly)
	@bash scripts/setup.sh

.PHONY: demo
demo: setup ## Start everything, send a few prompts, show what happens
	@$(VENV)/bin/octavo demo $(ARGS)

# 130 is how Ctrl-C ends it.
.PHONY: serve
serve: setup ## Serve the default model until Ctrl-C
	@$(VENV)/bin/octavo serve $(ARGS) || { status=$$?; [ $$status -eq 130 ] || exit $$status; }

.PHONY: test
test: setup ## Run the tests that need no GPU, in their short forms
	@bash scripts/run_tests.sh $(ARGS)

.PHONY: test-all
test-all: setup ## Run the tests that need no GPU, in their long forms too
	@$(PY) -m pytest -m 'not gpu' $(ARGS)

.PHONY: chaos
chaos: setup ## Break a running stack 200 times; every token must come all the same
	@$(PY) tests/chaos/run.py $(ARGS)
	@$(PY) -m pytest -m slow tests/chaos tests/e2e/test_executor_restart.py tests/e2e/test_tensor_parallel.py

.PHONY: reproduce
reproduce: setup ## Reproduce the paper's figures with the real scheduler core (TRACES=FOLDER adds real traces)
	@$(PY) -m scheduler_svc.simulator.reproduce $(if $(TRACES),--traces "$(TRACES)") $(ARGS)

.PHONY: console-check
console-check: setup ## Use the web console in a real browser (needs Chromium)
	@$(PY) tests/console/run.py $(ARGS)

.PHONY: bench
bench: setup ## Measure the scheduler core and the use of KV memory, in short
	@printf 'What a steady step costs the scheduler core:\n\n'
	@$(VENV)/bin/octavo bench core --steps 500
	@printf '\nHow well the KV pool is used, without a model:\n\n'
	@$(VENV)/bin/octavo bench memory --max-requests 100 | $(PY) -m json.tool

.PHONY: scheduler-alone
scheduler-alone: setup ## Install and start the scheduler where torch is not
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		$(PY) scripts/scheduler_venv.py "$$folder/venv" >/dev/null && \
		echo "the scheduler installs, starts and ends without torch"

.PHONY: aot
aot: setup ## Compile every kernel for GPUs not here; compare with the table
	@$(PY) -m octavo_kernels.aot $(ARGS)

.PHONY: gpu-check
gpu-check: setup ## Test the kernels on a GPU and measure them, in 8 minutes
	@bash scripts/gpu_check.sh $(ARGS)

.PHONY: lint
lint: setup ## Check style, protos and import rules
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/buf lint
	@$(VENV)/bin/lint-imports

.PHONY: format
format: setup ## Rewrite Python files in the house style
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

.PHONY: type
type: setup ## Check types
	@$(VENV)/bin/mypy

.PHONY: proto
proto: setup ## Generate what comes from proto/: code, reference, Node's copies
	@$(PY) scripts/generate_protos.py
	@$(PY) scripts/generate_reference.py
	@cp proto/octavo/v1/{inference,types}.proto clients/node/proto/octavo/v1/
	@cp clients/proto/octavo/client/details.proto clients/node/proto/octavo/client/

.PHONY: reference
reference: setup ## Write docs/reference.md and docs/metrics.md from their sources
	@$(PY) scripts/generate_reference.py
	@$(PY) scripts/generate_metrics_doc.py

.PHONY: observability-check
observability-check: setup ## Check rules, dashboard, metrics with Prometheus (says if it is missing)
	@$(PY) scripts/observability_check.py $(ARGS)

.PHONY: chart
chart: setup ## Write the Helm chart's schema, page, dashboard and rules from their sources
	@$(PY) scripts/generate_chart.py

.PHONY: chart-check
chart-check: setup ## Check the chart and the Dockerfiles (needs helm, hadolint, Prometheus; says what is missing)
	@bash scripts/chart_check.sh $(ARGS)

.PHONY: node-client
node-client: setup ## Install what the Node client needs
	@bash scripts/setup_node.sh

.PHONY: cpp-client
cpp-client: ## Build the C++ client (needs gRPC for C++; says what is missing)
	@bash scripts/build_cpp_client.sh

# Apart from the other tests, which run where there is no gRPC for C++.
.PHONY: clients-test
clients-test: setup ## Test the C++ client against the services
	@bash scripts/build_cpp_client.sh --tests
	@$(PY) -m pytest tests/e2e/cpp_client.py $(ARGS)

.PHONY: pin
pin: setup ## Write constraints.txt from what is installed
	@$(PY) scripts/pin_dependencies.py

.PHONY: clean
clean: ## Remove .venv and caches (the model store stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
