"""4-bit operators on the CPU; arguments and results in `_ops/fourbit.py`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._library import DTYPE, QUANT_TYPE, call, dense, dense_spans, pointer, targets, whole_blocks
from ..default._blocks import SPAN, exact_matmul, read, write
from ..._ops import register
from ...formats import num_blocks, packed_bytes, rows_of


def quantize_4bit(
    A: torch.Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    n = A.numel()
    packed = torch.empty(packed_bytes(n), dtype=torch.uint8)
    absmax = torch.empty(num_blocks(n, blocksize), dtype=torch.float32)
    for span, values in dense_spans(A, blocksize):
        call(
            "quantize_4bit",
            DTYPE[A.dtype],
            QUANT_TYPE[quant_type],
            blocksize,
            span.stop - span.start,
            values.data_ptr(),
            packed.data_ptr() + span.start // 2,
            absmax.data_ptr() + span.first * absmax.itemsize,
        )
    return packed.view(quant_storage).unsqueeze(1), absmax


def dequantize_4bit(
    A: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    dequantize_4bit_out(A, absmax, blocksize, quant_type, shape, dtype, out)
    return out


def dequantize_4bit_out(
    A: torch.Tensor,
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    absmax = dense(absmax)

    def decode(packed: torch.Tensor, first_block: int, values: torch.Tensor) -> None:
        call(
            "dequantize_4bit",
            DTYPE[dtype],
            QUANT_TYPE[quant_type],
            blocksize,
            values.numel(),
            packed.data_ptr(),
            absmax.data_ptr() + first_block * absmax.itemsize,
            values.data_ptr(),
        )

    if A.is_contiguous() and out.is_contiguous():
        decode(A, 0, out)
        return
    for span in whole_blocks(out.numel(), blocksize):
        packed = read(A, span.start // 2 // A.itemsize, packed_bytes(span.stop) // A.itemsize, A.dtype)
        values = torch.empty(span.stop - span.start, dtype=dtype)
        decode(packed, span.first, values)
        write(out, span.start, values)


# More input rows than this are multiplied by PyTorch, with some weight rows at a time decoded. One thread, 4096 x 4096,
# bf16, AVX-512: 7.1 ms for 64 rows in a tile against 8.6 (6.0 for PyTorch's product), 15 ms for 128 against 13.
_TILED_ROWS = 96

# Whether PyTorch has a fast bf16 product here: oneDNN uses what the processor has. Without, the one in fp32 is faster.
_BF16_PRODUCTS = "avx512_bf16" in targets()


class _Weight(NamedTuple):
    """A packed weight (n, k) as the library takes it: dense, with nested statistics or without."""

    packed: torch.Tensor
    quant_type: str
    code: torch.Tensor | None
    blocksize: int
    absmax: torch.Tensor
    absmax_8bit: torch.Tensor | None = None
    absmax_code: torch.Tensor | None = None
    absmax_offset: float = 0.0

    def statistics(self) -> tuple[int, int | None, int | None, float]:
        return self.absmax.data_ptr(), pointer(self.absmax_8bit), pointer(self.absmax_code), self.absmax_offset


def _multiply(
    A: torch.Tensor, weight: _Weight, shapeB: Sequence[int], bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """`A @ weight.T + bias` into a dense `out`; docs/numerics.md states the precision."""
    m = rows_of(A)
    if m > _TILED_ROWS:
        _multiply_by_panels(A.reshape(m, -1), weight, shapeB, bias, out.view(m, -1))
        return
    n, k = shapeB
    a, bias = dense(A), None if bias is None else dense(bias)
    call(
        "gemm_4bit",
        DTYPE[A.dtype],
        QUANT_TYPE[weight.quant_type],
        pointer(weight.code),
        weight.blocksize,
        m,
        n,
        k,
        a.data_ptr(),
        weight.packed.data_ptr(),
        *weight.statistics(),
        pointer(bias),
        out.data_ptr(),
    )


def _multiply_by_panels(
    A: torch.Tensor, weight: _Weight, shapeB: Sequence[int], bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    n, k = shapeB
    dtype = torch.bfloat16 if _BF16_PRODUCTS and A.dtype == torch.bfloat16 else torch.float32
    x, bias = A.to(dtype), None if bias is None else bias.to(dtype)
    rows = max(1, SPAN // max(k, 1))
    panel = torch.empty((min(rows, n), k), dtype=dtype)
    with exact_matmul(A.device):
        for first in range(0, n, rows):
            part = panel[: min(rows, n - first)]
            call(
                "decode_rows_4bit",
                DTYPE[dtype],
                QUANT_TYPE[weight.quant_type],
                pointer(weight.code),
                weight.blocksize,
                n,
                k,
                weight.packed.data_ptr(),
                *weight.statistics(),
                None,
                first,
                part.shape[0],
                part.data_ptr(),
            )
            last = first + part.shape[0]
            out[:, first:last] = torch.nn.functional.linear(x, part, None if bias is None else bias[first:last])


def gemm_4bit(
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
) -> torch.Tensor:
    weight = _Weight(dense(B), quant_type, None, blocksize, dense(absmax))
    if absmax_8bit is not None and absmax_code is not None and absmax_offset is not None:
        weight = weight._replace(
            absmax_8bit=dense(absmax_8bit), absmax_code=dense(absmax_code), absmax_offset=absmax_offset.item()
        )
    out = torch.empty((*A.shape[:-1], shapeB[0]), dtype=A.dtype)
    _multiply(A, weight, shapeB, bias, out)
    return out


def gemv_4bit(
    A: torch.Tensor, B: torch.Tensor, shapeB: Sequence[int], absmax: torch.Tensor, code: torch.Tensor, blocksize: int
) -> torch.Tensor:
    out = torch.empty((*A.shape[:-1], shapeB[0]), dtype=A.dtype)
    _multiply(A, _Weight(dense(B), "nf4", dense(code), blocksize, dense(absmax)), shapeB, None, out)
    return out


def gemv_4bit_out(
    A: torch.Tensor,
    B: torch.Tensor,
    shapeB: Sequence[int],
    absmax: torch.Tensor,
    code: torch.Tensor,
    blocksize: int,
    out: torch.Tensor,
) -> None:
    out.copy_(gemv_4bit(A, B, shapeB, absmax, code, blocksize))


for _op, _kernel in {
    "quantize_4bit": quantize_4bit,
    "dequantize_4bit": dequantize_4bit,
    "dequantize_4bit.out": dequantize_4bit_out,
    "gemm_4bit": gemm_4bit,
    "gemv_4bit": gemv_4bit,
    "gemv_4bit.out": gemv_4bit_out,
}.items():
    register(_op, _kernel, "CPU", "native")
