"""Reference of the optimizer operators: one table of update rules, shared by 32-bit and 8-bit states.

fp32 arithmetic in spans of the flattened, row-major tensors: any strides, bounded temporaries, nothing read back to
the host.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ._blocks import Span, by_block, read, spans, write
from ..._ops import register_reference
from ..._ops.optim import STATE_ROWS
from ...formats import OPTIMIZER_BLOCKSIZE


class Hyper(NamedTuple):
    """What one update needs besides tensors."""

    beta1: float
    beta2: float
    beta3: float
    alpha: float
    eps: float
    weight_decay: float
    step: int
    lr: float
    gnorm_scale: float
    skip_zeros: bool


# A rule advances the fp32 moments in place by the fp32 gradient and returns the direction: p <- p - lr * direction.


def _momentum(h: Hyper, g: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """SGD with momentum, as in torch.optim.SGD: the first gradient initialises the buffer."""
    if h.step == 1:
        return m.copy_(g)
    return m.mul_(h.beta1).add_(g)


def _rmsprop(h: Hyper, g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """RMSprop (Tieleman and Hinton 2012, lecture 6.5)."""
    v.mul_(h.beta1).addcmul_(g, g, value=1 - h.beta1)
    return g / (v.sqrt() + h.eps)


def _adagrad(h: Hyper, g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Adagrad (Duchi et al. 2011, JMLR 12)."""
    v.addcmul_(g, g)
    return g / (v.sqrt() + h.eps)


def _lion(h: Hyper, g: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): beta1 for the direction, beta2 for the state."""
    direction = (m * h.beta1).add_(g, alpha=1 - h.beta1).sign_()
    m.mul_(h.beta2).add_(g, alpha=1 - h.beta2)
    return direction


def _second_moment_root(h: Hyper, g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Advance the second moment of the Adam family; return its bias-corrected root plus eps."""
    v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
    return v.sqrt().div_((1 - h.beta2**h.step) ** 0.5).add_(h.eps)


def _adam(h: Hyper, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1)."""
    m.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
    return (m / (1 - h.beta1**h.step)).div_(_second_moment_root(h, g, v))


def _ademamix(h: Hyper, g: torch.Tensor, m1: torch.Tensor, m2: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137, algorithm 1): only the fast average is bias-corrected."""
    m1.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
    m2.mul_(h.beta3).add_(g, alpha=1 - h.beta3)
    return (m1 / (1 - h.beta1**h.step)).add_(m2, alpha=h.alpha).div_(_second_moment_root(h, g, v))


class Rule(NamedTuple):
    advance: Callable[..., torch.Tensor]
    decoupled: bool  # weight decay shrinks the old parameter (AdamW) instead of joining the gradient (L2)


# LARS (arXiv:1708.03888) and LAMB (arXiv:1904.00962) are momentum and Adam with a bound on the norm of the direction,
# given by `max_unorm`. `adam` has decoupled decay, like upstream's.
RULES = {
    "momentum": Rule(_momentum, decoupled=False),
    "lars": Rule(_momentum, decoupled=False),
    "rmsprop": Rule(_rmsprop, decoupled=False),
    "adagrad": Rule(_adagrad, decoupled=False),
    "lion": Rule(_lion, decoupled=True),
    "adam": Rule(_adam, decoupled=True),
    "lamb": Rule(_adam, decoupled=True),
    "ademamix": Rule(_ademamix, decoupled=True),
}


def _direction(rule: Rule, h: Hyper, g: torch.Tensor, p: torch.Tensor, moments: list[torch.Tensor]) -> torch.Tensor:
    """Advance `moments` in place by one span of the gradient; return the direction, 0 where an element is skipped."""
    grad = g * h.gnorm_scale
    if h.weight_decay and not rule.decoupled:
        grad.add_(p, alpha=h.weight_decay)
    if not h.skip_zeros:
        return rule.advance(h, grad, *moments)
    skipped = g == 0
    old = [m.clone() for m in moments]
    direction = rule.advance(h, grad, *moments).masked_fill(skipped, 0)
    for m, before in zip(moments, old, strict=True):
        m.copy_(torch.where(skipped, before, m))
    return direction


def _descend(
    rule: Rule, h: Hyper, g: torch.Tensor, p: torch.Tensor, direction: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The new fp32 values of one span of the parameter."""
    if scale is not None:
        direction = direction * scale
    # Decoupled decay acts on the old parameter (Loshchilov and Hutter 2019, arXiv:1711.05101).
    decay = h.weight_decay if rule.decoupled else 0.0
    new = torch.add(p * (1 - h.lr * decay) if decay else p, direction, alpha=-h.lr)
    return torch.where(g == 0, p, new) if h.skip_zeros else new


def _moments(optimizer_name: str, *states: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors of single moments in (state1, state2), or of their absmax: stacked ones are taken apart."""
    moments: list[torch.Tensor] = []
    for state, rows in zip(states, STATE_ROWS[optimizer_name], strict=True):
        if state is not None and rows:
            moments += [state] if rows == 1 else state.unbind(0)
    return moments


def _read(span: Span, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [read(tensor, span.start, span.stop, torch.float32) for tensor in tensors]


@torch.no_grad()
def optimizer_update_32bit(
    optimizer_name: str,
    g: torch.Tensor,
    p: torch.Tensor,
    state1: torch.Tensor,
    state2: torch.Tensor | None,
    unorm_vec: torch.Tensor | None,
    max_unorm: float,
    param_norm: float,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    step: int,
    lr: float,
    gnorm_scale: float,
    skip_zeros: bool = False,
) -> None:
    """Update `p` (fp32, fp16 or bf16) and fp32 states in place.

    With `max_unorm > 0` the direction's 2-norm over all of `p` goes to `unorm_vec`, and the direction is scaled down to
    `max_unorm * param_norm` where it is longer. With `skip_zeros`, elements whose gradient is 0 do not change.
    """
    rule = RULES[optimizer_name]
    h = Hyper(beta1, beta2, beta3, alpha, eps, weight_decay, step, lr, gnorm_scale, skip_zeros)
    states = _moments(optimizer_name, state1, state2)

    scale = None
    if max_unorm > 0:
        # The norm must be known before the first write, so the directions are computed twice.
        norms = [torch.zeros((), dtype=torch.float32, device=p.device)]
        for span in spans(p.numel(), OPTIMIZER_BLOCKSIZE):
            grad, old, *moments = _read(span, g, p, *states)
            norms.append(torch.linalg.vector_norm(_direction(rule, h, grad, old, moments)))
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if unorm_vec is not None:
            unorm_vec.copy_(norm)
        limit = max_unorm * param_norm
        scale = torch.where(norm > limit, limit / norm, 1.0)

    for span in spans(p.numel(), OPTIMIZER_BLOCKSIZE):
        grad, old, *moments = _read(span, g, p, *states)
        direction = _direction(rule, h, grad, old, moments)
        write(p, span.start, _descend(rule, h, grad, old, direction, scale))
        for state, moment in zip(states, moments, strict=True):
            write(state, span.start, moment)


@torch.no_grad()
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
    weight_decay: float,
    gnorm_scale: float,
    skip_zeros: bool = False,
) -> None:
    """Update `p` (fp32, fp16 or bf16) and 8-bit states in place: decode, apply the 32-bit rule, encode.

    With `skip_zeros`, elements whose gradient is 0 do not change. Their state keeps its value to within the 8-bit
    code of a block that changes around them, and to the bit in a block without any gradient.
    """
    rule = RULES[optimizer_name]
    h = Hyper(beta1, beta2, beta3, alpha, eps, weight_decay, step, lr, gnorm_scale, skip_zeros)
    states = _moments(optimizer_name, state1, state2)
    scales = _moments(optimizer_name, absmax1, absmax2)
    rows1, rows2 = STATE_ROWS[optimizer_name]
    maps = [qmap1] * rows1 + [qmap2] * rows2
    ops = torch.ops.bitsandbytes

    for span in spans(p.numel(), OPTIMIZER_BLOCKSIZE):
        grad, old = _read(span, g, p)
        codes = [read(state, span.start, span.stop, torch.uint8) for state in states]
        moments = [
            ops.dequantize_blockwise(code, absmax[span.first : span.last], qmap, OPTIMIZER_BLOCKSIZE, torch.float32)
            for code, absmax, qmap in zip(codes, scales, maps, strict=True)
        ]
        direction = _direction(rule, h, grad, old, moments)
        write(p, span.start, _descend(rule, h, grad, old, direction))

        for state, code, absmax, qmap, moment in zip(states, codes, scales, maps, moments, strict=True):
            new_code, new_absmax = ops.quantize_blockwise(moment, qmap, OPTIMIZER_BLOCKSIZE)
            if skip_zeros:
                # Encoding a decoded block again may move its absmax: -1 is no level of the signed map.
                touched = by_block(grad != 0, span, OPTIMIZER_BLOCKSIZE).any(1)
                elements = touched.unsqueeze(1).expand(-1, OPTIMIZER_BLOCKSIZE).reshape(-1)[: code.numel()]
                new_code = torch.where(elements, new_code, code)
                new_absmax = torch.where(touched, new_absmax, absmax[span.first : span.last])
            write(state, span.start, new_code)
            absmax[span.first : span.last].copy_(new_absmax)


register_reference("optimizer_update_32bit", optimizer_update_32bit)
register_reference("optimizer_update_8bit_blockwise", optimizer_update_8bit_blockwise)
