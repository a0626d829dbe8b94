"""4-bit quantisation of any parameter of any module, such as the fused expert weights of mixture-of-experts models."""

import copy
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
import torch.nn.utils.parametrize as P

from .linear4bit import state_from_checkpoint
from .. import functional as F
from ..errors import ArgumentError
from ..formats import BLOCKSIZES_4BIT, DEFAULT_BLOCKSIZE_4BIT


class Bnb4bitParametrization(nn.Module):
    """Decodes the packed parameter that it is registered on, in the original shape and dtype.

    Args:
        quant_state: The state of the packed codes.
    """

    def __init__(self, quant_state: F.QuantState):
        super().__init__()
        self.quant_state = quant_state

    @torch.no_grad()
    def forward(self, quantized_param: torch.Tensor) -> torch.Tensor:
        return F.dequantize_4bit(quantized_param, self.quant_state)

    def _apply(self, fn, recurse=True):
        # fn may cast as well as move. A probe of a dtype that no cast touches tells where to.
        super()._apply(fn, recurse)
        device = fn(self.quant_state.absmax.new_empty(0, dtype=torch.uint8)).device
        if device != self.quant_state.absmax.device:
            self.quant_state = copy.copy(self.quant_state).to(device)
        return self


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    if not hasattr(module, name):
        raise AttributeError(f"Module does not have parameter '{name}'")
    parameter = getattr(module, name)
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"Parameter '{name}' is not an instance of nn.Parameter")
    return parameter


def _blocksize_within_experts(shape: torch.Size, requested: int | None) -> int:
    """The block size for a parameter whose first dimensions, before the last two, count experts.

    A block never holds values of two experts: their scales have nothing to do with each other.
    """
    expert = shape[-2:].numel()
    if len(shape) < 3:
        return DEFAULT_BLOCKSIZE_4BIT if requested is None else requested
    fitting = [size for size in BLOCKSIZES_4BIT if expert % size == 0]
    if requested is None:
        requested = max((size for size in fitting if size <= DEFAULT_BLOCKSIZE_4BIT), default=DEFAULT_BLOCKSIZE_4BIT)
    if requested not in fitting:
        raise ArgumentError(
            "replace_parameter_4bit",
            "blocksize",
            f"one that divides the {expert} elements of an expert ({fitting or 'none does'})",
            requested,
        )
    return requested


def replace_parameter_4bit(
    module: nn.Module,
    param_name: str,
    compress_statistics: bool = False,
    quant_type: Literal["nf4", "fp4"] = "nf4",
    blocksize: int | None = None,
) -> None:
    """Quantise a parameter in place; reading the attribute decodes it, once per forward of its module.

    The state dict holds the packed codes under the parameter's name and the statistics beside it, as for `Linear4bit`,
    and loads the same. Parameters of three or more dimensions are quantised per expert.

    Args:
        module: Holds the parameter.
        param_name: Its attribute name.
        compress_statistics: Quantise the scales too.
        quant_type: "nf4" or "fp4".
        blocksize: Elements of a block. If None: 64, or 32 where only that divides an expert.

    Raises:
        AttributeError: There is no such attribute.
        TypeError: It is not a parameter.
        ArgumentError: (a ValueError) blocks would cross experts.
    """
    original = _parameter(module, param_name)
    packed, state = F.quantize_4bit(
        original.data,
        blocksize=_blocksize_within_experts(original.shape, blocksize),
        compress_statistics=compress_statistics,
        quant_type=quant_type,
    )
    setattr(module, param_name, nn.Parameter(packed, requires_grad=False))
    _register(module, param_name, state)


def replace_parameter_4bit_prequantized(
    module: nn.Module, param_name: str, qs_dict: dict[str, Any], device: torch.device
) -> None:
    """As `replace_parameter_4bit`, for a parameter that holds packed codes already.

    Args:
        module: Holds the parameter.
        param_name: Its attribute name.
        qs_dict: The statistics, as `QuantState.from_dict` takes them.
        device: Where the statistics go.
    """
    _parameter(module, param_name)
    _register(module, param_name, F.QuantState.from_dict(qs_dict, device=device))


def _register(module: nn.Module, name: str, state: F.QuantState) -> None:
    P.register_parametrization(module, name, Bnb4bitParametrization(state), unsafe=True)
    _register_parametrization_hooks(module, name)


def _register_parametrization_hooks(module: nn.Module, name: str) -> None:
    module.register_state_dict_post_hook(partial(_save, param_name=name))
    module.register_load_state_dict_pre_hook(partial(_load, param_name=name))
    module.register_forward_pre_hook(_enable_parametrization_cache)
    # always_call: activation checkpointing leaves a recomputed forward by an exception, and the cache would stay on
    # for the rest of the run, with every decoded parameter in it.
    module.register_forward_hook(_disable_parametrization_cache, always_call=True)


def _enable_parametrization_cache(module: nn.Module, inputs: Any) -> None:
    P._cache_enabled += 1


def _disable_parametrization_cache(module: nn.Module, inputs: Any, output: Any) -> None:
    # Never below 0: the hook also runs when an earlier pre-hook failed before ours counted.
    P._cache_enabled = max(0, P._cache_enabled - 1)
    if not P._cache_enabled:
        P._cache = {}


def _parametrization(module: nn.Module, name: str) -> Bnb4bitParametrization:
    parametrizations = cast(nn.ModuleDict, module.parametrizations)[name]
    return next(p for p in cast(nn.ModuleList, parametrizations) if isinstance(p, Bnb4bitParametrization))


def _save(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *, param_name: str) -> None:
    """State-dict hook: the packed codes under the parameter's own name, the statistics beside them."""
    packed = state_dict.pop(f"{prefix}parametrizations.{param_name}.original", None)
    if packed is None:
        return
    state_dict[prefix + param_name] = packed
    for name, value in _parametrization(module, param_name).quant_state.as_dict(packed=True).items():
        state_dict[f"{prefix}{param_name}.{name}"] = value


def _load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
    *,
    param_name: str,
) -> None:
    """State-dict hook: the inverse of `_save`."""
    key = prefix + param_name
    stats = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(key + ".")}
    if key not in state_dict:
        return
    if not stats:
        error_msgs.append(f"{key}: packed codes must come with their statistics, got the codes alone")
        del state_dict[key]
        return
    parametrization = _parametrization(module, param_name)
    old = parametrization.quant_state
    packed = state_dict.pop(key)
    try:
        parametrization.quant_state = state_from_checkpoint(stats, packed, old.shape, old.absmax.device)
    except ValueError as error:
        error_msgs.append(f"{key}: {error}")
        return
    state_dict[f"{prefix}parametrizations.{param_name}.original"] = packed
