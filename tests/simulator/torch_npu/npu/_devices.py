"""Devices, their chip, and which one is current."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import _native

__all__ = [
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_soc_version",
    "init",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "set_compile_mode",
    "set_device",
    "set_option",
    "synchronize",
    "utilization",
]


def _get_device_index(device: Any = None, optional: bool = False, allow_cpu: bool = False) -> int:
    """The index that `device` names; the current device where it names none."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "npu":
            if allow_cpu and device.type == "cpu":
                return -1
            raise ValueError(f"Expected a npu device, but got: {device}")
        device = device.index
    return current_device() if device is None or device < 0 else device


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return _native.device_count()


def is_initialized() -> bool:
    return bool(_native.is_initialised()) and not _is_in_bad_fork()


def _is_in_bad_fork() -> bool:
    return bool(_native.is_forked_child())


def init() -> None:
    _native.initialise()


_lazy_init = init


def _lazy_call(call: Callable[[], None]) -> None:
    call()


def current_device() -> int:
    return _native.current_device()


def set_device(device: Any) -> None:
    index = _get_device_index(device)
    if index >= 0:
        _native.set_device(index)


class device:
    """Makes a device the current one within a `with` block; None and negative numbers leave it as it is."""

    def __init__(self, device: Any):
        self.idx = -1 if device is None else _get_device_index(device, allow_cpu=True)

    def __enter__(self) -> None:
        self.previous = current_device()
        if self.idx >= 0:
            _native.set_device(self.idx)

    def __exit__(self, *_) -> None:
        if self.idx >= 0:
            _native.set_device(self.previous)


class device_of(device):
    """Makes the device of a tensor the current one; of a tensor on the CPU, none."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__(tensor.device if tensor.device.type == "npu" else None)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_get_device_index(device))


def get_soc_version() -> int:
    return _native.chip_version()


def get_device_name(device: Any = None) -> str:
    init()
    return _native.chip_name().decode()


@dataclass(frozen=True)
class _DeviceProperties:
    name: str
    total_memory: int
    cube_core_num: int
    vector_core_num: int
    L2_cache_size: int
    uuid: str


def get_device_properties(device: Any = None) -> _DeviceProperties:
    split = get_soc_version() >= 220  # two vector cores beside each matrix core; before, one core does both
    cores = 20 if split else 8
    return _DeviceProperties(
        name=get_device_name(),
        total_memory=_native.device_memory(),
        cube_core_num=cores,
        vector_core_num=2 * cores if split else cores,
        L2_cache_size=192 << 20,
        uuid=f"simulated-{_get_device_index(device)}",
    )


def get_device_capability(device: Any = None) -> None:
    """None, as on the real device unless an environment variable says otherwise."""


def can_device_access_peer(device: int, peer: int) -> bool:
    return True


def is_bf16_supported(including_emulation: bool = False) -> bool:
    return get_soc_version() >= 220


def utilization(device: Any = None) -> int:
    return 0


def set_compile_mode(jit_compile: bool = False) -> None:
    """Without effect here."""


def set_option(option: dict) -> None:
    """Without effect here."""
