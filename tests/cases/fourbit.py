"""4-bit quantisation: exact inputs, statistics, codes and decoded values.

All inputs are fp32 numbers. A case holds for each dtype that can represent its inputs.
"""

from dataclasses import dataclass
import math

import numpy as np

INF, NAN = math.inf, math.nan

# Table of the QLoRA paper, appendix E, in code order.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# Sign, two exponent bits with bias 2, one mantissa bit; code 8 decodes to +0.
FP4 = (
    0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4,
    0.0, -1 / 192, -2 / 3, -1.0, -1 / 3, -1 / 2, -1 / 6, -1 / 4,
)  # fmt: skip

ZERO_CODE = {"nf4": 7, "fp4": 0}

# Decision points as upstream's CUDA kernels spell them, between codes k and k + 1.
NF4_POINTS = (
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984,
    -0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668,
    0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
)  # fmt: skip

# Decision points of the magnitudes, with the codes of the smaller and the larger neighbour.
FP4_POINTS = (
    (0.00260416674427688, 0, 1),
    (0.0859375, 1, 6),
    (0.2083333432674408, 6, 7),
    (0.2916666865348816, 7, 4),
    (0.4166666865348816, 4, 5),
    (0.5833333730697632, 5, 2),
    (0.8333333730697632, 2, 3),
)


def _up(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(INF)))


@dataclass(frozen=True)
class Case:
    """One block, shorter than every block size.

    zero: code and decoded value of a 0 added to the block.
    decoded: None where each value is simply level * absmax.
    """

    name: str
    quant_type: str
    values: tuple[float, ...]
    absmax: float
    codes: tuple[int, ...]
    decoded: tuple[float, ...] | None = None
    zero: tuple[int, float] | None = None

    def __str__(self) -> str:
        return f"{self.quant_type} {self.name}"

    @property
    def zero_code(self) -> int:
        return ZERO_CODE[self.quant_type] if self.zero is None else self.zero[0]

    @property
    def zero_decoded(self) -> float:
        return 0.0 if self.zero is None else self.zero[1]


_TINY = 2.0**-130  # its reciprocal is not finite in fp32
_SMALLEST = 2.0**-149

_SPECIAL = (
    # name, values, absmax, NF4 codes, FP4 codes, NF4 decoded, FP4 decoded, decoded value of a zero
    ("zeros", (0.0, 0.0, 0.0), 0.0, (7, 7, 7), (0, 0, 0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 0.0),
    ("negative zeros", (-0.0, -0.0), 0.0, (7, 7), (0, 0), (0.0, 0.0), (0.0, 0.0), 0.0),
    ("a negative zero", (1.0, -0.0), 1.0, (15, 7), (3, 0), (1.0, 0.0), (1.0, 0.0), 0.0),
    ("one value", (3.0,), 3.0, (15,), (3,), (3.0,), (3.0,), 0.0),
    ("one negative value", (-3.0,), 3.0, (0,), (11,), (-3.0,), (-3.0,), 0.0),
    ("three ones", (1.0, 1.0, 1.0), 1.0, (15,) * 3, (3,) * 3, (1.0,) * 3, (1.0,) * 3, 0.0),
    ("an infinity", (1.0, INF, -3.0, 0.0), INF, (7, 0, 7, 7), (0, 0, 8, 0),
     (NAN, -INF, NAN, NAN), (NAN, NAN, NAN, NAN), NAN),
    ("a negative infinity", (1.0, -INF), INF, (7, 0), (0, 0), (NAN, -INF), (NAN, NAN), NAN),
    ("absmax below 2.9e-39", (_TINY, -_TINY, _TINY / 2, 0.0), _TINY, (15, 0, 12, 7), (3, 11, 5, 0), None, None, 0.0),
    ("the smallest number", (_SMALLEST, -_SMALLEST, 0.0), _SMALLEST, (15, 0, 7), (3, 11, 0), None, None, 0.0),
    ("the smallest absmax with a reciprocal", (2.0**-127, -(2.0**-127)), 2.0**-127, (15, 0), (3, 11), None, None, 0.0),
    ("the largest fp32 number", (3.4028234663852886e38, -1.7014117331926443e38), 3.4028234663852886e38,
     (15, 2), (3, 13), None, None, 0.0),
)  # fmt: skip

_NAN_BLOCKS = (
    ("a NaN", (1.0, NAN, -2.0)),
    ("a NaN and an infinity", (INF, NAN)),
    ("nothing but NaN", (NAN,)),
)

SPECIAL = tuple(
    Case(name, quant_type, values, absmax, codes, decoded, (ZERO_CODE[quant_type], zero))
    for name, values, absmax, nf4, fp4, nf4_decoded, fp4_decoded, zero in _SPECIAL
    for quant_type, codes, decoded in (("nf4", nf4, nf4_decoded), ("fp4", fp4, fp4_decoded))
) + tuple(
    Case(name, quant_type, values, NAN, (0,) * len(values), (NAN,) * len(values), (0, NAN))
    for name, values in _NAN_BLOCKS
    for quant_type in ZERO_CODE
)

LEVELS = (
    Case("every level", "nf4", NF4, 1.0, tuple(range(16)), NF4),
    Case("every level", "fp4", FP4, 1.0, (*range(8), 0, *range(9, 16)), FP4),
    Case("every magnitude in twelfths", "fp4", (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0), 12.0, tuple(range(8))),
)

TIES = (
    Case("a tie goes to the lower level", "nf4", (*NF4_POINTS, 1.0), 1.0, (*range(15), 15)),
    Case("just above a tie", "nf4", (*map(_up, NF4_POINTS), 1.0), 1.0, (*range(1, 16), 15)),
    Case("a tie goes towards zero", "fp4", (*(p for p, *_ in FP4_POINTS), 1.0), 1.0,
         (*(low for _, low, _ in FP4_POINTS), 3)),
    Case("a negative tie goes towards zero", "fp4", (*(-p for p, *_ in FP4_POINTS), 1.0), 1.0,
         (*(low + 8 for _, low, _ in FP4_POINTS), 3)),
    Case("just above a tie", "fp4", (*(_up(p) for p, *_ in FP4_POINTS), 1.0), 1.0,
         (*(high for *_, high in FP4_POINTS), 3)),
    Case("just below a negative tie", "fp4", (*(-_up(p) for p, *_ in FP4_POINTS), 1.0), 1.0,
         (*(high + 8 for *_, high in FP4_POINTS), 3)),
)  # fmt: skip

# Zero with the sign bit.
NEGATIVE_ZERO = (
    Case("a tiny negative value has code 8 and decodes to +0", "fp4", (1.0, -(2.0**-10), 2.0**-10), 1.0, (3, 8, 0),
         (1.0, 0.0, 0.0)),
    Case("a negative value that scales to -0 has code 8", "fp4", (2.0**20, -_SMALLEST), 2.0**20, (3, 8),
         (2.0**20, 0.0)),
)  # fmt: skip

CASES = SPECIAL + LEVELS + TIES + NEGATIVE_ZERO

# quant_type, values, packed bytes with block size 64
PACKED = (
    ("nf4", (1.0, -1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0), (0xF0, 0x7C, 0x77, 0x77)),
    ("fp4", (1.0, -1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0), (0x3B, 0x05, 0x00, 0x00)),
    ("nf4", (1.0, 1.0, 1.0), (0xFF, 0xF7)),
    ("fp4", (1.0, 1.0, 1.0), (0x33, 0x30)),
    ("nf4", (), ()),
    ("fp4", (), ()),
)

# Sizes around block boundaries: one element, odd, prime, a block more or less one.
SIZES = (0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 129, 509, 4095, 4096, 4097, 8191)
SHAPES = (
    (),
    (1,),
    (7, 13),
    (1, 63),
    (65,),
    (127, 129),
    (3, 5, 7),
    (2, 3, 4, 5),
    (1, 1),
    (64, 1),
    (0,),
    (0, 64),
    (4, 0),
)
