"""The CPU backend: kernels of libbitsandbytes_cpu, compiled for several instruction sets and chosen at run time."""

from . import blockwise, fourbit, int8
from ._library import last_target, path, select_target, target, targets, threading, using_target

__all__ = [
    "blockwise",
    "fourbit",
    "int8",
    "last_target",
    "path",
    "select_target",
    "target",
    "targets",
    "threading",
    "using_target",
]
