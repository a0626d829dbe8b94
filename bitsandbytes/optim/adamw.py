"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from .optimizer import Optimizer2State, only


class AdamW(Optimizer2State):
    """AdamW with 32-bit or 8-bit state.

    Args:
        params: Parameters or parameter groups.
        lr, betas, eps: As in `torch.optim.AdamW`.
        weight_decay: Decoupled: the parameter is multiplied by `1 - lr * weight_decay` before the update.
        amsgrad: Not supported.
        optim_bits: 8 or 32.
        args: An object with the attributes that `Optimizer2State` documents.
        min_8bit_size: Parameters with fewer elements keep 32-bit state.
        is_paged: Whether state may be paged out to host memory.

    Raises:
        ValueError: For a hyperparameter out of range, or `amsgrad=True`.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        only(self, amsgrad=(amsgrad, False))
        super().__init__(
            "adam", params, lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size, is_paged=is_paged
        )


class AdamW8bit(AdamW):
    """AdamW with 8-bit state. `optim_bits` exists for compatibility: only its default, 32, is taken."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        only(self, optim_bits=(optim_bits, 32))
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, 8, args, min_8bit_size, is_paged)


class AdamW32bit(AdamW):
    """AdamW with 32-bit state."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        only(self, optim_bits=(optim_bits, 32))
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, 32, args, min_8bit_size, is_paged)


class PagedAdamW(AdamW):
    """AdamW with paged state."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, optim_bits, args, min_8bit_size, True)


class PagedAdamW8bit(AdamW8bit):
    """AdamW with paged 8-bit state."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, optim_bits, args, min_8bit_size, True)


class PagedAdamW32bit(AdamW32bit):
    """AdamW with paged 32-bit state."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, optim_bits, args, min_8bit_size, True)
