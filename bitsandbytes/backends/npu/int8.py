"""LLM.int8() on the matrix units of the NPU; arguments and results in `_ops/int8.py`."""

import torch

from ._tiers import Implementation, Support, implementations
from ...formats import rows_of

# With an int32 result npu_quant_matmul adds in int32. Whether it applies the scale of 1, which it wants, in fp32 is not
# documented. Sums of this many products are at most 2**24, so they are exact either way.
_EXACT_COLUMNS = 1024

_MOST_COLUMNS = 65535  # of an operand, as documented


def int8_linear_matmul_out(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(int8_linear_matmul(A, B))


def int8_linear_matmul(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    columns = A.shape[-1]
    rows = A.reshape(rows_of(A), columns)
    total = torch.zeros((rows.shape[0], B.shape[0]), dtype=torch.int32, device=A.device)
    if total.numel():
        one = torch.ones(1, dtype=torch.float32, device=A.device)
        for first in range(0, columns, _EXACT_COLUMNS):
            part = slice(first, first + _EXACT_COLUMNS)
            for start in range(0, B.shape[0], _MOST_COLUMNS):
                some = slice(start, start + _MOST_COLUMNS)
                total[:, some] += torch.ops.npu.npu_quant_matmul(
                    rows[:, part].contiguous(), B[some, part].contiguous().t(), one, output_dtype=torch.int32
                )
    return total.view(*A.shape[:-1], B.shape[0])


_MATMUL = Support(families=("A2", "A3"), ranks=range(1, 9))

implementations["int8_linear_matmul"] = [Implementation("torch_npu", int8_linear_matmul, _MATMUL)]
implementations["int8_linear_matmul.out"] = [Implementation("torch_npu", int8_linear_matmul_out, _MATMUL)]
