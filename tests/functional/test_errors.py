"""Every invalid argument of the functions raises `ArgumentError`, and nothing is computed before it does."""

import pytest
import torch

from bitsandbytes.errors import ArgumentError
import bitsandbytes.functional as F
from tests.cases.modes import NothingRuns
from tests.helpers import NOT_FLOATS

F32, U8, I8, I32 = torch.float32, torch.uint8, torch.int8, torch.int32


def _tensor(*shape, dtype=F32):
    return torch.zeros(*shape, dtype=dtype)


X = _tensor(5, 70)
PACKED, STATE = F.quantize_4bit(X, quant_type="nf4")
NESTED = F.quantize_4bit(X, quant_type="nf4", compress_statistics=True)[1]
CODES, BLOCKWISE = F.quantize_blockwise(X, blocksize=100)
BLOCKWISE_NESTED = F.quantize_blockwise(X, blocksize=100, nested=True)[1]


def state(**changes):
    fields = {name: getattr(STATE, name) for name in ("absmax", "shape", "code", "blocksize", "quant_type", "dtype")}
    return F.QuantState(**fields | changes)


WRONG_BLOCKSIZES = (0, -1, 2**64)
ROWS = [
    # function, positional arguments, keyword arguments, argument named, text of what came
    *[("quantize_4bit", (X,), {"blocksize": b}, "blocksize", b) for b in (*WRONG_BLOCKSIZES, 3, 16, 8192)],
    *[(f"quantize_{t}", (X,), {"blocksize": b}, "blocksize", b) for t in ("nf4", "fp4") for b in (0, 3, 2**64)],
    *[("quantize_4bit", (_tensor(5, 70, dtype=d),), {}, "A", d) for d in NOT_FLOATS],
    ("quantize_4bit", (X,), {"quant_type": "nf5"}, "quant_type", "'nf5'"),
    ("quantize_4bit", (X,), {"quant_type": "int4"}, "quant_type", "'int4'"),
    ("quantize_4bit", (X,), {"quant_storage": torch.float16}, "quant_storage", torch.float16),
    ("quantize_4bit", (X,), {"quant_storage": torch.complex64}, "quant_storage", torch.complex64),
    ("quantize_4bit", (X,), {"out": _tensor(175, dtype=U8)}, "out", "(175,)"),
    ("quantize_4bit", (X,), {"out": _tensor(176, 1, dtype=U8)}, "out", "(176, 1)"),
    ("quantize_4bit", (X,), {"out": _tensor(175, 1, dtype=I8)}, "out", I8),
    ("quantize_4bit", (X,), {"out": _tensor(175, 1, dtype=U8).to("meta")}, "out", "meta"),
    ("quantize_4bit", (X,), {"absmax": _tensor(5)}, "absmax", "(5,)"),
    ("quantize_4bit", (X,), {"absmax": _tensor(6, 1)}, "absmax", "(6, 1)"),
    ("quantize_4bit", (X,), {"absmax": _tensor(6, dtype=torch.float64)}, "absmax", torch.float64),
    ("quantize_4bit", (X,), {"absmax": _tensor(6), "compress_statistics": True}, "absmax", F32),
    ("quantize_4bit", (X,), {"absmax": _tensor(6).to("meta")}, "absmax", "meta"),
    ("dequantize_4bit", (PACKED,), {}, "absmax and out", None),
    ("dequantize_4bit", (PACKED,), {"absmax": STATE.absmax}, "absmax and out", None),
    ("dequantize_4bit", (PACKED,), {"out": X}, "absmax and out", None),
    *[
        ("dequantize_4bit", (PACKED,), {"absmax": STATE.absmax, "out": X, "blocksize": b}, "blocksize", b)
        for b in (*WRONG_BLOCKSIZES, 3)
    ],
    ("dequantize_4bit", (PACKED,), {"absmax": STATE.absmax, "out": X, "quant_type": "nf5"}, "quant_type", "nf5"),
    ("dequantize_4bit", (PACKED,), {"absmax": STATE.absmax[:5], "out": X}, "absmax", 5),
    ("dequantize_4bit", (PACKED,), {"absmax": STATE.absmax, "out": X.double()}, "dtype", torch.float64),
    ("dequantize_4bit", (PACKED, STATE), {"blocksize": 128}, "blocksize", 128),
    ("dequantize_4bit", (PACKED, STATE), {"quant_type": "fp4"}, "quant_type", "'fp4'"),
    ("dequantize_4bit", (PACKED, STATE), {"quant_type": "nf5"}, "quant_type", "'nf5'"),
    ("dequantize_4bit", (PACKED, state(quant_type=None)), {}, "quant_type", None),
    ("dequantize_4bit", (PACKED, state(quant_type="int4")), {}, "quant_type", "int4"),
    *[("dequantize_4bit", (PACKED, state(blocksize=b)), {}, "blocksize", b) for b in (*WRONG_BLOCKSIZES, 3, 128)[:4]],
    ("dequantize_4bit", (PACKED, state(dtype=torch.float64)), {}, "dtype", torch.float64),
    ("dequantize_4bit", (PACKED, state(absmax=STATE.absmax[:5])), {}, "absmax", 5),
    ("dequantize_4bit", (PACKED, state(shape=(5, 71))), {}, None, None),
    ("dequantize_4bit", (PACKED[:-1], STATE), {}, "A", 174),
    ("dequantize_4bit", (PACKED[:-1], NESTED), {}, "A", 174),
    ("dequantize_4bit", (PACKED, STATE), {"out": X[:4]}, "out", "(4, 70)"),
    ("dequantize_4bit", (PACKED, STATE), {"out": X.half()}, "out", torch.float16),
    ("dequantize_4bit", (PACKED, STATE), {"out": X.to("meta")}, "out", "meta"),
    ("dequantize_4bit", (PACKED, NESTED), {"out": X[:4]}, "out", "(4, 70)"),
    ("dequantize_fp4", (PACKED, STATE), {}, "quant_type", "'fp4'"),
    ("gemv_4bit", (X[:1], PACKED), {}, "state", None),
    ("gemv_4bit", (X[:1, :69], PACKED), {"state": STATE}, "A", "(1, 69)"),
    ("gemv_4bit", (X[:1, :69], PACKED), {"state": NESTED}, "A", "(1, 69)"),
    ("gemv_4bit", (X[:1].double(), PACKED), {"state": STATE}, "A", torch.float64),
    ("gemv_4bit", (X[:1], PACKED[:-1]), {"state": STATE}, "B", 174),
    ("gemv_4bit", (X[:1], PACKED), {"state": state(shape=(5, 10, 7))}, "shapeB", None),
    ("gemv_4bit", (X[:1], PACKED), {"state": STATE, "out": _tensor(1, 6)}, "out", "(1, 6)"),
    *[("quantize_blockwise", (X,), {"blocksize": b}, "blocksize", b) for b in (*WRONG_BLOCKSIZES, 2**63, 1.5, True)],
    *[("quantize_blockwise", (_tensor(5, 70, dtype=d),), {}, "A", d) for d in NOT_FLOATS],
    ("quantize_blockwise", (X,), {"code": _tensor(16)}, "code", 16),
    ("quantize_blockwise", (X,), {"code": _tensor(256, dtype=torch.float64)}, "code", torch.float64),
    ("quantize_blockwise", (X,), {"out": _tensor(350, dtype=U8)}, "out", "(350,)"),
    ("quantize_blockwise", (X,), {"out": _tensor(5, 70, dtype=I8)}, "out", I8),
    ("quantize_blockwise", (X,), {"out": _tensor(5, 70, dtype=U8).to("meta")}, "out", "meta"),
    ("quantize_blockwise", (X,), {"absmax": _tensor(2)}, "absmax", "(2,)"),
    ("quantize_blockwise", (X,), {"absmax": _tensor(1, dtype=torch.float16)}, "absmax", torch.float16),
    ("dequantize_blockwise", (CODES,), {}, "quant_state or absmax", None),
    *[
        ("dequantize_blockwise", (CODES,), {"absmax": _tensor(4), "blocksize": b}, "blocksize", b)
        for b in WRONG_BLOCKSIZES
    ],
    ("dequantize_blockwise", (CODES,), {"absmax": _tensor(5), "blocksize": 100}, "absmax", 5),
    ("dequantize_blockwise", (CODES,), {"absmax": _tensor(4), "blocksize": 100, "code": _tensor(255)}, "code", 255),
    ("dequantize_blockwise", (CODES.float(), BLOCKWISE), {}, "A", F32),
    ("dequantize_blockwise", (CODES[:4], BLOCKWISE), {}, "absmax", 4),
    ("dequantize_blockwise", (CODES.float(), BLOCKWISE_NESTED), {}, "A", F32),
    ("dequantize_blockwise", (CODES, BLOCKWISE), {"out": X[:4]}, "out", "(4, 70)"),
    ("dequantize_blockwise", (CODES, BLOCKWISE), {"out": X.double()}, "out", torch.float64),
    ("dequantize_blockwise", (CODES, BLOCKWISE), {"out": X.to("meta")}, "out", "meta"),
    ("int8_vectorwise_quant", (X,), {"threshold": -1.0}, "threshold", -1.0),
    ("int8_vectorwise_quant", (X,), {"threshold": float("nan")}, "threshold", "nan"),
    *[("int8_vectorwise_quant", (_tensor(5, 70, dtype=d),), {}, "A", d) for d in NOT_FLOATS],
    ("int8_double_quant", (X,), {"threshold": -1.0}, "threshold", -1.0),
    *[
        ("int8_double_quant", (X,), {name: _tensor(5)}, name, "(5,)")
        for name in ("col_stats", "row_stats", "out_col", "out_row")
    ],
    ("int8_vectorwise_dequant", (_tensor(5, 7, dtype=I8), _tensor(4)), {}, "stats", 4),
    ("int8_vectorwise_dequant", (_tensor(5, 7), _tensor(5)), {}, "A", F32),
    ("int8_linear_matmul", (_tensor(3, 7, dtype=I8), _tensor(5, 7, dtype=I8)), {"dtype": F32}, "dtype", F32),
    ("int8_linear_matmul", (_tensor(3, 7, dtype=I8), _tensor(7, 5, dtype=I8)), {}, "B", "(7, 5)"),
    (
        "int8_linear_matmul",
        (_tensor(3, 7, dtype=I8), _tensor(5, 7, dtype=I8)),
        {"out": _tensor(5, 3, dtype=I32)},
        "out",
        "(5, 3)",
    ),
    ("int8_linear_matmul", (_tensor(3, 7, dtype=I8), _tensor(5, 7, dtype=I8)), {"out": _tensor(3, 5)}, "out", F32),
    ("int8_mm_dequant", (_tensor(3, 5), _tensor(3), _tensor(5)), {}, "A", F32),
    ("int8_mm_dequant", (_tensor(3, 5, dtype=I32), _tensor(5), _tensor(3)), {}, "row_stats", 5),
    ("int8_mm_dequant", (_tensor(3, 5, dtype=I32), _tensor(3), _tensor(5)), {"out": _tensor(5, 3)}, "out", "(5, 3)"),
    (
        "int8_mm_dequant",
        (_tensor(3, 5, dtype=I32), _tensor(3), _tensor(5)),
        {"out": _tensor(3, 5, dtype=torch.float64)},
        "dtype",
        torch.float64,
    ),
    ("int8_mm_dequant", (_tensor(3, 5, dtype=I32), _tensor(3), _tensor(5)), {"bias": _tensor(3)}, "bias", "(3,)"),
    ("elementwise_func", ("sqrt", X, None, 0), {}, "func_name", "'sqrt'"),
    ("prefetch_tensor", (X,), {}, "A", None),
]
# What a call may run before it refuses: the default map is copied for the state that would be returned.
ALLOWED = {"quantize_blockwise", "dequantize_blockwise"}


class NothingButTheMap(NothingRuns):
    """As its base, but the copy of a map of at most 256 levels may run."""

    def before(self, func, args, kwargs):
        if not (func._opname == "_to_copy" and args[0].numel() <= 256):
            super().before(func, args, kwargs)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "argument", "got"),
    [pytest.param(*row, id=f"{row[0]}-{row[3]}-{i}") for i, row in enumerate(ROWS)],
)
def test_an_invalid_argument_is_refused_before_anything_runs(function, args, kwargs, argument, got):
    mode = NothingButTheMap() if function in ALLOWED else NothingRuns()
    with mode, pytest.raises(ArgumentError) as caught:
        getattr(F, function)(*args, **kwargs)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.op == function or (error.op, function) in {
        (f"{verb}_4bit", f"{verb}_{t}") for verb in ("quantize", "dequantize") for t in ("nf4", "fp4")
    }
    assert str(error).startswith(f"{error.op}: {error.argument} must be ")
    if argument is not None:
        assert argument in error.argument.split() or argument == error.argument, error
    if got is not None:
        assert str(got) in str(error).rpartition(", got ")[2], error


# bitsandbytes#1071: absurd block sizes killed the process.
@pytest.mark.parametrize("blocksize", [0, -1, 3, 2**64])
@pytest.mark.parametrize("shape", [(4, 64), (0,), (0, 64)], ids=str)
def test_an_absurd_blocksize_is_a_value_error_also_for_an_empty_tensor(shape, blocksize):
    with pytest.raises(ValueError, match="blocksize"):
        F.quantize_4bit(torch.zeros(shape), blocksize=blocksize)
    if blocksize == 3:
        assert F.quantize_blockwise(torch.zeros(shape), blocksize=3)[0].shape == shape
    else:
        with pytest.raises(ValueError, match="blocksize"):
            F.quantize_blockwise(torch.zeros(shape), blocksize=blocksize)
