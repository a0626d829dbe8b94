"""4-bit operators on the CPU; arguments and results in `_ops/fourbit.py`."""

from collections.abc import Sequence

import torch

from ._library import DTYPE, QUANT_TYPE, call, dense, dense_spans, empty, is_dense, targets, whole_blocks
from ..default._blocks import SPAN, exact_matmul, read, write
from ..._ops import register
from ...formats import num_blocks, packed_bytes, rows_of


def quantize_4bit(
    A: torch.Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    n = A.numel()
    packed = empty((packed_bytes(n),), torch.uint8)
    absmax = empty((num_blocks(n, blocksize),), torch.float32)
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
    out = empty(shape, dtype)
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

    if is_dense(A) and is_dense(out):
        decode(A, 0, out)
        return
    for span in whole_blocks(out.numel(), blocksize):
        packed = read(A, span.start // 2 // A.itemsize, packed_bytes(span.stop) // A.itemsize, A.dtype)
        values = empty((span.stop - span.start,), dtype)
        decode(packed, span.first, values)
        write(out, span.start, values)


# More input rows than this are multiplied by PyTorch, with some weight rows at a time decoded. One thread, 4096 x 4096,
# bf16, AVX-512: 7.1 ms for 64 rows in a tile against 8.6 (6.0 for PyTorch's product), 15 ms for 128 against 13.
_TILED_ROWS = 96

# Whether PyTorch has a fast bf16 product here: oneDNN uses what the processor has. Without, the one in fp32 is faster.
_BF16_PRODUCTS = "avx512_bf16" in targets()


class _Weight:
    """A packed weight as the library takes it. Holds on to the dense copies that its addresses need."""

    def __init__(
        self,
        packed: torch.Tensor,
        shape: Sequence[int],
        quant_type: str,
        blocksize: int,
        absmax: torch.Tensor,
        absmax_8bit: torch.Tensor | None = None,
        absmax_code: torch.Tensor | None = None,
        absmax_offset: torch.Tensor | None = None,
        code: torch.Tensor | None = None,
    ):
        self.shape = shape
        self._dense: list[torch.Tensor] = []

        def address(tensor: torch.Tensor | None) -> int | None:
            if tensor is None:
                return None
            tensor = dense(tensor)
            self._dense.append(tensor)
            return tensor.data_ptr()

        offset = 0.0 if absmax_offset is None else absmax_offset.item()
        self.format = QUANT_TYPE[quant_type], address(code), blocksize
        self.data = address(packed), address(absmax), address(absmax_8bit), address(absmax_code), offset

    def multiply(self, A: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`A @ weight.T + bias`; docs/numerics.md states the precision."""
        n, k = self.shape
        m = rows_of(A)
        out = empty((*A.shape[:-1], n), A.dtype)
        if m > _TILED_ROWS:
            self._multiply_by_panels(A.reshape(m, k), bias, out.view(m, n))
            return out
        a, bias = dense(A), None if bias is None else dense(bias)
        bias_address = None if bias is None else bias.data_ptr()
        call("gemm_4bit", DTYPE[A.dtype], *self.format, m, n, k, a.data_ptr(), *self.data, bias_address, out.data_ptr())
        return out

    def _multiply_by_panels(self, A: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        n, k = self.shape
        dtype = torch.bfloat16 if _BF16_PRODUCTS and A.dtype == torch.bfloat16 else torch.float32
        x, bias = A.to(dtype), None if bias is None else bias.to(dtype)
        rows = max(1, SPAN // max(k, 1))
        panel = empty((min(rows, n), k), dtype)
        with exact_matmul(A.device):
            for first in range(0, n, rows):
                last = min(first + rows, n)
                part = panel[: last - first]
                self.decode_rows(None, first, part)
                out[:, first:last] = torch.nn.functional.linear(x, part, None if bias is None else bias[first:last])

    def decode_rows(self, indices: torch.Tensor | None, first: int, out: torch.Tensor) -> None:
        """Rows `indices` (dense, int64), or all from `first` on, decoded into a dense `out` of shape (..., columns)."""
        address = None if indices is None else indices.data_ptr()
        count = rows_of(out) if indices is None else indices.numel()
        call(
            "decode_rows_4bit", DTYPE[out.dtype], *self.format, *self.shape, *self.data, address, first, count,
            out.data_ptr(),
        )  # fmt: skip


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
    weight = _Weight(B, shapeB, quant_type, blocksize, absmax, absmax_8bit, absmax_code, absmax_offset)
    return weight.multiply(A, bias)


def gemv_4bit(
    A: torch.Tensor, B: torch.Tensor, shapeB: Sequence[int], absmax: torch.Tensor, code: torch.Tensor, blocksize: int
) -> torch.Tensor:
    # The code takes the place of the levels of the type.
    return _Weight(B, shapeB, "nf4", blocksize, absmax, code=code).multiply(A)


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
    weight = _Weight(B, shapeB, quant_type, blocksize, absmax, absmax_8bit, absmax_code, absmax_offset)
    out = empty((*indices.shape, shapeB[1]), dtype)
    weight.decode_rows(dense(indices.long()), 0, out)
    return out


register("quantize_4bit", quantize_4bit, "CPU", "native")
register("dequantize_4bit", dequantize_4bit, "CPU", "native")
register("dequantize_4bit.out", dequantize_4bit_out, "CPU", "native")
register("gemm_4bit", gemm_4bit, "CPU", "native")
register("gemv_4bit", gemv_4bit, "CPU", "native")
register("gemv_4bit.out", gemv_4bit_out, "CPU", "native")
register("embedding_4bit", embedding_4bit, "CPU", "native")
