"""Which ATen operators the real torch_npu runs on the device, and that the reference uses no other."""

import pytest
import torch

from tests.simulator.cann import aten_without_kernel
from tests.simulator.cann.wheel import DOUBLE, FELL_BACK, fresh, operators_of

# Every call of the reference on the device, in a process of its own: torch_npu warns of the host once per operator.
RUN_REFERENCE = """
import torch
from tests.simulator.cann.wheel import log
from tests.cases.reference import reference_calls
for label, function, args in reference_calls("npu:0"):
    try:
        function(*args)
        torch.npu.synchronize()
    except Exception as error:
        print("failed:", label, error)
print(*log(), sep="\\n")
"""
EXACT = "precision 0"


def test_the_list_of_operators_without_a_kernel_is_current():
    assert aten_without_kernel.FILE.read_text() == aten_without_kernel.content(), "make aten-without-kernel"


def test_an_operator_of_the_list_runs_on_the_host_with_a_warning():
    assert "aten::digamma" in aten_without_kernel.without_kernel()
    run = fresh("-c", "import torch, torch_npu; print(torch.digamma(torch.ones(1).to('npu')).cpu())")
    assert "-0.5772" in run.stdout, run.stderr
    assert FELL_BACK in run.stderr


def test_the_reference_runs_on_the_device_alone():
    run = fresh("-c", RUN_REFERENCE)
    assert run.returncode == 0, run.stderr
    assert FELL_BACK not in run.stderr
    called = run.stdout.splitlines()
    assert not [line for line in called if line.startswith("failed:")]
    assert f"aclnnMm 0 0 0, {EXACT}" in called  # the matmuls, int8 ones too, are in fp32
    operators = [line for line in called if line.startswith("aclnn") and " " in line]
    assert len(operators) > 50
    assert not [line for line in operators if DOUBLE in line.split(",")[0].split()]
    assert not [line for line in called if line.startswith("aclop ")]  # the operators of older versions of CANN


def test_operators_are_called_with_the_types_of_their_tensors():
    """What the log of the test above is made of."""
    x = torch.zeros(2, dtype=torch.int8, device="npu")
    assert operators_of(x.abs) == {"aclnnAbs 2 2"}


@pytest.mark.parametrize(
    "mode",
    ["torch.npu.matmul.allow_hf32 = True", "torch.npu.matmul.cube_math_type = npu_config._CubeMathType.USE_HF32"],
)
def test_matmuls_stay_exact_in_the_modes_of_torch_npu(mode):
    code = f"""
import torch
from torch_npu.npu import npu_config
from tests.cases.reference import reference_calls
from tests.simulator.cann.wheel import operators_of

def ours():
    for label, function, args in reference_calls("npu:0"):
        if "mm" in label or "mv" in label or "matmul" in label:
            function(*args)

x = torch.zeros(2, 2, device="npu")
{mode}
for function in (lambda: torch.mm(x, x), ours, lambda: torch.mm(x, x)):
    print(sorted({{line.split(", ")[1] for line in operators_of(function) if ", " in line}}))
"""
    run = fresh("-c", code)
    assert run.stdout.splitlines()[-3:] == [f"['{mode}']" for mode in ("precision 3", EXACT, "precision 3")], run.stderr
