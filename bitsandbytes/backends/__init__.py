"""The backends: which exist, which are usable here, and why the others are not.

A backend is a package of this folder, or one that another distribution offers under the entry-point group
`bitsandbytes.backends` (a function without arguments that registers its kernels with `bitsandbytes._ops.register`).
"""

from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
import warnings

import torch

from .. import _env
from ..errors import BackendUnavailableError

#: In the order of loading: a later one replaces the kernels of an earlier one.
_BACKENDS = ("default", "cpu", "npu")

_status: dict[str, tuple[bool, str]] = {}

#: The packages of this folder that were imported. They may have two functions: `why_not()` gives the reason why the
#: backend cannot be used now, or an empty string, where that depends on what happens after the import; `check_dtype(op,
#: dtype)` raises if the chip cannot compute with a dtype.
_loaded: dict[str, ModuleType] = {}


def load() -> None:
    """Import every backend of this package, then those of other distributions.

    One that cannot be used here leaves its reason in `status()`. A foreign backend that fails does not take the
    package down: the failure is a warning and stays in `status()`.

    Raises:
        BackendUnavailableError: The environment asks for a backend that cannot be used here.
    """
    for name in _BACKENDS:
        try:
            _loaded[name] = import_module(f"{__name__}.{name}")
        except BackendUnavailableError as error:
            if name == "cpu" and _env.CPU_TARGET:
                raise BackendUnavailableError(f"BNB_CPU_TARGET is '{_env.CPU_TARGET}', but {error}") from None
            _status[name] = (False, str(error))
        else:
            _status[name] = (True, "")
    for entry in entry_points(group="bitsandbytes.backends"):
        try:
            entry.load()()
        except Exception as error:
            _status[entry.name] = (False, f"{type(error).__name__}: {error}")
            warnings.warn(f"bitsandbytes: backend '{entry.name}' failed to load: {error}", stacklevel=2)
        else:
            _status[entry.name] = (True, "")


def status() -> dict[str, tuple[bool, str]]:
    """Backend name -> (available, why not); the reason is empty where it is available."""
    now = {name: backend.why_not() for name, backend in _loaded.items() if hasattr(backend, "why_not")}
    return _status | {name: (not why, why) for name, why in now.items()}


def check_dtype(op: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise if a device cannot compute with `dtype`. Operators do so by themselves; this is for what is around them.

    Raises:
        UnsupportedError: It names the chip and what works.
    """
    # torch.compile cannot trace a question to the driver; the operators in what it compiles still ask.
    check = getattr(_loaded.get(device.type), "check_dtype", None)
    if check is not None and not torch.compiler.is_compiling():
        check(op, dtype)
