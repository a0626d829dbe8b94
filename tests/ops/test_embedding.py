"""`embedding_4bit` and `int8_embedding` against rows of the decoded table."""

import pytest
import torch

from tests.helpers import (
    FLOATS,
    QUANT_TYPES,
    assert_same,
    dynamic_map,
    oracle_dequantize_4bit,
    oracle_dequantize_blockwise,
    randint,
    randn,
)

every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
ROWS = 9
# Rows that start within a byte, within a block, and at blocks; shorter and longer than vectors and blocks.
WIDTHS = (1, 2, 7, 31, 32, 33, 64, 65, 96, 100, 130, 257)


def indices(dtype=torch.int64, device="cpu"):
    return torch.tensor([[8, 0, 3], [3, 7, 1]], dtype=dtype, device=device)


@every_dtype
@pytest.mark.parametrize("blocksize", [32, 64, 256])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_4bit_rows_equal_those_of_the_decoded_table(quant_type, width, blocksize, dtype, target):
    numel = ROWS * width
    packed = randint(0, 256, ((numel + 1) // 2, 1), torch.uint8)
    absmax = randn(-(numel // -blocksize), seed=1).abs()
    args = [t.to(target.device) for t in (packed, absmax)]
    result = target.op("embedding_4bit")(
        indices(device=target.device), args[0], [ROWS, width], args[1], blocksize, quant_type, dtype
    )
    table = oracle_dequantize_4bit(packed, absmax, blocksize, quant_type, (ROWS, width), dtype)
    assert_same(result.cpu(), table[indices()])


@every_dtype
@pytest.mark.parametrize("width", [31, 64, 100, 20_000])  # the last has more than 256 blocks a row
def test_4bit_rows_with_nested_statistics(width, dtype, target):
    numel = ROWS * width
    packed = randint(0, 256, ((numel + 1) // 2, 1), torch.uint8)
    codes = randint(0, 256, (-(numel // -64),), torch.uint8, seed=1)
    scales, offset = randn(-(codes.numel() // -256), seed=2).abs(), torch.tensor(0.75)
    moved = [t.to(target.device) for t in (packed, scales, codes, dynamic_map(), offset)]
    result = target.op("embedding_4bit")(
        indices(device=target.device), moved[0], [ROWS, width], moved[1], 64, "nf4", dtype, *moved[2:]
    )
    absmax = oracle_dequantize_blockwise(codes, scales, dynamic_map(), 256) + offset
    assert_same(result.cpu(), oracle_dequantize_4bit(packed, absmax, 64, "nf4", (ROWS, width), dtype)[indices()])


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_int8_rows_equal_those_of_the_decoded_table(width, dtype, target):
    codes, stats = randint(-127, 128, (ROWS, width)), randn(ROWS, seed=1).abs()
    result = target.op("int8_embedding")(
        indices(device=target.device), codes.to(target.device), stats.to(target.device), dtype
    )
    table = (codes.float() * stats.unsqueeze(1) * torch.tensor(1 / 127)).to(dtype)
    assert_same(result.cpu(), table[indices()])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 1, 3)])
def test_indices_of_any_shape(shape, dtype, target):
    rows = randint(0, ROWS, shape, dtype, device=target.device)
    codes, stats = randint(-127, 128, (ROWS, 6), device=target.device), torch.ones(ROWS, device=target.device)
    result = target.op("int8_embedding")(rows, codes, stats, torch.float32)
    assert result.shape == (*shape, 6)
    packed = torch.zeros(ROWS * 3, dtype=torch.uint8, device=target.device)
    absmax = torch.ones(1, device=target.device)
    assert target.op("embedding_4bit")(rows, packed, [ROWS, 6], absmax, 64, "nf4", torch.float32).shape == (*shape, 6)


@pytest.mark.parametrize("index", [ROWS, -1, 2**40])
def test_a_row_that_does_not_exist_raises(index, target):
    rows = torch.tensor([0, index], device=target.device)
    packed = torch.zeros(ROWS * 32, dtype=torch.uint8, device=target.device)
    absmax = torch.ones(ROWS, device=target.device)
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)range|bound"):
        target.op("embedding_4bit")(rows, packed, [ROWS, 64], absmax, 64, "nf4", torch.float32)
    codes = torch.zeros(ROWS, 64, dtype=torch.int8, device=target.device)
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)range|bound"):
        target.op("int8_embedding")(rows, codes, absmax, torch.float32)
