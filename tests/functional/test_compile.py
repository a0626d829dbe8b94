"""`torch.compile(fullgraph=True)` of function calls gives the eager results."""

import pytest
import torch

import bitsandbytes as bnb
import bitsandbytes.functional as F
from tests.helpers import as_tuple, assert_all_same, randint, randn

WEIGHT, STATE = F.quantize_4bit(randn(6, 64), quant_type="nf4", compress_statistics=True)
CODES, ROWS, _ = F.int8_vectorwise_quant(randn(6, 64))


def round_trip_4bit(x):
    packed, state = F.quantize_4bit(x, quant_type="nf4", blocksize=32)
    return packed, state.absmax, F.dequantize_4bit(packed, state)


def round_trip_nested(x):
    packed, state = F.quantize_4bit(x, compress_statistics=True)
    return packed, state.absmax, state.offset, F.dequantize_fp4(packed, state)


def round_trip_blockwise(x):
    codes, state = F.quantize_blockwise(x, blocksize=100)
    return codes, state.absmax, F.dequantize_blockwise(codes, state)


def gemv(x):
    return F.gemv_4bit(x, WEIGHT, state=STATE)


def matmul(x):
    return bnb.matmul_4bit(x, WEIGHT.t(), quant_state=STATE)


def int8(x):
    codes, stats, _ = F.int8_vectorwise_quant(x)
    product = F.int8_linear_matmul(codes, CODES)
    return codes, stats, product, F.int8_mm_dequant(product, stats, ROWS), F.int8_vectorwise_dequant(codes, stats)


def int8_with_outliers(x):
    codes, stats, columns = F.int8_vectorwise_quant(x, threshold=2.0)
    result, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(x, codes, CODES, stats, ROWS, columns)
    return codes, stats, columns, result


@pytest.mark.parametrize(
    "function", [round_trip_4bit, round_trip_nested, round_trip_blockwise, gemv, matmul, int8, int8_with_outliers]
)
def test_fullgraph_with_dynamic_shapes(function):
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5, 17):
        x = randn(rows, 64, seed=rows)
        assert_all_same(as_tuple(compiled(x)), as_tuple(function(x)))


def test_into_given_tensors():
    code = F.create_dynamic_map()

    def function(codes, out):
        torch.ops.bitsandbytes.dequantize_blockwise.out(codes, torch.ones(3), code, 64, torch.float32, out=out)
        return out + 1

    torch.compiler.reset()
    codes = randint(0, 256, (3, 64), torch.uint8)
    out, expected = torch.zeros(3, 64), torch.zeros(3, 64)
    result = torch.compile(function, backend="aot_eager", fullgraph=True)(codes, out)
    assert_all_same((result, out), (function(codes, expected), expected))
