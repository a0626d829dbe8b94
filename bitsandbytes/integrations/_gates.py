"""How a gate is opened: a function that asks for a CUDA device or an XPU is made to ask for an NPU.

The libraries treat an XPU as they should treat an NPU: they ask `torch.xpu` and send weights to "xpu:0". Here their
functions get `npu` for every `xpu`, in names and in strings, and change in nothing else. That is the change that
the libraries themselves need, so it goes away with it.

A function keeps its identity, only its code is replaced: whoever imported it before has the new one too.
"""

from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
import inspect
import re
from typing import Any

import torch

from ..errors import UnsupportedError

_XPU = re.compile(r"(?<![a-zA-Z])xpu(?![a-zA-Z])")
_NPU = re.compile(r"(?<![a-zA-Z])npu(?![a-zA-Z])")  # no part of a word: "input" contains it


def open_gates(library: str, series: tuple[str, ...], gates: Iterable[tuple[Any, str]]) -> None:
    """Make functions of `library` accept an NPU. Those that do already stay as they are; without an NPU all do.

    Args:
        library: Name of the distribution.
        series: Its versions, as "major.minor", whose functions are known.
        gates: (module or class, name of a function in it).

    Raises:
        UnsupportedError: A function refuses NPUs in a version that is not known.
    """
    if not _npu_is_present():
        return
    closed = [(owner, name) for owner, name in gates if not _accepts_npu(getattr(owner, name, None))]
    if not closed:
        return
    installed = version(library)
    if ".".join(installed.split(".")[:2]) not in series:
        names = ", ".join(name for _, name in closed)
        raise UnsupportedError(
            f"bitsandbytes.integrations.{library}: {library} {installed} is not known to this version of bitsandbytes, "
            f"and it does not accept NPUs by itself (in {names}); known versions of {library} are {', '.join(series)}"
        )
    for owner, name in closed:
        function = inspect.unwrap(getattr(owner, name))
        function.__code__ = function.__code__.replace(
            co_names=_with_npu(function.__code__.co_names), co_consts=_with_npu(function.__code__.co_consts)
        )


def _npu_is_present() -> bool:
    if find_spec("torch_npu") is None:
        return False
    import torch_npu  # noqa: F401  # names the device, if PyTorch did not load it by itself

    return torch.npu.is_available()  # type: ignore[attr-defined]


def _accepts_npu(function: Callable[..., Any] | None) -> bool:
    if function is None:
        return False
    code = inspect.unwrap(function).__code__
    strings = [text for text in (*code.co_names, *code.co_consts) if isinstance(text, str)]
    return any(_NPU.search(text) for text in strings if text != function.__doc__)


def _with_npu(value: Any) -> Any:
    """`value`, a name or a constant of a function's code, with npu for xpu."""
    if isinstance(value, str):
        return _XPU.sub("npu", value)
    return tuple(map(_with_npu, value)) if isinstance(value, tuple) else value
