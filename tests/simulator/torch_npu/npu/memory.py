"""Statistics of the device memory."""

from typing import Any

from ._devices import _get_device_index
from .. import _native

__all__ = [
    "empty_cache",
    "ipc_collect",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
]


def memory_stats(device: Any = None) -> dict[str, int]:
    allocated, allocated_peak, reserved, reserved_peak, count = _native.memory_statistics(_get_device_index(device))
    stats = {"allocation.all.allocated": count}
    for kind in ("allocated_bytes", "active_bytes", "requested_bytes"):
        stats |= {f"{kind}.all.current": allocated, f"{kind}.all.peak": allocated_peak}
    return stats | {"reserved_bytes.all.current": reserved, "reserved_bytes.all.peak": reserved_peak}


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


memory_cached, max_memory_cached = memory_reserved, max_memory_reserved


def reset_peak_memory_stats(device: Any = None) -> None:
    _native.reset_peak_memory(_get_device_index(device))


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Without effect here: nothing is accumulated but the number of allocations."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    total = _native.device_memory()
    return total - memory_reserved(device), total


def empty_cache() -> None:
    _native.empty_cache()


def ipc_collect() -> None:
    """Without effect here."""
