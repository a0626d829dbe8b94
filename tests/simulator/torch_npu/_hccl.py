"""Makes "hccl" known to torch.distributed."""

from datetime import timedelta

import torch
import torch.distributed as dist


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A group that serves the devices with "hccl" and the host with the gloo that it is built on."""
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    torch.ops.simulator.add_hccl(group.boxed())
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


def register() -> None:
    if dist.is_available():
        dist.Backend.register_backend("hccl", _group, devices=["npu"])
