"""LLM.int8() rows: exact inputs, thresholds, statistics, codes and outlier columns."""

from dataclasses import dataclass
import math

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Case:
    """outliers: None means that outliers are off."""

    name: str
    rows: tuple[tuple[float, ...], ...]
    stats: tuple[float, ...]
    codes: tuple[tuple[int, ...], ...]
    threshold: float = 0.0
    outliers: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name


_SMALL = 2.0**-124  # 127 / _SMALL is not finite in fp32, 1 / _SMALL is
_TINY = 2.0**-130  # neither is

CASES = (
    Case("ties go to the even code", ((127.0, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5),), (127.0,),
         ((127, 0, 2, 2, 4, 0, -2, -2),)),
    Case("-128 does not occur", ((-1.0, 1.0), (-0.75, 0.5)), (1.0, 0.75), ((-127, 127), (-127, 85))),
    Case("a row of zeros", ((0.0, -0.0, 0.0), (1.0, 0.0, -1.0)), (0.0, 1.0), ((0, 0, 0), (127, 0, -127))),
    Case("a row with a NaN", ((1.0, NAN, 2.0), (1.0, -1.0, 0.0)), (NAN, 1.0), ((0, 0, 0), (127, -127, 0))),
    Case("a row with an infinity", ((1.0, INF, 2.0), (-INF, 1.0, 0.0), (1.0, -1.0, 0.0)), (INF, INF, 1.0),
         ((0, 0, 0), (0, 0, 0), (127, -127, 0))),
    Case("127/absmax is not finite", ((_SMALL, -_SMALL, _SMALL / 2, _SMALL / 4),), (_SMALL,), ((127, -127, 64, 32),)),
    Case("1/absmax is not finite", ((_TINY, -_TINY, _TINY / 2, 0.0),), (_TINY,), ((127, -127, 64, 0),)),
    Case("the largest fp32 number", ((3.4028234663852886e38, -3.4028234663852886e38),), (3.4028234663852886e38,),
         ((127, -127),)),
    Case("one element", ((-3.0,),), (3.0,), ((-127,),)),
    Case("the threshold is inclusive", ((1.0, 6.0, -2.0), (0.5, 1.0, -1.0)), (2.0, 1.0),
         ((64, 0, -127), (64, 0, -127)), 6.0, (1,)),
    Case("below the threshold is no outlier", ((1.0, 5.96875, -2.0),), (5.96875,), ((21, 127, -43),), 6.0, ()),
    Case("negative outliers", ((1.0, -7.0, 0.5),), (1.0,), ((127, 0, 64),), 6.0, (1,)),
    Case("the rest of an outlier column counts for the statistic", ((1.0, 8.0), (2.0, 4.0)), (1.0, 4.0),
         ((127, 0), (64, 0)), 6.0, (1,)),
    Case("nothing but outliers in a row", ((8.0, -9.0), (1.0, 2.0)), (0.0, 2.0), ((0, 0), (0, 0)), 6.0, (0, 1)),
    Case("no outliers at all", ((1.0, -2.0), (0.0, 4.0)), (2.0, 4.0), ((64, -127), (0, 127)), 6.0, ()),
    Case("several outlier columns, ascending", ((1.0, 9.0, 1.0, 1.0), (1.0, 1.0, 1.0, -9.0)), (1.0, 1.0),
         ((127, 0, 127, 0), (127, 0, 127, 0)), 6.0, (1, 3)),
    Case("an infinity is an outlier", ((1.0, INF, -1.0),), (1.0,), ((127, 0, -127),), 6.0, (1,)),
    Case("a NaN is no outlier", ((1.0, NAN, 7.0),), (NAN,), ((0, 0, 0),), 6.0, (2,)),
    Case("an infinite threshold", ((1.0, -2.0),), (2.0,), ((64, -127),), INF, ()),
)  # fmt: skip

SHAPES = ((1,), (5,), (1, 1), (3, 7), (7, 130), (2, 3, 65), (2, 1, 3, 8), (0, 4), (3, 0))
THRESHOLDS = (0.0, 0.5, 3.0, 100.0)
