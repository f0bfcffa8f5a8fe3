# Every target first installs what it needs, once, and again when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
PYTEST_WORKERS ?= 4
SCALE ?= cpu
BENCH_OUT ?= benchmarks/results

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := $(VENV)/bin
PAGE_TESTS = tests/docs tests/report/test_report_in_browser.py tests/service/test_dashboard_browser.py \
	-k "readme_sample or blocks or everyone_can_read or low_contrast"
PYTEST = $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
WORD_PROBLEMS := examples/data/word_problems/train.jsonl
PREFERENCES := examples/data/preferences/train.jsonl

# Compiled files are kept even if the environment disables them, because hundreds of processes import the same source.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH_VERSION=$(TORCH_VERSION) PYTEST_WORKERS=$(PYTEST_WORKERS)"

.PHONY: quickstart
quickstart: $(VENV)/.base $(WORD_PROBLEMS) ## Set up, then tune 24 LoRA configurations (about two minutes on a CPU)
	$(BIN)/alto tune examples/quickstart.yaml

.PHONY: preferences
preferences: $(VENV)/.base $(PREFERENCES) ## Set up, then tune 12 configurations of DPO (about a minute on a CPU)
	$(BIN)/alto tune examples/preferences.yaml

.PHONY: test test-all test-nightly durations
# One thread per worker, because torch would otherwise give every worker all cores. Tests that start processes wait for
# them, so four workers keep two cores busy. A worker keeps to files as long as it can, so that the fixtures of a file are
# made only once.
test test-all test-nightly durations: export OMP_NUM_THREADS = 1
test test-all test-nightly durations: export TOKENIZERS_PARALLELISM = false
test: $(VENV)/.dev ## Set up, then run the tests
	$(PYTEST)

test-all: $(VENV)/.dev ## Set up, then run the slow tests too, with more examples, and check their CPU time
	$(PYTEST) --all

test-nightly: $(VENV)/.dev ## Set up, then run all tests with still more examples and kills
	$(PYTEST) --nightly

durations: $(VENV)/.dev ## Set up, then run the tests of test-all, and write their CPU time to tests/durations.json
	$(PYTEST) --all --write-durations

.PHONY: lint
lint: $(VENV)/.dev ## Set up, then check style, docstrings, types, imports, pages: links, samples, age of pictures, contrast
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tools.check_docstrings
	$(BIN)/python -m tools.make_pictures --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(SITE)
	$(BIN)/python -m pytest -n 2 -q --all $(PAGE_TESTS)

.PHONY: format
format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: docs
docs: $(VENV)/.dev ## Write the generated pages and parts anew: most of docs/*.md, figures in README.md, the picture in architecture.md
	$(BIN)/python -m tools.make_reference
	$(BIN)/python -m tools.make_event_docs
	$(BIN)/python -m tools.make_benchmark_docs
	$(BIN)/python -m tools.make_kernel_docs
	$(BIN)/python -m tools.make_template_docs
	$(BIN)/python -m tools.make_model_docs
	$(BIN)/python -m tools.make_package_graph

.PHONY: pictures
pictures: $(VENV)/.dev ## Make the pictures of README.md anew, from a run of the quickstart and a service (needs chromium)
	$(BIN)/python -m tools.make_pictures

.PHONY: site
site: $(VENV)/.dev ## Set up, then write the documentation as a site to site/; a link that leads nowhere is an error
	$(SITE)

.PHONY: bench-smoke
bench-smoke: $(VENV)/.bench ## Set up, then run every benchmark at its smallest scale
	$(BIN)/python -m benchmarks.paper all others --scale smoke --out $(BENCH_OUT)

.PHONY: bench-paper
bench-paper: $(VENV)/.bench ## Set up, then measure the paper's tables and figures (after a kill it continues)
	$(BIN)/python -m benchmarks.paper all --scale cpu
	$(BIN)/python -m tools.make_benchmark_docs

.PHONY: bench-real
bench-real: $(VENV)/.bench ## Set up, then measure on a pretrained model, for hours (SCALE=gpu: on a GPU; after a kill it continues)
	$(BIN)/python -m tools.make_real_model
	$(BIN)/python -m benchmarks.paper real --scale $(SCALE)
	$(BIN)/python -m tools.make_benchmark_docs

.PHONY: test-servers
test-servers: $(VENV)/.dev $(VENV)/.bench ## Set up, then load exports into vLLM and llama.cpp and compare with PEFT (half an hour; make what it needs: ten minutes)
	$(BIN)/python -m tools.make_real_model --models smollm2-135m gemma-3-270m
	$(BIN)/python -m tools.make_servers
	$(BIN)/pip install --quiet mlflow trackio
	$(PYTEST) --all tests/servers tests/trackers
	$(BIN)/python -m benchmarks.paper servers --scale cpu
	$(BIN)/python -m tools.make_benchmark_docs

.PHONY: bench-gpu
# Uses the given Python and installs nothing, because machines with a GPU have their own torch. The commands take a few
# minutes each, the slowest last. If one fails, the others still run, and all write to one result per benchmark.
bench-gpu: export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))
bench-gpu: ## Run the benchmarks that need an NVIDIA GPU; PYTHON must have torch, triton, transformers, peft, pydantic
	@failed=0; \
	measure() { \
		set -- $(PYTHON) -m benchmarks.paper "$$@" --scale gpu --out $(BENCH_OUT); \
		echo "$$*"; "$$@" || { failed=1; echo "failed: $$*"; }; \
	}; \
	measure kernels --models 1b --stages layers ops; \
	measure kernels --models 8b --stages layers ops; \
	measure memory --stages peaks; \
	measure utilization --models 1b --stages memory; \
	measure utilization --models 8b --stages memory; \
	measure utilization --models 1b --stages steps; \
	measure utilization --models 8b --stages steps; \
	measure memory --stages durations; \
	if [ "$$(nvidia-smi --list-gpus | wc -l)" -gt 1 ]; then measure adapter-parallel; \
	else echo "one GPU: adapter-parallel needs two or more"; fi; \
	measure kernels --models 8b --stages steps; \
	measure kernels --models 1b --stages steps; \
	exit $$failed

.PHONY: release
release: $(VENV)/.release ## Set up, then build the archives and check them as a stranger would install them, for each version of Python
	$(BIN)/python -m tools.release --torch $(TORCH_VERSION) $(if $(RELEASE_PYTHONS),--pythons $(RELEASE_PYTHONS))

.PHONY: clean
clean: ## Delete .venv, caches, build products, made models and generated data; runs/ stays
	rm -rf .venv .venv-servers build dist site examples/data .models
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ALTO needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch is installed first, with an exact version, because otherwise the resolver would choose the version by other packages.
$(VENV)/.torch: | $(VENV)/.created
	$(BIN)/python -m pip install torch==$(TORCH_VERSION)
	@touch $@

$(VENV)/.base: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install -e .
	@touch $@

$(VENV)/.dev: pyproject.toml benchmarks/peers.txt $(VENV)/.base
	$(BIN)/python -m pip install -e '.[dev]' -r benchmarks/peers.txt
	@touch $@

$(VENV)/.bench: pyproject.toml benchmarks/peers.txt $(VENV)/.base
	$(BIN)/python -m pip install -e '.[bench,gguf,gpu,scheduler,service]' -r benchmarks/peers.txt
	@touch $@

$(VENV)/.release: | $(VENV)/.created
	$(BIN)/python -m pip install 'build>=1.3' 'twine>=6' 'pip-licenses>=5'
	@touch $@

$(WORD_PROBLEMS): examples/make_word_problems.py | $(VENV)/.created
	$(BIN)/python examples/make_word_problems.py

$(PREFERENCES): examples/make_preferences.py examples/make_word_problems.py | $(VENV)/.created
	$(BIN)/python examples/make_preferences.py
