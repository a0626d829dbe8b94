"""A stand-in for torch_npu and an Ascend machine on a CPU-only PyTorch. See README.md beside this package."""

import os

# As the real package: `import torch` loads this one through its entry point, and must not while it is being imported.
_autoload_setting = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch  # noqa: E402

if _autoload_setting is None:
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _autoload_setting

from . import _native  # noqa: E402, F401  the device itself

torch.utils.rename_privateuse1_backend("npu")

from . import _C, _dynamo, _hccl, _vendor, npu  # noqa: E402, F401
from .npu._devices import get_soc_version  # noqa: E402, F401

__version__ = "2.13.0+simulated"
is_simulated = True

# Numbers of the dtypes that PyTorch does not have.
int4 = 285
hifloat8 = 290
float8_e5m2 = 291
float8_e4m3fn = 292
float8_e8m0fnu = 293
float4_e2m1fn_x2 = 296
float4_e1m2fn_x2 = 297

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
npu._after_registration()
_dynamo.register_when_imported()
_hccl.register()
_vendor.define()

from . import optim  # noqa: E402, F401
from ._vendor.optimizers import npu_apply_adam_w  # noqa: E402, F401


def _autoload() -> None:
    """What PyTorch calls after the import; everything is done by then."""


def __getattr__(name: str):
    """`npu_*`: the operators of the namespace `npu`.

    transformers imports some of them by name, so one that is not emulated fails only when it is called.
    """
    if name.startswith(("npu_", "_npu_", "get_npu_")):
        return getattr(torch.ops.npu, name, None) or _vendor.missing(name)
    raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
