"""Optimizer steps on one parameter; 4096 x 4096 is 16.8 million elements."""

from typing import Any

import torch

import bitsandbytes as bnb

from . import Case, Setting, nbytes, operation


def _stepped(at: Setting, optimizer: Any, **options: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """A parameter with a gradient, and its optimizer after the step that makes the states."""
    parameter = torch.nn.Parameter(at.randn(at.rows, at.columns))
    parameter.grad = at.randn(at.rows, at.columns)
    made = optimizer([parameter], lr=1e-4, **options)
    made.step()
    return parameter, made


def _adamw(at: Setting, optimizer: Any) -> Case:
    parameter, ours = _stepped(at, optimizer)
    _, torchs = _stepped(at, torch.optim.AdamW, fused=True)
    # The maps of 8-bit states are tables, not data that a step moves.
    states = [value for key, value in ours.state[parameter].items() if key.startswith(("state", "absmax"))]
    moved = nbytes(parameter) * 3 + nbytes(*states) * 2  # the gradient is read, all else is read and written
    return Case(ours.step, (), moved, "fused AdamW", torchs.step)


@operation("optimizer_update_8bit_blockwise")
def adamw8bit(at: Setting) -> Case:
    return _adamw(at, bnb.optim.AdamW8bit)


@operation("optimizer_update_32bit")
def adamw32bit(at: Setting) -> Case:
    return _adamw(at, bnb.optim.AdamW32bit)
