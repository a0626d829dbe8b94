"""The contract of every operator: schema, fake, argument check, and the one way to register a kernel.

PyTorch runs neither schema checks nor fakes on real calls, so `register` puts the operator's argument check in front
of each kernel. A family module (`fourbit`, `blockwise`, `int8`, `optim`) calls `define` once per operator.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
import warnings

import torch

NAMESPACE = "bitsandbytes"

# Kept alive for the life of the process: PyTorch forgets a library's operators when the object dies.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

_check_of: dict[str, Callable[..., None]] = {}

_kernels: dict[tuple[str, str], Callable[..., Any]] = {}

#: operator -> dispatch key -> name of the implementation, as registered. Read by `python -m bitsandbytes`.
implementations: dict[str, dict[str, str]] = defaultdict(dict)

#: Dispatch keys of the devices that the package supports on purpose; any other device runs with a warning.
SUPPORTED_KEYS = ("CPU", "PrivateUse1")


def define(schema: str, check: Callable[..., None], fake: Callable[..., Any]) -> None:
    """Declare an operator.

    Args:
        schema: Operator name and signature in PyTorch's schema language, without namespace.
        check: Takes the operator's arguments and raises on the first bad one. It looks at metadata only.
        fake: Takes the operator's arguments and returns empty tensors of the result's shapes and dtypes.
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _check_of[name] = check

    def checked_fake(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return fake(*args, **kwargs)

    torch.library.register_fake(f"{NAMESPACE}::{name}", checked_fake, lib=_library)


def operators() -> tuple[str, ...]:
    """The names of all operators, with ".out" where that is an overload."""
    return tuple(_check_of)


def schema(op: str) -> torch.FunctionSchema:
    """The schema of an operator."""
    name, _, overload = op.partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload or "default")._schema


def registered(op: str, key: str) -> Callable[..., Any]:
    """The kernel that runs operator `op` under a dispatch key, without the argument check in front of it."""
    return _kernels[op, key]


def register(op: str, kernel: Callable[..., Any], key: str, implementation: str) -> None:
    """Register a kernel of operator `op` under a dispatch key (such as "CPU"), behind the operator's argument check.

    It replaces the kernel that was registered there before: backends are loaded from the reference to the best.
    """
    known = key in implementations[op]
    _kernels[op, key] = kernel
    implementations[op][key] = implementation
    if known:  # PyTorch's dispatcher warns of a second registration
        return
    check = _check_of[op]

    def checked_kernel(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        kernel = _kernels[op, key]
        if not torch.is_grad_enabled():  # entering no_grad takes 1.1 us, a third of a small kernel
            return kernel(*args, **kwargs)
        # No operator has a derivative of its own; PyTorch says so when one is asked for.
        with torch.no_grad():
            return kernel(*args, **kwargs)

    _library.impl(op, checked_kernel, key)


def register_reference(op: str, kernel: Callable[..., Any]) -> None:
    """Register the reference implementation of `op` for every device.

    Supported devices get it as it is. All others reach it through the composite key, which says once per device type
    that no faster implementation exists: nothing falls back silently.
    """
    for key in SUPPORTED_KEYS:
        register(op, kernel, key, "default")

    def announced_kernel(*args: Any, **kwargs: Any) -> Any:
        warn_reference_only(next(a for a in args if isinstance(a, torch.Tensor)).device.type)
        return kernel(*args, **kwargs)

    register(op, announced_kernel, "CompositeExplicitAutograd", "default")


_announced: set[str] = set()


def warn_reference_only(device_type: str) -> None:
    """Warn, once per process and device type, that operators run on the PyTorch reference."""
    if device_type not in _announced:
        _announced.add(device_type)
        warnings.warn(
            f"bitsandbytes: there are no kernels for device type '{device_type}'; "
            "operators run on the PyTorch reference implementation, which is exact but slow",
            stacklevel=3,
        )


from . import blockwise, fourbit, int8, optim  # noqa: E402, F401  each declares its operators
