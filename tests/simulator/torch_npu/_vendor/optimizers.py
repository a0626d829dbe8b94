"""The fused AdamW step."""

import torch

from ._registry import FLOATS, require, vendor_op


@vendor_op("npu_apply_adam_w.out")
def npu_apply_adam_w(
    beta1_power,
    beta2_power,
    lr,
    weight_decay,
    beta1,
    beta2,
    epsilon,
    grad,
    max_grad_norm,
    amsgrad,
    maximize,
    *,
    out,
):
    """The powers are those of the step before."""
    var, m, v = out
    require(
        grad.dtype in FLOATS and grad.dtype == var.dtype == m.dtype == v.dtype,
        "npu_apply_adam_w: grad, var, m and v have one floating-point dtype",
    )
    require(grad.shape == var.shape == m.shape == v.shape, "npu_apply_adam_w: grad, var, m and v have one shape")
    require(not amsgrad or max_grad_norm is not None, "npu_apply_adam_w: amsgrad needs max_grad_norm")
    g = -grad.float() if maximize else grad.float()
    m.copy_(beta1 * m.float() + (1 - beta1) * g)
    v.copy_(beta2 * v.float() + (1 - beta2) * g * g)
    second = v.float()
    if amsgrad:
        max_grad_norm.copy_(torch.maximum(max_grad_norm, v))
        second = max_grad_norm.float()
    step = m.float() / (1 - beta1_power * beta1) / ((second / (1 - beta2_power * beta2)).sqrt() + epsilon)
    var.copy_(var.float() * (1 - lr * weight_decay) - lr * step)
    return var, m, v
