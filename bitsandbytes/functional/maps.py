"""Quantisation maps as tensors: the 8-bit maps of the optimizers and other callers, and the 4-bit code tables."""

import functools
from itertools import product

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..errors import UnsupportedError
from ..formats import CODEBOOKS, MAP_SIZE, codebook, create_dynamic_map

# AbnormalFloat4 for blocks of 64, Yoshida 2023, arXiv:2306.06965, in descending order.
_AF4_64 = (
    1.0,
    0.72424863,
    0.55496234,
    0.42563882,
    0.31675666,
    0.21961274,
    0.12934483,
    0.04273164,
    0.0,
    -0.04934812,
    -0.14982478,
    -0.25607552,
    -0.3736951,
    -0.51243739,
    -0.69441008,
    -1.0,
)
_INT4 = tuple(v / 7 for v in (*range(7, -1, -1), *range(0, -8, -1)))


def _padded(levels: torch.Tensor) -> torch.Tensor:
    """`levels` ascending, with zeros added up to 256."""
    zeros = torch.zeros(MAP_SIZE - levels.numel(), dtype=torch.float32, device="cpu")
    return torch.cat((levels.to(torch.float32), zeros)).sort().values


def create_linear_map(signed=True, total_bits=8, add_zero=True) -> torch.Tensor:
    """256 ascending fp32 levels, equally spaced in [-1, 1] (signed) or [0, 1].

    Args:
        signed: Whether negative levels exist.
        total_bits: Bits of a code; maps of fewer than 8 repeat 0 in the middle.
        add_zero: Give up one level so that 0 is exact (always so below 8 bits).
    """
    count = 2**total_bits
    if signed and (add_zero or total_bits < 8):
        count -= 1
    levels = torch.linspace(-1.0 if signed else 0.0, 1.0, count, dtype=torch.float32, device="cpu")
    half = count // 2
    middle = torch.zeros(MAP_SIZE - count, dtype=torch.float32, device="cpu")
    return torch.cat((levels[:half], middle, levels[half:]))


def create_normal_map(offset=0.9677083, use_extra_value=True) -> torch.Tensor:
    """Quantiles of N(0, 1) scaled to [-1, 1], ascending, padded with zeros to 256 fp32 levels. Needs scipy.

    Args:
        offset: Probability of the outermost quantile.
        use_extra_value: One more positive than negative level (NF4 is made this way; QLoRA, arXiv:2305.14314).
    """
    try:
        from scipy.stats import norm
    except ImportError as error:
        raise ImportError("create_normal_map needs scipy: install bitsandbytes[test]") from error

    def quantiles(count: int) -> torch.Tensor:
        grid = torch.linspace(offset, 0.5, count + 1, dtype=torch.float32, device="cpu")[:-1]
        return torch.tensor(norm.ppf(grid.numpy()).tolist(), dtype=torch.float32, device="cpu")

    levels = _padded(torch.cat((quantiles(8 if use_extra_value else 7), -quantiles(7))))
    return levels / levels.max()


def create_fp8_map(signed=True, exponent_bits=5, precision_bits=2, total_bits=8) -> torch.Tensor:
    """Every value of a small floating-point format, ascending, scaled to a maximum of 1, padded to 256 fp32 levels.

    Args:
        signed: Whether one bit is the sign.
        exponent_bits: A stored exponent `e > 0` stands for `2**(bias + 1 - e)` with bias `2**(exponent_bits - 1)`;
            `e = 0` marks subnormals, `2**-bias` times the fraction.
        precision_bits: Bits of the fraction.
        total_bits: Their sum, with the sign.
    """
    if exponent_bits + precision_bits + bool(signed) != total_bits:
        raise ValueError(
            f"create_fp8_map: total_bits must be the sum of sign, exponent and precision bits, "
            f"{bool(signed)} + {exponent_bits} + {precision_bits}, got {total_bits}"
        )
    bias = 2 ** (exponent_bits - 1)
    steps = 2**precision_bits
    magnitudes = [
        (step / steps) * 2.0**-bias if exponent == 0 else (1 + step / steps) * 2.0 ** (bias + 1 - exponent)
        for exponent, step in product(range(2**exponent_bits), range(steps))
    ]
    values = magnitudes + [-v for v in magnitudes] if signed else magnitudes
    levels = _padded(torch.tensor(values, dtype=torch.float32, device="cpu"))
    return levels / levels.max()


def get_4bit_type(typename, device=None, blocksize=64) -> torch.Tensor:
    """The 16 fp32 levels of a 4-bit type in code order, scaled to a maximum of 1.

    Args:
        typename: "nf4", "fp4", "int4" or "af4"; the operators take the first two.
        device: Where the table goes; the current accelerator if None, else the CPU.
        blocksize: "af4" is defined for 64 only.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    if typename == "af4" and blocksize != 64:
        raise UnsupportedError(f"get_4bit_type: blocksize must be 64 for af4, got {blocksize}")
    tables = CODEBOOKS | {"int4": _INT4, "af4": _AF4_64}
    if typename not in tables:
        raise UnsupportedError(f"get_4bit_type: typename must be one of {', '.join(tables)}, got {typename!r}")
    return torch.tensor(tables[typename], dtype=torch.float32, device=device)


#: The maps that optimizers and `quantize_blockwise` use, by name, on the CPU.
name2qmap = {"dynamic": create_dynamic_map(signed=True), "udynamic": create_dynamic_map(signed=False)}


def table(name: str, device: torch.device) -> torch.Tensor:
    """A new tensor of the levels of "nf4", "fp4" or the "dynamic" map.

    The first for a device is copied from the host, the others from one that stays there.
    """
    # What a mode or a compiler sees may be no real tensor, and must not stay.
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return get_4bit_type(name, device) if name in CODEBOOKS else name2qmap[name].to(device, copy=True)
    return (codebook(name, device) if name in CODEBOOKS else _shared_map(name, device)).clone()


@functools.cache
def _shared_map(name: str, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return name2qmap[name].to(device)
