"""4-bit quantisation, NF4 and FP4."""

from collections.abc import Sequence

import torch

from .blockwise import compress_absmax, decoded_absmax, finish
from .maps import table
from .._ops import _checks as check
from ..errors import ArgumentError
from ..formats import DEFAULT_BLOCKSIZE_4BIT, NESTED_BLOCKSIZE, num_blocks, packed_bytes
from ..quant_state import QuantState, resolve_quant_type


class _Default(str):
    """A default that can be told from the same value given by the caller."""


_FP4_BY_DEFAULT = _Default("fp4")


@torch.no_grad()  # codes have no derivative
def quantize_4bit(
    A: torch.Tensor,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize=None,
    compress_statistics=False,
    quant_type="fp4",
    quant_storage=torch.uint8,
) -> tuple[torch.Tensor, QuantState]:
    """Quantise to 4 bits per element: the nearest level after scaling each block to [-1, 1].

    Args:
        A: Any shape and strides; float32, float16 or bfloat16.
        absmax: Vector of one value per block that receives the scales (fp32; uint8 with `compress_statistics`).
        out: Receives the packed codes.
        blocksize: Elements of a block of the flattened tensor: 32, 64 (if None), 128, ... or 4096.
        compress_statistics: Also quantise the scales to 8 bits in blocks of 256 (QLoRA's double quantisation).
        quant_type: "nf4" or "fp4".
        quant_storage: dtype of the packed tensor; its bytes are the same for each.

    Returns:
        Packed codes of shape (bytes / item size, 1), and the state that decodes them.

    Raises:
        ArgumentError: (a ValueError) before anything is computed.
    """
    op = "quantize_4bit"
    if blocksize is None:
        blocksize = DEFAULT_BLOCKSIZE_4BIT
    check.blocksize_4bit(op, blocksize)
    if out is not None:
        size = packed_bytes(A.numel()) // quant_storage.itemsize
        check.out_like(op, out, (size, 1), quant_storage, A.device)
    if absmax is not None:
        scale_dtype = torch.uint8 if compress_statistics else torch.float32
        check.out_like(op, absmax, (num_blocks(A.numel(), blocksize),), scale_dtype, A.device, "absmax")

    packed, scales = torch.ops.bitsandbytes.quantize_4bit(A, blocksize, quant_type, quant_storage)
    state = QuantState(
        absmax=scales,
        shape=A.shape,
        dtype=A.dtype,
        blocksize=blocksize,
        code=table(quant_type, A.device),
        quant_type=quant_type,
    )
    if compress_statistics:
        state = compress_absmax(state, NESTED_BLOCKSIZE)
    return finish(packed, state, out, absmax)


def quantize_fp4(
    A: torch.Tensor,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize=None,
    compress_statistics=False,
    quant_storage=torch.uint8,
):
    """`quantize_4bit` with FP4."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "fp4", quant_storage)


def quantize_nf4(
    A: torch.Tensor,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize=None,
    compress_statistics=False,
    quant_storage=torch.uint8,
):
    """`quantize_4bit` with NF4."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "nf4", quant_storage)


def dequantize_4bit(
    A: torch.Tensor,
    quant_state: QuantState | None = None,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int | None = None,
    quant_type=_FP4_BY_DEFAULT,
) -> torch.Tensor:
    """Decode `quantize_4bit`'s codes: level times absmax in fp32, then one cast.

    Args:
        A: Packed codes in any storage dtype. A row vector (1, n > 1), the packed tensor transposed, gives the
            transposed result.
        quant_state: The state that came with them. Asking for another `blocksize` or `quant_type` is an error.
        absmax: fp32 scales; required, with `out`, when there is no state.
        out: Receives the result; shape and dtype of the original tensor.
        blocksize: Block size when there is no state; 64 if None.
        quant_type: "nf4" or "fp4" when there is no state.

    Returns:
        Tensor of the original shape and dtype.

    Raises:
        ArgumentError: (a ValueError) before any memory is read.
    """
    op = "dequantize_4bit"
    if quant_state is None:
        if absmax is None or out is None:
            raise ArgumentError(op, "absmax and out", "given when there is no quant_state", (absmax, out))
        quant_state = QuantState(
            absmax=absmax,
            shape=out.shape,
            dtype=out.dtype,
            blocksize=DEFAULT_BLOCKSIZE_4BIT if blocksize is None else blocksize,
            quant_type=str(quant_type),
        )
    elif blocksize is not None and blocksize != quant_state.blocksize:
        raise ArgumentError(op, "blocksize", f"{quant_state.blocksize}, that of quant_state", blocksize)
    decoded_type = resolve_quant_type(op, quant_state, None if quant_type is _FP4_BY_DEFAULT else quant_type)
    shape: Sequence[int] = quant_state.shape
    check.blocksize_4bit(op, quant_state.blocksize)
    # Here too, because nested scales are decoded before the operator runs.
    check.packed(op, "A", A, shape)
    if out is not None:
        check.out_like(op, out, shape, quant_state.dtype, A.device)

    args = (A, decoded_absmax(quant_state), quant_state.blocksize, decoded_type, shape, quant_state.dtype)
    if out is None:
        out = torch.ops.bitsandbytes.dequantize_4bit(*args)
    else:
        torch.ops.bitsandbytes.dequantize_4bit.out(*args, out=out)
    return out.t() if A.dim() == 2 and A.shape[0] == 1 < A.shape[1] and len(shape) == 2 else out


def dequantize_fp4(
    A: torch.Tensor,
    quant_state: QuantState | None = None,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int | None = None,
) -> torch.Tensor:
    """`dequantize_4bit` with FP4."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "fp4")


def dequantize_nf4(
    A: torch.Tensor,
    quant_state: QuantState | None = None,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int | None = None,
) -> torch.Tensor:
    """`dequantize_4bit` with NF4."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "nf4")


def gemv_4bit(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    transposed_A=False,
    transposed_B=False,
    state: QuantState | None = None,
) -> torch.Tensor:
    """`A @ W.T` with a packed weight, accumulated in fp32.

    Args:
        A: (..., in_features); float32, float16 or bfloat16. Any number of rows.
        B: Packed W of shape (out_features, in_features), in any orientation of the packed vector.
        out: Receives the result.
        transposed_A, transposed_B: Not used.
        state: The state of B.
    """
    if state is None:
        raise ArgumentError("gemv_4bit", "state", "the QuantState of B", None)
    check.matmul_4bit("gemv_4bit", A, B, state.shape, state.blocksize)  # before nested scales are decoded
    args = (A, B, state.shape, decoded_absmax(state), state.code, state.blocksize)
    if out is None:
        return torch.ops.bitsandbytes.gemv_4bit(*args)
    torch.ops.bitsandbytes.gemv_4bit.out(*args, out=out)
    return out
