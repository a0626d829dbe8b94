"""Temporaries are bounded by a constant: measured in bytes of PyTorch's allocator."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import bitsandbytes.functional as F
from tests.helpers import devices

MIB = 2**20
LIMIT = 256 * MIB  # for an input (or result) of 1 GiB
FULL = 1024 * MIB

pytestmark = pytest.mark.skipif("cpu" not in devices(), reason="measures the CPU's allocator")


def allocated(call) -> tuple[int, int]:
    """Bytes allocated at most during a call, and those that its result holds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del result
    return peak, now


def temporaries(call) -> int:
    peak, result = allocated(call)
    return peak - result


def at_full_size(make_call) -> float:
    """Temporaries for a tensor of 1 GiB, from those for 16 and 64 MiB: they grow linearly or not at all."""
    small, large = FULL // 64, FULL // 16
    first, second = temporaries(make_call(small)), temporaries(make_call(large))
    return second + (second - first) * (FULL - large) / (large - small)


def tensor(layout: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """`size` bytes as a matrix: contiguous, transposed, or expanded from one row or one column."""
    columns = 2048
    rows = size // dtype.itemsize // columns
    if layout == "expanded rows":
        return torch.randn(1, columns).to(dtype).expand(rows, columns)
    if layout == "expanded columns":
        return torch.randn(rows, 1).to(dtype).expand(rows, columns)
    values = torch.empty(rows, columns, dtype=dtype)
    values[:] = torch.randn(1, columns).to(dtype)
    return values.view(columns, rows).t() if layout == "transposed" else values


def quantize_nf4(x):
    return F.quantize_4bit(x, quant_type="nf4")


def quantize_fp4_nested(x):
    return F.quantize_4bit(x, quant_type="fp4", compress_statistics=True)


QUANTIZE = {
    "nf4": quantize_nf4,
    "nested fp4": quantize_fp4_nested,
    "blockwise": F.quantize_blockwise,
    "blockwise in one block": lambda x: F.quantize_blockwise(x, blocksize=2**40),
    "int8 rows": F.int8_vectorwise_quant,
    "int8 rows with outliers": lambda x: F.int8_vectorwise_quant(x, threshold=3.0),
}
LAYOUTS = ("contiguous", "transposed", "expanded rows", "expanded columns")


def quantize_call(name, layout, size):
    x = tensor(layout, size, torch.float16)
    assert x.numel() * x.itemsize == size
    return lambda: QUANTIZE[name](x)


def dequantize_call(name, layout, size):
    """A call that decodes to `size` bytes, mostly of fp16, from codes that lie as `layout` says."""
    numel = size // 2
    if name == "blockwise":
        codes = tensor(layout, numel, torch.uint8)
        absmax = torch.ones(-(numel // -4096))
        return lambda: torch.ops.bitsandbytes.dequantize_blockwise(
            codes, absmax, F.create_dynamic_map(), 4096, torch.float16
        )
    if name == "int8 rows":
        codes = tensor(layout, numel // 2, torch.int8)  # decodes to fp32
        return lambda: F.int8_vectorwise_dequant(codes, torch.ones(codes.shape[0]))
    packed = tensor(layout, numel // 2, torch.uint8)
    rows = numel // 2048
    args = (packed, torch.ones(-(numel // -64)), 64, "nf4", (rows, 2048), torch.float16)
    if name == "nf4 into out":
        out = torch.empty(2048, rows, dtype=torch.float16).t()
        return lambda: torch.ops.bitsandbytes.dequantize_4bit.out(*args, out=out)
    return lambda: torch.ops.bitsandbytes.dequantize_4bit(*args)


DEQUANTIZE = ("nf4", "nf4 into out", "blockwise", "int8 rows")


CALLS = [
    pytest.param(make, name, layout, id=f"{verb} {name}, {layout}")
    for verb, make, names in (("quantise", quantize_call, QUANTIZE), ("decode", dequantize_call, DEQUANTIZE))
    for name in names
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("make", "name", "layout"), CALLS)
def test_temporaries_for_1_gib_stay_below_256_mib_by_extrapolation(make, name, layout):
    assert at_full_size(lambda size: make(name, layout, size)) < LIMIT


LARGE = [
    call
    for call in CALLS
    if call.values[1:] in {(name, "transposed") for name in ("nf4", "blockwise", "int8 rows")}
    or call.values[1:] in {("nf4", layout) for layout in ("contiguous", "expanded rows")}
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name", "layout"), LARGE)
def test_temporaries_for_1_gib_stay_below_256_mib(make, name, layout):
    assert temporaries(make(name, layout, FULL)) < LIMIT


@pytest.mark.parametrize("layout", ["transposed", "expanded rows", "expanded columns"])
def test_the_measure_notices_a_contiguous_copy(layout):
    def make(size):
        x = tensor(layout, size, torch.float16)
        return lambda: quantize_nf4(x.contiguous())

    assert at_full_size(make) > LIMIT


def test_the_measure_notices_a_cast_of_the_whole_result():
    def make(size):
        call = dequantize_call("nf4", "contiguous", size)
        return lambda: call().float().half()

    assert at_full_size(make) > LIMIT


def test_decoding_a_few_rows_of_a_matmul_does_not_decode_the_whole_weight():
    packed = torch.zeros(2**24, 1, dtype=torch.uint8)  # decodes to 128 MiB of fp32
    absmax = torch.ones(2**25 // 64)
    x = torch.ones(1, 4096, dtype=torch.float16)
    args = (packed, [2**13, 4096], absmax, 64, "nf4")
    assert temporaries(lambda: torch.ops.bitsandbytes.gemm_4bit(x, *args)) < 32 * MIB
