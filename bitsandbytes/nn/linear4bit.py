"""`Params4bit` and the Linear layers with a 4-bit weight (QLoRA, arXiv:2305.14314)."""

from collections.abc import Sequence
import copy
import logging
from math import prod
from typing import Any

import torch
from torch import nn

import bitsandbytes as bnb

from ._parameter import QuantizedParameter
from ..errors import NotQuantizedError
from ..formats import DEFAULT_BLOCKSIZE_4BIT, num_blocks, packed_bytes
from ..quant_state import QuantState

logger = logging.getLogger("bitsandbytes.nn.modules")  # the name that applications configure


def _of_state(path: str) -> property:
    """A property of the parameter that reads through to its quant_state.

    FSDP resolves state-dict keys such as "weight.absmax" attribute by attribute. These are properties, not a
    `__getattr__`, which torch.compile cannot trace on a tensor subclass.
    """

    def get(self: "Params4bit") -> Any:
        value = self.__dict__.get("quant_state")
        for name in path.split("."):
            if value is None:
                raise AttributeError(f"'{type(self).__name__}' has no '{path}': its quant_state is {self.quant_state}")
            value = getattr(value, name)
        return value

    return property(get)


class Params4bit(QuantizedParameter):
    """A parameter that is quantised to 4 bits when it is moved to a device, whichever device it is on before.

    Args:
        data: The floating-point weight, or packed codes with `bnb_quantized=True` and their `quant_state`.
        requires_grad: Packed codes have no gradient; leave it False.
        quant_state: The state of packed codes.
        blocksize: Elements of a block; 64 if None.
        compress_statistics: Quantise the scales too.
        quant_type: "nf4" or "fp4".
        quant_storage: dtype of the packed tensor. A floating one lets FSDP shard it.
        module: The layer whose `quant_state` is set along.
        bnb_quantized: Whether `data` is packed.

    Other keyword arguments are ignored: libraries pass the `__dict__` of another parameter.
    """

    blocksize: int
    compress_statistics: bool
    quant_type: str
    quant_state: QuantState | None
    quant_storage: torch.dtype
    bnb_quantized: bool
    module: "Quantized4bitModule | None"

    def __new__(
        cls,
        data: torch.Tensor | None = None,
        requires_grad=False,
        quant_state: QuantState | None = None,
        blocksize: int | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: "Quantized4bitModule | None" = None,
        bnb_quantized: bool = False,
        **kwargs,
    ) -> "Params4bit":
        self = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        self.blocksize = DEFAULT_BLOCKSIZE_4BIT if blocksize is None else blocksize
        self.compress_statistics = compress_statistics
        self.quant_type = quant_type
        self.quant_state = quant_state
        self.quant_storage = quant_storage
        self.bnb_quantized = bnb_quantized
        self.module = module
        return self

    absmax = _of_state("absmax")
    code = _of_state("code")
    quant_map = _of_state("code")
    offset = _of_state("offset")
    state2 = _of_state("state2")
    nested_absmax = _of_state("state2.absmax")
    nested_blocksize = _of_state("state2.blocksize")
    nested_quant_map = _of_state("state2.code")
    nested_dtype = _of_state("state2.dtype")
    nested_offset = _of_state("offset")

    @classmethod
    def from_prequantized(
        cls,
        data: torch.Tensor,
        quantized_stats: dict[str, Any],
        requires_grad: bool = False,
        device="cuda",
        module: "Quantized4bitModule | None" = None,
        **kwargs,
    ) -> "Params4bit":
        """A parameter from packed codes and the statistics a checkpoint holds beside them.

        Args:
            data: Packed codes in any storage dtype.
            quantized_stats: As `QuantState.from_dict` takes them.
            requires_grad: Leave it False.
            device: Where everything goes.
            module: The layer whose `quant_state` is set along.
        """
        state = QuantState.from_dict(qs_dict=quantized_stats, device=device)
        return cls.prequantized(data.to(device), state, requires_grad, module)

    @classmethod
    def prequantized(
        cls,
        data: torch.Tensor,
        state: QuantState,
        requires_grad: bool = False,
        module: "Quantized4bitModule | None" = None,
    ) -> "Params4bit":
        """A parameter from packed codes and their state; the layer's `quant_state` is set along."""
        if module is not None:
            module.quant_state = state
        return cls(
            data,
            requires_grad=requires_grad,
            quant_state=state,
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=data.dtype,
            module=module,
            bnb_quantized=True,
        )

    def _adopt(self, other: "Params4bit") -> None:
        self.quant_state, self.bnb_quantized = other.quant_state, other.bnb_quantized
        if self.module is not None and self.bnb_quantized:
            self.module.quant_state = self.quant_state

    def _is_quantized(self) -> bool:
        return self.bnb_quantized

    def _needs_quantization(self) -> bool:
        # Libraries put a merged floating-point weight into a parameter built with the old one's attributes.
        state = self.quant_state
        stale = state is not None and self.is_floating_point() and self.shape == state.shape
        return not self.bnb_quantized or stale

    def _with(self, data: torch.Tensor, state: QuantState | None, quantized: bool) -> "Params4bit":
        other = type(self)(data, **(self.__dict__ | {"quant_state": state, "bnb_quantized": quantized}))
        if quantized and self.module is not None:
            self.module.quant_state = state
        return other

    def _quantize(self, device) -> "Params4bit":
        packed, state = bnb.functional.quantize_4bit(
            self.data.to(device),
            blocksize=self.blocksize,
            compress_statistics=self.compress_statistics,
            quant_type=self.quant_type,
            quant_storage=self.quant_storage,
        )
        return self._with(packed, state, True)

    def _moved(self, data: torch.Tensor) -> "Params4bit":
        state = self.quant_state
        if state is not None:
            state = copy.copy(state).to(data.device)
        return self._with(data, state, self.bnb_quantized)


def fix_4bit_weight_quant_state_from_module(module: "Quantized4bitModule") -> None:
    """Give a layer's weight its quant_state back from the layer, where a wrapper replaced the parameter (FSDP does).

    Raises:
        NotQuantizedError: The layer has none either: it was never moved to a device.
    """
    if getattr(module.weight, "quant_state", None) is not None:
        return
    state = getattr(module, "quant_state", None)
    if state is None:
        raise NotQuantizedError(
            f"{type(module).__name__}: the weight is not quantised yet; move the layer to a device first, "
            "for example with .to('cpu')"
        )
    if not isinstance(module.weight, Params4bit):
        module.weight = Params4bit(module.weight, quant_storage=module.weight.dtype, bnb_quantized=True, module=module)
    module.weight.quant_state = state


def state_from_checkpoint(
    stats: dict[str, torch.Tensor], data: torch.Tensor, shape: Sequence[int], device: torch.device
) -> QuantState:
    """The state of the packed codes `data` from the statistics beside them. It shares no memory with the checkpoint.

    Raises:
        ValueError: Something is missing, or this does not decode a weight of this shape.
    """
    try:
        # Clones: from_dict does not copy what is on the device already.
        state = QuantState.from_dict({key: item.clone() for key, item in stats.items()}, device=device)
    except KeyError as error:
        raise ValueError(f"its statistics lack {error}") from None
    numel = prod(shape)
    for what, expected, got in (
        ("the shape in its quant_state", tuple(shape), tuple(state.shape)),
        ("the bytes of its codes", packed_bytes(numel), data.nbytes),
        ("the number of its absmax", num_blocks(numel, state.blocksize), state.absmax.numel()),
        ("the dtype of its absmax", torch.uint8 if state.nested else torch.float32, state.absmax.dtype),
    ):
        if expected != got:
            raise ValueError(f"{what} must be {expected}, got {got}")
    return state


class Quantized4bitModule(nn.Module):
    """State dict of a layer whose `weight` is a `Params4bit`: the statistics stand beside the packed weight."""

    weight: Any
    quant_state: QuantState | None

    def _weight_shape(self) -> tuple[int, int]:
        """Shape of the weight in floating point."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = self.weight.data  # a plain tensor: any reader can unpickle it
        state = getattr(self.weight, "quant_state", None)
        if state is not None:
            for name, value in state.as_dict(packed=True).items():
                destination[f"{prefix}weight.{name}"] = value if keep_vars else value.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        name = prefix + "weight"
        stats = {key: value for key, value in state_dict.items() if key.startswith(name + ".")}
        others = {key: value for key, value in state_dict.items() if key not in stats}
        if name in others:
            try:
                self.weight = others[name] = self._loaded_weight(others[name], stats)
            except ValueError as error:
                error_msgs.append(f"{name}: {error}")
                del others[name]
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _loaded_weight(self, value: torch.Tensor, stats: dict[str, torch.Tensor]) -> Params4bit:
        """The parameter for a checkpoint's weight. It shares no memory with the checkpoint."""
        old = self.weight
        device = value.device if old.device.type == "meta" else old.device
        data = value.data.to(device, copy=True)
        if stats:
            state = state_from_checkpoint(stats, data, self._weight_shape(), device)
            return Params4bit.prequantized(data, state, module=self)
        if tuple(value.shape) != self._weight_shape():
            raise ValueError(
                f"must be of shape {self._weight_shape()}, or packed with its statistics, "
                f"got {tuple(value.shape)} alone"
            )
        quantized = getattr(old, "bnb_quantized", True)
        new = Params4bit(data, **{**getattr(old, "__dict__", {}), "quant_state": None, "bnb_quantized": False})
        return new.to(device) if quantized and device.type != "meta" else new


class Linear4bit(Quantized4bitModule, nn.Linear):
    """A Linear layer with a 4-bit weight. The weight is quantised when the layer is moved to a device.

    Args:
        input_features, output_features, bias, device: As for `torch.nn.Linear`.
        compute_dtype: dtype of the matmul; that of the first input if None (float32 and bfloat16 inputs settle it).
        compress_statistics, quant_type, quant_storage: As for `Params4bit`.
    """

    def __init__(
        self,
        input_features,
        output_features,
        bias=True,
        compute_dtype=None,
        compress_statistics=True,
        quant_type="fp4",
        quant_storage=torch.uint8,
        device=None,
    ):
        super().__init__(input_features, output_features, bias, device)
        self.weight = Params4bit(
            self.weight.data,
            requires_grad=False,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
            quant_storage=quant_storage,
            module=self,
        )
        self.compute_dtype = compute_dtype
        self.compute_type_is_set = compute_dtype is not None
        self.quant_state = None
        self.quant_storage = quant_storage

    def _weight_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def set_compute_type(self, x: torch.Tensor) -> None:
        """Compute in x's dtype from now on, if its range is safe; float16 inputs leave the choice open."""
        if x.dtype in (torch.float32, torch.bfloat16):
            self.compute_dtype = x.dtype
        elif not torch.compiler.is_compiling():
            logger.warning(
                "Linear4bit: compute_dtype is not set, so float16 inputs are computed in float16, whose range can be "
                "too small for inference or training of large models. Set compute_dtype for training and inference."
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), in x's dtype."""
        bnb.nn.modules.fix_4bit_weight_quant_state_from_module(self)
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        dtype = self.compute_dtype or x.dtype
        weight = self.weight
        bias = None if self.bias is None else self.bias.to(dtype)
        if x.dtype == dtype:  # `to` would take 0.4 us to find out, twice
            return bnb.matmul_4bit(x, weight, bias=bias, quant_state=weight.quant_state)
        bnb.backends.check_dtype("Linear4bit", x.device, x.dtype)
        return bnb.matmul_4bit(x.to(dtype), weight, bias=bias, quant_state=weight.quant_state).to(x.dtype)


class LinearFP4(Linear4bit):
    """`Linear4bit` with FP4."""

    def __init__(
        self,
        input_features,
        output_features,
        bias=True,
        compute_dtype=None,
        compress_statistics=True,
        quant_storage=torch.uint8,
        device=None,
    ):
        super().__init__(
            input_features, output_features, bias, compute_dtype, compress_statistics, "fp4", quant_storage, device
        )


class LinearNF4(Linear4bit):
    """`Linear4bit` with NF4."""

    def __init__(
        self,
        input_features,
        output_features,
        bias=True,
        compute_dtype=None,
        compress_statistics=True,
        quant_storage=torch.uint8,
        device=None,
    ):
        super().__init__(
            input_features, output_features, bias, compute_dtype, compress_statistics, "nf4", quant_storage, device
        )
