"""LAMB (You et al. 2020, arXiv:1904.00962), in upstream's form: Adam whose update is bounded relative to the weight."""

from .optimizer import Optimizer2State, only


class LAMB(Optimizer2State):
    """LAMB with 32-bit or 8-bit state.

    Args:
        params: Parameters or parameter groups.
        lr, betas, eps: As in `torch.optim.Adam`.
        bias_correction: Only True is supported.
        weight_decay: Decoupled: the parameter is multiplied by `1 - lr * weight_decay` before the update.
        amsgrad: Not supported.
        adam_w_mode: Only True is supported.
        optim_bits: 8 or 32.
        args: An object with the attributes that `Optimizer2State` documents.
        min_8bit_size: Parameters with fewer elements keep 32-bit state.
        max_unorm: The update's direction is scaled down to this multiple of the parameter's norm; 0 for no bound.

    Raises:
        ValueError: For a hyperparameter out of range or not supported.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        adam_w_mode=True,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        max_unorm=1.0,
    ):
        only(self, bias_correction=(bias_correction, True), amsgrad=(amsgrad, False), adam_w_mode=(adam_w_mode, True))
        super().__init__(
            "lamb", params, lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size, max_unorm=max_unorm
        )


class LAMB8bit(LAMB):
    """LAMB with 8-bit state. `max_unorm` takes only its default, as upstream's does; `LAMB(optim_bits=8)` takes any."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        adam_w_mode=True,
        args=None,
        min_8bit_size=4096,
        max_unorm=1.0,
    ):
        only(self, max_unorm=(max_unorm, 1.0))
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            8,
            args,
            min_8bit_size,
            max_unorm,
        )


class LAMB32bit(LAMB):
    """LAMB with 32-bit state."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        adam_w_mode=True,
        args=None,
        min_8bit_size=4096,
        max_unorm=1.0,
    ):
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            32,
            args,
            min_8bit_size,
            max_unorm,
        )
