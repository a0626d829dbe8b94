"""Helpers that other packages import from here."""

from collections.abc import Callable
import shlex
import subprocess

import torch

from .quant_state import pack_dict_to_tensor, unpack_tensor_to_dict

__all__ = [
    "INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING",
    "LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING",
    "OutlierTracer",
    "execute_and_return",
    "find_outlier_dims",
    "outlier_hook",
    "pack_dict_to_tensor",
    "replace_linear",
    "sync_gpu",
    "unpack_tensor_to_dict",
]

# int8 weight layouts by name, as checkpoints number them. Only "row" is written or read.
LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING = {"row": 0, "col32": 1, "col_turing": 2, "col_ampere": 3}
INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING = {n: name for name, n in LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING.items()}


def find_outlier_dims(weight, reduction_dim=0, zscore=4.0, topk=None, rdm=False) -> torch.Tensor:
    """Indices of the dimensions of a matrix whose standard deviation stands out.

    Args:
        weight: Matrix.
        reduction_dim: The dimension over which the standard deviation is taken.
        zscore: How many standard deviations of the standard deviations above their mean count as standing out.
        topk: Take this many of the largest instead.
        rdm: Draw `topk` columns at random instead.
    """
    if rdm:
        return torch.randint(weight.shape[1], (topk,), device=weight.device)
    deviations = weight.std(reduction_dim)
    if topk is not None:
        return deviations.topk(topk).indices
    return ((deviations - deviations.mean()) / deviations.std() > zscore).nonzero().view(-1)


def outlier_hook(module, input) -> None:
    """Forward pre-hook of `OutlierTracer`: on a layer's first call, note its input dimensions that hold outliers.

    The weight of a layer shows the outliers of its own input, except for the first layer, where the input is tested
    too: by the spread of each dimension and by the magnitude 6 of LLM.int8() (arXiv:2208.07339, section 3).
    """
    tracer = OutlierTracer.get_instance()
    key = tracer.get_hvalue(module.weight)
    if key in tracer.hvalue2outlier_idx:
        for hook in tracer.hooks:
            hook.remove()
        return
    outliers = find_outlier_dims(module.weight)
    if not tracer.hvalue2outlier_idx:
        rows = input[0].reshape(-1, input[0].shape[-1])
        spread = find_outlier_dims(rows, reduction_dim=0, zscore=3.0)
        large = (rows.abs() > 6).any(0).nonzero().view(-1)
        outliers = torch.cat((spread, large)).unique()
    tracer.hvalue2outlier_idx[key] = outliers


class OutlierTracer:
    """Collects the outlier dimensions of every Linear layer of a model. Use `get_instance()`."""

    _instance = None

    def __init__(self):
        raise RuntimeError("OutlierTracer: call get_instance() instead")

    def initialize(self, model) -> None:
        self.hvalue2outlier_idx: dict[int, torch.Tensor] = {}
        self.hooks = [
            module.register_forward_pre_hook(outlier_hook)
            for module in model.modules()
            if isinstance(module, torch.nn.Linear)
        ]

    def is_initialized(self) -> bool:
        return hasattr(self, "hvalue2outlier_idx")

    def get_hvalue(self, weight) -> int:
        """The key of a weight: the address of its storage."""
        return weight.untyped_storage().data_ptr()

    def get_outliers(self, weight) -> torch.Tensor | None:
        """The outlier dimensions of a weight, or None while its layer has not run."""
        return self.hvalue2outlier_idx.get(self.get_hvalue(weight)) if self.is_initialized() else None

    @classmethod
    def get_instance(cls):
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
        return cls._instance


def replace_linear(
    model: torch.nn.Module,
    linear_replacement: Callable[[int, int, bool], torch.nn.Module],
    skip_modules=("lm_head",),
    copy_weights=False,
    post_processing_function: str | None = None,
) -> torch.nn.Module:
    """Replace every `torch.nn.Linear` below `model`, in place, and return `model`.

    Args:
        model: Searched recursively.
        linear_replacement: Called with in_features, out_features and whether there is a bias.
        skip_modules: Child names that stay.
        copy_weights: Reuse the old weight and bias parameters.
        post_processing_function: Name of a method of the old layer to call after it was replaced, if it has it.
    """
    for name, module in model.named_children():
        replace_linear(module, linear_replacement, skip_modules, copy_weights, post_processing_function)
        if isinstance(module, torch.nn.Linear) and name not in skip_modules:
            replacement = linear_replacement(module.in_features, module.out_features, module.bias is not None)
            if copy_weights:
                replacement.weight = module.weight
                replacement.bias = module.bias
            setattr(model, name, replacement)
            if post_processing_function is not None and hasattr(module, post_processing_function):
                getattr(module, post_processing_function)()
    return model


def execute_and_return(command_string: str) -> tuple[str, str]:
    """Run a command (split as a shell would, but without a shell) and return its stripped stdout and stderr."""
    result = subprocess.run(shlex.split(command_string), capture_output=True, text=True, check=False)
    return result.stdout.strip(), result.stderr.strip()


def sync_gpu(t: torch.Tensor) -> None:
    """Wait until the accelerator that holds `t` has finished its queue. Nothing happens for other devices."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == t.device.type:
        torch.accelerator.synchronize(t.device)
