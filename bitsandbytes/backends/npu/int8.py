"""LLM.int8() on the matrix units of the NPU; arguments and results in `_ops/int8.py`."""

import torch

from ._tiers import Implementation, Support, implementations
from ..default.int8 import exact_product

_MOST_COLUMNS = 65535  # of an operand, as documented


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # With an int32 result it adds in int32. Whether it applies the scale of 1, which it wants, in fp32 is not
    # documented; the sums of `exact_product` are exact either way.
    one = torch.ones(1, dtype=torch.float32, device=a.device)
    parts = [
        torch.ops.npu.npu_quant_matmul(a.contiguous(), some.contiguous().t(), one, output_dtype=torch.int32)
        for some in b.split(_MOST_COLUMNS)
    ]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def int8_linear_matmul(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    return exact_product(A, B, _multiply)


def int8_linear_matmul_out(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(int8_linear_matmul(A, B))


_MATMUL = Support(families=("A2", "A3"), ranks=range(1, 9))

implementations["int8_linear_matmul"] = [Implementation("torch_npu", int8_linear_matmul, _MATMUL)]
implementations["int8_linear_matmul.out"] = [Implementation("torch_npu", int8_linear_matmul_out, _MATMUL)]
