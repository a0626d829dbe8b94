"""Optimizer state of sharded parameters (`DTensor`, as FSDP2 and tensor parallelism make them).

Every rank updates its own shard with its own blocks. The states are `DTensor`s too, so that a checkpoint gathers or
saves all ranks' values; a plain tensor would be taken for a replica and all but one rank's values would be lost.
"""

from typing import TYPE_CHECKING, TypeGuard

import torch

from ..formats import OPTIMIZER_BLOCKSIZE, num_blocks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    # By attribute: builds of PyTorch without torch.distributed have no DTensor to test for.
    return hasattr(tensor, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, sharing its memory; the tensor itself if it is not a `DTensor`."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def zeros_stacked(p: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of shape `(rows, *p.shape)`, sharded like `p`; of shape `p.shape` for one row."""
    shape = p.shape if rows == 1 else torch.Size((rows, *p.shape))
    if not is_sharded(p):
        return torch.zeros(shape, dtype=dtype, device=p.device)
    from torch.distributed.tensor import DTensor, Shard

    added = len(shape) - p.dim()
    placements = [Shard(place.dim + added) if isinstance(place, Shard) else place for place in p.placements]
    own = p.to_local()
    shard = torch.zeros((*shape[:added], *own.shape), dtype=dtype, device=own.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, p.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def zeros_per_block(p: torch.Tensor, rows: int) -> torch.Tensor:
    """fp32 zeros, one per block of `p`: `(blocks,)`, or `(rows, blocks)`.

    For a sharded parameter: `(*mesh.shape, [rows,] blocks of the largest shard)`, so that all ranks hold equal shapes.
    """
    stack = () if rows == 1 else (rows,)
    if not is_sharded(p):
        return torch.zeros((*stack, num_blocks(p.numel(), OPTIMIZER_BLOCKSIZE)), dtype=torch.float32, device=p.device)
    from torch.distributed.tensor import DTensor, Shard

    mesh = p.device_mesh
    largest = list(p.shape)
    for axis, place in enumerate(p.placements):
        if isinstance(place, Shard):
            largest[place.dim] = -(largest[place.dim] // -mesh.size(axis))
    blocks = num_blocks(torch.Size(largest).numel(), OPTIMIZER_BLOCKSIZE)
    shard = torch.zeros((*(1,) * mesh.ndim, *stack, blocks), dtype=torch.float32, device=p.to_local().device)
    return DTensor.from_local(shard, mesh, [Shard(axis) for axis in range(mesh.ndim)], run_check=False)


def local_blocks(absmax: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """This rank's part of what `zeros_per_block` made, as `(blocks,)` or `(rows, blocks)`, sharing its memory."""
    if not is_sharded(absmax):
        return absmax
    shard = absmax.to_local()
    blocks = num_blocks(local(p).numel(), OPTIMIZER_BLOCKSIZE)
    return shard.reshape(shard.shape[absmax.device_mesh.ndim :])[..., :blocks]
