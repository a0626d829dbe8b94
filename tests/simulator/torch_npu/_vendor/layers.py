"""Fused layers: normalisation, gated activation, rotary embedding."""

import torch
import torch.nn.functional as F

from ._registry import FLOATS, LIBRARY, gradients, require, vendor_op


def _normalised(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    axes = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@vendor_op("npu_rms_norm")
def npu_rms_norm(input, gamma, epsilon=1e-6):
    require(input.dtype in FLOATS, f"npu_rms_norm: unsupported dtype {input.dtype}")
    require(
        gamma.dtype in (input.dtype, torch.float32), f"npu_rms_norm: gamma is {gamma.dtype} and the input {input.dtype}"
    )
    require(
        gamma.dim() <= input.dim() and input.shape[input.dim() - gamma.dim() :] == gamma.shape,
        f"npu_rms_norm: gamma of shape {tuple(gamma.shape)} does not fit an input of {tuple(input.shape)}",
    )
    return _normalised(input, gamma, epsilon)


@vendor_op("npu_rms_norm_backward")
def npu_rms_norm_backward(dy, input, gamma, rstd):
    axes = tuple(range(input.dim() - gamma.dim(), input.dim()))
    normal, scaled = input.float() * rstd, dy.float() * gamma.float()
    d_input = rstd * (scaled - normal * (scaled * normal).mean(axes, keepdim=True))
    d_gamma = (dy.float() * normal).flatten(0, input.dim() - gamma.dim() - 1).sum(0)
    return d_input.to(input.dtype), d_gamma.to(torch.float32)


def _save_rms_norm(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _rms_norm_gradient(ctx, gradient, _):
    x, gamma, rstd = ctx.saved_tensors
    d_x, d_gamma = torch.ops.npu.npu_rms_norm_backward(gradient, x, gamma, rstd)
    return d_x, d_gamma.to(gamma.dtype), None


torch.library.register_autograd("npu::npu_rms_norm", _rms_norm_gradient, setup_context=_save_rms_norm, lib=LIBRARY)


def _geglu(x: torch.Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = x.float().chunk(2, dim)
    gate, value = (left, right) if activate_left else (right, left)
    gelu = F.gelu(gate, approximate="tanh" if approximate else "none")
    return (value * gelu).to(x.dtype), gelu.to(x.dtype)


@vendor_op("npu_geglu")
def npu_geglu(input, dim=-1, approximate=1, activate_left=False):
    require(input.dtype in FLOATS, f"npu_geglu: unsupported dtype {input.dtype}")
    require(input.shape[dim] % 2 == 0, f"npu_geglu: dimension {dim} of {tuple(input.shape)} is odd")
    return _geglu(input, dim, approximate, activate_left)


@vendor_op("npu_geglu_grad")
def npu_geglu_grad(grad_output, input, gelu, dim=-1, approximate=1, activate_left=False):
    return gradients(lambda x: _geglu(x, dim, approximate, activate_left)[0], [input], grad_output)[0]


def _save_geglu(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])
    ctx.settings = inputs[1:]
    ctx.mark_non_differentiable(output[1])


def _geglu_gradient(ctx, gradient, _):
    return torch.ops.npu.npu_geglu_grad(gradient, *ctx.saved_tensors, *ctx.settings), None, None, None


torch.library.register_autograd("npu::npu_geglu", _geglu_gradient, setup_context=_save_geglu, lib=LIBRARY)


def _turned(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Every pair (a, b) as (-b, a); the pairs are the halves of the last axis, or neighbours in it."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rotated(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, mode: str) -> torch.Tensor:
    return (x.float() * r1.float() + _turned(x.float(), mode) * r2.float()).to(x.dtype)


@vendor_op("npu_rotary_mul")
def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    require(input.dtype in FLOATS, f"npu_rotary_mul: unsupported dtype {input.dtype}")
    require(
        input.dim() == r1.dim() == r2.dim() == 4 and input.shape[-1] % 2 == 0 and input.shape[-1] < 896,
        "npu_rotary_mul takes three tensors of 4 dimensions, the last of which is even and below 896",
    )
    require(rotary_mode in ("half", "interleave"), f"npu_rotary_mul: no rotary_mode '{rotary_mode}'")
    if rotate is not None:
        return (input * r1 + (input @ rotate) * r2).to(input.dtype)
    return _rotated(input, r1, r2, rotary_mode)


@vendor_op("npu_rotary_mul_backward")
def npu_rotary_mul_backward(grad, input, r1, r2, rotary_mode="half"):
    return gradients(lambda *inputs: _rotated(*inputs, rotary_mode), [input, r1, r2], grad)


def _save_rotary(ctx, inputs, output):
    x, r1, r2, ctx.mode, rotate = inputs
    require(rotate is None, "npu_rotary_mul has no gradient with `rotate`")
    ctx.save_for_backward(x, r1, r2)


def _rotary_gradient(ctx, gradient):
    return *torch.ops.npu.npu_rotary_mul_backward(gradient, *ctx.saved_tensors, ctx.mode), None, None


torch.library.register_autograd("npu::npu_rotary_mul", _rotary_gradient, setup_context=_save_rotary, lib=LIBRARY)
