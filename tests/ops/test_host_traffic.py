"""The operators leave the host alone: no copy in either direction, no value read, no wait for the device."""

import pytest
import torch

from tests.helpers import FLOATS, QUANT_TYPES, dynamic_map, randint, randn
from tests.simulator.helpers import counted, only_simulated

pytestmark = only_simulated

N, K = 6, 64
SHAPE = [N, K]
PACKED = randint(0, 256, (N * K // 2, 1), torch.uint8)
CODES = randint(0, 256, (N, K), torch.uint8)
INT8 = randint(-127, 128, (N, K), torch.int8)
STATS = randn(N).abs()
NESTED = (torch.ones(1), 64), (CODES[0, :N].clone(), dynamic_map(), torch.tensor(0.5))  # replaces absmax; follows

# name -> operator, and its arguments for an activation, a 4-bit type and a dtype
CALLS = {
    "quantize_4bit": ("quantize_4bit", lambda x, q, d: (x, 64, q, torch.uint8)),
    "dequantize_4bit": ("dequantize_4bit", lambda x, q, d: (PACKED, STATS, 64, q, SHAPE, d)),
    "gemm_4bit": ("gemm_4bit", lambda x, q, d: (x, PACKED, SHAPE, STATS, 64, q, x[0, :N].clone())),
    "gemm_4bit nested": ("gemm_4bit", lambda x, q, d: (x, PACKED, SHAPE, *NESTED[0], q, None, *NESTED[1])),
    "embedding_4bit": ("embedding_4bit", lambda x, q, d: (torch.tensor([3, 0]), PACKED, SHAPE, STATS, 64, q, d)),
    "embedding_4bit nested": (
        "embedding_4bit",
        lambda x, q, d: (torch.tensor([3, 0]), PACKED, SHAPE, *NESTED[0], q, d, *NESTED[1]),
    ),
    "quantize_blockwise": ("quantize_blockwise", lambda x, q, d: (x, dynamic_map(), 64)),
    "dequantize_blockwise": ("dequantize_blockwise", lambda x, q, d: (CODES, STATS, dynamic_map(), 64, d)),
    "int8_vectorwise_quant": ("int8_vectorwise_quant", lambda x, q, d: (x,)),
    "int8_scaled_mm": ("int8_scaled_mm", lambda x, q, d: (INT8, INT8, STATS, STATS, None, d)),
    "int8_embedding": ("int8_embedding", lambda x, q, d: (torch.tensor([3, 0]), INT8, STATS, d)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_traffic(dtype, quant_type, name, target):
    op, arguments = CALLS[name]
    arguments = arguments(randn(N, K, dtype=dtype), quant_type, dtype)
    arguments = [a.to(target.device) if isinstance(a, torch.Tensor) else a for a in arguments]
    target.op(op)(*arguments)  # tables that are built once come from the host
    with counted() as counts:
        target.op(op)(*arguments)
    assert counts.launches + counts.stream_reads > 0
    assert counts.waits == 0, counts
    # A kernel of this package is launched on the stream's address; reading it waits for the queue of launches.
    assert counts.stream_reads == (target.implementation == "ascendc"), counts
