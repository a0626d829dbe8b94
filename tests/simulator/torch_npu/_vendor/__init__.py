"""The operators of the namespace `npu`: what the vendor's library offers beyond PyTorch's operators."""

from collections.abc import Callable


def define() -> None:
    pass


def missing(name: str) -> Callable:
    """Stands for a vendor operator that is not emulated."""

    def call(*_, **__):
        raise NotImplementedError(f"torch_npu.{name} is not emulated by the simulated NPU")

    call.__name__ = name
    return call
