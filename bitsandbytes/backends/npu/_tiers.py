"""Which implementation of an operator runs on the NPU: an ordered list each, of which the first that accepts wins.

| tier        | what                                                                    |
| ----------- | ----------------------------------------------------------------------- |
| `ascendc`   | kernels of this package                                                 |
| `torch_npu` | fused operators of torch_npu, where one computes what the operator says |
| `default`   | the reference, on tensors of the device                                 |

An implementation declares as data what it takes; a refusal is a reason in words. `BNB_NPU_IMPL` or `forced` asks for a
tier by name: for all operators that have it (`torch_npu`) or for one (`int8_linear_matmul=default`), several with
commas. A tier that was asked for and refuses is an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import chips
from ... import _env, _ops
from ...errors import UnsupportedError

TIERS = ("ascendc", "torch_npu", "default")


class Call(NamedTuple):
    """What of a call decides who runs it. None stands for what the operator does not have."""

    dtype: torch.dtype | None  # of the first tensor; None for packed codes, whose dtype is only how they are stored
    rank: int
    blocksize: int | None
    out_dtype: torch.dtype | None


def _names(values: Any) -> str:
    return ", ".join(str(value).removeprefix("torch.") for value in values)


@dataclass(frozen=True)
class Support:
    """What an implementation takes; None is everything.

    Attributes:
        families: Names of chip families.
        dtypes: Of the first tensor, unless that is packed.
        ranks: Of the first tensor.
        blocksizes, out_dtypes: Of operators that have these arguments.
    """

    families: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    ranks: range | None = None
    blocksizes: tuple[int, ...] | None = None
    out_dtypes: tuple[torch.dtype, ...] | None = None

    def refusal_of(self, chip: chips.Chip) -> str:
        """Why it never runs on a chip, or an empty string."""
        if self.families is None or chip.family in self.families:
            return ""
        return f"it is for chips of the families {_names(self.families)}; the family of {chip.name} is {chip.family}"

    def refusal(self, call: Call) -> str:
        """Why it does not run a call, or an empty string."""
        if why := self.refusal_of(chips.chip()):
            return why
        for what, value, valid in (
            ("dtype", call.dtype, self.dtypes),
            ("rank", call.rank, self.ranks),
            ("block size", call.blocksize, self.blocksizes),
            ("result dtype", call.out_dtype, self.out_dtypes),
        ):
            if valid is not None and value not in valid:
                return f"it takes the {what} {_names(valid)}, not {_names([value])}"
        return ""


@dataclass(frozen=True)
class Implementation:
    """One way to run an operator.

    Attributes:
        tier: One of `TIERS`.
        kernel: Takes the operator's arguments.
        supports: What it takes.
    """

    tier: str
    kernel: Callable[..., Any]
    supports: Support = field(default_factory=Support)


@dataclass(frozen=True)
class Choice:
    """What runs a call, and why the tiers before it do not."""

    op: str
    chip: str
    tier: str
    refused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.chip}: {self.tier}"]
        return "\n".join(lines + [f"  not {tier}: {why}" for tier, why in self.refused.items()])


#: operator -> its implementations, best first.
implementations: dict[str, list[Implementation]] = {}

_forced = _env.NPU_IMPL
_chosen: dict[str, dict[Call, Callable[..., Any]]] = {}


@contextmanager
def forced(tiers: str) -> Iterator[None]:
    """Within the context, and in the whole process, run what `tiers` names, in the syntax of `BNB_NPU_IMPL`.

    Raises:
        UnsupportedError: There is no such tier or operator.
    """
    before = _forced
    _parse(tiers)
    _set_forced(tiers)
    try:
        yield
    finally:
        _set_forced(before)


def _set_forced(tiers: str) -> None:
    global _forced
    _forced = tiers
    for chosen in _chosen.values():
        chosen.clear()


def _parse(tiers: str) -> tuple[str, dict[str, str]]:
    """The tier for all operators, or an empty string, and those for single ones."""
    for_all, for_one = "", {}
    for item in filter(None, (item.strip() for item in tiers.split(","))):
        op, _, tier = item.rpartition("=")
        if tier not in TIERS:
            raise UnsupportedError(f"BNB_NPU_IMPL: a tier must be one of {_names(TIERS)}, got '{tier}' in '{tiers}'")
        if op and op not in implementations:
            raise UnsupportedError(f"BNB_NPU_IMPL: there is no operator '{op}', named in '{tiers}'")
        if op:
            for_one[op] = tier
        else:
            for_all = tier
    return for_all, for_one


def choose(op: str, call: Call) -> tuple[Implementation, Choice]:
    """The implementation that runs a call.

    Raises:
        UnsupportedError: The chip cannot compute with a dtype of the call, or a tier that was asked for refuses.
    """
    for dtype in (call.dtype, call.out_dtype):
        if dtype is not None:
            chips.check_dtype(op, dtype)
    by_tier = {candidate.tier: candidate for candidate in implementations[op]}
    for_all, for_one = _parse(_forced)
    wanted = for_one.get(op) or (for_all if for_all in by_tier else "")
    refused: dict[str, str] = {}
    for tier in [wanted] if wanted else by_tier:
        why = by_tier[tier].supports.refusal(call) if tier in by_tier else "the operator does not have it"
        if not why:
            return by_tier[tier], Choice(op, chips.chip().name, tier, refused)
        refused[tier] = why
    # Only a tier that was asked for gets here: the reference takes everything.
    raise UnsupportedError(f"{op}: BNB_NPU_IMPL asks for '{wanted}', which refuses: {refused[wanted]}")


def _reader(op: str) -> Callable[[tuple[Any, ...]], Call]:
    """Finds in an operator's arguments what a `Call` says."""
    arguments = _ops.schema(op).arguments
    names = [argument.name for argument in arguments]
    first = next(i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type))
    is_packed = op.startswith("dequantize_4bit")
    nowhere = len(names)
    blocksize_at = names.index("blocksize") if "blocksize" in names else nowhere
    dtype_at = names.index("dtype") if "dtype" in names else nowhere

    def read(args: tuple[Any, ...]) -> Call:
        tensor, count = args[first], len(args)  # PyTorch leaves trailing defaults out
        return Call(
            None if is_packed else tensor.dtype,
            tensor.dim(),
            args[blocksize_at] if blocksize_at < count else None,
            args[dtype_at] if dtype_at < count else None,
        )

    return read


def overview(op: str) -> dict[str, str]:
    """Tier -> why it does not run on this chip, or an empty string if it does for some calls, in order."""
    chip = chips.chip()
    return {candidate.tier: candidate.supports.refusal_of(chip) for candidate in implementations[op]}


def kernel(op: str) -> Callable[..., Any]:
    """The kernel to register for an operator: it runs the first of its implementations that accepts the call."""
    read = _reader(op)
    chosen = _chosen.setdefault(op, {})

    def run(*args: Any) -> Any:
        call = read(args)
        found = chosen.get(call)
        if found is None:
            found = chosen[call] = choose(op, call)[0].kernel
        return found(*args)

    return run


def explain(op: str, *args: Any, **kwargs: Any) -> Choice:
    """What would run `torch.ops.bitsandbytes.<op>(*args, **kwargs)`, and why no better tier. Nothing is computed.

    Args:
        op: Name of an operator, such as "gemm_4bit" or "dequantize_4bit.out".
        args, kwargs: Its arguments; of tensors only dtype and rank count, so they may be on any device.

    Raises:
        UnsupportedError: There is no such operator, or the call would raise it.
    """
    if op not in implementations:
        raise UnsupportedError(f"there is no operator '{op}'; there are {_names(sorted(implementations))}")
    arguments = _ops.schema(op).arguments[len(args) :]
    values = (*args, *(kwargs.get(argument.name, argument.default_value) for argument in arguments))
    return choose(op, _reader(op)(values))[1]
