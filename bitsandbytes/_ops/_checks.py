"""Checks shared by the operator families. They look at metadata only and cost a few comparisons."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..errors import ArgumentError
from ..formats import BLOCKSIZES_4BIT, CODEBOOKS, FLOAT_DTYPES, MAP_SIZE, NESTED_BLOCKSIZE, num_blocks, packed_bytes


def listed(values: Sequence[Any]) -> str:
    return "one of " + ", ".join(str(v) for v in values)


def one_of(op: str, argument: str, value: Any, valid: Sequence[Any]) -> None:
    if value not in valid:
        raise ArgumentError(op, argument, listed(valid), repr(value) if isinstance(value, str) else value)


def float_dtype(op: str, argument: str, dtype: torch.dtype) -> None:
    one_of(op, argument, dtype, FLOAT_DTYPES)


def dtype_is(op: str, argument: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ArgumentError(op, argument, f"{dtype}", tensor.dtype)


def same_device(op: str, reference: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.device != reference.device:
            raise ArgumentError(op, argument, f"on {reference.device}, like the first tensor", tensor.device)


def blocksize_4bit(op: str, blocksize: int) -> None:
    one_of(op, "blocksize", blocksize, BLOCKSIZES_4BIT)


def quant_type(op: str, name: str) -> None:
    one_of(op, "quant_type", name, tuple(CODEBOOKS))


def blocksize_8bit(op: str, blocksize: int) -> None:
    # The operators take 64-bit integers; a larger value would fail in the dispatcher with an error that names nothing.
    if not isinstance(blocksize, int) or isinstance(blocksize, bool) or not 0 < blocksize < 2**63:
        raise ArgumentError(op, "blocksize", "a positive integer below 2**63", blocksize)


def absmax(op: str, tensor: torch.Tensor, numel: int, blocksize: int, argument: str = "absmax") -> None:
    dtype_is(op, argument, tensor, torch.float32)
    expected = num_blocks(numel, blocksize)
    if tensor.numel() != expected:
        raise ArgumentError(
            op, argument, f"of {expected} values, one per block of {blocksize} in {numel} elements", f"{tensor.numel()}"
        )


def packed(op: str, argument: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    if any(size < 0 for size in shape):
        raise ArgumentError(op, "shape", "of sizes that are not negative", list(shape))
    got, expected = tensor.numel() * tensor.itemsize, packed_bytes(prod(shape))
    if got != expected:
        raise ArgumentError(op, argument, f"{expected} bytes, the packed size of {list(shape)}", f"{got} bytes")


def matmul_4bit(op: str, A: torch.Tensor, B: torch.Tensor, shapeB: Sequence[int], blocksize: int) -> None:
    blocksize_4bit(op, blocksize)
    float_dtype(op, "the dtype of A", A.dtype)
    if len(shapeB) != 2:
        raise ArgumentError(op, "shapeB", "[out_features, in_features]", list(shapeB))
    if A.dim() == 0 or A.shape[-1] != shapeB[1]:
        raise ArgumentError(op, "A", f"of {shapeB[1]} columns, the in_features of shapeB", f"shape {tuple(A.shape)}")
    packed(op, "B", B, shapeB)
    same_device(op, A, B=B)


def statistics(
    op: str,
    numel: int,
    blocksize: int,
    absmax_: torch.Tensor,
    absmax_8bit: torch.Tensor | None,
    absmax_code: torch.Tensor | None,
    absmax_offset: torch.Tensor | None,
) -> None:
    """The scales of a 4-bit weight: plain, or nested, where absmax_8bit holds codes and absmax the scales of theirs."""
    if absmax_8bit is None:
        absmax(op, absmax_, numel, blocksize)
        return
    if absmax_code is None or absmax_offset is None:
        raise ArgumentError(op, "absmax_code and absmax_offset", "given with absmax_8bit", None)
    dtype_is(op, "absmax_8bit", absmax_8bit, torch.uint8)
    blocks = num_blocks(numel, blocksize)
    if absmax_8bit.numel() != blocks:
        raise ArgumentError(op, "absmax_8bit", f"of {blocks} values, one per block", absmax_8bit.numel())
    absmax(op, absmax_, blocks, NESTED_BLOCKSIZE)
    code_map(op, absmax_code, MAP_SIZE, "absmax_code")
    float_dtype(op, "the dtype of absmax_offset", absmax_offset.dtype)
    if absmax_offset.numel() != 1:
        raise ArgumentError(op, "absmax_offset", "a single value", f"{absmax_offset.numel()} values")


def indices(op: str, tensor: torch.Tensor) -> None:
    one_of(op, "the dtype of indices", tensor.dtype, (torch.int64, torch.int32))


def code_map(op: str, tensor: torch.Tensor, size: int = MAP_SIZE, argument: str = "code") -> None:
    dtype_is(op, argument, tensor, torch.float32)
    if tensor.numel() != size:
        raise ArgumentError(op, argument, f"a map of {size} levels", f"{tensor.numel()}")


def out_like(
    op: str,
    out: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    argument: str = "out",
) -> None:
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(op, argument, f"of shape {tuple(shape)}", tuple(out.shape))
    if out.dtype != dtype:
        raise ArgumentError(op, argument, f"of dtype {dtype}", out.dtype)
    if out.device != device:
        raise ArgumentError(op, argument, f"on {device}", out.device)
