"""The real torch_npu on stub CANN, for the tests of this folder. Importing this elsewhere skips the importing test."""

from collections.abc import Callable
import ctypes
import os
import subprocess
import sys

import pytest
import torch

if os.environ.get("BNB_TEST_TORCH_NPU") != "1":
    pytest.skip("needs the environment of `make test-torch-npu`", allow_module_level=True)

import torch_npu  # noqa: F401  registers the device

FELL_BACK = "CAUTION: The operator"  # torch_npu's warning, once for each operator that it runs on the host
DOUBLE = "11"  # as an aclDataType

_stub = ctypes.CDLL("libascendcl.so")
_stub.stub_log.restype = ctypes.c_char_p

hold_copies = _stub.stub_hold_copies
release_copies = _stub.stub_release


def calls(name: str) -> int:
    """How often a function of CANN was called in this process."""
    return _stub.stub_calls(name.encode())


def log() -> set[str]:
    """Everything called in this process; operators as in "aclnnAdd 0 0 0", with the aclDataType of each tensor."""
    return set(_stub.stub_log().decode().splitlines())


def operators_of(function: Callable[[], object]) -> set[str]:
    """The operators of CANN that a call of `function` runs, as in `log()`."""
    torch.npu.synchronize()
    _stub.stub_clear()
    function()
    torch.npu.synchronize()
    return {line for line in log() if line.startswith("aclnn") and " " in line}


def fresh(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A Python process of its own, which has torch_npu only if it imports it."""
    return subprocess.run([sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True)
