"""Reference of the 4-bit operators. The rules are in docs/numerics.md; arguments and results in `_ops/fourbit.py`."""

from collections.abc import Sequence
import functools
from math import prod

import torch

from ._blocks import SPAN, block_absmax, by_block, exact_matmul, look_up, read, scale, spans, write
from ..._ops import register_reference
from ...formats import (
    FP4_BY_MAGNITUDE,
    FP4_SIGN,
    NESTED_BLOCKSIZE,
    ZERO_CODE,
    codebook,
    decision_points,
    num_blocks,
    packed_bytes,
    rows_of,
)


def _points_below(values: torch.Tensor, quant_type: str) -> torch.Tensor:
    """uint8 number of decision points strictly below each value; 0 for NaN, for which every comparison is false.

    Comparing 15 times takes 21 ms where `torch.bucketize` takes 48 ms (4M values, two AVX-512 cores).
    """
    count = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for point in decision_points(quant_type):
        count += values > point
    return count


@functools.cache
def _fp4_codes(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(FP4_BY_MAGNITUDE, dtype=torch.uint8, device=device)


def _encode(values: torch.Tensor, absmax: torch.Tensor, quant_type: str) -> torch.Tensor:
    """Codes of fp32 `values`, shape (blocks, elements); overwrites `values`."""
    if quant_type == "nf4":
        return _points_below(scale(values, absmax), quant_type)
    negative = values < 0  # the sign of the input: scaling may round a tiny negative value to -0
    magnitude = scale(values, absmax).abs_()
    negative &= magnitude == magnitude  # NaN has code 0, without sign
    codes = _fp4_codes(values.device)[_points_below(magnitude, quant_type).int()]
    return codes.add_(negative.to(torch.uint8), alpha=FP4_SIGN)  # bool times int would be int64


def quantize_4bit(
    A: torch.Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    n = A.numel()
    absmax = block_absmax(A, blocksize)
    packed = torch.empty(packed_bytes(n), dtype=torch.uint8, device=A.device)
    for span in spans(n, blocksize):
        values = by_block(read(A, span.start, span.stop, torch.float32), span, blocksize)
        codes = _encode(values, absmax[span.first : span.last], quant_type).view(-1)[: span.stop - span.start]
        if codes.numel() % 2:
            codes = torch.nn.functional.pad(codes, (0, 1), value=ZERO_CODE[quant_type])
        pairs = codes.view(-1, 2)
        torch.add(pairs[:, 1], pairs[:, 0], alpha=16, out=packed[span.start // 2 : packed_bytes(span.stop)])
    return packed.view(quant_storage).unsqueeze(1), absmax


def _pairs(code: torch.Tensor) -> torch.Tensor:
    """For every byte its two fp32 levels, viewed as one int64, so that one gather decodes two elements.

    4M elements: 0.9 ms; gathering rows of a (256, 2) table takes 18 ms (two AVX-512 cores).
    """
    return torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1).view(torch.int64).view(-1)


@functools.cache
def _type_pairs(quant_type: str, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return _pairs(codebook(quant_type, device))


class _Packed:
    """A packed tensor of any storage dtype and strides that decodes any range of its elements."""

    def __init__(self, packed: torch.Tensor, absmax: torch.Tensor, pairs: torch.Tensor, blocksize: int, numel: int):
        self.packed, self.absmax, self.pairs = packed, absmax.reshape(-1), pairs
        self.blocksize, self.numel = blocksize, numel

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        size = self.packed.itemsize
        first = start // size
        data = read(self.packed, first, -(stop // -size), self.packed.dtype).view(torch.uint8)
        return data[start - first * size : stop - first * size]

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """fp32 elements `start` to `stop`: level times absmax, one rounding."""
        first, last = start // self.blocksize, num_blocks(stop, self.blocksize)
        begin, end = first * self.blocksize, min(last * self.blocksize, self.numel)
        bytes_ = self._bytes(begin // 2, packed_bytes(end))
        levels = self.pairs.index_select(0, bytes_.int()).view(torch.float32)
        whole = (end - begin) // self.blocksize
        scales = self.absmax[first:last]
        levels[: whole * self.blocksize].view(-1, self.blocksize).mul_(scales[:whole].unsqueeze(1))
        levels[whole * self.blocksize :].mul_(scales[-1:])
        return levels[start - begin : stop - begin]


def dequantize_4bit_out(
    A: torch.Tensor,
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    weight = _Packed(A, absmax, _type_pairs(quant_type, A.device), blocksize, prod(shape))
    for span in spans(weight.numel, blocksize):
        write(out, span.start, weight.decode(span.start, span.stop))


def dequantize_4bit(
    A: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype, device=A.device)
    dequantize_4bit_out(A, absmax, blocksize, quant_type, shape, dtype, out)
    return out


def _matmul(
    A: torch.Tensor, weight: _Packed, shapeB: Sequence[int], bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """`A @ weight.T + bias`, all in fp32, decoding a bounded number of weight rows at a time; one cast at the end."""
    n, k = shapeB
    rows = max(1, SPAN // max(k, 1))
    # A fresh copy: the sum's order, and so its last bits, must not depend on the strides or alignment of A.
    x = read(A, 0, A.numel(), torch.float32).view(rows_of(A), k)
    result = torch.empty((x.shape[0], n), dtype=torch.float32, device=A.device)
    with exact_matmul(A.device):
        for first in range(0, n, rows):
            last = min(first + rows, n)
            part = weight.decode(first * k, last * k).view(last - first, k)
            torch.mm(x, part.t(), out=result[:, first:last])
    if bias is not None:
        result += bias.float()
    out.copy_(result.view(out.shape))


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
    if absmax_8bit is not None and absmax_offset is not None:
        absmax = torch.ops.bitsandbytes.dequantize_blockwise(
            absmax_8bit, absmax, absmax_code, NESTED_BLOCKSIZE, torch.float32
        )
        absmax += absmax_offset
    out = torch.empty((*A.shape[:-1], shapeB[0]), dtype=A.dtype, device=A.device)
    _matmul(A, _Packed(B, absmax, _type_pairs(quant_type, A.device), blocksize, prod(shapeB)), shapeB, bias, out)
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
    _matmul(A, _Packed(B, absmax, _pairs(code.reshape(-1)), blocksize, prod(shapeB)), shapeB, None, out)


def gemv_4bit(
    A: torch.Tensor, B: torch.Tensor, shapeB: Sequence[int], absmax: torch.Tensor, code: torch.Tensor, blocksize: int
) -> torch.Tensor:
    out = torch.empty((*A.shape[:-1], shapeB[0]), dtype=A.dtype, device=A.device)
    gemv_4bit_out(A, B, shapeB, absmax, code, blocksize, out)
    return out


def embedding_4bit(
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
) -> torch.Tensor:
    packed, absmax, width = B.reshape(-1).view(torch.uint8), absmax.reshape(-1), shapeB[1]

    def scales(blocks: torch.Tensor) -> torch.Tensor:
        """fp32 scales of the given blocks; nested statistics are decoded for these alone."""
        if absmax_8bit is None or absmax_code is None or absmax_offset is None:
            return absmax[blocks]
        codes = absmax_8bit.reshape(-1)[blocks].int()
        return absmax_code.reshape(-1)[codes] * absmax[blocks // NESTED_BLOCKSIZE] + absmax_offset

    def decode(rows: torch.Tensor) -> torch.Tensor:
        # The blocks of each row; a row that starts within a block may reach into one more. Gathering whole blocks
        # keeps them aligned. index_select refuses rows outside the table; the clamp is for the short last block.
        start = rows.unsqueeze(1) * width
        first, last = start // blocksize, (start + width - 1) // blocksize
        count = -(width // -blocksize) + (width % blocksize != 0)
        blocks = torch.minimum(first + torch.arange(count, device=rows.device), last)
        half = blocksize // 2
        bytes_ = (blocks.unsqueeze(2) * half + torch.arange(half, device=rows.device)).clamp_(max=packed.numel() - 1)
        values = dequantize_4bit(
            packed.index_select(0, bytes_.view(-1)),
            scales(blocks.view(-1)),
            blocksize,
            quant_type,
            (rows.numel(), count * blocksize),
            dtype,
        )
        if width % blocksize == 0:
            return values
        return values.gather(1, start - first * blocksize + torch.arange(width, device=rows.device))

    return look_up(indices, width, dtype, decode)


register_reference("quantize_4bit", quantize_4bit)
register_reference("dequantize_4bit", dequantize_4bit)
register_reference("dequantize_4bit.out", dequantize_4bit_out)
register_reference("gemm_4bit", gemm_4bit)
register_reference("gemv_4bit", gemv_4bit)
register_reference("gemv_4bit.out", gemv_4bit_out)
register_reference("embedding_4bit", embedding_4bit)
