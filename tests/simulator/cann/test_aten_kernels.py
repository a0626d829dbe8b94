"""Which ATen operators the real torch_npu runs on the device, and that the reference uses no other."""

import re

import torch

from tests.simulator.cann import aten_without_kernel
from tests.simulator.cann.wheel import fresh, log

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
FELL_BACK = "CAUTION: The operator"
DOUBLE = "11"


def test_the_list_of_operators_without_a_kernel_is_current():
    assert aten_without_kernel.FILE.read_text() == aten_without_kernel.content(), "make aten-without-kernel"


def test_an_operator_of_the_list_runs_on_the_host_with_a_warning():
    assert "aten::digamma" in aten_without_kernel.without_kernel()
    run = fresh("import torch, torch_npu; print(torch.digamma(torch.ones(1).to('npu')).cpu())")
    assert "-0.5772" in run.stdout, run.stderr
    assert FELL_BACK in run.stderr


def test_the_reference_runs_on_the_device_alone():
    run = fresh(RUN_REFERENCE)
    assert run.returncode == 0, run.stderr
    assert FELL_BACK not in run.stderr
    called = run.stdout.splitlines()
    assert not [line for line in called if line.startswith("failed:")]
    assert "aclnnMm 0 0 0" in called  # the matmuls, int8 ones too, are in fp32
    operators = [line for line in called if re.match(r"aclnn\w+ \d", line)]
    assert len(operators) > 50
    assert not [line for line in operators if DOUBLE in line.split()]
    assert not [line for line in called if line.startswith("aclop ")]  # the operators of older versions of CANN


def test_operators_are_called_with_the_types_of_their_tensors():
    """What the log of the test above is made of."""
    torch.zeros(2, dtype=torch.int8, device="npu").abs()
    torch.npu.synchronize()
    assert "aclnnAbs 2 2" in log()
