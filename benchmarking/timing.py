"""How a case is timed: side by side with a copy of as many bytes and with PyTorch's own operation."""

from collections.abc import Callable
import ctypes
from dataclasses import dataclass
import platform
from statistics import median
import time
from typing import Any

from cases import Case
import torch

_CACHE_BYTES = 128 << 20  # more than the last level of a core's caches holds

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


@dataclass(frozen=True)
class Effort:
    """How long to repeat: at least `repeats` times and `seconds`, but no further round after `limit` seconds."""

    repeats: int = 10
    seconds: float = 0.5
    limit: float = 5.0


class Memory:
    """Where the calls find their inputs and put their outputs.

    warm: the same inputs, and outputs in memory that was in use before.
    fresh: copies of the inputs and new outputs in pages that the kernel has to provide, and nothing in the caches.
    """

    def __init__(self, kind: str, device: torch.device):
        self.fresh = kind == "fresh"
        self.device = device
        if self.fresh:
            self._eviction = torch.zeros(_CACHE_BYTES, dtype=torch.uint8, device=device)
        # Outputs are allocated inside the operations. Only glibc lets us say which pages they get.
        if platform.libc_ver()[0] == "glibc":
            settings = {_M_MMAP_THRESHOLD: 1 << 16} if self.fresh else {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1}
            for parameter, value in settings.items():
                ctypes.CDLL(None).mallopt(parameter, value)

    def synchronize(self) -> None:
        """Wait for all that was started."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, call: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> float:
        """The time of one call."""
        if self.fresh:
            inputs = tuple(tensor.clone() for tensor in inputs)
            self._eviction.add_(1)
        self.synchronize()
        start = time.perf_counter()
        result = call(*inputs)
        self.synchronize()
        stop = time.perf_counter()
        del result  # giving memory back is not part of the call
        return stop - start

    def copy(self, moved: int) -> tuple[Callable[..., object], tuple[torch.Tensor, ...]]:
        """A call that reads and writes `moved` bytes in total, and its input."""
        source = torch.zeros(max(1, moved // 2), dtype=torch.uint8, device=self.device)
        if self.fresh:
            return lambda source: torch.empty_like(source).copy_(source), (source,)
        return torch.empty_like(source).copy_, (source,)


def _works(call: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether PyTorch's own operation takes this shape and dtype on this device."""
    try:
        call(*inputs)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@torch.no_grad()
def measure(case: Case, memory: Memory, effort: Effort) -> dict[str, Any]:
    """Minimum and median of the case's time for a unit, and what the same rounds gave for its two comparisons."""
    case.call(*case.inputs)  # the first call may do more than the others
    calls = {"op": (case.call, case.inputs), "copy": memory.copy(case.moved)}
    if case.torch_call is not None and _works(case.torch_call, case.inputs):
        calls["torch"] = case.torch_call, case.inputs
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    start, rounds = time.perf_counter(), 0
    while True:
        # Neighbours on the machine slow all three down alike.
        for name, (call, inputs) in calls.items():
            seconds[name].append(memory.seconds(call, inputs) / (1 if name == "copy" else case.units))
        rounds, spent = rounds + 1, time.perf_counter() - start
        if spent >= effort.limit or (spent >= effort.seconds and rounds >= effort.repeats):
            break
    best = {name: min(values) for name, values in seconds.items()}
    result: dict[str, Any] = {
        "repeats": rounds,
        "min_ms": best["op"] * 1e3,
        "median_ms": median(seconds["op"]) * 1e3,
        "per_second": 1 / best["op"],
        "bytes": case.moved,
        "gb_per_s": case.moved / best["op"] / 1e9,
        "copy_ms": best["copy"] * 1e3,
        "copy_ratio": best["op"] / best["copy"],
    }
    if "torch" in best:
        result |= {
            "torch_op": case.torch_op,
            "torch_ms": best["torch"] * 1e3,
            "torch_ratio": best["op"] / best["torch"],
        }
    return result
