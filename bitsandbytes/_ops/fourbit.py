"""4-bit operators: `quantize_4bit`, `dequantize_4bit`, `gemm_4bit`, `gemv_4bit`, `embedding_4bit`.

A packed tensor holds two codes in a byte, element 2i in the high nibble. Its dtype is the caller's storage dtype;
only its bytes matter. `absmax` has one fp32 value per block of the flattened, row-major tensor.
"""

from collections.abc import Sequence
from math import prod

import torch

from . import _checks as check
from . import define
from ..errors import ArgumentError
from ..formats import num_blocks, packed_bytes


def _check_quantize(A: torch.Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype) -> None:
    op = "quantize_4bit"
    check.blocksize_4bit(op, blocksize)
    check.quant_type(op, quant_type)
    check.float_dtype(op, "the dtype of A", A.dtype)
    if quant_storage.is_complex or quant_storage == torch.bool:
        raise ArgumentError(op, "quant_storage", "a real integer or floating dtype", quant_storage)
    if packed_bytes(A.numel()) % quant_storage.itemsize:
        raise ArgumentError(
            op,
            "quant_storage",
            f"a dtype whose item size divides the {packed_bytes(A.numel())} packed bytes of A",
            f"{quant_storage} of {quant_storage.itemsize} bytes",
        )


def _fake_quantize(
    A: torch.Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    n = A.numel()
    packed = A.new_empty((packed_bytes(n) // quant_storage.itemsize, 1), dtype=quant_storage)
    return packed, A.new_empty((num_blocks(n, blocksize),), dtype=torch.float32)


define(
    "quantize_4bit(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)",
    _check_quantize,
    _fake_quantize,
)


def _check_dequantize(
    A: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> None:
    op = "dequantize_4bit"
    check.blocksize_4bit(op, blocksize)
    check.quant_type(op, quant_type)
    check.float_dtype(op, "dtype", dtype)
    check.packed(op, "A", A, shape)
    check.absmax(op, absmax, prod(shape), blocksize)
    check.same_device(op, A, absmax=absmax)


def _fake_dequantize(
    A: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return A.new_empty(shape, dtype=dtype)


define(
    "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor",
    _check_dequantize,
    _fake_dequantize,
)


def _check_dequantize_out(
    A: torch.Tensor,
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    _check_dequantize(A, absmax, blocksize, quant_type, shape, dtype)
    check.out_like("dequantize_4bit", out, shape, dtype, A.device)


define(
    "dequantize_4bit.out(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype, "
    "Tensor(a!) out) -> ()",
    _check_dequantize_out,
    lambda *args, **kwargs: None,
)


def _check_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    shapeB: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> None:
    op = "gemm_4bit"
    check.quant_type(op, quant_type)
    check.matmul_4bit(op, A, B, shapeB, blocksize)
    check.statistics(op, prod(shapeB), blocksize, absmax, absmax_8bit, absmax_code, absmax_offset)
    if bias is not None:
        if tuple(bias.shape) != (shapeB[0],):
            raise ArgumentError(op, "bias", f"of shape ({shapeB[0]},)", tuple(bias.shape))
        check.dtype_is(op, "bias", bias, A.dtype)
    check.same_device(
        op, A, absmax=absmax, bias=bias, absmax_8bit=absmax_8bit, absmax_code=absmax_code, absmax_offset=absmax_offset
    )


def _fake_matmul(A: torch.Tensor, B: torch.Tensor, shapeB: Sequence[int], *args, **kwargs) -> torch.Tensor:
    return A.new_empty((*A.shape[:-1], shapeB[0]))


define(
    "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, "
    "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
    _check_gemm,
    _fake_matmul,
)


def _check_embedding(
    indices: torch.Tensor,
    B: torch.Tensor,
    shapeB: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    dtype: torch.dtype,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> None:
    op = "embedding_4bit"
    check.indices(op, indices)
    check.quant_type(op, quant_type)
    check.blocksize_4bit(op, blocksize)
    check.float_dtype(op, "dtype", dtype)
    if len(shapeB) != 2:
        raise ArgumentError(op, "shapeB", "[num_embeddings, embedding_dim]", list(shapeB))
    check.packed(op, "B", B, shapeB)
    check.statistics(op, prod(shapeB), blocksize, absmax, absmax_8bit, absmax_code, absmax_offset)
    check.same_device(
        op,
        indices,
        B=B,
        absmax=absmax,
        absmax_8bit=absmax_8bit,
        absmax_code=absmax_code,
        absmax_offset=absmax_offset,
    )


define(
    "embedding_4bit(Tensor indices, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, "
    "ScalarType dtype, Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
    _check_embedding,
    lambda indices, B, shapeB, absmax, blocksize, quant_type, dtype, *nested, **named: indices.new_empty(
        (*indices.shape, shapeB[1]), dtype=dtype
    ),
)


def _check_gemv(
    A: torch.Tensor, B: torch.Tensor, shapeB: Sequence[int], absmax: torch.Tensor, code: torch.Tensor, blocksize: int
) -> None:
    op = "gemv_4bit"
    check.matmul_4bit(op, A, B, shapeB, blocksize)
    check.absmax(op, absmax, prod(shapeB), blocksize)
    check.code_map(op, code, 16)
    check.same_device(op, A, absmax=absmax, code=code)


define(
    "gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor",
    _check_gemv,
    _fake_matmul,
)


def _check_gemv_out(
    A: torch.Tensor,
    B: torch.Tensor,
    shapeB: Sequence[int],
    absmax: torch.Tensor,
    code: torch.Tensor,
    blocksize: int,
    out: torch.Tensor,
) -> None:
    _check_gemv(A, B, shapeB, absmax, code, blocksize)
    check.out_like("gemv_4bit", out, (*A.shape[:-1], shapeB[0]), A.dtype, A.device)


define(
    "gemv_4bit.out(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize, Tensor(a!) out) -> ()",
    _check_gemv_out,
    lambda *args, **kwargs: None,
)
