"""The package under the real torch_npu: importing it, what it registers, and that its kernels are the ones that run."""

import pytest
import torch

import bitsandbytes
from bitsandbytes import _ops
from bitsandbytes.backends.default.optim import RULES
from tests.cases.samples import FIRST
from tests.optim.test_ops import inputs8, inputs32
from tests.simulator.cann.wheel import DOUBLE, FELL_BACK, fresh

STARTS_A_DEVICE = ("aclInit", "aclrtSetDevice", "aclrtCreateStreamWithConfig", "aclrtMallocAlign32")


@pytest.mark.parametrize(
    "imports, autoload",
    [
        ("import bitsandbytes", "0"),
        ("import bitsandbytes", "1"),
        ("import torch_npu, bitsandbytes", "0"),
        ("import bitsandbytes, torch_npu", "0"),
    ],
)
def test_importing_the_package_starts_no_device(imports, autoload):
    code = f"""
import sys
{imports}
import ctypes
stub = ctypes.CDLL("libascendcl.so")
print("torch_npu" in sys.modules, [stub.stub_calls(name.encode()) for name in {STARTS_A_DEVICE}])
"""
    run = fresh("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    loaded = autoload == "1" or "torch_npu" in imports
    assert run.stdout.splitlines()[-1:] == [f"{loaded} [0, 0, 0, 0]"], run.stderr


def test_starting_a_device_is_seen():
    code = f"""
import torch
from tests.simulator.cann.wheel import calls
torch.zeros(1, device="npu")
assert all(calls(name) for name in {STARTS_A_DEVICE})
"""
    run = fresh("-c", code)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("op", _ops.implementations)
def test_every_operator_has_a_kernel_for_the_device(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"bitsandbytes::{op}", "PrivateUse1")


class Reached(Exception):
    """A kernel of the package ran."""


@pytest.fixture
def expect_kernel(monkeypatch):
    """Make the kernel that is registered for an operator on the device tell that it runs."""

    def replace(op: str):
        def kernel(*args, **kwargs):
            raise Reached(op)

        monkeypatch.setitem(_ops._kernels, (op, "PrivateUse1"), kernel)
        return pytest.raises(Reached, match=f"^{op}$")

    return replace


def on_device(args: dict) -> list:
    return [value.to("npu") if isinstance(value, torch.Tensor) else value for value in args.values()]


@pytest.mark.parametrize("op", FIRST)
def test_operators_on_the_device_reach_the_registered_kernel(op, expect_kernel):
    name, _, overload = op.partition(".")
    args = on_device(FIRST[op].args())
    with expect_kernel(op):
        getattr(getattr(torch.ops.bitsandbytes, name), overload or "default")(*args)


@pytest.mark.parametrize("optimizer", RULES)
def test_optimizer_operators_reach_the_registered_kernel(optimizer, expect_kernel):
    with expect_kernel("optimizer_update_32bit"):
        torch.ops.bitsandbytes.optimizer_update_32bit(*on_device(inputs32(optimizer)))
    with expect_kernel("optimizer_update_8bit_blockwise"):
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(*on_device(inputs8(optimizer)))


def test_a_layer_is_quantised_where_it_is_moved(expect_kernel):
    with expect_kernel("quantize_4bit"):
        bitsandbytes.nn.Linear4bit(64, 32).to("npu")
    with expect_kernel("int8_vectorwise_quant"):
        bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False).to("npu")


def test_nothing_of_the_package_runs_on_the_host_or_in_float64():
    run = fresh("-m", "tests.simulator.cann.session")
    assert run.returncode == 0, run.stderr
    assert FELL_BACK not in run.stderr
    operators = [line.split(",")[0].split() for line in run.stdout.splitlines() if line.startswith("aclnn")]
    assert ["aclnnMm", "0", "0", "0"] in operators
    assert not [operator for operator in operators if DOUBLE in operator]


@pytest.mark.parametrize("autoload", [False, True])
def test_info_shows_the_device_if_torch_npu_is_loaded_and_survives_that_it_computes_nothing(autoload):
    run = fresh("-m", "bitsandbytes", "info", TORCH_DEVICE_BACKEND_AUTOLOAD=str(int(autoload)))
    assert "Traceback" not in run.stderr
    for line in ("Operators on npu", "Self-test on npu:0", "Self-test on npu:1", "FAILED"):
        assert (line in run.stdout) is autoload
