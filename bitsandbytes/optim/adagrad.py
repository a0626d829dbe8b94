"""Adagrad (Duchi et al. 2011, JMLR 12)."""

from .optimizer import Optimizer1State, only


class Adagrad(Optimizer1State):
    """Adagrad with 32-bit or 8-bit state.

    Args:
        params: Parameters or parameter groups.
        lr, eps: As in `torch.optim.Adagrad`.
        weight_decay: Added to the gradient, times the parameter.
        lr_decay, initial_accumulator_value: Only 0 is supported.
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
        lr_decay=0,
        weight_decay=0,
        initial_accumulator_value=0,
        eps=1e-10,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        only(self, lr_decay=(lr_decay, 0), initial_accumulator_value=(initial_accumulator_value, 0))
        super().__init__("adagrad", params, lr, (0.0, 0.0), eps, weight_decay, optim_bits, args, min_8bit_size)


class Adagrad8bit(Adagrad):
    """Adagrad with 8-bit state."""

    def __init__(
        self,
        params,
        lr=1e-2,
        lr_decay=0,
        weight_decay=0,
        initial_accumulator_value=0,
        eps=1e-10,
        optim_bits=8,
        args=None,
        min_8bit_size=4096,
    ):
        only(self, optim_bits=(optim_bits, 8))
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, 8, args, min_8bit_size)


class Adagrad32bit(Adagrad):
    """Adagrad with 32-bit state."""

    def __init__(
        self,
        params,
        lr=1e-2,
        lr_decay=0,
        weight_decay=0,
        initial_accumulator_value=0,
        eps=1e-10,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        only(self, optim_bits=(optim_bits, 32))
        super().__init__(params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, 32, args, min_8bit_size)
