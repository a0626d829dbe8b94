"""What the test folders share: devices, implementations, tolerances, layouts, bitwise comparison, and oracles.

The oracles restate the numeric rules (docs/numerics.md) in numpy and call nothing of the package. numpy's float32
operations are single IEEE operations, as the rules demand.
"""

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
import torch

from bitsandbytes import _ops
from bitsandbytes._ops import implementations
from tests.cases import fourbit as fourbit_cases

GOLDEN = Path(__file__).parent / "golden"

# --- Formats ----------------------------------------------------------------------------------------------------------

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NOT_FLOATS = (torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64)
STORAGES = (
    torch.uint8,
    torch.int8,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.float32,
    torch.int32,
    torch.float64,
    torch.int64,
)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
QUANT_TYPES = ("nf4", "fp4")

# --- Tolerances -------------------------------------------------------------------------------------------------------

EPS32 = torch.finfo(torch.float32).eps
GEMM_STEPS = 2  # gemm error: at most GEMM_STEPS * K * EPS32 * sum |x| |w|, and one rounding of the output
NESTED_OFFSET_RTOL = 1e-6  # the mean of the scales, in any order of summation
EPILOGUE_STEPS = 4  # single fp32 operations of an int8 epilogue
LOGITS_RTOL = 1e-4  # logits of a checkpoint, relative to the largest


def one_rounding(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of `values` after a cast to `dtype`."""
    info = torch.finfo(dtype)
    return values.abs().double() * (info.eps / 2) + info.smallest_normal * info.eps / 2


# --- Devices and implementations --------------------------------------------------------------------------------------

QUANT_OPS = (
    "dequantize_4bit",
    "dequantize_4bit.out",
    "dequantize_blockwise",
    "dequantize_blockwise.out",
    "embedding_4bit",
    "gemm_4bit",
    "gemv_4bit",
    "gemv_4bit.out",
    "int8_double_quant",
    "int8_embedding",
    "int8_linear_matmul",
    "int8_linear_matmul.out",
    "int8_mixed_scaled_mm",
    "int8_mm_dequant",
    "int8_scaled_mm",
    "int8_vectorwise_dequant",
    "int8_vectorwise_quant",
    "quantize_4bit",
    "quantize_blockwise",
)
_FAMILY = {
    name: "int8" if name.startswith("int8") else "blockwise" if "blockwise" in name else "fourbit" for name in QUANT_OPS
}


def devices() -> tuple[str, ...]:
    """Devices to test: those of BNB_TEST_DEVICE (`npu:0,npu:1`), else the CPU and the accelerator, where present."""
    forced = os.environ.get("BNB_TEST_DEVICE")
    if forced:
        return tuple(forced.split(","))
    if torch.accelerator.is_available():
        return ("cpu", torch.accelerator.current_accelerator().type)
    return ("cpu",)


def dispatch_key(device: str | torch.device) -> str:
    """The key under which the package registers its kernels for a device."""
    kind = torch.device(device).type
    special = {"cpu": "CPU", "meta": "Meta", torch._C._get_privateuse1_backend_name(): "PrivateUse1"}
    return special.get(kind, "CompositeExplicitAutograd")


def overload(op: str):
    """The operator object of "name" or "name.overload"."""
    name, _, variant = op.partition(".")
    return getattr(getattr(torch.ops.bitsandbytes, name), variant or "default")


def reference(op: str) -> Callable:
    """The reference function of an operator, as it runs where it is registered."""
    module = import_module(f"bitsandbytes.backends.default.{_FAMILY[op]}")
    return torch.no_grad()(getattr(module, op.replace(".", "_")))


@contextmanager
def reference_on_the_cpu():
    """Within the context, every quantisation operator on CPU tensors runs the reference."""
    keys = [(op, "CPU") for op in QUANT_OPS]
    before = {key: _ops._kernels[key] for key in keys}
    _ops._kernels.update({key: reference(key[0]) for key in keys})
    try:
        yield
    finally:
        _ops._kernels.update(before)


@dataclass(frozen=True)
class Target:
    """One implementation on one device; `native` on the CPU once for every instruction set this machine runs."""

    device: str
    implementation: str
    instructions: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.device, self.implementation, self.instructions)))

    def op(self, name: str) -> Callable:
        """The operator, run by this implementation; skips the test where it has none."""
        registered = implementations[name][dispatch_key(self.device)]
        if registered == self.implementation:
            return self._witnessed(overload(name)) if self.instructions else overload(name)
        if self.implementation == "default":
            return reference(name)
        pytest.skip(f"{name} on {self.device} has no implementation '{self.implementation}', only '{registered}'")

    def _witnessed(self, op: Callable) -> Callable:
        """`op` on these instructions; asserts that they ran unless there was nothing to compute."""

        def run(*args, **kwargs):
            cpu = import_module("bitsandbytes.backends.cpu")
            with cpu.using_target(self.instructions):
                result = op(*args, **kwargs)
                assert cpu.last_target() == self.instructions
            return result

        return run


def targets() -> list[Target]:
    """Every device with the reference and with each implementation that is registered there."""
    found = []
    for device in devices():
        for name in sorted({implementations[op][dispatch_key(device)] for op in QUANT_OPS} | {"default"}):
            if name == "native":
                cpu = import_module("bitsandbytes.backends.cpu")
                found += [Target(device, name, instructions) for instructions in cpu.targets()]
            else:
                found.append(Target(device, name))
    return found


# --- Comparison -------------------------------------------------------------------------------------------------------

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns as integers, on the CPU, contiguous."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.dtype == torch.bool else tensor.view(_INTEGER[tensor.itemsize])


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Same shape, dtype and bits, -0 apart from +0; all NaNs are one value."""
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    different = bits(actual) != bits(expected)
    if actual.dtype.is_floating_point:
        different &= ~(actual.cpu().isnan() & expected.cpu().isnan())
    where = different.flatten().nonzero().flatten()
    if where.numel():
        at = where[:5]
        got, wanted = actual.cpu().flatten()[at].tolist(), expected.cpu().flatten()[at].tolist()
        raise AssertionError(
            f"{what}: {where.numel()} of {different.numel()} differ, at {at.tolist()}: {got} != {wanted}"
        )


def assert_all_same(actual: Iterable, expected: Iterable, what: str = "") -> None:
    """`assert_same` over tuples that may hold None."""
    actual, expected = tuple(actual), tuple(expected)
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (e is None), (what, i)
        if e is not None:
            assert_same(a, e, f"{what}[{i}]")


def as_tuple(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


# --- Layouts ----------------------------------------------------------------------------------------------------------


def poisoned(shape, like: torch.Tensor) -> torch.Tensor:
    """A tensor of values that show wherever they are used by mistake."""
    value = float("nan") if like.dtype.is_floating_point else True if like.dtype == torch.bool else -1
    if like.dtype == torch.uint8:
        value = 255
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def _every_other(t: torch.Tensor) -> torch.Tensor:
    base = poisoned((*t.shape[:-1], 2 * t.shape[-1]), t)
    base[..., ::2] = t
    return base[..., ::2]


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def _inner(t: torch.Tensor) -> torch.Tensor:
    base = poisoned([size + 3 for size in t.shape], t)
    inside = base[tuple(slice(1, size + 1) for size in t.shape)]
    inside.copy_(t)
    return inside


def _offset(t: torch.Tensor) -> torch.Tensor:
    base = poisoned((t.numel() + 4,), t)
    inside = base[1 : t.numel() + 1].view(t.shape)
    inside.copy_(t)
    return inside


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.to(memory_format=torch.channels_last) if t.dim() == 4 else _transposed(t)


#: Name -> a tensor with the same values in another place or order of memory, surrounded by poison where that applies.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every other": _every_other,
    "transposed": _transposed,
    "inside a larger one": _inner,
    "unaligned": _offset,
    "channels last": _channels_last,
}


def relaid(value, layout: str):
    """`value` in another layout, if it is a tensor that can have one."""
    return LAYOUTS[layout](value) if isinstance(value, torch.Tensor) and value.dim() else value


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes of the storage below a tensor, gaps and neighbours included."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.cpu().clone()


class Unchanged:
    """Context manager: the memory below every tensor given must be the same bit for bit afterwards."""

    def __init__(self, *values):
        self.tensors = [v for v in values if isinstance(v, torch.Tensor)]

    def __enter__(self):
        self.before = [storage_bytes(t) for t in self.tensors]

    def __exit__(self, kind, error, traceback):
        if kind is None:
            for i, (tensor, before) in enumerate(zip(self.tensors, self.before, strict=True)):
                assert torch.equal(storage_bytes(tensor), before), f"tensor argument {i} was changed"


@contextmanager
def matmul_precision(precision: str):
    """PyTorch's process-wide precision of fp32 matmuls; checks that nothing inside changes it for good."""

    def settings():
        matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        return torch.get_float32_matmul_precision(), *(matmul.fp32_precision for matmul in matmuls)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        inside = settings()
        yield
        assert settings() == inside
    finally:
        torch.set_float32_matmul_precision(before)


# --- Values -----------------------------------------------------------------------------------------------------------


def randn(*shape, dtype=torch.float32, device="cpu", seed=0, scale=1.0) -> torch.Tensor:
    """Normal values that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def randint(low: int, high: int, shape, dtype=torch.int8, device="cpu", seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(dtype).to(device)


def representable(values, dtype: torch.dtype) -> bool:
    """Whether the fp32 `values` keep their value in `dtype`."""
    wide = torch.tensor(values, dtype=torch.float32)
    narrow = wide.to(dtype).float()
    return bool(((wide == narrow) | (wide.isnan() & narrow.isnan())).all())


def with_dtypes(cases, values) -> list:
    """Parameters (case, dtype) for each dtype that can represent the case's inputs, `values(case)`."""
    return [
        pytest.param(case, dtype, id=f"{case}-{dtype}")
        for case in cases
        for dtype in FLOATS
        if representable(values(case), dtype)
    ]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values of a floating tensor in row-major order, as float32 (exact)."""
    return tensor.detach().cpu().float().contiguous().numpy().reshape(-1)


# --- Oracles ----------------------------------------------------------------------------------------------------------

LEVELS = {"nf4": np.array(fourbit_cases.NF4, np.float32), "fp4": np.array(fourbit_cases.FP4, np.float32)}


def oracle_absmax(x: np.ndarray, blocksize: int) -> np.ndarray:
    """Largest magnitude of each block, NaN if there is one."""
    if x.size == 0:
        return np.zeros(0, np.float32)
    return np.maximum.reduceat(np.abs(x), np.arange(0, x.size, min(blocksize, x.size)))


def oracle_scaled(x: np.ndarray, absmax: np.ndarray, target: float = 1.0) -> np.ndarray:
    """`x * (target / absmax)`; `x / absmax * target` where that is not finite; 0 where absmax is 0."""
    target = np.float32(target)
    with np.errstate(all="ignore"):
        factor = target / absmax
        scaled = np.where(np.isinf(factor), x / absmax * target, x * factor)
    return np.where(absmax == 0, np.float32(0), scaled)


def _per_element(absmax: np.ndarray, blocksize: int, numel: int) -> np.ndarray:
    return absmax[np.arange(numel) // blocksize] if numel else np.zeros(0, np.float32)


def _count_below(points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Points strictly below each value; none for NaN."""
    return np.where(np.isnan(values), 0, np.searchsorted(points, np.nan_to_num(values, nan=0.0), side="left"))


def oracle_codes_4bit(x: np.ndarray, absmax: np.ndarray, blocksize: int, quant_type: str) -> np.ndarray:
    levels = LEVELS[quant_type]
    scaled = oracle_scaled(x, _per_element(absmax, blocksize, x.size))
    if quant_type == "nf4":
        points = (levels[:-1] + levels[1:]) / np.float32(2)
        return _count_below(points, scaled).astype(np.uint8)
    order = np.argsort(levels[:8], kind="stable")
    sorted_levels = levels[:8][order]
    points = (sorted_levels[:-1] + sorted_levels[1:]) / np.float32(2)
    magnitude = order[_count_below(points, np.abs(scaled))]
    return np.where(np.isnan(scaled), 0, magnitude + 8 * (x < 0)).astype(np.uint8)


def pack(codes: np.ndarray, zero_code: int) -> np.ndarray:
    """Two codes a byte, the first in the high nibble."""
    if codes.size % 2:
        codes = np.append(codes, np.uint8(zero_code))
    return (codes[::2] << 4) | codes[1::2]


def unpack(packed: torch.Tensor, numel: int) -> np.ndarray:
    data = bits(packed.cpu().contiguous().view(torch.uint8)).numpy().reshape(-1)
    return np.stack((data >> 4, data & 15), axis=1).reshape(-1)[:numel]


def oracle_quantize_4bit(x: torch.Tensor, blocksize: int, quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 packed bytes of shape (n, 1), and absmax."""
    values = to_numpy(x)
    absmax = oracle_absmax(values, blocksize)
    codes = oracle_codes_4bit(values, absmax, blocksize, quant_type)
    packed = pack(codes, 7 if quant_type == "nf4" else 0)
    return torch.from_numpy(packed).view(-1, 1), torch.from_numpy(absmax)


def oracle_dequantize_4bit(
    packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, shape, dtype=torch.float32
) -> torch.Tensor:
    numel = int(np.prod(shape))
    with np.errstate(all="ignore"):
        levels = LEVELS[quant_type][unpack(packed, numel)]
        values = levels * _per_element(to_numpy(absmax), blocksize, numel)
    return torch.from_numpy(values).view(torch.Size(shape)).to(dtype)


@cache
def golden_maps() -> dict[str, torch.Tensor]:
    """Maps recorded from upstream, by function and arguments."""
    return load_file(GOLDEN / "maps.safetensors")


def dynamic_map(signed: bool = True) -> torch.Tensor:
    return golden_maps()[f"dynamic signed={signed} max_exponent_bits=7 total_bits=8"]


def oracle_quantize_blockwise(x: torch.Tensor, code: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact nearest: midpoints of two fp32 levels are exact in float64 for the maps in use."""
    values, levels = to_numpy(x), to_numpy(code).astype(np.float64)
    absmax = oracle_absmax(values, blocksize)
    scaled = oracle_scaled(values, _per_element(absmax, blocksize, values.size)).astype(np.float64)
    codes = _count_below((levels[:-1] + levels[1:]) / 2, scaled).astype(np.uint8)
    return torch.from_numpy(codes).view(x.shape), torch.from_numpy(absmax)


def oracle_dequantize_blockwise(
    codes: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, blocksize: int, dtype=torch.float32
) -> torch.Tensor:
    index = codes.cpu().contiguous().numpy().reshape(-1)
    with np.errstate(all="ignore"):
        values = to_numpy(code)[index] * _per_element(to_numpy(absmax), blocksize, index.size)
    return torch.from_numpy(values).view(codes.shape).to(dtype)


def oracle_int8_rows(x: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, row statistics, outlier columns."""
    columns = x.shape[-1]
    values = (
        to_numpy(x).reshape(-1, columns) if x.numel() else np.zeros((int(np.prod(x.shape[:-1])), columns), np.float32)
    )
    magnitude = np.abs(values)
    with np.errstate(invalid="ignore"):
        outlier = magnitude >= np.float32(threshold) if threshold > 0 else np.zeros_like(magnitude, bool)
    kept = np.where(outlier, np.float32(0), magnitude)
    stats = kept.max(axis=1, initial=0.0) if not np.isnan(kept).any() else np.maximum.reduce(kept, axis=1, initial=0.0)
    scaled = oracle_scaled(values, stats[:, None], 127.0)
    whole = np.clip(np.rint(np.nan_to_num(scaled, nan=0.0, posinf=127, neginf=-127)), -127, 127)
    whole[:, outlier.any(axis=0)] = 0
    codes = torch.from_numpy(whole.astype(np.int8)).view(x.shape)
    found = torch.from_numpy(np.flatnonzero(outlier.any(axis=0))) if threshold > 0 else None
    return codes, torch.from_numpy(stats.astype(np.float32)), found
