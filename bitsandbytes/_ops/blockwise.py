"""8-bit blockwise operators: `quantize_blockwise`, `dequantize_blockwise`.

A `code` is a map of 256 ascending fp32 levels; a uint8 code is an index into it.
"""

import torch

from . import _checks as check
from . import define
from ..formats import num_blocks


def _check_quantize(A: torch.Tensor, code: torch.Tensor, blocksize: int) -> None:
    op = "quantize_blockwise"
    check.blocksize_8bit(op, blocksize)
    check.float_dtype(op, "the dtype of A", A.dtype)
    check.code_map(op, code)
    check.same_device(op, A, code=code)


def _fake_quantize(A: torch.Tensor, code: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    absmax = A.new_empty((num_blocks(A.numel(), blocksize),), dtype=torch.float32)
    return A.new_empty(A.shape, dtype=torch.uint8), absmax


define(
    "quantize_blockwise(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
    _check_quantize,
    _fake_quantize,
)


def _check_dequantize(
    A: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, blocksize: int, dtype: torch.dtype
) -> None:
    op = "dequantize_blockwise"
    check.blocksize_8bit(op, blocksize)
    check.dtype_is(op, "the dtype of A", A, torch.uint8)
    check.float_dtype(op, "dtype", dtype)
    check.code_map(op, code)
    check.absmax(op, absmax, A.numel(), blocksize)
    check.same_device(op, A, absmax=absmax, code=code)


def _fake_dequantize(
    A: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, blocksize: int, dtype: torch.dtype
) -> torch.Tensor:
    return A.new_empty(A.shape, dtype=dtype)


define(
    "dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor",
    _check_dequantize,
    _fake_dequantize,
)


def _check_dequantize_out(
    A: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    blocksize: int,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    _check_dequantize(A, absmax, code, blocksize, dtype)
    check.out_like("dequantize_blockwise", out, A.shape, dtype, A.device)


define(
    "dequantize_blockwise.out(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype, "
    "Tensor(a!) out) -> ()",
    _check_dequantize_out,
    lambda *args, **kwargs: None,
)
