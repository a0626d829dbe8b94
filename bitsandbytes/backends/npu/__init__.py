"""Ascend NPUs, through torch_npu. docs/npu.md says what runs on which chip, and how that was tested.

The backend needs torch_npu to be installed and imports nothing of it: PyTorch loads torch_npu by itself, and the device
is initialised by the first operator that runs there.
"""

from importlib.util import find_spec
import sys

import torch

from ... import _ops
from ...errors import BackendUnavailableError

if find_spec("torch_npu") is None:
    raise BackendUnavailableError("torch_npu is not installed")

from . import int8  # noqa: F401  declares implementations
from ._tiers import Choice, Implementation, explain, forced, implementations, kernel, overview  # noqa: F401
from .chips import Chip, check_dtype, chip  # noqa: F401

_KEY = "PrivateUse1"  # the name of the device may come later, when torch_npu is imported

for _op in _ops.operators():
    implementations.setdefault(_op, []).append(Implementation("default", _ops.registered(_op, _KEY)))
    _ops.register(_op, kernel(_op), _KEY, "npu")


def why_not() -> str:
    """Why tensors cannot be on an NPU in this process, in one line; empty if they can. Initialises nothing."""
    if "torch_npu" not in sys.modules:
        return "torch_npu is installed but not imported; TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps PyTorch from doing that"
    if not torch.npu.device_count():  # type: ignore[attr-defined]
        return "torch_npu finds no NPU"
    return ""
