"""LLM.int8() operators on the CPU; arguments and results in `_ops/int8.py`."""

from collections.abc import Iterator

import torch

from ._library import DTYPE, call, dense, dense_spans, empty
from ..default import int8 as reference
from ..._ops import register
from ...formats import rows_of


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _row_spans(tensor: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """First row, number of rows, and their elements as a dense vector."""
    if tensor.numel() == 0:
        yield 0, rows_of(tensor), tensor
        return
    for span, values in dense_spans(tensor, tensor.shape[-1]):
        yield span.first, span.last - span.first, values


def int8_vectorwise_quant(
    A: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    columns = A.shape[-1]
    codes = empty(A.shape, torch.int8)
    stats = empty((rows_of(A),), torch.float32)
    outlier = torch.zeros(columns, dtype=torch.uint8) if threshold > 0.0 else None
    for first, rows, values in _row_spans(A):
        call(
            "int8_vectorwise_quant",
            DTYPE[A.dtype],
            rows,
            columns,
            values.data_ptr(),
            threshold,
            codes.data_ptr() + first * columns,
            stats.data_ptr() + first * stats.itemsize,
            _pointer(outlier),
        )
    if outlier is None:
        return codes, stats, None
    outlier_cols = outlier.nonzero().view(-1)
    if outlier_cols.numel():
        codes.index_fill_(-1, outlier_cols, 0)
    return codes, stats, outlier_cols


def int8_vectorwise_dequant(A: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    columns, stats = A.shape[-1], dense(stats)
    out = empty(A.shape, torch.float32)
    for first, rows, codes in _row_spans(A):
        call(
            "int8_vectorwise_dequant",
            DTYPE[out.dtype],
            rows,
            columns,
            codes.data_ptr(),
            stats.data_ptr() + first * stats.itemsize,
            None,
            rows,
            out.data_ptr() + first * columns * out.itemsize,
        )
    return out


def int8_embedding(indices: torch.Tensor, A: torch.Tensor, stats: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, codes, stats = dense(indices.long()), dense(A), dense(stats)
    out = empty((*indices.shape, A.shape[1]), dtype)
    call(
        "int8_vectorwise_dequant",
        DTYPE[dtype],
        *A.shape,
        codes.data_ptr(),
        stats.data_ptr(),
        rows.data_ptr(),
        rows.numel(),
        out.data_ptr(),
    )
    return out


def int8_linear_matmul(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    out = empty((*A.shape[:-1], B.shape[0]), torch.int32)
    A, B = dense(A), dense(B)
    call("int8_linear_matmul", rows_of(A), *B.shape, A.data_ptr(), B.data_ptr(), out.data_ptr())
    return out


def int8_linear_matmul_out(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(int8_linear_matmul(A, B))


def _epilogue(
    row_stats: torch.Tensor, col_stats: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return dense(row_stats), dense(col_stats), None if bias is None else dense(bias.float())


def int8_mm_dequant(
    A: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype, columns = dtype or torch.float16, A.shape[-1]
    row_stats, col_stats, bias = _epilogue(row_stats, col_stats, bias)
    out = empty(A.shape, dtype)
    for first, rows, product in _row_spans(A):
        call(
            "int8_mm_dequant",
            DTYPE[dtype],
            rows,
            columns,
            product.data_ptr(),
            row_stats.data_ptr() + first * row_stats.itemsize,
            col_stats.data_ptr(),
            _pointer(bias),
            out.data_ptr() + first * columns * out.itemsize,
        )
    return out


def _scaled_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    outlier_cols: torch.Tensor | None = None,
    outliers: torch.Tensor | None = None,
) -> torch.Tensor:
    """`int8_scaled_mm` plus the product of `outliers`, columns of A in floating point, with those of the decoded B."""
    row_stats, col_stats, bias = _epilogue(row_stats, col_stats, bias)
    out = empty((*A.shape[:-1], B.shape[0]), dtype)
    A, B = dense(A), dense(B)
    if outlier_cols is not None and outliers is not None:
        outlier_cols, outliers = dense(outlier_cols), dense(outliers.float())
    call(
        "int8_scaled_mm",
        DTYPE[dtype],
        rows_of(A),
        *B.shape,
        A.data_ptr(),
        B.data_ptr(),
        row_stats.data_ptr(),
        col_stats.data_ptr(),
        _pointer(bias),
        0 if outlier_cols is None else outlier_cols.numel(),
        _pointer(outlier_cols),
        _pointer(outliers),
        out.data_ptr(),
    )
    return out


def int8_scaled_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return _scaled_mm(A, B, row_stats, col_stats, bias, dtype or torch.float16)


def int8_mixed_scaled_mm(
    A: torch.Tensor,
    CA: torch.Tensor,
    CB: torch.Tensor,
    SCA: torch.Tensor,
    SCB: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    outliers = None
    if outlier_cols is not None:
        outliers = A.reshape(rows_of(A), A.shape[-1]).index_select(1, outlier_cols)  # checks the indices
    return _scaled_mm(CA, CB, SCA, SCB, bias, A.dtype, outlier_cols, outliers), outliers


register("int8_vectorwise_quant", int8_vectorwise_quant, "CPU", "native")
register("int8_double_quant", reference.int8_double_quant, "CPU", "native")  # two calls of int8_vectorwise_quant
register("int8_vectorwise_dequant", int8_vectorwise_dequant, "CPU", "native")
register("int8_embedding", int8_embedding, "CPU", "native")
register("int8_linear_matmul", int8_linear_matmul, "CPU", "native")
register("int8_linear_matmul.out", int8_linear_matmul_out, "CPU", "native")
register("int8_mm_dequant", int8_mm_dequant, "CPU", "native")
register("int8_scaled_mm", int8_scaled_mm, "CPU", "native")
register("int8_mixed_scaled_mm", int8_mixed_scaled_mm, "CPU", "native")
