"""Valid calls of every quantisation operator, as arguments by name in the order of the schema.

They are made of random codes and statistics, so no operator is needed to build the arguments of another.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.helpers import dynamic_map, randint, randn


@dataclass(frozen=True)
class Sample:
    op: str
    name: str
    build: Callable[[], dict]

    def __str__(self) -> str:
        return f"{self.op} {self.name}".strip()

    def args(self, device: str = "cpu") -> dict:
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.build().items()}


_ROWS, _COLUMNS, _OUT = 3, 70, 5  # 350 weights: blocks of 64 end inside rows, and the last block is short


def _codes(numel: int, storage: torch.dtype = torch.uint8) -> torch.Tensor:
    return randint(0, 256, ((numel + 1) // 2,), torch.uint8, seed=1).view(storage).view(-1, 1)


def _scales(count: int, seed: int = 2) -> torch.Tensor:
    return randn(count, seed=seed).abs() + 0.1


def _quantize_4bit(quant_type, dtype, shape=(_OUT, _COLUMNS), storage=torch.uint8):
    return lambda: {
        "A": randn(*shape, dtype=dtype),
        "blocksize": 64,
        "quant_type": quant_type,
        "quant_storage": storage,
    }


def _dequantize_4bit(quant_type, dtype, shape=(_OUT, _COLUMNS), storage=torch.uint8, out=False):
    numel = torch.Size(shape).numel()

    def build():
        args = {
            "A": _codes(numel, storage),
            "absmax": _scales(-(numel // -64)),
            "blocksize": 64,
            "quant_type": quant_type,
            "shape": list(shape),
            "dtype": dtype,
        }
        return args | {"out": torch.empty(shape, dtype=dtype)} if out else args

    return build


def _gemm(quant_type, dtype, lead=(_ROWS,), bias=False, nested=False):
    def build():
        blocks = -(_OUT * _COLUMNS // -64)
        args = {
            "A": randn(*lead, _COLUMNS, dtype=dtype),
            "B": _codes(_OUT * _COLUMNS),
            "shapeB": [_OUT, _COLUMNS],
            "absmax": _scales(1 if nested else blocks),
            "blocksize": 64,
            "quant_type": quant_type,
            "bias": randn(_OUT, dtype=dtype, seed=3) if bias else None,
        }
        if nested:
            args |= {
                "absmax_8bit": randint(0, 256, (blocks,), torch.uint8, seed=4),
                "absmax_code": dynamic_map(),
                "absmax_offset": torch.tensor(1.5),
            }
        return args

    return build


def _gemv(dtype, lead=(1,), out=False):
    def build():
        args = {
            "A": randn(*lead, _COLUMNS, dtype=dtype),
            "B": _codes(_OUT * _COLUMNS),
            "shapeB": [_OUT, _COLUMNS],
            "absmax": _scales(-(_OUT * _COLUMNS // -64)),
            "code": _scales(16, seed=5),
            "blocksize": 64,
        }
        return args | {"out": torch.empty(*lead, _OUT, dtype=dtype)} if out else args

    return build


def _embedding_4bit(quant_type, dtype, lead=(4,), nested=False, indices=torch.int64):
    def build():
        gemm = _gemm(quant_type, dtype, nested=nested)()
        args = {"indices": randint(0, _OUT, lead, indices, seed=6)}
        args |= {name: gemm[name] for name in ("B", "shapeB", "absmax", "blocksize", "quant_type")} | {"dtype": dtype}
        return args | {name: gemm[name] for name in ("absmax_8bit", "absmax_code", "absmax_offset") if nested}

    return build


def _int8_embedding(dtype, lead=(4,), indices=torch.int64):
    return lambda: {
        "indices": randint(0, _OUT, lead, indices, seed=6),
        "A": randint(-127, 128, (_OUT, _COLUMNS)),
        "stats": _scales(_OUT),
        "dtype": dtype,
    }


def _quantize_blockwise(dtype, shape=(_OUT, _COLUMNS), blocksize=100):
    return lambda: {"A": randn(*shape, dtype=dtype), "code": dynamic_map(), "blocksize": blocksize}


def _dequantize_blockwise(dtype, shape=(_OUT, _COLUMNS), blocksize=100, out=False):
    def build():
        args = {
            "A": randint(0, 256, shape, torch.uint8),
            "absmax": _scales(-(torch.Size(shape).numel() // -blocksize)),
            "code": dynamic_map(),
            "blocksize": blocksize,
            "dtype": dtype,
        }
        return args | {"out": torch.empty(shape, dtype=dtype)} if out else args

    return build


def _int8_quant(dtype, threshold, shape=(_ROWS, _COLUMNS)):
    return lambda: {"A": randn(*shape, dtype=dtype), "threshold": threshold}


def _int8_matmul(lead=(_ROWS,), out=False):
    def build():
        args = {
            "A": randint(-127, 128, (*lead, _COLUMNS)),
            "B": randint(-127, 128, (_OUT, _COLUMNS), seed=1),
        }
        return args | {"out": torch.empty(*lead, _OUT, dtype=torch.int32)} if out else args

    return build


def _mm_dequant(dtype, bias=None, lead=(_ROWS,)):
    return lambda: {
        "A": randint(-(10**6), 10**6, (*lead, _OUT), torch.int32),
        "row_stats": _scales(torch.Size(lead).numel()),
        "col_stats": _scales(_OUT, seed=3),
        "dtype": dtype,
        "bias": None if bias is None else randn(_OUT, dtype=bias),
    }


def _scaled_mm(dtype, bias=None, lead=(_ROWS,)):
    return lambda: {
        **_int8_matmul(lead)(),
        "row_stats": _scales(torch.Size(lead).numel()),
        "col_stats": _scales(_OUT, seed=3),
        "bias": None if bias is None else randn(_OUT, dtype=bias),
        "dtype": dtype,
    }


def _mixed(dtype, outliers, bias=None, lead=(_ROWS,)):
    return lambda: {
        "A": randn(*lead, _COLUMNS, dtype=dtype),
        "CA": randint(-127, 128, (*lead, _COLUMNS)),
        "CB": randint(-127, 128, (_OUT, _COLUMNS), seed=1),
        "SCA": _scales(torch.Size(lead).numel()),
        "SCB": _scales(_OUT, seed=3),
        "outlier_cols": None if outliers is None else torch.tensor(outliers, dtype=torch.int64),
        "bias": None if bias is None else randn(_OUT, dtype=bias),
    }


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

SAMPLES = (
    Sample("quantize_4bit", "nf4 fp32", _quantize_4bit("nf4", F32)),
    Sample("quantize_4bit", "fp4 fp16, odd", _quantize_4bit("fp4", F16, (3, 5, 7))),
    Sample("quantize_4bit", "nf4 bf16 in float storage, 4-D", _quantize_4bit("nf4", BF16, (2, 3, 4, 8), BF16)),
    Sample("dequantize_4bit", "nf4 fp32", _dequantize_4bit("nf4", F32)),
    Sample("dequantize_4bit", "fp4 fp16, odd", _dequantize_4bit("fp4", F16, (3, 5, 7))),
    Sample("dequantize_4bit", "nf4 bf16 from float storage", _dequantize_4bit("nf4", BF16, (8, 72), F16)),
    Sample("dequantize_4bit.out", "nf4 fp32", _dequantize_4bit("nf4", F32, out=True)),
    Sample("dequantize_4bit.out", "fp4 bf16, 4-D", _dequantize_4bit("fp4", BF16, (2, 3, 4, 5), out=True)),
    Sample("gemm_4bit", "nf4 fp32", _gemm("nf4", F32)),
    Sample("gemm_4bit", "fp4 bf16 with bias, 3-D", _gemm("fp4", BF16, (2, 3), bias=True)),
    Sample("gemm_4bit", "nf4 fp16 nested with bias", _gemm("nf4", F16, bias=True, nested=True)),
    Sample("gemv_4bit", "fp32", _gemv(F32)),
    Sample("gemv_4bit", "fp16, a vector", _gemv(F16, ())),
    Sample("gemv_4bit.out", "bf16, 3-D", _gemv(BF16, (2, 1), out=True)),
    Sample("embedding_4bit", "nf4 fp32", _embedding_4bit("nf4", F32)),
    Sample("embedding_4bit", "fp4 bf16, 3-D int32", _embedding_4bit("fp4", BF16, (2, 1, 3), indices=torch.int32)),
    Sample("embedding_4bit", "nf4 fp16 nested", _embedding_4bit("nf4", F16, nested=True)),
    Sample("quantize_blockwise", "fp32", _quantize_blockwise(F32)),
    Sample("quantize_blockwise", "fp16, 4-D", _quantize_blockwise(F16, (2, 3, 4, 5), 7)),
    Sample("dequantize_blockwise", "fp32", _dequantize_blockwise(F32)),
    Sample("dequantize_blockwise", "bf16, 4-D", _dequantize_blockwise(BF16, (2, 3, 4, 5), 7)),
    Sample("dequantize_blockwise.out", "fp16", _dequantize_blockwise(F16, out=True)),
    Sample("int8_vectorwise_quant", "fp16", _int8_quant(F16, 0.0)),
    Sample("int8_vectorwise_quant", "fp32 with outliers, 3-D", _int8_quant(F32, 2.0, (2, 3, 70))),
    Sample("int8_double_quant", "bf16", _int8_quant(BF16, 0.0)),
    Sample("int8_double_quant", "fp32 with outliers, 3-D", _int8_quant(F32, 2.0, (2, 3, 70))),
    Sample("int8_vectorwise_dequant", "", lambda: {"A": randint(-127, 128, (3, 70)), "stats": _scales(3)}),
    Sample("int8_vectorwise_dequant", "3-D", lambda: {"A": randint(-127, 128, (2, 3, 7)), "stats": _scales(6)}),
    Sample("int8_embedding", "fp32", _int8_embedding(F32)),
    Sample("int8_embedding", "bf16, 3-D int32", _int8_embedding(BF16, (2, 1, 3), torch.int32)),
    Sample("int8_linear_matmul", "", _int8_matmul()),
    Sample("int8_linear_matmul", "3-D", _int8_matmul((2, 3))),
    Sample("int8_linear_matmul.out", "", _int8_matmul(out=True)),
    Sample("int8_mm_dequant", "default dtype", _mm_dequant(None)),
    Sample("int8_mm_dequant", "bf16 with bias, 3-D", _mm_dequant(BF16, F16, (2, 3))),
    Sample("int8_scaled_mm", "default dtype", _scaled_mm(None)),
    Sample("int8_scaled_mm", "fp32 with bias, 3-D", _scaled_mm(F32, F32, (2, 3))),
    Sample("int8_mixed_scaled_mm", "fp16, outliers off", _mixed(F16, None)),
    Sample("int8_mixed_scaled_mm", "fp32, no outlier found", _mixed(F32, [])),
    Sample("int8_mixed_scaled_mm", "bf16 with outliers and bias, 3-D", _mixed(BF16, [0, 9, 69], BF16, (2, 3))),
)

#: The first sample of each operator.
FIRST = {sample.op: sample for sample in reversed(SAMPLES)}
