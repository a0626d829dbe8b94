"""AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137): Adam with a second, slow average of the gradients."""

from collections.abc import Iterable
import math
from typing import Literal

import torch

from .optimizer import Optimizer2State

Betas = tuple[float, float, float]


def scheduled(alpha: float, beta1: float, beta3: float, t_alpha: int | None, t_beta3: int | None, step: int):
    """`alpha` and `beta3` at a step (section 3 of the paper): both grow to their final value.

    `alpha` grows linearly over `t_alpha` steps. `beta3` starts at `beta1` and grows over `t_beta3` steps so that the
    average's time constant, `1 / ln(beta)`, changes linearly.
    """
    if t_alpha:
        alpha = min(step / t_alpha, 1.0) * alpha
    if t_beta3 and step < t_beta3 and beta3 > 0:
        share = step / t_beta3
        start = 1 / math.log(beta1) if beta1 > 0 else 0.0
        beta3 = min(math.exp(1 / ((1 - share) * start + share / math.log(beta3))), beta3)
    return alpha, beta3


class _ReferenceAdEMAMix(torch.optim.Optimizer):
    """AdEMAMix in plain PyTorch, state in the parameter's dtype. Arguments are those of `AdEMAMix`."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        t_beta3: int | None = None,
        t_alpha: int | None = None,
    ):
        defaults = dict(
            lr=lr, betas=betas, alpha=alpha, eps=eps, weight_decay=weight_decay, t_beta3=t_beta3, t_alpha=t_alpha
        )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            step = group["step"] = group.get("step", 0) + 1
            beta1, beta2, beta3 = group["betas"]
            alpha, beta3 = scheduled(group["alpha"], beta1, beta3, group["t_alpha"], group["t_beta3"], step)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m1_m2"] = p.new_zeros((2, *p.shape))
                    state["nu"] = torch.zeros_like(p)
                for average, beta in zip(state["m1_m2"], (beta1, beta3), strict=True):
                    average.mul_(beta).add_(p.grad, alpha=1 - beta)
                state["nu"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                fast, slow = state["m1_m2"]
                root = (state["nu"] / (1 - beta2**step)).sqrt()
                direction = (fast / (1 - beta1**step) + alpha * slow) / (root + group["eps"])
                p.sub_(group["lr"] * (direction + group["weight_decay"] * p))
        return loss


class AdEMAMix(Optimizer2State):
    """AdEMAMix with 32-bit or 8-bit state. `state1` stacks the fast and the slow average.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Of the fast average, the second moment and the slow average.
        alpha: Weight of the slow average.
        t_alpha: Steps over which `alpha` grows from 0; None for no schedule.
        t_beta3: Steps over which the third beta grows from the first; None for no schedule.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled: the parameter is multiplied by `1 - lr * weight_decay` before the update.
        optim_bits: 8 or 32.
        min_8bit_size: Parameters with fewer elements keep 32-bit state.
        is_paged: Whether state may be paged out to host memory.

    Raises:
        ValueError: For a hyperparameter out of range.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        optim_bits: Literal[8, 32] = 32,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(
            "ademamix",
            params,
            lr,
            betas,
            eps,
            weight_decay,
            optim_bits,
            min_8bit_size=min_8bit_size,
            is_paged=is_paged,
            alpha=alpha,
            t_alpha=t_alpha,
            t_beta3=t_beta3,
        )

    def _at_step(self, config, step):
        beta1, beta2, beta3 = config["betas"]
        alpha, beta3 = scheduled(config["alpha"], beta1, beta3, config["t_alpha"], config["t_beta3"], step)
        return {**config, "alpha": alpha, "betas": (beta1, beta2, beta3)}


class AdEMAMix8bit(AdEMAMix):
    """AdEMAMix with 8-bit state."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(params, lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay, 8, min_8bit_size, is_paged)


class AdEMAMix32bit(AdEMAMix):
    """AdEMAMix with 32-bit state."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(params, lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay, 32, min_8bit_size, is_paged)


class PagedAdEMAMix(AdEMAMix):
    """AdEMAMix with paged state."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        optim_bits: Literal[8, 32] = 32,
        min_8bit_size: int = 4096,
    ):
        super().__init__(params, lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay, optim_bits, min_8bit_size, True)


class PagedAdEMAMix8bit(AdEMAMix8bit):
    """AdEMAMix with paged 8-bit state."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
    ):
        super().__init__(params, lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay, min_8bit_size, True)


class PagedAdEMAMix32bit(AdEMAMix32bit):
    """AdEMAMix with paged 32-bit state."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
    ):
        super().__init__(params, lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay, min_8bit_size, True)
