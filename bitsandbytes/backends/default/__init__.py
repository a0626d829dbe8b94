"""The reference backend: plain PyTorch on any device, exact, in bounded memory. Every other backend is held to it."""

from . import blockwise, fourbit, int8, optim

__all__ = ["blockwise", "fourbit", "int8", "optim"]
