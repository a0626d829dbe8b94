"""LLM.int8() operators. Matrices are row-major; leading dimensions of `A` are rows.

Statistics are absolute maxima, one fp32 value per row (`row_stats`, `SCA`) or per output column (`col_stats`, `SCB`);
a code stands for `code * statistic / 127`. `threshold > 0` makes an element an outlier when its magnitude reaches it.
"""

import torch

from . import _checks as check
from . import define
from ..errors import ArgumentError
from ..formats import rows_of


def _matrix(op: str, argument: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        raise ArgumentError(op, argument, "a tensor of one or more dimensions", "a scalar")


def _weight(op: str, argument: str, tensor: torch.Tensor, columns: int) -> None:
    if tensor.dim() != 2 or tensor.shape[1] != columns:
        raise ArgumentError(op, argument, f"of shape (out_features, {columns})", tuple(tensor.shape))


def _stats(op: str, argument: str, stats: torch.Tensor, size: int) -> None:
    check.dtype_is(op, argument, stats, torch.float32)
    if stats.numel() != size:
        raise ArgumentError(op, argument, f"of {size} values", stats.numel())


def _check_quant(op: str, A: torch.Tensor, threshold: float) -> None:
    _matrix(op, "A", A)
    check.float_dtype(op, "the dtype of A", A.dtype)
    if not threshold >= 0.0:
        raise ArgumentError(op, "threshold", "0 (no outliers) or positive", threshold)


def _check_vectorwise_quant(A: torch.Tensor, threshold: float = 0.0) -> None:
    _check_quant("int8_vectorwise_quant", A, threshold)


def _fake_vectorwise_quant(
    A: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    codes = A.new_empty(A.shape, dtype=torch.int8)
    row_stats = A.new_empty((rows_of(A),), dtype=torch.float32)
    if threshold == 0.0:
        return codes, row_stats, None
    outliers = torch.library.get_ctx().new_dynamic_size(min=0)
    return codes, row_stats, A.new_empty((outliers,), dtype=torch.int64)


define(
    "int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)",
    _check_vectorwise_quant,
    _fake_vectorwise_quant,
)


def _check_double_quant(A: torch.Tensor, threshold: float = 0.0) -> None:
    _check_quant("int8_double_quant", A, threshold)


def _fake_double_quant(
    A: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    by_row, row_stats, outlier_cols = _fake_vectorwise_quant(A, threshold)
    col_stats = A.new_empty((A.shape[-1],), dtype=torch.float32)
    return by_row, torch.empty_like(by_row), row_stats, col_stats, outlier_cols


define(
    "int8_double_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor?)",
    _check_double_quant,
    _fake_double_quant,
)


def _check_vectorwise_dequant(A: torch.Tensor, stats: torch.Tensor) -> None:
    op = "int8_vectorwise_dequant"
    _matrix(op, "A", A)
    check.dtype_is(op, "A", A, torch.int8)
    _stats(op, "stats", stats, rows_of(A))
    check.same_device(op, A, stats=stats)


define(
    "int8_vectorwise_dequant(Tensor A, Tensor stats) -> Tensor",
    _check_vectorwise_dequant,
    lambda A, stats: A.new_empty(A.shape, dtype=torch.float32),
)


def _check_embedding(indices: torch.Tensor, A: torch.Tensor, stats: torch.Tensor, dtype: torch.dtype) -> None:
    op = "int8_embedding"
    check.indices(op, indices)
    if A.dim() != 2:
        raise ArgumentError(op, "A", "of shape (num_embeddings, embedding_dim)", tuple(A.shape))
    check.dtype_is(op, "A", A, torch.int8)
    _stats(op, "stats", stats, A.shape[0])
    check.float_dtype(op, "dtype", dtype)
    check.same_device(op, indices, A=A, stats=stats)


define(
    "int8_embedding(Tensor indices, Tensor A, Tensor stats, ScalarType dtype) -> Tensor",
    _check_embedding,
    lambda indices, A, stats, dtype: indices.new_empty((*indices.shape, A.shape[1]), dtype=dtype),
)


def _check_linear_matmul(A: torch.Tensor, B: torch.Tensor, op: str = "int8_linear_matmul") -> None:
    _matrix(op, "A", A)
    check.dtype_is(op, "A", A, torch.int8)
    check.dtype_is(op, "B", B, torch.int8)
    _weight(op, "B", B, A.shape[-1])
    check.same_device(op, A, B=B)


define(
    "int8_linear_matmul(Tensor A, Tensor B) -> Tensor",
    _check_linear_matmul,
    lambda A, B: A.new_empty((*A.shape[:-1], B.shape[0]), dtype=torch.int32),
)


def _check_linear_matmul_out(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> None:
    _check_linear_matmul(A, B)
    check.out_like("int8_linear_matmul", out, (*A.shape[:-1], B.shape[0]), torch.int32, A.device)


define(
    "int8_linear_matmul.out(Tensor A, Tensor B, Tensor(a!) out) -> ()",
    _check_linear_matmul_out,
    lambda A, B, out: None,
)


def _check_epilogue(
    op: str,
    rows: int,
    columns: int,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    dtype: torch.dtype | None,
    bias: torch.Tensor | None,
) -> None:
    _stats(op, "row_stats", row_stats, rows)
    _stats(op, "col_stats", col_stats, columns)
    if dtype is not None:
        check.float_dtype(op, "dtype", dtype)
    if bias is not None:
        check.float_dtype(op, "the dtype of bias", bias.dtype)
        if tuple(bias.shape) != (columns,):
            raise ArgumentError(op, "bias", f"of shape ({columns},)", tuple(bias.shape))


def _check_mm_dequant(
    A: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    op = "int8_mm_dequant"
    _matrix(op, "A", A)
    check.dtype_is(op, "A", A, torch.int32)
    _check_epilogue(op, rows_of(A), A.shape[-1], row_stats, col_stats, dtype, bias)
    check.same_device(op, A, row_stats=row_stats, col_stats=col_stats, bias=bias)


define(
    "int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, "
    "Tensor? bias=None) -> Tensor",
    _check_mm_dequant,
    lambda A, row_stats, col_stats, dtype=None, bias=None: A.new_empty(A.shape, dtype=dtype or torch.float16),
)


def _check_scaled_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    op = "int8_scaled_mm"
    _check_linear_matmul(A, B, op)
    _check_epilogue(op, rows_of(A), B.shape[0], row_stats, col_stats, dtype, bias)
    check.same_device(op, A, row_stats=row_stats, col_stats=col_stats, bias=bias)


define(
    "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None, "
    "ScalarType? dtype=None) -> Tensor",
    _check_scaled_mm,
    lambda A, B, row_stats, col_stats, bias=None, dtype=None: A.new_empty(
        (*A.shape[:-1], B.shape[0]), dtype=dtype or torch.float16
    ),
)


def _check_mixed_scaled_mm(
    A: torch.Tensor,
    CA: torch.Tensor,
    CB: torch.Tensor,
    SCA: torch.Tensor,
    SCB: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    op = "int8_mixed_scaled_mm"
    check.float_dtype(op, "the dtype of A", A.dtype)
    if A.shape != CA.shape:
        raise ArgumentError(op, "CA", f"of shape {tuple(A.shape)}, like A", tuple(CA.shape))
    _check_linear_matmul(CA, CB, op)
    _check_epilogue(op, rows_of(CA), CB.shape[0], SCA, SCB, None, bias)
    if outlier_cols is not None:
        check.dtype_is(op, "outlier_cols", outlier_cols, torch.int64)
        if outlier_cols.dim() != 1:
            raise ArgumentError(op, "outlier_cols", "a vector of column indices", f"{outlier_cols.dim()} dimensions")
    check.same_device(op, A, CA=CA, CB=CB, SCA=SCA, SCB=SCB, outlier_cols=outlier_cols, bias=bias)


def _fake_mixed_scaled_mm(
    A: torch.Tensor,
    CA: torch.Tensor,
    CB: torch.Tensor,
    SCA: torch.Tensor,
    SCB: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = A.new_empty((*A.shape[:-1], CB.shape[0]))
    if outlier_cols is None:
        return out, None
    return out, A.new_empty((rows_of(A), outlier_cols.shape[0]))


define(
    "int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None, "
    "Tensor? bias=None) -> (Tensor, Tensor?)",
    _check_mixed_scaled_mm,
    _fake_mixed_scaled_mm,
)
