"""Optimizer updates as functions; `bitsandbytes.optim` calls them."""

import torch


def optimizer_update_32bit(
    optimizer_name: str,
    g: torch.Tensor,
    p: torch.Tensor,
    state1: torch.Tensor,
    beta1: float,
    eps: float,
    step: int,
    lr: float,
    state2: torch.Tensor | None = None,
    beta2: float = 0.0,
    beta3: float = 0.0,
    alpha: float = 0.0,
    weight_decay: float = 0.0,
    gnorm_scale: float = 1.0,
    unorm_vec: torch.Tensor | None = None,
    max_unorm: float = 0.0,
    skip_zeros=False,
) -> None:
    """Update `p` and its 32-bit optimizer states in place.

    Args:
        optimizer_name: `momentum`, `lars`, `rmsprop`, `adagrad`, `lion`, `adam`, `lamb` or `ademamix`.
        g: Gradient, dtype and number of elements of `p`; any strides. It is not changed.
        p: Parameter of any shape: fp32, fp16 or bf16.
        state1: First moment, fp32, shape of `p`; `(2, *p.shape)` for `ademamix`.
        beta1: Decay of the first moment; the smoothing constant of `rmsprop`.
        eps: Added to the root of the second moment.
        step: Number of this update, from 1.
        lr: Learning rate.
        state2: Second moment, fp32, shape of `p`: `adam`, `lamb` and `ademamix` only.
        beta2: Decay of the second moment; of the state for `lion`.
        beta3: Decay of the slow average of `ademamix`.
        alpha: Weight of the slow average of `ademamix`.
        weight_decay: Decoupled for `adam`, `lamb`, `ademamix` and `lion`, added to the gradient otherwise.
        gnorm_scale: The gradient is multiplied by it.
        unorm_vec: One fp32 value that receives the norm of the update direction if `max_unorm > 0`.
        max_unorm: If positive, the largest norm of the update direction relative to the norm of `p`. Computing the
            norm of `p` is then the only time that the host waits for the device.
        skip_zeros: Leave elements whose gradient is 0, and their states, unchanged.

    Raises:
        ArgumentError: For an unknown name, wrong dtypes, sizes or devices, or a missing state.
    """
    param_norm = 0.0
    if max_unorm > 0:
        param_norm = float(torch.linalg.vector_norm(p.detach(), dtype=torch.float32))
    torch.ops.bitsandbytes.optimizer_update_32bit(
        optimizer_name,
        g,
        p,
        state1,
        state2,
        unorm_vec,
        max_unorm,
        param_norm,
        beta1,
        beta2,
        beta3,
        alpha,
        eps,
        weight_decay,
        step,
        lr,
        gnorm_scale,
        skip_zeros,
    )


def optimizer_update_8bit_blockwise(
    optimizer_name: str,
    g: torch.Tensor,
    p: torch.Tensor,
    state1: torch.Tensor,
    state2: torch.Tensor | None,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    step: int,
    lr: float,
    qmap1: torch.Tensor,
    qmap2: torch.Tensor | None,
    absmax1: torch.Tensor,
    absmax2: torch.Tensor | None,
    weight_decay: float = 0.0,
    gnorm_scale: float = 1.0,
    skip_zeros=False,
) -> None:
    """Update `p` and its 8-bit optimizer states in place; blocks of 256 elements of the flattened states.

    Arguments not listed are those of `optimizer_update_32bit`.

    Args:
        state1: Codes of the first moment, uint8, shape of `p`; `(2, *p.shape)` for `ademamix`.
        state2: Codes of the second moment, uint8, or None.
        qmap1: The 256 fp32 levels of `state1`'s codes, ascending.
        qmap2: The same for `state2`.
        absmax1: fp32, one value per block of `state1`: `(blocks,)`; `(2, blocks)` for `ademamix`.
        absmax2: The same for `state2`.

    Raises:
        ArgumentError: For an unknown name, wrong dtypes, sizes or devices, or a missing state.
    """
    torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
        optimizer_name,
        g,
        p,
        state1,
        state2,
        beta1,
        beta2,
        beta3,
        alpha,
        eps,
        step,
        lr,
        qmap1,
        qmap2,
        absmax1,
        absmax2,
        weight_decay,
        gnorm_scale,
        skip_zeros,
    )
