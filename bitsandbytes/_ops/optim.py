"""Optimizer operators: `optimizer_update_32bit`, `optimizer_update_8bit_blockwise`.

Both update the parameter `p` and the optimizer's states in place from the gradient `g`. The 8-bit operator keeps a
state as codes of a 256-entry map and one fp32 absmax per block of `formats.OPTIMIZER_BLOCKSIZE` elements.
The schemas mark `g` and the maps as mutable, as upstream's do; no implementation here writes to them.
"""

import torch

from . import _checks as check
from . import define
from ..errors import ArgumentError
from ..formats import OPTIMIZER_BLOCKSIZE, num_blocks

#: optimizer name -> number of moments held in (state1, state2). Two moments in one state are stacked along dim 0.
STATE_ROWS = {
    "momentum": (1, 0),
    "lars": (1, 0),
    "rmsprop": (1, 0),
    "adagrad": (1, 0),
    "lion": (1, 0),
    "adam": (1, 1),
    "lamb": (1, 1),
    "ademamix": (2, 1),
}


def _state(op: str, argument: str, state: torch.Tensor | None, dtype: torch.dtype, rows: int, p: torch.Tensor) -> None:
    if state is None:
        raise ArgumentError(op, argument, f"a {dtype} tensor for this optimizer", None)
    check.dtype_is(op, argument, state, dtype)
    if rows == 1:
        if state.numel() != p.numel():
            raise ArgumentError(op, argument, f"of {p.numel()} elements, like p", state.numel())
    elif tuple(state.shape) != (rows, *p.shape):
        raise ArgumentError(op, argument, f"of shape {(rows, *p.shape)}", tuple(state.shape))


def _check_common(
    op: str, name: str, g: torch.Tensor, p: torch.Tensor, states: tuple[torch.Tensor | None, ...], dtype, step: int
) -> None:
    check.one_of(op, "optimizer_name", name, tuple(STATE_ROWS))
    check.float_dtype(op, "the dtype of p", p.dtype)
    check.dtype_is(op, "the dtype of g", g, p.dtype)
    if g.layout != torch.strided:
        raise ArgumentError(op, "g", "a dense tensor", g.layout)
    if g.numel() != p.numel():
        raise ArgumentError(op, "g", f"of {p.numel()} elements, like p", g.numel())
    if step < 1:
        raise ArgumentError(op, "step", "at least 1, the number of this update", step)
    for argument, state, rows in zip(("state1", "state2"), states, STATE_ROWS[name], strict=True):
        if rows:
            _state(op, argument, state, dtype, rows, p)


def _check_32bit(
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
    op = "optimizer_update_32bit"
    _check_common(op, optimizer_name, g, p, (state1, state2), torch.float32, step)
    if unorm_vec is not None:
        check.dtype_is(op, "unorm_vec", unorm_vec, torch.float32)
        if unorm_vec.numel() != 1:
            raise ArgumentError(op, "unorm_vec", "a single value", f"{unorm_vec.numel()} values")
    check.same_device(op, g, p=p, state1=state1, state2=state2, unorm_vec=unorm_vec)


define(
    "optimizer_update_32bit(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, "
    "Tensor(a3!)? state2, Tensor(a4!)? unorm_vec, float max_unorm, float param_norm, float beta1, float beta2, "
    "float beta3, float alpha, float eps, float weight_decay, int step, float lr, float gnorm_scale, "
    "bool skip_zeros=False) -> ()",
    _check_32bit,
    lambda *args, **kwargs: None,
)


def _check_8bit(
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
    op = "optimizer_update_8bit_blockwise"
    _check_common(op, optimizer_name, g, p, (state1, state2), torch.uint8, step)
    blocks = num_blocks(p.numel(), OPTIMIZER_BLOCKSIZE)
    for i, (qmap, absmax, rows) in enumerate(
        zip((qmap1, qmap2), (absmax1, absmax2), STATE_ROWS[optimizer_name], strict=True), start=1
    ):
        if not rows:
            continue
        if qmap is None or absmax is None:
            raise ArgumentError(op, f"qmap{i} and absmax{i}", "given for this optimizer", None)
        check.code_map(op, qmap, argument=f"qmap{i}")
        check.dtype_is(op, f"absmax{i}", absmax, torch.float32)
        shape = (blocks,) if rows == 1 else (rows, blocks)
        if tuple(absmax.shape) != shape:
            valid = f"of shape {shape}, one value per block of {OPTIMIZER_BLOCKSIZE} elements"
            raise ArgumentError(op, f"absmax{i}", valid, tuple(absmax.shape))
    check.same_device(
        op, g, p=p, state1=state1, state2=state2, qmap1=qmap1, qmap2=qmap2, absmax1=absmax1, absmax2=absmax2
    )


define(
    "optimizer_update_8bit_blockwise(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, "
    "Tensor(a3!)? state2, float beta1, float beta2, float beta3, float alpha, float eps, int step, float lr, "
    "Tensor(a4!) qmap1, Tensor(a5!)? qmap2, Tensor(a6!) absmax1, Tensor(a7!)? absmax2, float weight_decay, "
    "float gnorm_scale, bool skip_zeros=False) -> ()",
    _check_8bit,
    lambda *args, **kwargs: None,
)
