"""Lion (Chen et al. 2023, arXiv:2302.06675)."""

from .optimizer import Optimizer1State


class Lion(Optimizer1State):
    """Lion with 32-bit or 8-bit state.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: For the direction of the update, and for the state.
        weight_decay: Decoupled: the parameter is multiplied by `1 - lr * weight_decay` before the update.
        optim_bits: 8 or 32.
        args: An object with the attributes that `Optimizer2State` documents.
        min_8bit_size: Parameters with fewer elements keep 32-bit state.
        is_paged: Whether state may be paged out to host memory.

    Raises:
        ValueError: For a hyperparameter out of range.
    """

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        super().__init__(
            "lion", params, lr, betas, 0.0, weight_decay, optim_bits, args, min_8bit_size, is_paged=is_paged
        )


class Lion8bit(Lion):
    """Lion with 8-bit state."""

    def __init__(
        self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0, args=None, min_8bit_size=4096, is_paged=False
    ):
        super().__init__(params, lr, betas, weight_decay, 8, args, min_8bit_size, is_paged)


class Lion32bit(Lion):
    """Lion with 32-bit state."""

    def __init__(
        self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0, args=None, min_8bit_size=4096, is_paged=False
    ):
        super().__init__(params, lr, betas, weight_decay, 32, args, min_8bit_size, is_paged)


class PagedLion(Lion):
    """Lion with paged state."""

    def __init__(
        self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0, optim_bits=32, args=None, min_8bit_size=4096
    ):
        super().__init__(params, lr, betas, weight_decay, optim_bits, args, min_8bit_size, True)


class PagedLion8bit(Lion8bit):
    """Lion with paged 8-bit state."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0, args=None, min_8bit_size=4096):
        super().__init__(params, lr, betas, weight_decay, args, min_8bit_size, True)


class PagedLion32bit(Lion32bit):
    """Lion with paged 32-bit state."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0, args=None, min_8bit_size=4096):
        super().__init__(params, lr, betas, weight_decay, args, min_8bit_size, True)
