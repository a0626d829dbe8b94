"""Every invalid argument of every operator raises `ArgumentError` before any PyTorch operator runs."""

import re

import pytest
import torch

from bitsandbytes.errors import ArgumentError, BitsAndBytesError
from tests.cases.modes import NothingRuns
from tests.cases.samples import FIRST, SAMPLES
from tests.helpers import NOT_FLOATS, QUANT_OPS, overload

F32, F16, I8, U8, I32 = torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32


def zeros(*shape, dtype=F32, device=None):
    """A tensor to be made on the device of the test."""
    return lambda on: torch.zeros(*shape, dtype=dtype, device=device or on)


def meta(*shape, dtype=F32):
    return zeros(*shape, dtype=dtype, device="meta")


# Samples: 5 x 70 weights with block size 64 are 175 bytes and 6 blocks; 3 x 70 inputs; blockwise has block size 100.
BLOCKSIZES_4BIT = [("blocksize", value, "blocksize", value) for value in (0, -1, 3, 16, 33, 8192, 2**62)]
QUANT_TYPES = [("quant_type", value, "quant_type", repr(value)) for value in ("nf5", "NF4", "int4", "")]
FLOAT_A = [("A", zeros(5, 70, dtype=dtype), "A", dtype) for dtype in NOT_FLOATS]
RESULT_DTYPES = [("dtype", dtype, "dtype", dtype) for dtype in NOT_FLOATS]
SHAPES_4BIT = [
    ("shape", [5, 71], None, None),
    ("shape", [5], None, None),
    ("shape", [-5, -70], None, None),
    ("shape", [-1, 70], None, None),
]
DEQUANTIZE_4BIT = [
    *BLOCKSIZES_4BIT,
    *QUANT_TYPES,
    *RESULT_DTYPES,
    *SHAPES_4BIT,
    ("absmax", zeros(5), "absmax", "5"),
    ("absmax", zeros(7), "absmax", "7"),
    ("absmax", zeros(6, dtype=torch.float64), "absmax", torch.float64),
    ("absmax", zeros(6, dtype=F16), "absmax", F16),
    ("absmax", meta(6), "absmax", None),
    ("A", zeros(174, 1, dtype=U8), "A", "174"),
    ("A", zeros(176, 1, dtype=U8), "A", "176"),
    ("A", zeros(175, 1, dtype=F16), "A", "350"),
]
GEMM = [
    *BLOCKSIZES_4BIT,
    *[("A", zeros(3, 70, dtype=dtype), "A", dtype) for dtype in NOT_FLOATS],
    ("A", zeros(3, 71), "A", "(3, 71)"),
    ("A", zeros(70, 3), "A", "(70, 3)"),
    ("A", zeros(()), "A", "()"),
    ("shapeB", [5], "shapeB", "[5]"),
    ("shapeB", [5, 7, 10], "shapeB", "[5, 7, 10]"),
    ("shapeB", [6, 70], None, None),
    ("shapeB", [-5, -70], None, None),
    ("B", zeros(174, 1, dtype=U8), "B", "174"),
    ("B", zeros(175, 1, dtype=F32), "B", "700"),
    ("B", meta(175, 1, dtype=U8), None, None),
    ("absmax", zeros(5), "absmax", "5"),
    ("absmax", zeros(6, dtype=F16), "absmax", F16),
    ("absmax", meta(6), "absmax", None),
]
INDICES = [("indices", zeros(4, dtype=dtype), "indices", dtype) for dtype in (F32, U8, I8, torch.int16, torch.bool)]
CODE_MAPS = [
    ("code", zeros(255), "code", "255"),
    ("code", zeros(16), "code", "16"),
    ("code", zeros(256, dtype=torch.float64), "code", torch.float64),
    ("code", meta(256), "code", None),
]
BLOCKSIZES_8BIT = [("blocksize", value, "blocksize", value) for value in (0, -1, -(2**63))]
DEQUANTIZE_BLOCKWISE = [
    *BLOCKSIZES_8BIT,
    *CODE_MAPS,
    *RESULT_DTYPES,
    ("A", zeros(5, 70, dtype=I8), "A", I8),
    ("A", zeros(5, 70), "A", F32),
    ("absmax", zeros(3), "absmax", "3"),
    ("absmax", zeros(5), "absmax", "5"),
    ("absmax", zeros(4, dtype=torch.bfloat16), "absmax", torch.bfloat16),
    ("absmax", meta(4), "absmax", None),
]
INT8_QUANT = [
    *[("A", zeros(3, 70, dtype=dtype), "A", dtype) for dtype in NOT_FLOATS],
    ("A", zeros(()), "A", None),
    ("threshold", -1.0, "threshold", "-1.0"),
    ("threshold", -1e-30, "threshold", None),
    ("threshold", float("nan"), "threshold", "nan"),
]
INT8_MATMUL = [
    ("A", zeros(3, 70), "A", F32),
    ("A", zeros(3, 70, dtype=U8), "A", U8),
    ("A", zeros((), dtype=I8), "A", None),
    ("A", zeros(3, 69, dtype=I8), "B", None),
    ("B", zeros(5, 70), "B", F32),
    ("B", zeros(70, 5, dtype=I8), "B", "(70, 5)"),
    ("B", zeros(70, dtype=I8), "B", "(70,)"),
    ("B", meta(5, 70, dtype=I8), "B", None),
]
EPILOGUE = [
    ("row_stats", zeros(4), "row_stats", "4"),
    ("row_stats", zeros(3, dtype=F16), "row_stats", F16),
    ("row_stats", meta(3), "row_stats", None),
    ("col_stats", zeros(4), "col_stats", "4"),
    ("col_stats", zeros(5, dtype=torch.float64), "col_stats", torch.float64),
    ("col_stats", meta(5), "col_stats", None),
    *RESULT_DTYPES,
    ("bias", zeros(4), "bias", "(4,)"),
    ("bias", zeros(1, 5), "bias", "(1, 5)"),
    ("bias", zeros(5, dtype=torch.float64), "bias", torch.float64),
    ("bias", meta(5), "bias", None),
]


def outs(*shape, dtype=F32):
    other = F16 if dtype == F32 else F32
    return [
        ("out", zeros(torch.Size(shape).numel(), dtype=dtype), "out", None),
        ("out", zeros(*shape, 1, dtype=dtype), "out", None),
        ("out", zeros(*shape, dtype=other), "out", other),
        ("out", zeros(*shape, dtype=torch.float64), "out", torch.float64),
        ("out", meta(*shape, dtype=dtype), "out", "meta"),
    ]


# operator -> (argument changed, wrong value, argument named or None where several are at fault, text of what came)
TABLE = {
    "quantize_4bit": [
        *BLOCKSIZES_4BIT,
        *QUANT_TYPES,
        *FLOAT_A,
        ("quant_storage", torch.complex64, "quant_storage", torch.complex64),
        ("quant_storage", torch.bool, "quant_storage", torch.bool),
        ("quant_storage", F16, "quant_storage", F16),  # 175 bytes
        ("quant_storage", torch.float64, "quant_storage", torch.float64),
    ],
    "dequantize_4bit": DEQUANTIZE_4BIT,
    "dequantize_4bit.out": [*DEQUANTIZE_4BIT, *outs(5, 70)],
    "embedding_4bit": [
        *INDICES,
        *BLOCKSIZES_4BIT,
        *QUANT_TYPES,
        *RESULT_DTYPES,
        *[row for row in GEMM if row[0] in ("B", "shapeB", "absmax")],
        ("absmax_8bit", zeros(6, dtype=U8), "absmax_code and absmax_offset", "None"),
    ],
    "gemm_4bit": [
        *GEMM,
        *QUANT_TYPES,
        ("bias", zeros(4), "bias", "(4,)"),
        ("bias", zeros(5, 1), "bias", "(5, 1)"),
        ("bias", zeros(5, dtype=F16), "bias", F16),
        ("bias", meta(5), "bias", None),
        ("absmax_8bit", zeros(6, dtype=U8), "absmax_code and absmax_offset", "None"),
    ],
    "gemv_4bit": [
        *GEMM,
        ("code", zeros(15), "code", "15"),
        ("code", zeros(256), "code", "256"),
        ("code", zeros(16, dtype=F16), "code", F16),
        ("code", meta(16), "code", None),
    ],
    "quantize_blockwise": [*BLOCKSIZES_8BIT, *FLOAT_A, *CODE_MAPS],
    "dequantize_blockwise": DEQUANTIZE_BLOCKWISE,
    "dequantize_blockwise.out": [*DEQUANTIZE_BLOCKWISE, *outs(5, 70, dtype=F16)],
    "int8_vectorwise_quant": INT8_QUANT,
    "int8_double_quant": INT8_QUANT,
    "int8_vectorwise_dequant": [
        ("A", zeros(3, 70), "A", F32),
        ("A", zeros(3, 70, dtype=U8), "A", U8),
        ("A", zeros((), dtype=I8), "A", None),
        ("stats", zeros(2), "stats", "2"),
        ("stats", zeros(70), "stats", "70"),
        ("stats", zeros(3, dtype=F16), "stats", F16),
        ("stats", meta(3), "stats", None),
    ],
    "int8_embedding": [
        *INDICES,
        *RESULT_DTYPES,
        ("A", zeros(5, 70), "A", F32),
        ("A", zeros(5, 70, dtype=U8), "A", U8),
        ("A", zeros(70, dtype=I8), "A", "(70,)"),
        ("A", meta(5, 70, dtype=I8), "A", None),
        ("stats", zeros(4), "stats", "4"),
        ("stats", zeros(5, dtype=F16), "stats", F16),
        ("stats", meta(5), "stats", None),
    ],
    "int8_linear_matmul": INT8_MATMUL,
    "int8_linear_matmul.out": [*INT8_MATMUL, *outs(3, 5, dtype=I32)],
    "int8_mm_dequant": [
        *EPILOGUE,
        ("A", zeros(3, 5), "A", F32),
        ("A", zeros(3, 5, dtype=I8), "A", I8),
        ("A", zeros((), dtype=I32), "A", None),
    ],
    "int8_scaled_mm": [*INT8_MATMUL, *EPILOGUE],
    "int8_mixed_scaled_mm": [
        ("A", zeros(3, 70, dtype=torch.float64), "A", torch.float64),
        ("A", zeros(3, 70, dtype=I8), "A", I8),
        ("A", zeros(3, 69, dtype=F16), None, None),
        ("CA", zeros(3, 69, dtype=I8), "CA", "(3, 69)"),
        ("CA", zeros(3, 70), None, F32),
        ("CB", zeros(5, 69, dtype=I8), None, "(5, 69)"),
        ("CB", zeros(5, 70), None, F32),
        ("SCA", zeros(4), None, "4"),
        ("SCB", zeros(4), None, "4"),
        ("SCB", zeros(5, dtype=F16), None, F16),
        ("outlier_cols", zeros(2, dtype=I32), "outlier_cols", I32),
        ("outlier_cols", zeros(1, 2, dtype=torch.int64), "outlier_cols", None),
        ("outlier_cols", meta(2, dtype=torch.int64), "outlier_cols", None),
        ("bias", zeros(4), "bias", "(4,)"),
        ("bias", zeros(5, dtype=torch.float64), "bias", torch.float64),
    ],
}
TABLE["gemv_4bit.out"] = [
    *[row for row in TABLE["gemv_4bit"] if row[0] != "A"],
    *outs(2, 1, 5, dtype=torch.bfloat16),
    ("out", zeros(2, 5, dtype=torch.bfloat16), "out", "(2, 5)"),
]

ROWS = [(op, *row) for op in QUANT_OPS for row in TABLE[op]]


def refuse(op, args, argument, got):
    """The call must raise; nothing may run before it does."""
    family = op.removesuffix(".out")
    with NothingRuns(), pytest.raises(ArgumentError) as caught:
        overload(op)(**args)
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, BitsAndBytesError)
    assert error.op == family
    text = str(error)
    pattern = rf"{re.escape(family)}: (?P<argument>.+?) must be (?P<valid>.+), got (?P<got>.+)"
    parts = re.fullmatch(pattern, text, re.DOTALL)
    assert parts, text
    if argument is not None:
        assert re.search(rf"\b{re.escape(argument)}\b", error.argument), text
        assert error.argument == parts["argument"]
    if got is not None:
        assert str(got) in parts["got"], text


@pytest.mark.parametrize(
    ("op", "changed", "value", "argument", "got"),
    [pytest.param(*row, id=f"{row[0]}-{row[1]}-{i}") for i, row in enumerate(ROWS)],
)
def test_an_invalid_argument_is_refused_before_anything_runs(op, changed, value, argument, got, device):
    args = FIRST[op].args(device)
    value = value(device) if callable(value) and not isinstance(value, torch.dtype) else value
    refuse(op, args | {changed: value}, argument, got)


NESTED = [
    ("absmax_8bit", zeros(5, dtype=U8), "absmax_8bit", "5"),
    ("absmax_8bit", zeros(6, dtype=I8), "absmax_8bit", I8),
    ("absmax_8bit", meta(6, dtype=U8), None, None),
    ("absmax", zeros(2), "absmax", "2"),
    ("absmax", zeros(1, dtype=F16), "absmax", F16),
    ("absmax_code", None, "absmax_code and absmax_offset", None),
    ("absmax_code", zeros(255), "absmax_code", "255"),
    ("absmax_code", zeros(256, dtype=F16), "absmax_code", F16),
    ("absmax_offset", None, "absmax_code and absmax_offset", None),
    ("absmax_offset", zeros(2), "absmax_offset", "2"),
    ("absmax_offset", zeros((), dtype=torch.float64), "absmax_offset", torch.float64),
    ("absmax_offset", meta(()), "absmax_offset", None),
]


@pytest.mark.parametrize("op", ["gemm_4bit", "embedding_4bit"])
@pytest.mark.parametrize(("changed", "value", "argument", "got"), NESTED)
def test_invalid_nested_statistics_are_refused(changed, value, argument, got, op, device):
    sample = next(s for s in SAMPLES if s.op == op and "nested" in s.name)
    value = value(device) if callable(value) else value
    refuse(op, sample.args(device) | {changed: value}, argument, got)


def test_the_table_covers_every_operator():
    assert set(TABLE) == set(QUANT_OPS)


@pytest.mark.parametrize("op", QUANT_OPS)
def test_the_valid_call_is_not_refused(op, device):
    overload(op)(**FIRST[op].args(device))


@pytest.mark.parametrize("op", QUANT_OPS)
def test_nothing_runs_notices_what_runs(op, device):
    """The mode used above looks inside the operators: a valid call trips it."""
    with NothingRuns(), pytest.raises(AssertionError, match=r"aten.* ran"):
        overload(op)(**FIRST[op].args(device))
