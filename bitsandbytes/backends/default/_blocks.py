"""Reading, scaling and writing a strided tensor of any size block by block, with bounded temporaries.

A block is `blocksize` consecutive elements of the flattened, row-major tensor. Work goes in spans: a span holds either
whole blocks (the last may be short) or a part of one block that is larger than a span.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from ...formats import num_blocks

# Elements of a span: its temporaries, a dozen of at most 4 bytes an element, stay below 48 MiB. Of 2**16 to 2**22, this
# size was within 7 % of the fastest for every operator on 4096 x 4096 (process time of one AVX-512 core, best of 3).
SPAN = 1 << 20


class Span(NamedTuple):
    start: int  # first element
    stop: int
    first: int  # first block
    last: int  # one past the last block


def spans(numel: int, blocksize: int) -> Iterator[Span]:
    """Cut `numel` elements into spans of at most `SPAN` elements that never share a block unless it is larger."""
    if numel == 0:
        return
    if blocksize <= SPAN:
        step = SPAN - SPAN % blocksize
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            yield Span(start, stop, start // blocksize, num_blocks(stop, blocksize))
    else:
        for block in range(num_blocks(numel, blocksize)):
            end = min((block + 1) * blocksize, numel)
            for start in range(block * blocksize, end, SPAN):
                yield Span(start, min(start + SPAN, end), block, block + 1)


def _views(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views whose row-major elements, one after the other, are `tensor.flatten()[start:stop]`; none is copied."""
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row = tensor[0].numel()
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _views(tensor[first], head, tail)
        return
    if head:
        yield from _views(tensor[first], head, row)
        first += 1
    if first < last:
        yield tensor[first:last]
    if tail:
        yield from _views(tensor[last], 0, tail)


def read(tensor: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """A fresh contiguous vector of elements `start` to `stop`, cast to `dtype`. Callers may write to it."""
    buffer = torch.empty(stop - start, dtype=dtype, device=tensor.device)
    position = 0
    for view in _views(tensor, start, stop):
        buffer[position : position + view.numel()].view(view.shape).copy_(view)
        position += view.numel()
    return buffer


def write(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Store `values` from element `start` on, cast to the tensor's dtype."""
    position = 0
    for view in _views(tensor, start, start + values.numel()):
        view.copy_(values[position : position + view.numel()].view(view.shape))
        position += view.numel()


def by_block(values: torch.Tensor, span: Span, blocksize: int) -> torch.Tensor:
    """`values` of a span as (blocks, elements of a block); the short last block is padded with zeros."""
    blocks = span.last - span.first
    if blocks == 1:
        return values.view(1, -1)
    padding = blocks * blocksize - values.numel()
    if padding:
        values = torch.nn.functional.pad(values, (0, padding))
    return values.view(blocks, blocksize)


def block_absmax(tensor: torch.Tensor, blocksize: int) -> torch.Tensor:
    """fp32 absolute maximum of every block; NaN where a block holds one."""
    absmax = torch.zeros(num_blocks(tensor.numel(), blocksize), dtype=torch.float32, device=tensor.device)
    for span in spans(tensor.numel(), blocksize):
        magnitudes = read(tensor, span.start, span.stop, torch.float32).abs_()
        part = absmax[span.first : span.last]
        torch.maximum(part, by_block(magnitudes, span, blocksize).amax(1), out=part)
    return absmax


def scale(rows: torch.Tensor, absmax: torch.Tensor, target: float = 1.0) -> torch.Tensor:
    """In place: `x * (target / absmax)` per row, or `x / absmax * target` where that reciprocal is not finite.

    Both are single fp32 operations. A row of zeros stays zero; absmax NaN or infinite gives NaN where `x` is not
    finite. One multiplication by 1 and one division by 1 stand for the branch: they are exact and need no host
    synchronisation.
    """
    # Not `target / absmax`: PyTorch computes that as (1 / absmax) * target, which rounds twice.
    reciprocal = torch.full_like(absmax, target).div_(absmax)
    usable = reciprocal.isfinite()
    factor = torch.where(usable, reciprocal, 1.0)
    divisor = torch.where(usable | (absmax == 0), 1.0, absmax)
    rows.mul_(factor.unsqueeze(1)).div_(divisor.unsqueeze(1))
    if target != 1.0:
        rows.mul_(torch.where(usable, 1.0, target).unsqueeze(1))
    return rows


def look_up(
    indices: torch.Tensor, width: int, dtype: torch.dtype, decode: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`decode(rows)` over bounded parts of the flattened `indices`, joined to (*indices.shape, width)."""
    rows = indices.reshape(-1).long()
    out = torch.empty((rows.numel(), width), dtype=dtype, device=indices.device)
    step = max(1, SPAN // max(1, width))
    for start in range(0, rows.numel(), step):
        out[start : start + step] = decode(rows[start : start + step])
    return out.view(*indices.shape, width)


@contextmanager
def _exact_npu_matmul() -> Iterator[None]:
    """The same for the modes of torch_npu, of which `cube_math_type` wins over `allow_hf32` once it was set."""
    modes = getattr(getattr(torch, "npu", None), "matmul", None)
    math_type = getattr(modes, "cube_math_type", None)
    name, exact = ("allow_hf32", False) if math_type is None else ("cube_math_type", type(math_type)(0))
    saved = getattr(modes, name, exact)
    if saved == exact:
        yield
        return
    setattr(modes, name, exact)
    try:
        yield
    finally:
        setattr(modes, name, saved)


@contextmanager
def exact_matmul(device: torch.device) -> Iterator[None]:
    """fp32 matmuls in full fp32: no autocast and none of the process-wide reduced-precision modes."""
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    saved = [matmul.fp32_precision for matmul in matmuls]
    try:
        for matmul in matmuls:
            matmul.fp32_precision = "ieee"
        with (
            torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext(),
            _exact_npu_matmul() if device.type == "npu" else nullcontext(),
        ):
            yield
    finally:
        for matmul, precision in zip(matmuls, saved, strict=True):
            matmul.fp32_precision = precision
