"""Ascend chips, and what each can do. The numbers are those of torch_npu's `get_soc_version`."""

from dataclasses import dataclass
from functools import cache

import torch

from ...errors import UnsupportedArgumentError


@dataclass(frozen=True)
class Family:
    """Chips with the same instruction set.

    Attributes:
        name: As Huawei's documents call it.
        versions: Their numbers in torch_npu (enum `SocVersion` of its NpuVariables.h).
        bf16: Whether they compute with bfloat16.
    """

    name: str
    versions: range
    bf16: bool


_FAMILIES = (
    Family("910A", range(100, 105), bf16=False),
    Family("310P", range(200, 206), bf16=False),
    Family("A2", range(220, 226), bf16=True),  # Ascend910B1 to 910B4
    Family("310B", range(240, 244), bf16=False),
    Family("A3", range(250, 257), bf16=True),  # Ascend910_93..
    Family("950", range(260, 261), bf16=True),
)


@dataclass(frozen=True)
class Chip:
    """The chip of this process: torch_npu runs on cards of one kind.

    Attributes:
        name: What the driver calls it, such as "Ascend910B3".
        family: Name of its family, or "unknown"; then only the reference runs.
        bf16: Whether it computes with bfloat16. An unknown chip is asked, through torch_npu.
    """

    name: str
    family: str
    bf16: bool

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The floating dtypes that operators take on it."""
        half = (torch.float16, torch.bfloat16) if self.bf16 else (torch.float16,)
        return (torch.float32, *half)


@cache
def chip() -> Chip:
    """The chip. Initialises the device, so it is asked for when the first operator runs there and not before."""
    npu = torch.npu  # type: ignore[attr-defined]
    name, version = npu.get_device_name(), npu.get_soc_version()
    for family in _FAMILIES:
        if version in family.versions:
            return Chip(name, family.name, family.bf16)
    return Chip(name, "unknown", npu.is_bf16_supported())


def check_dtype(op: str, dtype: torch.dtype) -> None:
    """Raise if this process's chip cannot compute with `dtype`.

    Raises:
        UnsupportedArgumentError: (a ValueError) bfloat16 on a chip without it.
    """
    if dtype == torch.bfloat16 and not chip().bf16:
        raise UnsupportedArgumentError(
            f"{op}: {chip().name} has no bfloat16; use torch.float16, for example "
            "bnb_4bit_compute_dtype=torch.float16 and dtype=torch.float16 when the model is loaded"
        )
