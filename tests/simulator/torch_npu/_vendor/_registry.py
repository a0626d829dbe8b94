"""How an operator of the vendor is defined."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import _native, npu

LIBRARY = torch.library.Library("npu", "FRAGMENT")

_LINES = (Path(__file__).parents[2] / "vendor_schemas.txt").read_text().splitlines()
_SCHEMAS = {line.partition("(")[0]: line for line in _LINES if line.startswith("npu::")}

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# The numbers by which operators with an `int` argument know a dtype; PyTorch converts a torch.dtype into them.
DTYPES = {0: torch.uint8, 1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def require_emulated(holds: bool, what: str) -> None:
    if not holds:
        raise NotImplementedError(f"The simulated NPU does not emulate {what}")


def define(name: str) -> None:
    """Declares an operator with its real schema; `name` has the overload, if any, after a point."""
    LIBRARY.define(_SCHEMAS[f"npu::{name}"].removeprefix("npu::"))


def vendor_op(name: str) -> Callable[[Callable], Callable]:
    """Defines an operator by a function on CPU tensors, which gets aliases of the tensors on the device.

    What it returns is moved to the device, except the arguments that it wrote into. The same function computes shapes
    on meta tensors, so it must not look at values.
    """
    define(name)

    def implement(function: Callable) -> Callable:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            device = _common_device(name, tree_leaves((args, kwargs)))
            aliases: dict[torch.Tensor, torch.Tensor] = {}  # by identity

            def on_host(tensor: torch.Tensor) -> torch.Tensor:
                alias = torch.ops.simulator.on_host(tensor)
                aliases[alias] = tensor
                return alias

            def on_device(tensor: torch.Tensor) -> torch.Tensor:
                written = aliases.get(tensor)
                return torch.ops.simulator.to_device(tensor, device) if written is None else written

            _native.record_launch(f"npu::{name}".encode())
            args, kwargs = tree_map_only(torch.Tensor, on_host, (args, kwargs))
            with torch.no_grad():
                return tree_map_only(torch.Tensor, on_device, function(*args, **kwargs))

        LIBRARY.impl(name, kernel, "PrivateUse1")
        LIBRARY.impl(name, function, "Meta")
        return function

    return implement


def _common_device(name: str, arguments: Iterable[Any]) -> torch.device:
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    devices = {tensor.device for tensor in tensors}
    require(
        len(devices) == 1,
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{' and '.join(sorted(map(str, devices)))}! (in npu::{name})",
    )
    if not npu.is_bf16_supported():
        require(
            all(tensor.dtype != torch.bfloat16 for tensor in tensors),
            f"npu::{name} is not implemented for DT_BFLOAT16 on {npu.get_device_name()}",
        )
    return devices.pop()


def gradients(function: Callable, inputs: Iterable[torch.Tensor], gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of the one result of `function`, inside the kernel of a backward operator."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*inputs), inputs, gradient)
