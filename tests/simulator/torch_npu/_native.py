"""The functions of the C++ part (csrc/api.cpp)."""

import ctypes
from pathlib import Path

from ._build import library

_library = ctypes.CDLL(str(library()))


def _function(name: str, result: type | None = ctypes.c_int, *arguments: type):
    function = getattr(_library, f"simulator_{name}")
    function.restype, function.argtypes = result, arguments
    return function


def _raising(name: str, *arguments: type):
    """A function that returns the message of its error."""
    function = _function(name, ctypes.c_char_p, *arguments)

    def call(*values: int) -> None:
        message = function(*values)
        if message is not None:
            raise RuntimeError(message.decode())

    return call


def _numbers(name: str, count: int, *arguments: type):
    """A function that fills an array of int64."""
    array = ctypes.c_int64 * count
    function = _function(name, None, *arguments, array)

    def call(*values: int) -> list[int]:
        numbers = array()
        function(*values, numbers)
        return list(numbers)

    return call


initialise = _raising("initialise")
is_initialised = _function("is_initialised")
is_forked_child = _function("is_forked_child")
device_count = _function("device_count")
current_device = _function("current_device")
set_device = _raising("set_device", ctypes.c_int)
device_memory = _function("device_memory", ctypes.c_int64)
chip_version = _function("chip_version")
chip_name = _function("chip_name", ctypes.c_char_p)
host_address = _function("host_address", ctypes.c_void_p, ctypes.c_void_p)
device_of_address = _function("device_of_address", ctypes.c_int, ctypes.c_void_p)
memory_statistics = _numbers("memory_statistics", 5, ctypes.c_int)
reset_peak_memory = _function("reset_peak_memory", None, ctypes.c_int)
empty_cache = _function("empty_cache", None)
record_launch = _function("record_launch", None, ctypes.c_char_p)
counters = _numbers("counters", 6)
launched_ops = _function("launched_ops", ctypes.c_char_p)


# transformers draws the new rows of `resize_token_embeddings` with it. This package uses nothing of the kind.
_RUN_ON_THE_HOST_ALL_THE_SAME = {"aten::linalg_cholesky_ex", "aten::linalg_cholesky_ex.L"}


def _refuse_ops_without_kernel() -> None:
    text = (Path(__file__).parents[1] / "aten_without_kernel.txt").read_text()
    names = {line for line in text.splitlines() if not line.startswith("#")}
    # Here PyTorch runs `index` through `index.out`, for which the real torch_npu has no kernel: it has one for `index`.
    refused = {name for name in names if not name.endswith((".out", "_out")) or _functional(name) in names}
    refused -= _RUN_ON_THE_HOST_ALL_THE_SAME
    _function("refuse_ops", None, ctypes.c_char_p)(" ".join(refused).encode())


def _functional(out_form: str) -> str:
    return out_form.removesuffix("out").rstrip("_.")


_refuse_ops_without_kernel()
