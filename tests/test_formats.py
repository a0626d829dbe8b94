"""The constants and the arithmetic of the number formats."""

from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from bitsandbytes import formats
import bitsandbytes.functional as F
from tests.cases.fourbit import FP4, FP4_POINTS, NF4, NF4_POINTS, ZERO_CODE
from tests.helpers import BLOCKSIZES, assert_same, golden_maps

TABLES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor(FP4)}


# bitsandbytes#2025: one of several tables had a truncated constant.
@pytest.mark.parametrize("quant_type", TABLES)
def test_the_code_table_is_the_same_wherever_it_is_asked_for(quant_type, device):
    table = TABLES[quant_type]
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] << 4 | codes[1::2]).view(-1, 1).to(device)
    state = F.quantize_4bit(torch.ones(16, device=device), quant_type=quant_type)[1]
    one_hot = torch.eye(16, device=device)
    absmax = torch.ones(1, device=device)
    places = {
        "formats.CODEBOOKS": torch.tensor(formats.CODEBOOKS[quant_type]),
        "formats.codebook": formats.codebook(quant_type, torch.device(device)),
        "functional.get_4bit_type": F.get_4bit_type(quant_type, device=device),
        "QuantState.code": state.code,
        "recorded from upstream": golden_maps()[f"4bit typename={quant_type}"],
        "dequantize_4bit": torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, 64, quant_type, [16], torch.float32),
        "gemm_4bit": torch.ops.bitsandbytes.gemm_4bit(one_hot, packed, [1, 16], absmax, 64, quant_type).view(-1),
        "gemv_4bit": torch.ops.bitsandbytes.gemv_4bit(one_hot, packed, [1, 16], absmax, state.code, 64).view(-1),
    }
    for place, values in places.items():
        assert_same(values, table, place)


@pytest.mark.parametrize("quant_type", TABLES)
def test_zero_is_exact_and_has_the_code_of_the_table(quant_type):
    assert formats.ZERO_CODE[quant_type] == ZERO_CODE[quant_type]
    assert formats.CODEBOOKS[quant_type][ZERO_CODE[quant_type]] == 0.0


def test_fp4_magnitudes_are_the_bits_of_a_small_float():
    for code in range(8):
        exponent, fraction = code >> 1, code & 1
        magnitude = Fraction(2 + fraction, 3 * 2 ** (exponent - 1)) if exponent else Fraction(fraction, 192)
        assert np.float32(formats.FP4[code]) == np.float32(float(magnitude))
        assert formats.FP4[code + 8] == -formats.FP4[code]
    assert not np.signbit(formats.FP4[8])


def test_decision_points_are_those_of_upstreams_kernels():
    for quant_type, points in (("nf4", NF4_POINTS), ("fp4", [point for point, *_ in FP4_POINTS])):
        assert_same(torch.tensor(formats.decision_points(quant_type)), torch.tensor(points))


def test_block_sizes():
    assert formats.BLOCKSIZES_4BIT == BLOCKSIZES


@pytest.mark.parametrize(
    ("numel", "blocksize", "blocks", "packed"),
    [(0, 64, 0, 0), (1, 64, 1, 1), (63, 64, 1, 32), (64, 64, 1, 32), (65, 64, 2, 33),
     (2**31 + 65, 64, 2**25 + 2, 2**30 + 33), (5, 2**62, 1, 3)],
)  # fmt: skip
def test_block_arithmetic(numel, blocksize, blocks, packed):
    assert formats.num_blocks(numel, blocksize) == blocks
    assert formats.packed_bytes(numel) == packed


def check_exact_midpoints(levels: torch.Tensor):
    """Rounded down: the largest fp32 number that is not above the midpoint in real arithmetic."""
    points = formats.exact_midpoints(levels)
    assert points.dtype == torch.float32
    values = [Fraction(v) for v in levels.tolist()]
    for (a, b), point in zip(pairwise(values), points.tolist(), strict=True):
        middle = (a + b) / 2
        assert Fraction(point) <= middle
        above = float(np.nextafter(np.float32(point), np.float32(np.inf)))
        assert Fraction(above) > middle, (float(a), float(b), point)


@pytest.mark.parametrize("name", [name for name, levels in golden_maps().items() if (levels.diff() >= 0).all()])
def test_exact_midpoints_of_every_neighbour_pair_of_every_map(name):
    check_exact_midpoints(golden_maps()[name])


@given(
    st.lists(st.floats(-1, 1, width=32).filter(lambda v: v == 0 or abs(v) >= 2.0**-125), min_size=2, max_size=20).map(
        sorted
    )
)
def test_exact_midpoints_of_any_levels_above_the_subnormal_range(levels):
    check_exact_midpoints(torch.tensor(levels))


@given(st.floats(2.0**-60, 1, width=32))
def test_exact_midpoints_of_adjacent_numbers(level):
    upper = float(np.nextafter(np.float32(level), np.float32(2)))
    check_exact_midpoints(torch.tensor([-upper, -level, level, upper]))
