"""How kernels of this package are put on a stream of the NPU.

torch_npu queues its own operators and launches them from another thread; a kernel that is launched directly must come
behind them. Reading the stream's handle waits until the queue is launched, so it is read once for every launch, as the
last thing that PyTorch is asked before it: outputs are allocated earlier, and a handle is never kept.
"""

from collections.abc import Callable
from typing import Any

import torch

from .._native import check_status
from ...errors import NativeError


def launch(name: str, function: Callable[..., int], device: torch.device, *args: Any) -> None:
    """Call `function(stream, *args)`, a function of the launcher, with the current stream of `device`.

    Raises:
        NativeError: The stream is gone, as an operator that was queued before has failed; or the launch failed.
    """
    npu = torch.npu  # type: ignore[attr-defined]
    with npu.device(device):
        stream = npu.current_stream(device).npu_stream
        if not stream:
            raise NativeError(f"{name}: {device} has no stream any more; an operator that was queued before has failed")
        check_status(function(stream, *args), name)
