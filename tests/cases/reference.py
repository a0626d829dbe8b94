"""Every operator's reference with valid arguments, to look at what it asks of PyTorch."""

from collections.abc import Callable, Iterator
import functools

import torch

from bitsandbytes import formats
from bitsandbytes.backends.default import fourbit, optim
from tests.cases.samples import SAMPLES
from tests.helpers import FLOATS, reference
from tests.optim.test_ops import inputs8, inputs32


def forget_tables() -> None:
    """Empty the reference's caches, so that the next call makes its tables again."""
    for module in (formats, fourbit):
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def _on(device: str, args: dict) -> list:
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in args.values()]


def reference_calls(device: str = "cpu") -> Iterator[tuple[str, Callable, list]]:
    """(what it is, function, arguments) of each call."""
    for sample in SAMPLES:
        yield str(sample), reference(sample.op), _on(device, sample.args())
    for name in optim.RULES:
        for dtype in FLOATS:
            for changes in ({}, {"skip_zeros": True}):
                plain, coded = inputs32(name, dtype=dtype, **changes), inputs8(name, dtype=dtype, **changes)
                yield f"32-bit {name} {dtype}", optim.optimizer_update_32bit, _on(device, plain)
                yield f"8-bit {name} {dtype}", optim.optimizer_update_8bit_blockwise, _on(device, coded)
        bounded = inputs32(name, unorm_vec=torch.zeros(1), max_unorm=0.5, param_norm=1.0)
        yield f"32-bit {name}, norm", optim.optimizer_update_32bit, _on(device, bounded)
