"""`quantize_blockwise` and `dequantize_blockwise` against tables and an oracle."""

import pytest
import torch

from tests.cases.blockwise import BLOCKSIZES, CASES, SIZES
from tests.helpers import (
    FLOATS,
    assert_same,
    dynamic_map,
    golden_maps,
    oracle_dequantize_blockwise,
    oracle_quantize_blockwise,
    randint,
    randn,
    with_dtypes,
)

every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)

MAPS = {
    "dynamic": dynamic_map(),
    "unsigned dynamic": dynamic_map(signed=False),
    "linear": golden_maps()["linear signed=True total_bits=8 add_zero=True"],
    "fp8": golden_maps()["fp8 signed=True exponent_bits=4 precision_bits=3 total_bits=8"],
    "4 bits in 256": golden_maps()["dynamic signed=True max_exponent_bits=7 total_bits=4"],
}


def _powers_of_two() -> torch.Tensor:
    """Signed, down to subnormal levels; the midpoints are fp32 numbers."""
    magnitudes = 2.0 ** torch.arange(-127, 1, dtype=torch.float32)
    return torch.cat((-magnitudes[1:].flip(0), torch.zeros(1), magnitudes))


#: Maps that are harder to search.
HARD_MAPS = {
    "linear, unsigned": golden_maps()["linear signed=False total_bits=8 add_zero=True"],
    "fp8 with 5 exponent bits": golden_maps()["fp8 signed=True exponent_bits=5 precision_bits=2 total_bits=8"],
    "quantiles": randn(256, seed=1, scale=0.3).clamp(-1, 1).sort().values,
    "quantiles around 0.5": (0.5 + randn(256, seed=2, scale=1e-3)).sort().values,
    "pairs": torch.linspace(-1, 1, 128).repeat_interleave(2),
    "one level": torch.full((256,), 0.25),
    "powers of two": _powers_of_two(),
    "levels beyond 1": torch.linspace(-1.5, 1.3, 256),
    "levels far beyond 1": torch.linspace(-300, 200, 256),
    "huge levels": torch.linspace(-1.5e38, 1.5e38, 256),
}


def quantize(target, x, code, blocksize):
    return target.op("quantize_blockwise")(x.to(target.device), code.to(target.device), blocksize)


def dequantize(target, codes, absmax, code, blocksize, dtype):
    return target.op("dequantize_blockwise")(codes, absmax, code.to(target.device), blocksize, dtype)


@pytest.mark.parametrize("blocksize", [16, 100, 256, 4096])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (2, 1)], ids=["alone", "last", "between others"])
@pytest.mark.parametrize(("case", "dtype"), with_dtypes(CASES, lambda case: case.values))
def test_table(case, before, after, dtype, blocksize, target):
    code = dynamic_map(case.signed)
    padding = blocksize - len(case.values) if after else 0
    values = [1.0] * (before * blocksize) + [*case.values, *[0.0] * padding] + [1.0] * (after * blocksize)
    x = torch.tensor(values, dtype=torch.float32).to(dtype)
    codes, absmax = quantize(target, x, code, blocksize)
    decoded = dequantize(target, codes, absmax, code, blocksize, dtype).cpu()
    start, stop = before * blocksize, before * blocksize + len(case.values)

    assert_same(absmax, torch.tensor([1.0] * before + [case.absmax] + [1.0] * after))
    assert codes.cpu()[start:stop].tolist() == list(case.codes)
    assert codes.cpu()[stop : stop + padding].tolist() == [case.zero_code] * padding
    expected = case.decoded
    if expected is None:
        expected = (code[list(case.codes)] * torch.tensor(case.absmax)).tolist()
    assert_same(decoded[start:stop], torch.tensor(expected).to(dtype), "decoded")
    assert_same(decoded[stop : stop + padding], torch.full((padding,), case.zero_decoded, dtype=dtype), "padding")
    # The neighbours never notice.
    assert_same(decoded[:start], torch.ones(start, dtype=dtype), "before")
    assert_same(decoded[stop + padding :], torch.ones(after * blocksize, dtype=dtype), "after")


@pytest.mark.parametrize("name", MAPS)
@every_dtype
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_codes_statistics_and_decoding_equal_the_oracle_for_every_size(blocksize, dtype, name, target):
    code = MAPS[name]
    for numel in SIZES:
        x = randn(numel, dtype=dtype, seed=numel, scale=3.0)
        codes, absmax = quantize(target, x, code, blocksize)
        expected_codes, expected_absmax = oracle_quantize_blockwise(x, code, blocksize)
        assert_same(absmax, expected_absmax, f"absmax of {numel}")
        assert_same(codes, expected_codes, f"codes of {numel}")
        decoded = dequantize(target, codes, absmax, code, blocksize, dtype)
        assert_same(decoded, oracle_dequantize_blockwise(expected_codes, absmax, code, blocksize, dtype))


@pytest.mark.parametrize("copies", [1, 16])  # long inputs may be encoded in another way
@pytest.mark.parametrize("name", MAPS | HARD_MAPS)
def test_a_tie_goes_to_the_lower_code_and_its_neighbours_do_not(name, copies, target):
    """Around each midpoint: the exactly nearest level, also where the midpoint itself is no fp32 number."""
    code = (MAPS | HARD_MAPS)[name]
    exact = ((code[:-1].double() + code[1:].double()) / 2).float()
    near = (exact.view(torch.int32).unsqueeze(1) + torch.arange(-2, 3, dtype=torch.int32)).view(torch.float32).flatten()
    x = torch.cat((near[near.abs() <= 1], torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0**-149, -(2.0**-149)]))).repeat(copies)
    codes, absmax = quantize(target, x, code, 10**6)
    assert absmax.tolist() == [1.0]
    assert_same(codes, oracle_quantize_blockwise(x, code, 10**6)[0])


@pytest.mark.parametrize("numel", [100, 10_000])
@pytest.mark.parametrize("name", MAPS | HARD_MAPS)
def test_nan_has_code_0_in_every_map(name, numel, target):
    x = randn(numel)
    x[numel // 2] = float("nan")
    codes, absmax = quantize(target, x, (MAPS | HARD_MAPS)[name], 10**6)
    assert absmax.isnan().all()
    assert_same(codes, torch.zeros(numel, dtype=torch.uint8))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numel", [3 * 2**18 + 777, 2**20])
def test_long_blocks_on_several_threads(numel, threads, target):
    """The largest magnitude of each of three blocks lies at its start, at its end, or is a NaN in its middle."""
    blocksize = 2**18 + 259
    x = randn(numel, dtype=torch.bfloat16)
    x[0], x[2 * blocksize - 1], x[2 * blocksize + 100_000] = -100.0, 200.0, float("nan")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        codes, absmax = quantize(target, x, dynamic_map(), blocksize)
        decoded = dequantize(target, codes, absmax, dynamic_map(), blocksize, torch.float32)
    finally:
        torch.set_num_threads(before)
    expected_codes, expected_absmax = oracle_quantize_blockwise(x, dynamic_map(), blocksize)
    assert expected_absmax[:2].tolist() == [100.0, 200.0]
    assert_same(absmax, expected_absmax)
    assert_same(codes, expected_codes)
    assert_same(decoded, oracle_dequantize_blockwise(codes, absmax, dynamic_map(), blocksize, torch.float32))


def test_a_strided_block_that_is_too_large_for_a_copy():
    x = randn(1025, 2049, dtype=torch.bfloat16)
    expected_codes, expected_absmax = oracle_quantize_blockwise(x, dynamic_map(), 2**40)
    codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(x.t().contiguous().t(), dynamic_map(), 2**40)
    assert_same(absmax, expected_absmax)
    assert_same(codes, expected_codes)
    codes = codes.t().contiguous().t()
    decoded = torch.ops.bitsandbytes.dequantize_blockwise(codes, absmax, dynamic_map(), 2**40, torch.float16)
    assert_same(decoded, oracle_dequantize_blockwise(codes, absmax, dynamic_map(), 2**40, torch.float16))


@pytest.mark.parametrize("signed", [True, False])
def test_every_level_is_its_own_nearest(signed, target):
    code = dynamic_map(signed)
    codes, _ = quantize(target, code, code, 256)
    assert_same(codes, torch.arange(256, dtype=torch.uint8))
    decoded = dequantize(target, codes, torch.ones(1, device=target.device), code, 256, torch.float32)
    assert_same(decoded, code)


# bitsandbytes#1540: fp16 ones came back as zeros.
@every_dtype
def test_ones_come_back_as_ones_in_every_dtype(dtype, target):
    x = torch.ones(5, 10, dtype=dtype)
    codes, absmax = quantize(target, x, dynamic_map(), 4096)
    assert_same(dequantize(target, codes, absmax, dynamic_map(), 4096, dtype), x)


@every_dtype
@pytest.mark.parametrize("shape", [(), (1,), (7, 13), (3, 5, 7), (0,), (0, 64), (4, 0)], ids=str)
def test_every_shape_comes_back(shape, dtype, target):
    x = randn(*shape, dtype=dtype)
    codes, absmax = quantize(target, x, dynamic_map(), 7)
    expected_codes, expected_absmax = oracle_quantize_blockwise(x, dynamic_map(), 7)
    assert_same(codes, expected_codes)
    assert_same(absmax, expected_absmax)
    decoded = dequantize(target, codes, absmax, dynamic_map(), 7, dtype)
    assert_same(decoded, oracle_dequantize_blockwise(codes, absmax, dynamic_map(), 7, dtype))


@pytest.mark.parametrize("blocksize", [1, 3, 64, 4096])
def test_random_codes_decode_to_level_times_absmax_with_one_rounding(blocksize, target):
    codes = randint(0, 256, (33, 100), torch.uint8).t()
    absmax = randn(-(3300 // -blocksize)).abs() * 100
    for dtype in FLOATS:
        decoded = dequantize(target, codes.to(target.device), absmax.to(target.device), dynamic_map(), blocksize, dtype)
        assert_same(decoded, oracle_dequantize_blockwise(codes, absmax, dynamic_map(), blocksize, dtype))
