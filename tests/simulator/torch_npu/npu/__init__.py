"""`torch.npu`: the part of the real module's names that PyTorch and the Hugging Face packages use."""

import torch

from . import amp, memory, random  # noqa: F401
from ._devices import *  # noqa: F403
from ._devices import _get_device_index, _is_in_bad_fork, _lazy_call, _lazy_init  # noqa: F401
from .memory import *  # noqa: F403
from .random import *  # noqa: F403
from .random import _get_generator, _get_rng_state_offset, _set_rng_state_offset  # noqa: F401
from .streams import *  # noqa: F403

default_generators: tuple[torch.Generator, ...] = ()


def _after_registration() -> None:
    global default_generators
    default_generators = tuple(torch.ops.simulator.default_generator(i) for i in range(device_count()))  # noqa: F405


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32] if is_bf16_supported() else [torch.float16, torch.float32]  # noqa: F405


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("npu")


def set_autocast_enabled(enabled: bool) -> None:
    torch.set_autocast_enabled("npu", enabled)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("npu", dtype)
