"""8-bit blockwise quantisation with a map of 256 levels."""

import torch

from .maps import table
from .._ops import _checks as check
from ..errors import ArgumentError
from ..formats import DEFAULT_BLOCKSIZE_8BIT, num_blocks
from ..quant_state import QuantState


def _map(code: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    return table("dynamic", device) if code is None else code.to(device, copy=True)


@torch.no_grad()  # codes have no derivative
def quantize_blockwise(
    A: torch.Tensor,
    code: torch.Tensor | None = None,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize=DEFAULT_BLOCKSIZE_8BIT,
    nested=False,
) -> tuple[torch.Tensor, QuantState]:
    """Quantise to 8 bits per element: the nearest level of a map after scaling each block to [-1, 1].

    Args:
        A: Any shape and strides; float32, float16 or bfloat16.
        code: 256 ascending fp32 levels; the signed dynamic map if None.
        absmax: fp32 vector of one value per block that receives the scales.
        out: uint8 tensor of A's shape that receives the codes.
        blocksize: Elements of a block of the flattened tensor, any positive number.
        nested: Also quantise the scales, with the same blocksize.

    Returns:
        The uint8 codes in A's shape, and the state that decodes them.

    Raises:
        ArgumentError: (a ValueError) before anything is computed.
    """
    op = "quantize_blockwise"
    check.blocksize_8bit(op, blocksize)
    if out is not None:
        check.out_like(op, out, A.shape, torch.uint8, A.device)
    if absmax is not None:
        scale_dtype = torch.uint8 if nested else torch.float32
        check.out_like(op, absmax, (num_blocks(A.numel(), blocksize),), scale_dtype, A.device, "absmax")
    code = _map(code, A.device)
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(A, code, blocksize)
    state = QuantState(absmax=scales, code=code, blocksize=blocksize, dtype=A.dtype)
    if nested:
        state = compress_absmax(state, blocksize)
    return finish(codes, state, out, absmax)


def compress_absmax(state: QuantState, blocksize: int) -> QuantState:
    """Quantise a new state's scales, which are overwritten: their mean is subtracted, the rest goes to 8 bits."""
    # An empty tensor has no mean; NaN would not be valid JSON on disk.
    offset = state.absmax.mean() if state.absmax.numel() else state.absmax.new_zeros(())
    absmax, state2 = quantize_blockwise(state.absmax.sub_(offset), blocksize=blocksize)
    return QuantState(
        absmax=absmax,
        shape=state.shape,
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
        offset=offset,
        state2=state2,
    )


def finish(
    codes: torch.Tensor, state: QuantState, out: torch.Tensor | None, absmax: torch.Tensor | None
) -> tuple[torch.Tensor, QuantState]:
    """Hand the results over in the caller's tensors where there are any."""
    if absmax is not None:
        state.absmax = absmax.copy_(state.absmax)
    return (codes if out is None else out.copy_(codes)), state


def decoded_absmax(state: QuantState) -> torch.Tensor:
    """The fp32 scales of a state, nested or not."""
    if not state.nested:
        return state.absmax.float()
    return dequantize_blockwise(state.absmax, state.state2).float() + state.offset


def dequantize_blockwise(
    A: torch.Tensor,
    quant_state: QuantState | None = None,
    absmax: torch.Tensor | None = None,
    code: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int = DEFAULT_BLOCKSIZE_8BIT,
    nested=False,
) -> torch.Tensor:
    """Decode `quantize_blockwise`'s codes: level times absmax in fp32, then one cast.

    Args:
        A: uint8 codes, any shape and strides.
        quant_state: The state that came with them. It wins over `absmax`, `code` and `blocksize`.
        absmax: fp32 scales; required without a state.
        code: The map; the signed dynamic one if None.
        out: Receives the result; A's shape and the state's dtype.
        blocksize: The block size the codes were made with.
        nested: Not used; the state knows.

    Returns:
        Tensor of A's shape in the state's dtype (float32 without a state).
    """
    op = "dequantize_blockwise"
    if quant_state is None:
        if absmax is None:
            raise ArgumentError(op, "quant_state or absmax", "given", "neither")
        quant_state = QuantState(absmax=absmax, code=_map(code, A.device), blocksize=blocksize, dtype=torch.float32)
    check.blocksize_8bit(op, quant_state.blocksize)
    check.dtype_is(op, "the dtype of A", A, torch.uint8)  # here too: nested scales are decoded before the operator runs
    args = (A, decoded_absmax(quant_state), quant_state.code.to(A.device), quant_state.blocksize, quant_state.dtype)
    if out is None:
        return torch.ops.bitsandbytes.dequantize_blockwise(*args)
    torch.ops.bitsandbytes.dequantize_blockwise.out(*args, out=out)
    return out
