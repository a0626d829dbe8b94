"""SGD with momentum (Polyak 1964), in the form of `torch.optim.SGD`."""

from .optimizer import Optimizer1State, UnsupportedArgumentError, only


class SGD(Optimizer1State):
    """SGD with momentum, with 32-bit or 8-bit state.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: Not 0: `torch.optim.SGD` does that without any state.
        weight_decay: Added to the gradient, times the parameter.
        dampening, nesterov: Not supported.
        optim_bits: 8 or 32.
        args: An object with the attributes that `Optimizer2State` documents.
        min_8bit_size: Parameters with fewer elements keep 32-bit state.

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
    ):
        if momentum == 0:
            raise UnsupportedArgumentError(f"{type(self).__name__}: momentum=0 is not supported, use torch.optim.SGD")
        only(self, dampening=(dampening, 0), nesterov=(nesterov, False))
        super().__init__(
            "momentum", params, lr, (momentum, dampening), 0.0, weight_decay, optim_bits, args, min_8bit_size
        )


class SGD8bit(SGD):
    """SGD with momentum and 8-bit state."""

    def __init__(
        self, params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False, args=None, min_8bit_size=4096
    ):
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, 8, args, min_8bit_size)


class SGD32bit(SGD):
    """SGD with momentum and 32-bit state."""

    def __init__(
        self, params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False, args=None, min_8bit_size=4096
    ):
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, 32, args, min_8bit_size)
