"""Names around native pointers and paged memory that other packages import.

Paged optimizer state lives in ordinary memory so far: on the CPU the operating system pages it anyway. `get_paged`
marks its tensors, so that callers that ask for `is_paged` get the right answer.
"""

from collections.abc import Iterable
import ctypes

import torch

from ..errors import ArgumentError

FIRST_CUDA_DEVICE = torch.device("cuda", index=0)


class GlobalPageManager:
    """The process-wide list of paged tensors. Use `get_instance()`."""

    _instance = None

    def __init__(self):
        raise RuntimeError("GlobalPageManager: call get_instance() instead")

    def initialize(self):
        self.paged_tensors = []

    @classmethod
    def get_instance(cls):
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.initialize()
        return cls._instance

    def prefetch_all(self, to_cpu=False):
        """Prefetch every paged tensor, the latest first: the first ones are needed first and must not be evicted."""
        for tensor in reversed(self.paged_tensors):
            prefetch_tensor(tensor, to_cpu)


def get_paged(*shape, dtype=torch.float32, device=FIRST_CUDA_DEVICE) -> torch.Tensor:
    """An uninitialised tensor marked as paged."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.is_paged = True  # type: ignore[attr-defined]
    return tensor


def prefetch_tensor(A: torch.Tensor, to_cpu=False) -> None:
    """Bring a paged tensor to its device (or the CPU) ahead of use. It is there already, see the module's text.

    Raises:
        ArgumentError: A does not come from `get_paged`.
    """
    if not getattr(A, "is_paged", False):
        raise ArgumentError("prefetch_tensor", "A", "a tensor from get_paged", "one that is not paged")


def elementwise_func(func_name, A, B, value, prefetch=True) -> None:
    """In place on A: "fill" with `value`, "arange" (0, 1, 2, ...), or "_mul" by B."""
    if func_name == "fill":
        A.fill_(value)
    elif func_name == "arange":
        A.copy_(torch.arange(A.numel(), device=A.device).view(A.shape))
    elif func_name == "_mul":
        A.mul_(B)
    else:
        raise ArgumentError("elementwise_func", "func_name", "one of fill, arange, _mul", repr(func_name))


def fill(A, value, device=None, prefetch=True) -> None:
    """Fill A with `value`."""
    elementwise_func("fill", A, None, value)


def get_ptr(A: torch.Tensor | None) -> ctypes.c_void_p | None:
    """The address of a tensor's first element, for a C call."""
    return None if A is None else ctypes.c_void_p(A.data_ptr())


def is_on_gpu(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Check that all tensors lie on one accelerator (tensors marked as paged may lie anywhere).

    Raises:
        RuntimeError: One lies on the CPU, or they lie on different devices.
    """
    devices = {t.device for t in tensors if t is not None and not getattr(t, "is_paged", False)}
    if len(devices) > 1 or any(device.type == "cpu" for device in devices):
        raise RuntimeError(f"is_on_gpu: all tensors must be on one accelerator, got {sorted(map(str, devices))}")
    return True
