"""Random states."""

from collections.abc import Iterable
from typing import Any

import torch

from ._devices import _get_device_index, device_count

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def _get_generator(device: Any = None) -> torch.Generator:
    return torch.npu.default_generators[_get_device_index(device)]


def _generators() -> Iterable[torch.Generator]:
    return (_get_generator(i) for i in range(device_count()))


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return _get_generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators()]


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    _get_generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(_generators(), new_states, strict=True):
        generator.set_state(state)


def _get_rng_state_offset(device: Any = "npu") -> int:
    return _get_generator(device).get_offset()


def _set_rng_state_offset(offset: int, device: Any = "npu") -> None:
    _get_generator(device).set_offset(offset)


def manual_seed(seed: int) -> None:
    _get_generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(int(seed))


def seed() -> None:
    _get_generator().seed()


def seed_all() -> None:
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    return _get_generator().initial_seed()
