"""Modes that watch the PyTorch operators which a call runs, inside this package's operators too."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import dispatch_key


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class InsideOperators(TorchDispatchMode):
    """Calls `before` and `seen` for every PyTorch operator that runs, also inside the operators of this package."""

    def before(self, func, args, kwargs) -> None:
        """Called ahead of an operator."""

    def seen(self, func, args, kwargs, result) -> None:
        """Called when it has run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "bitsandbytes":
            devices = [t.device for t in _tensors((*args, *kwargs.values()))]
            # PyTorch picks the kernel for meta tensors as soon as there is one among the arguments.
            key = next((dispatch_key(d) for d in devices if d.type == "meta"), dispatch_key(devices[0]))
            with self:  # this operator itself goes past the mode, what it calls does not
                return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
        self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.seen(func, args, kwargs, result)
        return result


class NothingRuns(InsideOperators):
    """Fails on any PyTorch operator."""

    def before(self, func, args, kwargs):
        raise AssertionError(f"{func} ran")


# Each of these reads a value of a device tensor on the host.
_READS_ON_HOST = frozenset(
    "aten::" + name
    for name in (
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_dim",
    )
)


class Recorder(InsideOperators):
    """Names of the operators that ran, and what should not happen on a device."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.faults: set[str] = set()

    def seen(self, func, args, kwargs, result):
        name = f"{func.namespace}::{func._opname}"
        self.names.append(name)
        inputs = list(_tensors((*args, *kwargs.values())))
        outputs = list(_tensors((result,)))
        if name in _READS_ON_HOST:
            self.faults.add(name)
        if name.startswith("aten::index") and any(t.dtype == torch.bool for t in inputs[1:]):
            self.faults.add("a boolean index")
        # An NPU gives float32 where float64 is asked for, so the asking counts, too.
        dtypes = {*(t.dtype for t in inputs + outputs), *(v for v in kwargs.values() if isinstance(v, torch.dtype))}
        if dtypes & {torch.float64, torch.complex128}:
            self.faults.add("float64")
        if any(t.device.type != "cpu" for t in inputs) and any(t.device.type == "cpu" for t in outputs):
            self.faults.add("a copy to the host")
