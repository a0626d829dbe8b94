"""4-bit operators on the CPU; arguments and results in `_ops/fourbit.py`."""

from collections.abc import Sequence

import torch

from ._library import DTYPE, QUANT_TYPE, call, dense, dense_spans, whole_blocks
from ..default._blocks import write
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
            packed[span.start // 2 :].data_ptr(),
            absmax[span.first :].data_ptr(),
        )
    return packed.view(quant_storage).unsqueeze(1), absmax


def _dequantize(packed: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, out: torch.Tensor) -> None:
    call(
        "dequantize_4bit",
        DTYPE[out.dtype],
        QUANT_TYPE[quant_type],
        blocksize,
        out.numel(),
        packed.data_ptr(),
        absmax.data_ptr(),
        out.data_ptr(),
    )


def dequantize_4bit(
    A: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    _dequantize(dense(A), dense(absmax), blocksize, quant_type, out)
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
    packed, absmax = dense(A).view(-1).view(torch.uint8), dense(absmax).view(-1)
    if out.is_contiguous():
        _dequantize(packed, absmax, blocksize, quant_type, out)
        return
    for span in whole_blocks(out.numel(), blocksize):
        values = torch.empty(span.stop - span.start, dtype=dtype)
        _dequantize(packed[span.start // 2 :], absmax[span.first :], blocksize, quant_type, values)
        write(out, span.start, values)


for _op, _kernel in {
    "quantize_4bit": quantize_4bit,
    "dequantize_4bit": dequantize_4bit,
    "dequantize_4bit.out": dequantize_4bit_out,
}.items():
    register(_op, _kernel, "CPU", "native")
