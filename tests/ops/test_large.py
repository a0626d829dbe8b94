"""More than 2**31 elements: offsets are 64-bit everywhere. The inputs are expanded, so they are small themselves."""

import pytest
import torch

from tests.helpers import (
    assert_same,
    dynamic_map,
    oracle_dequantize_4bit,
    oracle_dequantize_blockwise,
    oracle_int8_rows,
    oracle_quantize_4bit,
    oracle_quantize_blockwise,
    randn,
)

pytestmark = pytest.mark.slow

# Odd, above 2**31 + 65, and the row length shares no factor with a block size, so every block differs.
ROWS, COLUMNS = 1_398_103, 1537
NUMEL = ROWS * COLUMNS
assert NUMEL > 2**31 + 65
assert NUMEL % 2


def row() -> torch.Tensor:
    return randn(COLUMNS, dtype=torch.float16)


def pattern(start: int, stop: int) -> torch.Tensor:
    """Elements `start` to `stop` of the flattened input."""
    return row()[torch.arange(start, stop) % COLUMNS]


def block_starts(blocksize: int) -> list[int]:
    """First elements of the blocks to check: at the ends, in the middle, and on both sides of 2**30 and 2**31."""
    last = (NUMEL - 1) // blocksize
    blocks = {0, 1, last // 2, last - 1, last}
    for edge in (2**30, 2**31):
        blocks |= {edge // blocksize - 1, edge // blocksize, edge // blocksize + 1}
    return [block * blocksize for block in sorted(blocks)]


def stop_of(start: int, blocksize: int) -> int:
    return min(start + blocksize, NUMEL)


# bitsandbytes#1782
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4bit(quant_type):
    blocksize = 64
    x = row().expand(ROWS, COLUMNS)
    packed, absmax = torch.ops.bitsandbytes.quantize_4bit(x, blocksize, quant_type, torch.uint8)
    assert packed.shape == ((NUMEL + 1) // 2, 1)
    assert absmax.shape == ((NUMEL + blocksize - 1) // blocksize,)
    decoded = torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, blocksize, quant_type, x.shape, torch.float16)
    assert decoded.shape == x.shape
    flat = decoded.view(-1)
    for start in block_starts(blocksize):
        stop = stop_of(start, blocksize)
        expected, scale = oracle_quantize_4bit(pattern(start, stop), blocksize, quant_type)
        assert_same(packed[start // 2 : (stop + 1) // 2], expected, f"codes at {start}")
        assert_same(absmax[start // blocksize : start // blocksize + 1], scale, f"absmax at {start}")
        values = oracle_dequantize_4bit(expected, scale, blocksize, quant_type, (stop - start,), torch.float16)
        assert_same(flat[start:stop], values, f"values at {start}")


def test_blockwise():
    blocksize = 4096
    x = row().expand(ROWS, COLUMNS)
    code = dynamic_map()
    codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(x, code, blocksize)
    assert absmax.shape == ((NUMEL + blocksize - 1) // blocksize,)
    decoded = torch.ops.bitsandbytes.dequantize_blockwise(codes, absmax, code, blocksize, torch.float16)
    for start in block_starts(blocksize):
        stop = stop_of(start, blocksize)
        expected, scale = oracle_quantize_blockwise(pattern(start, stop), code, blocksize)
        assert_same(codes.view(-1)[start:stop], expected, f"codes at {start}")
        assert_same(absmax[start // blocksize : start // blocksize + 1], scale, f"absmax at {start}")
        values = oracle_dequantize_blockwise(expected, scale, code, blocksize, torch.float16)
        assert_same(decoded.view(-1)[start:stop], values, f"values at {start}")


@pytest.mark.parametrize("threshold", [0.0, 3.0])
def test_int8_rows(threshold):
    scales = torch.tensor([[1.0], [0.5], [0.25]], dtype=torch.float16)
    three = row() * scales  # rows repeat with period 3, which is no divisor of a power of two
    x = three.repeat(ROWS // 3 // 1000, 1).expand(1001, -1, -1)
    rows = x.shape[0] * x.shape[1]
    assert rows * COLUMNS > 2**31
    codes, stats, outliers = torch.ops.bitsandbytes.int8_vectorwise_quant(x, threshold)
    expected_codes, expected_stats, expected_outliers = oracle_int8_rows(three, threshold)
    codes = codes.view(rows, COLUMNS)
    for at in {
        0,
        1,
        rows // 2,
        2**30 // COLUMNS,
        2**30 // COLUMNS + 1,
        2**31 // COLUMNS,
        2**31 // COLUMNS + 1,
        rows - 1,
    }:
        assert_same(codes[at], expected_codes[at % 3], f"row {at}")
        assert_same(stats[at], expected_stats[at % 3], f"statistic {at}")
    assert torch.equal(stats.view(-1, 3), expected_stats.expand(rows // 3, 3))
    if threshold:
        assert_same(outliers, expected_outliers)
    else:
        assert outliers is None
