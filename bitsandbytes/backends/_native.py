"""Shared libraries: where they are, what they declare, and how their errors become exceptions."""

from collections.abc import Mapping, Sequence
import ctypes
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, NativeError

PACKAGE = Path(__file__).parents[1]

#: Written by the build in the place of a library that could not be built: the reason, in one line.
REASON_SUFFIX = ".not-built.txt"

# csrc/common/status.h
_STATUS = {
    1: "an argument is invalid",
    2: "the target is unknown, or this machine cannot run it",
    3: "out of memory",
    4: "an index is out of range",
}


def load(stem: str, functions: Mapping[str, tuple[Any, Sequence[Any]]]) -> ctypes.CDLL:
    """Load `lib<stem>.so` from the package and declare its functions.

    Args:
        stem: Name of the library.
        functions: Name -> (result type, argument types).

    Raises:
        BackendUnavailableError: It is not there, does not load, or lacks a function; the message says why.
    """
    path = PACKAGE / f"lib{stem}.so"
    if not path.exists():
        reason = path.with_suffix(REASON_SUFFIX)
        why = reason.read_text().strip() if reason.exists() else "it was not built"
        raise BackendUnavailableError(f"{path.name} is not in {PACKAGE}: {why}")
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BackendUnavailableError(f"{path} does not load: {error}") from None
    return library


def check_status(status: int, function: str) -> None:
    """Raise `NativeError`, or what Python has for it, unless a function returned 0."""
    if status:
        error = {3: MemoryError, 4: IndexError}.get(status, NativeError)
        raise error(f"{function}: {_STATUS.get(status, f'status {status}')}")
