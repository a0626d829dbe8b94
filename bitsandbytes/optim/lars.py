"""LARS (You et al. 2017, arXiv:1708.03888), in upstream's form: momentum with a bound relative to the weight."""

import torch

from .optimizer import Optimizer1State, UnsupportedArgumentError, only


class LARS(Optimizer1State):
    """LARS with 32-bit or 8-bit state.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: Not 0.
        weight_decay: Added to the gradient, times the parameter.
        dampening, nesterov: Not supported.
        optim_bits: 8 or 32.
        args: An object with the attributes that `Optimizer2State` documents.
        min_8bit_size: Parameters with fewer elements keep 32-bit state.
        max_unorm: The momentum is scaled down to this multiple of the parameter's norm; 0 for no bound.

    Raises:
        ValueError: For a hyperparameter out of range or not supported.
    """

    def __init__(
        self,
        params,
        lr,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        max_unorm=0.02,
    ):
        if momentum == 0:
            raise UnsupportedArgumentError(f"{type(self).__name__}: momentum=0 is not supported")
        only(self, dampening=(dampening, 0), nesterov=(nesterov, False))
        super().__init__(
            "lars",
            params,
            lr,
            (momentum, dampening),
            0.0,
            weight_decay,
            optim_bits,
            args,
            min_8bit_size,
            max_unorm=max_unorm,
        )


class LARS8bit(LARS):
    """LARS with 8-bit state."""

    def __init__(
        self,
        params,
        lr,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        args=None,
        min_8bit_size=4096,
        max_unorm=0.02,
    ):
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, 8, args, min_8bit_size, max_unorm)


class LARS32bit(LARS):
    """LARS with 32-bit state."""

    def __init__(
        self,
        params,
        lr,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        args=None,
        min_8bit_size=4096,
        max_unorm=0.02,
    ):
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, 32, args, min_8bit_size, max_unorm)


class PytorchLARS(torch.optim.Optimizer):
    """LARS in plain PyTorch, state in the parameter's dtype.

    Args:
        params: Parameters or parameter groups.
        lr, momentum, dampening, weight_decay, nesterov: As in `torch.optim.SGD`.
        max_unorm: The update is scaled down to this multiple of the parameter's norm; 0 for no bound.

    Raises:
        ValueError: For a hyperparameter out of range, or Nesterov momentum without momentum or with dampening.
    """

    def __init__(
        self,
        params,
        lr=0.01,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        max_unorm=0.02,
    ):
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"Invalid {name}: must not be negative, got {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum needs momentum above 0 and dampening 0")
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            max_unorm=max_unorm,
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
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, p, self.state[p])
        return loss

    @staticmethod
    def _update(group, p, state):
        direction = p.grad.add(p, alpha=group["weight_decay"])
        if group["momentum"]:
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(group["momentum"]).add_(direction, alpha=1 - group["dampening"])
            else:
                state["momentum_buffer"] = direction.clone()
            buffer = state["momentum_buffer"]
            direction = direction.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        if group["max_unorm"] > 0:
            bound, norm = group["max_unorm"] * p.norm(dtype=torch.float32), direction.norm(dtype=torch.float32)
            direction = direction * torch.where(norm > bound, bound / norm, torch.ones_like(norm)).to(p.dtype)
        p.add_(direction, alpha=-group["lr"])
