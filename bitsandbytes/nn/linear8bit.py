"""`Int8Params` and the Linear layer with an int8 weight (LLM.int8(), arXiv:2208.07339)."""

from typing import Any

import torch
from torch import nn

import bitsandbytes as bnb

from ._parameter import QuantizedParameter
from ..errors import NotQuantizedError
from ..utils import INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING, LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING

_ROW = "row"


class Int8Params(QuantizedParameter):
    """A parameter that is quantised to int8 by row when it is moved to a device, whichever device it is on before.

    Args:
        data: The floating-point weight, or int8 codes.
        requires_grad: For a floating-point weight that stays so.
        has_fp16_weights: Keep the weight in floating point.
        CB: Not used: the attribute is `data` where that is int8, else None.
        SCB: fp32 absolute maxima of the rows.

    Other keyword arguments are ignored: libraries pass the `__dict__` of another parameter.
    """

    CB: torch.Tensor | None
    SCB: torch.Tensor | None
    has_fp16_weights: bool

    def __new__(
        cls,
        data: torch.Tensor | None = None,
        requires_grad=True,
        has_fp16_weights=False,
        CB: torch.Tensor | None = None,
        SCB: torch.Tensor | None = None,
        **kwargs,
    ) -> "Int8Params":
        data = torch.empty(0) if data is None else data
        self = torch.Tensor._make_subclass(cls, data, requires_grad and data.is_floating_point())
        self.SCB = SCB
        self.has_fp16_weights = has_fp16_weights
        self._data_changed()
        return self

    def _adopt(self, other: "Int8Params") -> None:
        self.SCB = other.SCB

    def _data_changed(self) -> None:
        self.CB = self.data if self.dtype == torch.int8 else None

    def _is_quantized(self) -> bool:
        return self.dtype == torch.int8

    def _needs_quantization(self) -> bool:
        return not self.has_fp16_weights and self.is_floating_point()

    def _quantize(self, device) -> "Int8Params":
        CB, SCB, _ = bnb.functional.int8_vectorwise_quant(self.data.to(device))
        return type(self)(CB, requires_grad=False, SCB=SCB)

    def _moved(self, data: torch.Tensor) -> "Int8Params":
        SCB = self.SCB if self._is_quantized() else None
        return type(self)(
            data,
            requires_grad=self.requires_grad,
            has_fp16_weights=self.has_fp16_weights,
            SCB=None if SCB is None else SCB.to(data.device),
        )


def maybe_rearrange_weight(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
    """State-dict hook: take the weight layout out of a checkpoint, as a name or a number, and accept "row" alone."""
    layout = state_dict.pop(f"{prefix}weight_format", _ROW)
    if isinstance(layout, torch.Tensor):
        layout = layout.item()
    layout = INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING.get(layout, layout)
    if layout != _ROW:
        raise ValueError(f"{prefix}weight_format: only the layout '{_ROW}' is supported, got {layout!r}")


class QuantizedInt8Module(nn.Module):
    """State dict of a layer whose `weight` is an `Int8Params`: `SCB` and `weight_format` stand beside the weight."""

    weight: Any

    def _statistics(self) -> torch.Tensor | None:
        return getattr(self.weight, "SCB", None)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = self.weight.data  # a plain tensor: any reader can unpickle it
        statistics = self._statistics()
        if self.weight.dtype == torch.int8 and statistics is not None:
            destination[prefix + "SCB"] = statistics if keep_vars else statistics.detach()
            destination[prefix + "weight_format"] = torch.tensor(
                LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING[_ROW], dtype=torch.uint8, device="cpu"
            )

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        others = dict(state_dict)
        maybe_rearrange_weight(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        name = prefix + "weight"
        value = others.get(name)
        SCB = None if value is None else others.pop(prefix + "SCB", None)
        if value is None:
            pass  # what else there is for this layer is unexpected, which PyTorch says
        elif (value.dtype == torch.int8) != (SCB is not None):
            # The first words are those that downstream code and tests look for.
            error_msgs.append(
                f"Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported: {name} must be int8 "
                f"with statistics in {prefix}SCB or floating-point without, got {value.dtype} "
                f"{'without' if SCB is None else 'with'} statistics"
            )
            del others[name]
        elif SCB is not None and SCB.shape != value.shape[:1]:
            error_msgs.append(f"{prefix}SCB: must hold one value for each row of {name}, got {SCB.numel()}")
            del others[name]
        elif value.shape == self.weight.shape:
            others[name] = self._loaded_weight(value, SCB)
            if others[name].dtype == torch.int8:
                self.weight = others[name]
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _loaded_weight(self, value: torch.Tensor, SCB: torch.Tensor | None) -> Any:
        """The parameter for a checkpoint's weight. It shares no memory with the checkpoint."""
        old = self.weight
        device = value.device if old.device.type == "meta" else old.device
        if SCB is not None:
            codes, statistics = value.data.to(device, copy=True), SCB.to(device, torch.float32, copy=True)
            return Int8Params(codes, requires_grad=False, SCB=statistics)
        if old.dtype == torch.int8:
            return Int8Params(value.data, requires_grad=False).to(device)
        # Floating point to floating point: PyTorch copies it into the old parameter, or takes it with assign=True.
        if not isinstance(old, Int8Params):  # a layer whose weight was replaced, by tying for instance
            return value
        return Int8Params(value.data, old.requires_grad, old.has_fp16_weights)


class Linear8bitLt(QuantizedInt8Module, nn.Linear):
    """A Linear layer with an int8 weight. The weight is quantised when the layer is moved to a device.

    Args:
        input_features, output_features, bias, device: As for `torch.nn.Linear`.
        has_fp16_weights: Keep the weight in floating point, train it, and quantise it in each forward.
        threshold: Magnitude from which an input is an outlier; its column is then computed in floating point. 0: none.
        index: Kept as an attribute for callers that read it.
    """

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias=True,
        has_fp16_weights=True,
        threshold=0.0,
        index=None,
        device=None,
    ):
        super().__init__(input_features, output_features, bias, device)
        self.state = bnb.MatmulLtState()
        self.state.threshold = threshold
        self.state.has_fp16_weights = has_fp16_weights
        self.state.use_pool = threshold > 0.0 and not has_fp16_weights
        self.index = index
        self.weight = Int8Params(self.weight.data, has_fp16_weights=has_fp16_weights, requires_grad=has_fp16_weights)

    def _statistics(self) -> torch.Tensor | None:
        SCB = super()._statistics()
        return self.state.SCB if SCB is None else SCB

    def init_8bit_state(self) -> None:
        """Let the state hold the weight's codes and statistics. Statistics set on the state alone stay."""
        self.state.CB = self.weight.CB
        if getattr(self.weight, "SCB", None) is not None:
            self.state.SCB = self.weight.SCB

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.state.CB is None:
            return self
        if self.weight.dtype == torch.int8:
            self.init_8bit_state()
            for name in ("SCB", "idx"):
                if (value := getattr(self.state, name)) is not None:
                    setattr(self.state, name, value.to(self.weight.device))
        else:
            self.state.reset_grads()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), in x's dtype."""
        self.state.is_training = self.training
        if self.weight.dtype == torch.int8:
            self.init_8bit_state()
            if self.state.SCB is None:
                raise NotQuantizedError("Linear8bitLt: the int8 weight has no statistics; set weight.SCB")
        else:
            self.state.reset_grads()  # what it holds belongs to an earlier weight
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return bnb.matmul(x, self.weight, bias=bias, state=self.state)
