"""RMSprop (Tieleman and Hinton 2012, lecture 6.5)."""

from .optimizer import Optimizer1State, UnsupportedArgumentError, only


class RMSprop(Optimizer1State):
    """RMSprop with 32-bit or 8-bit state.

    Args:
        params: Parameters or parameter groups.
        lr, eps: As in `torch.optim.RMSprop`.
        alpha: Smoothing constant, not 0.
        weight_decay: Added to the gradient, times the parameter.
        momentum, centered: Not supported.
        optim_bits: 8 or 32.
        args: An object with the attributes that `Optimizer2State` documents.
        min_8bit_size: Parameters with fewer elements keep 32-bit state.

    Raises:
        ValueError: For a hyperparameter out of range or not supported.
    """

    def __init__(
        self,
        params,
        lr=1e-2,
        alpha=0.99,
        eps=1e-8,
        weight_decay=0,
        momentum=0,
        centered=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        if alpha == 0:
            raise UnsupportedArgumentError(f"{type(self).__name__}: alpha=0 is not supported")
        only(self, momentum=(momentum, 0), centered=(centered, False))
        super().__init__("rmsprop", params, lr, (alpha, momentum), eps, weight_decay, optim_bits, args, min_8bit_size)


class RMSprop8bit(RMSprop):
    """RMSprop with 8-bit state."""

    def __init__(
        self,
        params,
        lr=1e-2,
        alpha=0.99,
        eps=1e-8,
        weight_decay=0,
        momentum=0,
        centered=False,
        args=None,
        min_8bit_size=4096,
    ):
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered, 8, args, min_8bit_size)


class RMSprop32bit(RMSprop):
    """RMSprop with 32-bit state."""

    def __init__(
        self,
        params,
        lr=1e-2,
        alpha=0.99,
        eps=1e-8,
        weight_decay=0,
        momentum=0,
        centered=False,
        args=None,
        min_8bit_size=4096,
    ):
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered, 32, args, min_8bit_size)
