"""The number formats: NF4, FP4 and the dynamic 8-bit maps, their decision points, and block arithmetic.

Each constant of the package's formats exists here and nowhere else.
"""

import functools
from math import prod

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCKSIZES_4BIT = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DEFAULT_BLOCKSIZE_4BIT = 64
DEFAULT_BLOCKSIZE_8BIT = 4096
NESTED_BLOCKSIZE = 256  # second-level blocks of compressed statistics
OPTIMIZER_BLOCKSIZE = 256  # blocks of 8-bit optimizer state
INT8_MAX = 127  # -128 is never produced: a symmetric range keeps -x representable
MAP_SIZE = 256  # entries of an 8-bit map

# NormalFloat4, Dettmers et al. 2023, arXiv:2305.14314, appendix E: quantiles of N(0, 1) scaled to [-1, 1].
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# Bits of an FP4 code: sign, two exponent bits with bias 2, one mantissa bit; in units of 1/12 of the largest value.
# The order is that of the codes, not of the values. Code 8 (zero with the sign bit) decodes to +0.
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(v / 12.0 for v in _FP4_TWELFTHS) + tuple(-v / 12.0 if v else 0.0 for v in _FP4_TWELFTHS)
FP4_SIGN = 8
# FP4_BY_MAGNITUDE[k] is the code of the k-th smallest magnitude.
FP4_BY_MAGNITUDE = tuple(sorted(range(8), key=lambda code: FP4[code]))

CODEBOOKS = {"nf4": NF4, "fp4": FP4}
QUANT_TYPES = tuple(CODEBOOKS)
ZERO_CODE = {name: levels.index(0.0) for name, levels in CODEBOOKS.items()}


def num_blocks(numel: int, blocksize: int) -> int:
    """Number of blocks of a tensor of `numel` elements; the last one may be short."""
    return -(numel // -blocksize)


def packed_bytes(numel: int) -> int:
    """Bytes that hold `numel` 4-bit codes, two in a byte."""
    return (numel + 1) // 2


def rows_of(tensor: torch.Tensor) -> int:
    """Number of rows of a tensor with its leading dimensions flattened."""
    return prod(tensor.shape[:-1])


def midpoints(levels: torch.Tensor) -> torch.Tensor:
    """Decision points `(a + b) / 2` between neighbours of ascending `levels`, in fp32, rounded to nearest."""
    return (levels[:-1] + levels[1:]) / 2


def exact_midpoints(levels: torch.Tensor) -> torch.Tensor:
    """Decision points between neighbours of ascending fp32 `levels`, rounded down.

    For every fp32 `x`, `x > exact_midpoints` equals `x > (a + b) / 2` in real arithmetic (unless that is subnormal),
    so counting the points below `x` gives the exactly nearest level. The rounding error of `a + b` comes from Knuth's
    TwoSum (TAOCP 2, 4.2.2), which needs no float64.
    """
    a, b = levels[:-1], levels[1:]
    s = a + b
    t = s - a
    error = (a - (s - t)) + (b - t)
    middle = s / 2
    # One unit in the last place towards minus infinity: the integer view of a float grows with its magnitude.
    # Where the sum is inexact it is not 0, so no sign change can occur.
    below = (middle.view(torch.int32) - middle.sign().to(torch.int32)).view(torch.float32)
    return torch.where(error < 0, below, middle)


@functools.cache
def codebook(quant_type: str, device: torch.device) -> torch.Tensor:
    """The 16 fp32 levels of `quant_type`, in code order, on `device`. Shared: never write to it."""
    with torch.inference_mode(False):
        return torch.tensor(CODEBOOKS[quant_type], dtype=torch.float32, device=device)


@functools.cache
def decision_points(quant_type: str) -> tuple[float, ...]:
    """The fp32 decision points of a 4-bit type: 15 between the NF4 levels, 7 between the FP4 magnitudes."""
    levels = FP4[:FP4_SIGN] if quant_type == "fp4" else CODEBOOKS[quant_type]
    with torch.inference_mode(False):
        return tuple(midpoints(torch.tensor(sorted(levels), dtype=torch.float32, device="cpu")).tolist())


def create_dynamic_map(signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8) -> torch.Tensor:
    """The dynamic tree map: an exponent of varying length leaves the remaining bits to a linear fraction.

    Dettmers 2015, arXiv:1511.04561, section 2.1. Exponent `e` covers the decade `(10**(e - max_exponent_bits),
    10**(e - max_exponent_bits + 1)]` with the midpoints of equal steps.

    Returns:
        256 ascending fp32 levels in [-1, 1] (signed) or [0, 1]; maps of fewer bits repeat 0.
    """
    fraction_bits = total_bits - 1 - max_exponent_bits
    decades = [(e, 2 ** (e + fraction_bits + (0 if signed else 1))) for e in range(max_exponent_bits)]
    if fraction_bits > 0:  # codes without an indicator bit extend the largest decade
        decades.append((max_exponent_bits - 1, 2**fraction_bits - 1))

    levels = [0.0, 1.0]
    for exponent, steps in decades:
        edges = torch.linspace(0.1, 1, int(steps) + 1, dtype=torch.float32, device="cpu")
        decade = 10 ** (exponent - max_exponent_bits + 1) * midpoints(edges)
        levels += decade.tolist()
        if signed:
            levels += (-decade).tolist()
    levels += [0.0] * (MAP_SIZE - len(levels))
    return torch.tensor(sorted(levels), dtype=torch.float32, device="cpu")
