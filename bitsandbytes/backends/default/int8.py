"""Reference of the LLM.int8() operators. Rules: docs/numerics.md; arguments and results: `_ops/int8.py`."""

from collections.abc import Callable

import torch

from ._blocks import by_block, exact_matmul, look_up, read, scale, spans, write
from ..._ops import register_reference
from ...formats import INT8_MAX, rows_of

# fp32 sums of this many products of int8 codes are exact: 1024 * 128 * 128 = 2**24.
_EXACT_COLUMNS = 1024


def _statistics(A: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Absmax of the rows without outlier elements, and a mask of the columns that hold one (None without threshold)."""
    columns = A.shape[-1]
    absmax = torch.zeros(rows_of(A), dtype=torch.float32, device=A.device)
    outlier = torch.zeros(columns, dtype=torch.bool, device=A.device) if threshold > 0.0 else None
    for span in spans(A.numel(), columns):
        magnitudes = by_block(read(A, span.start, span.stop, torch.float32).abs_(), span, columns)
        if outlier is not None:
            large = magnitudes >= threshold
            magnitudes.masked_fill_(large, 0.0)
            first = span.start - span.first * columns
            outlier[first : first + large.shape[1]] |= large.any(0)
        part = absmax[span.first : span.last]
        torch.maximum(part, magnitudes.amax(1), out=part)
    return absmax, outlier


def int8_vectorwise_quant(
    A: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    columns = A.shape[-1]
    absmax, outlier = _statistics(A, threshold)
    codes = torch.empty(A.shape, dtype=torch.int8, device=A.device)
    for span in spans(A.numel(), columns):
        values = by_block(read(A, span.start, span.stop, torch.float32), span, columns)
        scaled = scale(values, absmax[span.first : span.last], INT8_MAX).round_()
        # The clamp acts on outlier elements alone, whose columns become zero below. NaN (a row that is not finite): 0.
        scaled.clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(nan=0.0)
        write(codes, span.start, scaled.view(-1)[: span.stop - span.start])
    if outlier is None:
        return codes, absmax, None
    outlier_cols = outlier.nonzero().view(-1)
    codes.index_fill_(-1, outlier_cols, 0)
    return codes, absmax, outlier_cols


def int8_double_quant(
    A: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    by_row, row_stats, outlier_cols = torch.ops.bitsandbytes.int8_vectorwise_quant(A, threshold)
    by_column, col_stats, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(A.reshape(rows_of(A), A.shape[-1]).t())
    by_column = by_column.t().contiguous().view(A.shape)
    if outlier_cols is not None:
        # Outlier columns are computed apart in full precision. An outlier's whole column is left out, so the
        # statistics of the other columns need no second pass.
        by_column.index_fill_(-1, outlier_cols, 0)
        col_stats.index_fill_(0, outlier_cols, 0)
    return by_row, by_column, row_stats, col_stats, outlier_cols


def int8_vectorwise_dequant(A: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    out = torch.empty(A.shape, dtype=torch.float32, device=A.device)
    columns, stats = A.shape[-1], stats.reshape(-1)
    for span in spans(A.numel(), columns):
        codes = by_block(read(A, span.start, span.stop, torch.float32), span, columns)
        codes.mul_(stats[span.first : span.last].unsqueeze(1)).mul_(1 / INT8_MAX)
        write(out, span.start, codes.view(-1)[: span.stop - span.start])
    return out


def int8_embedding(indices: torch.Tensor, A: torch.Tensor, stats: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    stats = stats.reshape(-1)

    def decode(rows: torch.Tensor) -> torch.Tensor:
        return int8_vectorwise_dequant(A.index_select(0, rows), stats[rows])

    return look_up(indices, A.shape[1], dtype, decode)


def exact_product(
    A: torch.Tensor, B: torch.Tensor, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`A @ B.T` of int8 in int32, from `multiply(a, b) = a @ b.T` of parts whose sums are exact in fp32 too."""
    columns = A.shape[-1]
    rows = A.reshape(rows_of(A), columns)
    total = torch.zeros((rows.shape[0], B.shape[0]), dtype=torch.int32, device=A.device)
    if total.numel():
        for first in range(0, columns, _EXACT_COLUMNS):
            part = slice(first, first + _EXACT_COLUMNS)
            total += multiply(rows[:, part], B[:, part])
    return total.view(*A.shape[:-1], B.shape[0])


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # torch._int_mm is not used: on CPUs without VNNI its oneDNN kernel saturates 16-bit sums.
    return torch.mm(a.float(), b.float().t()).int()


def int8_linear_matmul(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    with exact_matmul(A.device):
        return exact_product(A, B, _multiply)


def int8_linear_matmul_out(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(int8_linear_matmul(A, B))


def int8_mm_dequant(
    A: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    result = row_stats.reshape(-1, 1) * col_stats.reshape(1, -1)
    result.mul_(A.reshape(result.shape)).mul_(1 / INT8_MAX**2)
    if bias is not None:
        result += bias.float()
    return result.view(A.shape).to(dtype or torch.float16)


def int8_scaled_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    ops = torch.ops.bitsandbytes
    return ops.int8_mm_dequant(ops.int8_linear_matmul(A, B), row_stats, col_stats, dtype, bias)


def int8_mixed_scaled_mm(
    A: torch.Tensor,
    CA: torch.Tensor,
    CB: torch.Tensor,
    SCA: torch.Tensor,
    SCB: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    ops = torch.ops.bitsandbytes
    if outlier_cols is None:
        return ops.int8_scaled_mm(CA, CB, SCA, SCB, bias, A.dtype), None
    result = ops.int8_scaled_mm(CA, CB, SCA, SCB, None, torch.float32)
    outliers = A.reshape(rows_of(A), A.shape[-1]).index_select(1, outlier_cols)
    weight = ops.int8_vectorwise_dequant(CB.index_select(1, outlier_cols), SCB)
    with exact_matmul(A.device):
        result.view(rows_of(A), CB.shape[0]).addmm_(outliers.float(), weight.t())
    if bias is not None:
        result += bias.float()
    return result.to(A.dtype), outliers


register_reference("int8_vectorwise_quant", int8_vectorwise_quant)
register_reference("int8_double_quant", int8_double_quant)
register_reference("int8_vectorwise_dequant", int8_vectorwise_dequant)
register_reference("int8_embedding", int8_embedding)
register_reference("int8_linear_matmul", int8_linear_matmul)
register_reference("int8_linear_matmul.out", int8_linear_matmul_out)
register_reference("int8_mm_dequant", int8_mm_dequant)
register_reference("int8_scaled_mm", int8_scaled_mm)
register_reference("int8_mixed_scaled_mm", int8_mixed_scaled_mm)
