"""The native library as other packages see it: flags they read and `lib`, whose members are C functions.

This package's own native code is reached through its backends. None of the C functions that other packages look for
exists here, and a lookup says so with an AttributeError, which makes `hasattr(lib, name)` false.
"""

import ctypes
from pathlib import Path
import sys

PACKAGE_DIR = Path(__file__).parent
DYNAMIC_LIBRARY_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

BNB_BACKEND = "CPU"
HIP_ENVIRONMENT = False
ROCM_GPU_ARCH = "unknown"


class BNBNativeLibrary:
    """Access to the functions of a loaded C library, or to none."""

    compiled_with_cuda = False

    def __init__(self, lib: ctypes.CDLL | None):
        self._lib = lib

    def __getattr__(self, name: str):
        function = None if name == "_lib" else getattr(self._lib, name, None)
        if function is None:
            raise AttributeError(
                f"bitsandbytes has no native function '{name}' on backend {BNB_BACKEND}: "
                f"{PACKAGE_DIR} holds none of upstream's C functions; every operator of torch.ops.bitsandbytes works "
                "without them"
            )
        return function

    def __getitem__(self, item: str):
        return getattr(self, item)


lib = BNBNativeLibrary(None)
