"""8-bit blockwise quantisation: exact inputs, statistics, codes and decoded values, by map.

A case is one block, shorter than every block size tested, and holds for each dtype that can represent its inputs.
"""

from dataclasses import dataclass
import math

INF, NAN = math.inf, math.nan

LOWEST = -0.992968738079071  # the lowest level of the signed dynamic map


@dataclass(frozen=True)
class Case:
    """zero: code and decoded value of a 0 added to the block; decoded: None where it is level * absmax."""

    name: str
    signed: bool
    values: tuple[float, ...]
    absmax: float
    codes: tuple[int, ...]
    decoded: tuple[float, ...] | None = None
    zero: tuple[int, float] | None = None

    def __str__(self) -> str:
        return f"{'signed' if self.signed else 'unsigned'} {self.name}"

    @property
    def zero_code(self) -> int:
        return (127 if self.signed else 0) if self.zero is None else self.zero[0]

    @property
    def zero_decoded(self) -> float:
        return 0.0 if self.zero is None else self.zero[1]


_TINY = 2.0**-130  # its reciprocal is not finite in fp32
_SMALLEST = 2.0**-149

CASES = (
    Case("zeros", True, (0.0, 0.0), 0.0, (127, 127), (0.0, 0.0)),
    Case("zeros", False, (0.0, 0.0), 0.0, (0, 0), (0.0, 0.0)),
    Case("negative zeros", True, (-0.0, -0.0), 0.0, (127, 127), (0.0, 0.0)),
    Case("negative zeros", False, (-0.0,), 0.0, (0,), (0.0,)),
    Case("a zero among others", True, (1.0, 0.0, -0.0), 1.0, (255, 127, 127), (1.0, 0.0, 0.0)),
    Case("nearly zero is zero", True, (1.0, 2.0**-23, -(2.0**-23)), 1.0, (255, 127, 127), (1.0, 0.0, 0.0)),
    Case("the smallest levels", True, (1.0, 2.0**-21, -(2.0**-21)), 1.0, (255, 128, 126)),
    Case("a negative absmax", True, (-1.0, 1.0), 1.0, (0, 255), (LOWEST, 1.0)),
    Case("one value", True, (5.0,), 5.0, (255,), (5.0,)),
    Case("one negative value", True, (-4.0,), 4.0, (0,), (4 * LOWEST,)),
    Case("a negative value has no level", False, (1.0, -1.0), 1.0, (255, 0), (1.0, 0.0)),
    Case("a NaN", True, (1.0, NAN, -2.0), NAN, (0, 0, 0), (NAN,) * 3, (0, NAN)),
    Case("a NaN", False, (1.0, NAN), NAN, (0, 0), (NAN,) * 2, (0, NAN)),
    Case("a NaN and an infinity", True, (INF, NAN), NAN, (0, 0), (NAN,) * 2, (0, NAN)),
    Case("an infinity", True, (1.0, INF, -3.0), INF, (127, 0, 127), (NAN, -INF, NAN), (127, NAN)),
    Case("a negative infinity", True, (1.0, -INF), INF, (127, 0), (NAN, -INF), (127, NAN)),
    Case("an infinity", False, (1.0, INF), INF, (0, 0), (NAN, NAN), (0, NAN)),
    Case("absmax below 2.9e-39", True, (_TINY, -_TINY, 0.0), _TINY, (255, 0, 127)),
    Case("the smallest number", True, (_SMALLEST, -_SMALLEST, 0.0), _SMALLEST, (255, 0, 127)),
    Case("the largest fp32 number", True, (3.4028234663852886e38, -3.4028234663852886e38), 3.4028234663852886e38,
         (255, 0)),
)  # fmt: skip

BLOCKSIZES = (1, 2, 3, 64, 100, 256, 257, 4096, 10**6, 2**62)
SIZES = (0, 1, 2, 3, 63, 64, 65, 99, 101, 255, 257, 4097, 8191)
