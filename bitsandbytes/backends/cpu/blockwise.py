"""8-bit blockwise operators on the CPU; arguments and results in `_ops/blockwise.py`."""

import torch

from ._library import DTYPE, call, dense, dense_spans, empty, is_dense
from ..default import blockwise as reference
from ..default._blocks import SPAN, read, spans, write
from ..._ops import register
from ...formats import num_blocks


def quantize_blockwise(A: torch.Tensor, code: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = A.numel()
    if min(n, blocksize) > SPAN and not is_dense(A):
        # A dense copy of a whole block would be too large. The reference goes through the block twice, in parts.
        return reference.quantize_blockwise(A, code, blocksize)
    code = dense(code)
    codes = empty(A.shape, torch.uint8)
    absmax = empty((num_blocks(n, blocksize),), torch.float32)
    for span, values in dense_spans(A, blocksize):
        call(
            "quantize_blockwise",
            DTYPE[A.dtype],
            blocksize,
            span.stop - span.start,
            values.data_ptr(),
            code.data_ptr(),
            codes.data_ptr() + span.start,
            absmax.data_ptr() + span.first * absmax.itemsize,
        )
    return codes, absmax


def dequantize_blockwise(
    A: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, blocksize: int, dtype: torch.dtype
) -> torch.Tensor:
    out = empty(A.shape, dtype)
    dequantize_blockwise_out(A, absmax, code, blocksize, dtype, out)
    return out


def dequantize_blockwise_out(
    A: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    blocksize: int,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    absmax, code = dense(absmax), dense(code)

    def decode(codes: torch.Tensor, first_block: int, values: torch.Tensor) -> None:
        call(
            "dequantize_blockwise",
            DTYPE[dtype],
            blocksize,
            values.numel(),
            codes.data_ptr(),
            absmax.data_ptr() + first_block * absmax.itemsize,
            code.data_ptr(),
            values.data_ptr(),
        )

    if is_dense(A) and is_dense(out):
        decode(A, 0, out)
        return
    for span in spans(A.numel(), blocksize):
        values = empty((span.stop - span.start,), dtype)
        decode(read(A, span.start, span.stop, A.dtype), span.first, values)
        write(out, span.start, values)


register("quantize_blockwise", quantize_blockwise, "CPU", "native")
register("dequantize_blockwise", dequantize_blockwise, "CPU", "native")
register("dequantize_blockwise.out", dequantize_blockwise_out, "CPU", "native")
