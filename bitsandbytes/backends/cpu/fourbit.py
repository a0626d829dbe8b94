"""4-bit operators on the CPU; arguments and results in `_ops/fourbit.py`."""

from collections.abc import Sequence

import torch

from ._library import DTYPE, QUANT_TYPE, call, dense, dense_spans, whole_blocks
from ..default._blocks import read, write
from ..._ops import register
from ...formats import num_blocks, packed_bytes


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


for _op, _kernel in {
    "quantize_4bit": quantize_4bit,
    "dequantize_4bit": dequantize_4bit,
    "dequantize_4bit.out": dequantize_4bit_out,
}.items():
    register(_op, _kernel, "CPU", "native")
