"""LLM.int8(): row-wise int8 quantisation, exact int8 matmul and its dequantisation (arXiv:2208.07339)."""

import torch

from .._ops import _checks as check
from ..errors import ArgumentError


@torch.no_grad()  # codes have no derivative
def int8_vectorwise_quant(A: torch.Tensor, threshold=0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise each row to int8 by its absolute maximum.

    Args:
        A: (..., columns); float32, float16 or bfloat16.
        threshold: Elements of at least this magnitude are outliers: they do not count for the statistic, and the
            columns that hold one get code 0. 0 turns this off.

    Returns:
        int8 codes in A's shape, fp32 absolute maxima of the rows, and the int64 outlier columns (None when off).
    """
    return torch.ops.bitsandbytes.int8_vectorwise_quant(A, threshold)


def int8_vectorwise_dequant(A: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """`A * stats / 127` per row, fp32.

    Args:
        A: int8 codes (..., columns).
        stats: fp32 absolute maxima, one per row.
    """
    return torch.ops.bitsandbytes.int8_vectorwise_dequant(A, stats)


@torch.no_grad()  # codes have no derivative
def int8_double_quant(
    A: torch.Tensor,
    col_stats: torch.Tensor | None = None,
    row_stats: torch.Tensor | None = None,
    out_col: torch.Tensor | None = None,
    out_row: torch.Tensor | None = None,
    threshold=0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise by row and by column.

    Args:
        A, threshold: As for `int8_vectorwise_quant`.
        col_stats, row_stats, out_col, out_row: Must be None; results are always new tensors.

    Returns:
        int8 codes by row, int8 codes by column, row statistics, column statistics, outlier columns (None when off).
    """
    given = {"col_stats": col_stats, "row_stats": row_stats, "out_col": out_col, "out_row": out_row}
    for argument, value in given.items():
        if value is not None:
            raise ArgumentError("int8_double_quant", argument, "None", f"a tensor of shape {tuple(value.shape)}")
    return torch.ops.bitsandbytes.int8_double_quant(A, threshold)


def int8_linear_matmul(
    A: torch.Tensor, B: torch.Tensor, out: torch.Tensor | None = None, dtype=torch.int32
) -> torch.Tensor:
    """`A @ B.T` of int8 matrices, exact.

    Args:
        A: (..., columns).
        B: (out_features, columns).
        out: int32 tensor (..., out_features) that receives the result.
        dtype: int32, the only accumulator.
    """
    check.one_of("int8_linear_matmul", "dtype", dtype, (torch.int32,))
    if out is None:
        return torch.ops.bitsandbytes.int8_linear_matmul(A, B)
    torch.ops.bitsandbytes.int8_linear_matmul.out(A, B, out)
    return out


def int8_mm_dequant(
    A: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`A * row_stats * col_stats / 127**2 + bias` in fp32, then one cast.

    Args:
        A: int32 result of `int8_linear_matmul`, (..., out_features).
        row_stats: fp32, one value per row of A.
        col_stats: fp32, one value per column.
        out: Receives the result, in its own dtype; float16 if None.
        bias: (out_features,) in a floating dtype.
    """
    if out is None:
        return torch.ops.bitsandbytes.int8_mm_dequant(A, row_stats, col_stats, torch.float16, bias)
    check.out_like("int8_mm_dequant", out, A.shape, out.dtype, A.device)
    return out.copy_(torch.ops.bitsandbytes.int8_mm_dequant(A, row_stats, col_stats, out.dtype, bias))
