"""4-bit and 8-bit quantisation for PyTorch."""

from . import _ops, backends, cextension, errors, formats, utils  # noqa: F401

backends.load()

from . import autograd, functional, nn, optim  # noqa: E402
from .autograd._functions import MatmulLtState, matmul, matmul_4bit  # noqa: E402
from .nn import modules  # noqa: E402
from .optim import adam  # noqa: E402

__version__ = "0.51.0"

#: Signals that downstream libraries test.
features = {"multi_backend"}

#: Device types on which every operator works. "cpu" and "npu" are supported on purpose; the others run the PyTorch
#: reference and say so in one warning.
supported_torch_devices = {"cpu", "npu", "cuda", "xpu", "mps", "hpu"}

__all__ = [
    "MatmulLtState",
    "adam",
    "autograd",
    "backends",
    "cextension",
    "features",
    "functional",
    "matmul",
    "matmul_4bit",
    "modules",
    "nn",
    "optim",
    "supported_torch_devices",
    "utils",
]
