"""The Ascend C kernels on the simulated chip, bit for bit against the reference.

The simulator fails a call whose kernel breaks a rule of the chip, so each of these tests also proves bounds, alignment,
order and so on for its sizes. tests/simulator/ascendc/README.md says what it cannot show.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
import shutil
import subprocess

import pytest
import torch

from bitsandbytes.backends.default import blockwise, fourbit
from bitsandbytes.formats import (
    CODEBOOKS,
    create_dynamic_map,
    decision_points,
    exact_midpoints,
    num_blocks,
    packed_bytes,
)

ROOT = Path(__file__).resolve().parents[3]
SIMULATOR = Path(__file__).resolve().parent
KERNELS = ROOT / "csrc" / "npu" / "kernels"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANT_TYPES = ("nf4", "fp4")
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
UB = 192 * 1024


class Options(ctypes.Structure):
    _fields_ = [
        ("cores", ctypes.c_uint32),
        ("ub_bytes", ctypes.c_uint32),
        ("at_end", ctypes.c_int32),
        ("only_block", ctypes.c_int32),
    ]


class Result(ctypes.Structure):
    _fields_ = [
        ("cycles", ctypes.c_double),
        ("bound", ctypes.c_double),
        ("busy", ctypes.c_double * 4),
        ("cores", ctypes.c_uint32),
        ("tile", ctypes.c_uint32),
        ("error", ctypes.c_char * 640),
    ]


@dataclass
class Simulated:
    """Calls an operator of the library; a violation is an AssertionError with the kernel, the call and the address."""

    library: ctypes.CDLL

    def __call__(self, op, dtype, *arguments, cores=40, at_end=True, only_block=-1) -> Result:
        options, result = Options(cores, UB, at_end, only_block), Result()
        values = [
            ctypes.c_void_p(None if value is None else value.data_ptr())
            if value is None or isinstance(value, torch.Tensor)
            else ctypes.c_int64(value)
            for value in arguments
        ]
        function = getattr(self.library, f"bnb_sim_{op}")
        status = function(ctypes.byref(options), ctypes.byref(result), DTYPES.index(dtype), *values)
        assert status == 0, result.error.decode()
        return result


@pytest.fixture(scope="session")
def simulated(tmp_path_factory) -> Simulated:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("ascendc") / "libbitsandbytes_npu_sim.so"
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", f"-I{SIMULATOR}", f"-I{ROOT / 'csrc'}"]
    sources = [SIMULATOR / "host.cpp", *sorted(KERNELS.glob("*.cpp"))]
    subprocess.run([compiler, *options, *map(str, sources), "-o", str(library)], check=True)
    return Simulated(ctypes.CDLL(str(library)))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """All NaNs are one value; -0 is not 0."""
    if not actual.dtype.is_floating_point:
        return torch.equal(actual, expected)
    bits = torch.int32 if actual.dtype == torch.float32 else torch.int16
    equal = actual.view(bits) == expected.view(bits)
    return bool((equal | (actual.isnan() & expected.isnan())).all())


def around(*sizes: int) -> list[int]:
    return sorted({size + d for size in sizes for d in range(-2, 3) if size + d > 0})


# What makes an absmax special: zero, both subnormal ranges, the largest, infinity, NaN.
SPECIAL = torch.tensor([0.0, -0.0, 1e-45, 1e-40, 2.9e-39, 1.2e-38, 6e-8, 65504.0, 1e5, 3.4e38, torch.inf, torch.nan])


def packed_case(n: int, blocksize: int, seed: int = 0, special: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + n)
    packed = torch.randint(0, 256, (packed_bytes(n),), dtype=torch.uint8, generator=generator)
    absmax = torch.rand(num_blocks(n, blocksize), generator=generator)
    if special:
        absmax[torch.rand(absmax.shape, generator=generator) < 0.5] = SPECIAL[0]
        picks = torch.randint(0, len(SPECIAL), absmax.shape, generator=generator)
        absmax = torch.where(torch.rand(absmax.shape, generator=generator) < 0.7, SPECIAL[picks], absmax)
    return packed, absmax


def check_dequantize_4bit(simulated, n, dtype, quant_type="nf4", blocksize=64, special=False, **options):
    packed, absmax = packed_case(n, blocksize, special=special)
    out = torch.empty(n, dtype=dtype)
    which = QUANT_TYPES.index(quant_type)
    result = simulated("dequantize_4bit", dtype, which, n, blocksize, packed, absmax, None, None, None, out, **options)
    expected = fourbit.dequantize_4bit(packed, absmax, blocksize, quant_type, (n,), dtype)
    assert same_bits(out, expected), (n, dtype, quant_type, blocksize)
    return result


def test_dequantize_4bit_every_size(simulated):
    for n in range(1, 5001):
        check_dequantize_4bit(simulated, n, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cores", [1, 8, 20, 40, 48])
def test_dequantize_4bit_boundaries(simulated, dtype, cores):
    # Of units (1024), tiles, shares, and sizes at which an earlier public kernel wrote past the end.
    for n in around(64, 1024, 2496, 4096, 8192, 16384, 1024 * cores, 2048 * cores):
        check_dequantize_4bit(simulated, n, dtype, cores=cores, at_end=n % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_dequantize_4bit_blocksizes(simulated, dtype, quant_type, blocksize):
    for n in (1, blocksize - 1, blocksize, blocksize + 1, 3 * blocksize, 40001, 65537):
        check_dequantize_4bit(simulated, n, dtype, quant_type, blocksize, special=True, cores=2)


# An earlier public kernel read and wrote past the end for these, or decoded the last element wrongly.
@pytest.mark.parametrize(
    ("n", "blocksize"),
    [(n, 64) for n in (64, 100, 2561, 2563, 2567, 2569, 4992, 5121, 10000, 97344)]
    + [(8192, 4096), (1 << 20, 4096), (6230016, 4096)],
)
def test_dequantize_4bit_where_others_failed(simulated, n, blocksize):
    check_dequantize_4bit(simulated, n, torch.float16, blocksize=blocksize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_dequantize_4bit_nested(simulated, dtype, blocksize):
    # 256 blocks share a second-level statistic; the sizes cross from one to the next.
    code = create_dynamic_map()
    for n in (1, blocksize + 1, 256 * blocksize if blocksize <= 512 else 9 * blocksize, 256 * 64 + 3, 600 * 32 + 1):
        packed, _ = packed_case(n, blocksize)
        generator = torch.Generator().manual_seed(n)
        codes = torch.randint(0, 256, (num_blocks(n, blocksize),), dtype=torch.uint8, generator=generator)
        second = torch.rand(num_blocks(codes.numel(), 256), generator=generator)
        offset = torch.tensor([0.37])
        out = torch.empty(n, dtype=dtype)
        simulated("dequantize_4bit", dtype, 0, n, blocksize, packed, second, codes, code, offset, out, cores=3)
        absmax = code[codes.int()] * second.repeat_interleave(256)[: codes.numel()] + offset
        expected = fourbit.dequantize_4bit(packed, absmax, blocksize, "nf4", (n,), dtype)
        assert same_bits(out, expected), (n, dtype, blocksize)


def float_case(n: int, dtype: torch.dtype, seed: int = 0, special: bool = False) -> torch.Tensor:
    """Values whose scale changes every 32 elements; some of the runs hold special values."""
    generator = torch.Generator().manual_seed(seed + n)
    values = torch.randn(n, generator=generator)
    if special:
        runs = num_blocks(n, 32)
        scales = 2.0 ** torch.randint(-140, 120, (runs,), generator=generator)
        scales = torch.where(torch.rand(runs, generator=generator) < 0.5, scales, 1.0)
        values *= scales.repeat_interleave(32)[:n]
        picks = SPECIAL[torch.randint(0, len(SPECIAL), (n,), generator=generator)]
        picks = torch.where(torch.rand(n, generator=generator) < 0.5, picks, -picks)
        rare = (torch.rand(runs, generator=generator) < 0.2).repeat_interleave(32)[:n]
        values = torch.where(rare & (torch.rand(n, generator=generator) < 0.2), picks, values)
    return values.to(dtype)


def check_quantize_4bit(simulated, values, quant_type="nf4", blocksize=64, **options) -> Result:
    n = values.numel()
    packed, absmax = torch.empty(packed_bytes(n), dtype=torch.uint8), torch.empty(num_blocks(n, blocksize))
    which = QUANT_TYPES.index(quant_type)
    result = simulated("quantize_4bit", values.dtype, which, n, blocksize, values, packed, absmax, **options)
    expected, statistics = fourbit.quantize_4bit(values, blocksize, quant_type, torch.uint8)
    assert same_bits(absmax, statistics), (n, values.dtype, quant_type, blocksize)
    assert same_bits(packed, expected.view(-1)), (n, values.dtype, quant_type, blocksize)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_quantize_4bit_sizes(simulated, dtype, quant_type):
    for n in [*range(1, 140), *range(140, 5000, 81)]:
        check_quantize_4bit(simulated, float_case(n, dtype), quant_type, at_end=n % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cores", [1, 8, 20, 40, 48])
def test_quantize_4bit_boundaries(simulated, dtype, cores):
    for n in around(4096, 8192, 1024 * cores):
        check_quantize_4bit(simulated, float_case(n, dtype), cores=cores)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_quantize_4bit_special_values(simulated, dtype, quant_type, blocksize):
    for seed, n in enumerate((1, blocksize - 1, blocksize, blocksize + 1, 3 * blocksize, 20001, 40001)):
        values = float_case(n, dtype, seed, special=True)
        check_quantize_4bit(simulated, values, quant_type, blocksize, cores=2)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_quantize_4bit_special_blocks(simulated, quant_type):
    # Blocks that are all one special value, and one special value among others, with odd ends.
    for value in (*SPECIAL.tolist(), *(-SPECIAL).tolist()):
        for n in (1, 63, 64, 65):
            check_quantize_4bit(simulated, torch.full((n,), value), quant_type)
            values = float_case(n, torch.float32)
            values[n // 2] = value
            check_quantize_4bit(simulated, values, quant_type)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_quantize_4bit_decision_points(simulated, quant_type):
    # At, just below and just above every point, and every level; the block's maximum is 1.
    points = torch.tensor([*decision_points(quant_type), *CODEBOOKS[quant_type]])
    near = torch.cat([points, points.nextafter(torch.tensor(2.0)), points.nextafter(torch.tensor(-2.0))])
    near = torch.cat([near, -near]).clamp(-1, 1)
    blocks = torch.nn.functional.pad(near, (0, -near.numel() % 63)).view(-1, 63)
    check_quantize_4bit(simulated, torch.nn.functional.pad(blocks, (1, 0), value=1.0).reshape(-1), quant_type)


def check_dequantize_blockwise(simulated, n, dtype, blocksize=256, special=False, **options) -> None:
    _, absmax = packed_case(n, blocksize, special=special)
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)
    code, out = create_dynamic_map(), torch.empty(n, dtype=dtype)
    simulated("dequantize_blockwise", dtype, n, blocksize, codes, absmax, code, out, **options)
    expected = blockwise.dequantize_blockwise(codes, absmax, code, blocksize, dtype)
    assert same_bits(out, expected), (n, dtype, blocksize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cores", [1, 8, 20, 40, 48])
def test_dequantize_blockwise_boundaries(simulated, dtype, cores):
    for n in [*range(1, 40), *range(40, 5000, 331), *around(4096, 8192, 1024 * cores, 2048 * cores)]:
        check_dequantize_blockwise(simulated, n, dtype, cores=cores, at_end=n % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocksize", [*BLOCKSIZES, 8192, 16384, 1 << 20])
def test_dequantize_blockwise_blocksizes(simulated, dtype, blocksize):
    # Blocks larger than a tile, and larger than the tensor.
    for n in (1, min(blocksize, 1 << 15) + 1, 3 * min(blocksize, 1 << 14), 40001):
        check_dequantize_blockwise(simulated, n, dtype, blocksize, special=True, cores=3)


def check_quantize_blockwise(simulated, values, blocksize=256, code=None, **options) -> None:
    n, code = values.numel(), create_dynamic_map() if code is None else code
    codes, absmax = torch.empty(n, dtype=torch.uint8), torch.empty(num_blocks(n, blocksize))
    points = exact_midpoints(code)
    simulated("quantize_blockwise", values.dtype, n, blocksize, values, points, codes, absmax, **options)
    expected, statistics = blockwise.quantize_blockwise(values, code, blocksize)
    assert same_bits(absmax, statistics), (n, values.dtype, blocksize)
    assert same_bits(codes, expected), (n, values.dtype, blocksize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cores", [1, 8, 20, 40, 48])
def test_quantize_blockwise_boundaries(simulated, dtype, cores):
    for n in [*range(1, 40), *range(40, 5000, 397), *around(4096, 8192, 1024 * cores)]:
        check_quantize_blockwise(simulated, float_case(n, dtype), cores=cores, at_end=n % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_quantize_blockwise_special_values(simulated, dtype, blocksize):
    for seed, n in enumerate((1, blocksize - 1, blocksize + 1, 3 * blocksize, 20001)):
        check_quantize_blockwise(simulated, float_case(n, dtype, seed, special=True), blocksize, cores=2)


@pytest.mark.parametrize("signed", [True, False])
def test_quantize_blockwise_decision_points(simulated, signed):
    code = create_dynamic_map(signed)
    points = torch.cat([exact_midpoints(code), code]).clamp(-1, 1)
    near = torch.cat([points, points.nextafter(torch.tensor(2.0)), points.nextafter(torch.tensor(-2.0))]).clamp(-1, 1)
    blocks = torch.nn.functional.pad(near, (0, -near.numel() % 63)).view(-1, 63)
    values = torch.nn.functional.pad(blocks, (1, 0), value=1.0).reshape(-1)
    check_quantize_blockwise(simulated, values, 64, code)


def check_gemv_4bit(simulated, batch, rows, columns, dtype, quant_type="nf4", blocksize=64, nested=False, **options):
    packed, absmax = packed_case(rows * columns, blocksize)
    x = float_case(batch * columns, dtype, seed=1).view(batch, columns)
    out = torch.empty(batch, rows, dtype=dtype)
    statistics = (absmax, None, None, None)
    if nested:
        codes, code, offset = (absmax * 255).to(torch.uint8), create_dynamic_map(), torch.tensor([0.5])
        second = torch.rand(num_blocks(codes.numel(), 256))
        absmax = code[codes.int()] * second.repeat_interleave(256)[: codes.numel()] + offset
        statistics = (second, codes, code, offset)
    which = QUANT_TYPES.index(quant_type)
    result = simulated(
        "gemv_4bit", dtype, which, batch, rows, columns, blocksize, x, packed, *statistics, out, **options
    )
    weight = fourbit.dequantize_4bit(packed, absmax, blocksize, quant_type, (rows, columns), torch.float32).double()
    exact = x.double() @ weight.t()
    # docs/numerics.md: the sum in fp32, and one rounding of the result.
    bound = 2 * columns * 2**-23 * (x.double().abs() @ weight.abs().t())
    bound += exact.abs() * torch.finfo(dtype).eps / 2 + 1e-7
    assert ((out.double() - exact).abs() <= bound).all(), (batch, rows, columns, dtype, quant_type, blocksize)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", range(1, 9))
def test_gemv_4bit_batch(simulated, dtype, batch):
    check_gemv_4bit(simulated, batch, 70, 576, dtype, cores=3)
    check_gemv_4bit(simulated, batch, 3, 9216, dtype, "fp4", cores=1)  # more than a tile in a row
    check_gemv_4bit(simulated, batch, 2, 33024, dtype, cores=1)  # an input that does not stay in the UB


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("nested", [False, True])
def test_gemv_4bit_blocksizes(simulated, quant_type, blocksize, nested):
    for rows, columns in ((1, blocksize), (5, 3 * blocksize), (130, 2 * min(blocksize, 256))):
        columns = max(columns, blocksize)
        check_gemv_4bit(simulated, 1, rows, columns, torch.bfloat16, quant_type, blocksize, nested, cores=2)


@pytest.mark.parametrize("cores", [1, 8, 20, 40, 48])
def test_gemv_4bit_rows(simulated, cores):
    for rows in around(cores, 64, 2 * cores):
        check_gemv_4bit(simulated, 2, rows, 128, torch.float16, cores=cores, at_end=rows % 2 == 0)


def test_gemv_4bit_shows_nan_and_infinity(simulated):
    packed, absmax = torch.full((2 * 64,), 0xFF, dtype=torch.uint8), torch.tensor([1.0, torch.nan, torch.inf, 1.0])
    out = torch.empty(1, 4)
    simulated("gemv_4bit", torch.float32, 0, 1, 4, 64, 64, torch.ones(64), packed, absmax, None, None, None, out)
    assert out[0, 1].isnan() and out[0, 2].isinf()
    assert out[0, [0, 3]].tolist() == [64.0, 64.0]


# Modelled on 910B3, 4096 x 4096, blocksize 64, as a multiple of what the HBM takes for the same bytes. One block runs:
# the first has the largest share, the others would take as long.
N = 4096 * 4096


def modelled(result: Result, limit: float) -> None:
    assert result.cores == 40
    assert 1.0 <= result.cycles / result.bound <= limit


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1.4), (torch.float16, 2.3), (torch.bfloat16, 2.3)])
def test_dequantize_4bit_modelled_time(simulated, dtype, limit):
    packed, absmax = packed_case(N, 64)
    out = torch.empty(N, dtype=dtype)
    arguments = (0, N, 64, packed, absmax, None, None, None, out)
    modelled(simulated("dequantize_4bit", dtype, *arguments, only_block=0), limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_4bit_modelled_time(simulated, dtype):
    values = torch.ones(N, dtype=dtype)
    packed, absmax = torch.empty(packed_bytes(N), dtype=torch.uint8), torch.empty(num_blocks(N, 64))
    modelled(simulated("quantize_4bit", dtype, 0, N, 64, values, packed, absmax, only_block=0), 6.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocksize", [64, 4096])
def test_dequantize_blockwise_modelled_time(simulated, dtype, blocksize):
    codes, absmax = torch.zeros(N, dtype=torch.uint8), torch.ones(num_blocks(N, blocksize))
    arguments = (N, blocksize, codes, absmax, create_dynamic_map(), torch.empty(N, dtype=dtype))
    modelled(simulated("dequantize_blockwise", dtype, *arguments, only_block=0), 2.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemv_4bit_modelled_time(simulated, dtype):
    # Faster than decoding, and then a product that takes no longer than the HBM for the decoded weight.
    packed, absmax = packed_case(N, 64)
    weight, x, y = torch.empty(N, dtype=dtype), torch.ones(4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    arguments = (0, N, 64, packed, absmax, None, None, None, weight)
    decode = simulated("dequantize_4bit", dtype, *arguments, only_block=0)
    arguments = (0, 1, 4096, 4096, 64, x, packed, absmax, None, None, None, y)
    fused = simulated("gemv_4bit", dtype, *arguments, only_block=0)
    product = weight.nbytes / 1.6e12 * 1.8e9
    assert fused.cycles < decode.cycles + product
