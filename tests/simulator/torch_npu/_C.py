"""The few names of the real extension module that other packages call."""

import torch

from . import npu

_storage_Use_Count = torch._C._storage_Use_Count
_npu_getDefaultStream = npu.default_stream


def _npu_getCurrentRawStream(device: int) -> int:
    return npu.current_stream(device).npu_stream
