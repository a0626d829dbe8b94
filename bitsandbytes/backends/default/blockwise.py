"""Reference of the 8-bit blockwise operators. Rules: docs/numerics.md; arguments and results: `_ops/blockwise.py`."""

import torch

from ._blocks import block_absmax, by_block, read, scale, spans, write
from ..._ops import register_reference
from ...formats import exact_midpoints

# NaN has code 0, so it is replaced by a value that is above no decision point of any map.
_BELOW_ALL = float("-inf")


def quantize_blockwise(A: torch.Tensor, code: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, torch.Tensor]:
    points = exact_midpoints(code.reshape(-1))
    absmax = block_absmax(A, blocksize)
    out = torch.empty(A.shape, dtype=torch.uint8, device=A.device)
    for span in spans(A.numel(), blocksize):
        values = by_block(read(A, span.start, span.stop, torch.float32), span, blocksize)
        scaled = scale(values, absmax[span.first : span.last]).nan_to_num_(nan=_BELOW_ALL)
        codes = torch.bucketize(scaled, points, out_int32=True).view(-1)
        write(out, span.start, codes[: span.stop - span.start])
    return out, absmax


def dequantize_blockwise_out(
    A: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    blocksize: int,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    absmax, code = absmax.reshape(-1), code.reshape(-1)
    for span in spans(A.numel(), blocksize):
        levels = code.index_select(0, read(A, span.start, span.stop, torch.int32))
        blocks = by_block(levels, span, blocksize) * absmax[span.first : span.last].unsqueeze(1)
        write(out, span.start, blocks.view(-1)[: span.stop - span.start])


def dequantize_blockwise(
    A: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, blocksize: int, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(A.shape, dtype=dtype, device=A.device)
    dequantize_blockwise_out(A, absmax, code, blocksize, dtype, out)
    return out


register_reference("quantize_blockwise", quantize_blockwise)
register_reference("dequantize_blockwise", dequantize_blockwise)
register_reference("dequantize_blockwise.out", dequantize_blockwise_out)
