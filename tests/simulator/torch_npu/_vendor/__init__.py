"""The operators of the namespace `npu`: what the vendor's library offers beyond PyTorch's operators.

Those that the Hugging Face packages or this package call. Their schemas are in vendor_schemas.txt; each holds its
arguments against the documented rules and then computes in plain PyTorch.
"""

from collections.abc import Callable


def define() -> None:
    from . import attention, formats, layers, optimizers, quantisation  # noqa: F401  each defines its operators


def missing(name: str) -> Callable:
    """Stands for a vendor operator that is not emulated."""

    def call(*_, **__):
        raise NotImplementedError(f"torch_npu.{name} is not emulated by the simulated NPU")

    call.__name__ = name
    return call
