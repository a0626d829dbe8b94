"""libbitsandbytes_cpu as Python sees it: its functions (csrc/cpu/api.h), targets, and tensors as arguments."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch

from .. import _native
from ..default._blocks import SPAN, Span, read
from ... import _env
from ...errors import UnsupportedError
from ...formats import num_blocks

_DTYPE = _QUANT_TYPE = _THREADS = c_int
_SIZE, _TENSOR = c_int64, c_void_p

_library = _native.load(
    "bitsandbytes_cpu",
    {
        "bnb_cpu_runnable_target": (c_char_p, [c_int]),
        "bnb_cpu_select_target": (c_int, [c_char_p]),
        "bnb_cpu_target": (c_char_p, []),
        "bnb_cpu_last_target": (c_char_p, []),
        "bnb_cpu_threading": (c_char_p, []),
        "bnb_cpu_use_large_pages": (None, [_TENSOR, _SIZE]),
        "bnb_cpu_codebook": (c_int, [_QUANT_TYPE, _TENSOR]),
        "bnb_cpu_quantize_4bit": (c_int, [_DTYPE, _QUANT_TYPE, _SIZE, _SIZE, _TENSOR, _TENSOR, _TENSOR, _THREADS]),
        "bnb_cpu_dequantize_4bit": (c_int, [_DTYPE, _QUANT_TYPE, _SIZE, _SIZE, _TENSOR, _TENSOR, _TENSOR, _THREADS]),
        "bnb_cpu_gemm_4bit": (
            c_int,
            [_DTYPE, _QUANT_TYPE, _TENSOR, *[_SIZE] * 4, *[_TENSOR] * 5, c_float, _TENSOR, _TENSOR, _THREADS],
        ),
        "bnb_cpu_decode_rows_4bit": (
            c_int,
            [
                _DTYPE,
                _QUANT_TYPE,
                _TENSOR,
                *[_SIZE] * 3,
                *[_TENSOR] * 4,
                c_float,
                _TENSOR,
                _SIZE,
                _SIZE,
                _TENSOR,
                _THREADS,
            ],
        ),
        "bnb_cpu_quantize_blockwise": (c_int, [_DTYPE, _SIZE, _SIZE, _TENSOR, _TENSOR, _TENSOR, _TENSOR, _THREADS]),
        "bnb_cpu_dequantize_blockwise": (c_int, [_DTYPE, _SIZE, _SIZE, _TENSOR, _TENSOR, _TENSOR, _TENSOR, _THREADS]),
        "bnb_cpu_int8_vectorwise_quant": (c_int, [_DTYPE, *[_SIZE] * 2, _TENSOR, c_float, *[_TENSOR] * 3, _THREADS]),
        "bnb_cpu_int8_vectorwise_dequant": (
            c_int,
            [_DTYPE, *[_SIZE] * 2, *[_TENSOR] * 3, _SIZE, _TENSOR, _THREADS],
        ),
        "bnb_cpu_int8_linear_matmul": (c_int, [*[_SIZE] * 3, *[_TENSOR] * 3, _THREADS]),
        "bnb_cpu_int8_mm_dequant": (c_int, [_DTYPE, *[_SIZE] * 2, *[_TENSOR] * 5, _THREADS]),
        "bnb_cpu_int8_scaled_mm": (
            c_int,
            [_DTYPE, *[_SIZE] * 3, *[_TENSOR] * 5, _SIZE, *[_TENSOR] * 3, _THREADS],
        ),
    },
)

# csrc/common/dtype.h
DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
QUANT_TYPE = {"nf4": 0, "fp4": 1}

# Smaller tensors come from memory that the process keeps.
_LARGE = 4 << 20


def call(op: str, *args: Any) -> None:
    """Run an operator of the library on as many threads as PyTorch uses."""
    _native.check_status(getattr(_library, f"bnb_cpu_{op}")(*args, torch.get_num_threads()), op)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised dense tensor for a kernel to fill, on large pages if it is large and the system has them."""
    out = torch.empty(shape, dtype=dtype)
    size = out.numel() * out.itemsize
    if size >= _LARGE:
        _library.bnb_cpu_use_large_pages(out.data_ptr(), size)
    return out


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds its values in row-major order."""
    return tensor.is_contiguous() and not tensor.is_neg()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy, that is dense."""
    return tensor if is_dense(tensor) else tensor.resolve_neg().contiguous()


def whole_blocks(numel: int, blocksize: int) -> Iterator[Span]:
    """Cut `numel` elements into spans of whole blocks, of about `SPAN` elements."""
    step = max(blocksize, SPAN - SPAN % blocksize)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        yield Span(start, stop, start // blocksize, num_blocks(stop, blocksize))


def dense_spans(tensor: torch.Tensor, blocksize: int) -> Iterator[tuple[Span, torch.Tensor]]:
    """Spans of whole blocks with their elements as a dense vector: one of all if that needs no copy."""
    numel = tensor.numel()
    if is_dense(tensor):
        yield Span(0, numel, 0, num_blocks(numel, blocksize)), tensor
    else:
        for span in whole_blocks(numel, blocksize):
            yield span, read(tensor, span.start, span.stop, tensor.dtype)


def path() -> str:
    """Where the library is."""
    return _library._name


# --- Targets ----------------------------------------------------------------------------------------------------------


def targets() -> tuple[str, ...]:
    """The instruction sets that this build has and this machine runs, best first."""
    names = iter(lambda: _library.bnb_cpu_runnable_target(len(found)), None)
    found: list[str] = []
    for name in names:
        found.append(name.decode())
    return tuple(found)


def target() -> str:
    """The instruction set in use."""
    return _library.bnb_cpu_target().decode()


def last_target() -> str:
    """The instruction set that ran the last native operator of this thread; empty if none since the last selection."""
    return _library.bnb_cpu_last_target().decode()


def threading() -> str:
    """What runs the threads of the kernels, in words."""
    return _library.bnb_cpu_threading().decode()


def select_target(name: str) -> None:
    """Use one instruction set from now on, in the whole process; an empty name chooses the best.

    Raises:
        UnsupportedError: This build or this machine does not have it.
    """
    if _library.bnb_cpu_select_target(name.encode()):
        raise UnsupportedError(f"CPU target must be one of {', '.join(targets())} on this machine, got '{name}'")


@contextmanager
def using_target(name: str) -> Iterator[None]:
    """Use one instruction set within the context."""
    before = target()
    select_target(name)
    try:
        yield
    finally:
        select_target(before)


if _env.CPU_TARGET:
    select_target(_env.CPU_TARGET)
