"""LLM.int8(): quantisation by rows, the int8 product, and the layers with int8 weights."""

import torch

import bitsandbytes as bnb
from bitsandbytes import functional as F

from . import Case, Setting, nbytes, operation

_OUTLIER = 20.0  # above the usual threshold of 6
_COLUMNS_AN_OUTLIER = 1024  # about the share that language models have


@operation("int8_vectorwise_quant", shapes="activations")
def int8_vectorwise_quant(at: Setting) -> Case:
    A = at.randn(at.rows, at.columns)
    codes, statistics, _ = F.int8_vectorwise_quant(A)
    return Case(F.int8_vectorwise_quant, (A,), nbytes(A, codes, statistics))


@operation("int8_linear_matmul", batched=True)
def int8_linear_matmul(at: Setting) -> Case:
    A, _, _ = F.int8_vectorwise_quant(at.randn(at.batch, at.columns))
    B, _, _ = F.int8_vectorwise_quant(at.randn(at.rows, at.columns))
    moved = nbytes(A, B) + at.batch * at.rows * torch.int32.itemsize
    return Case(lambda A: F.int8_linear_matmul(A, B), (A,), moved, "_int_mm", lambda A: torch._int_mm(A, B.t()))


@operation("int8_mixed_scaled_mm", batched=True)
def linear8bit(at: Setting) -> Case:
    W, x = at.randn(at.rows, at.columns), at.randn(at.batch, at.columns)
    x[:, ::_COLUMNS_AN_OUTLIER] = _OUTLIER
    layer = bnb.nn.Linear8bitLt(at.columns, at.rows, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
    layer.weight = bnb.nn.Int8Params(W.clone(), requires_grad=False, has_fp16_weights=False)
    layer = layer.to(at.device).eval()
    moved = nbytes(layer.weight, layer.weight.SCB, x) + at.batch * at.rows * x.element_size()
    return Case(layer, (x,), moved, "linear", lambda x: torch.nn.functional.linear(x, W))


@operation("int8_vectorwise_dequant", batched=True)
def embedding_8bit(at: Setting) -> Case:
    W, ids = at.randn(at.rows, at.columns), at.token_ids()
    layer = bnb.nn.Embedding8bit(at.rows, at.columns, dtype=at.dtype, device="meta")
    layer.weight = bnb.nn.Int8Params(W.clone(), requires_grad=False, has_fp16_weights=False)
    layer = layer.to(at.device)
    moved = nbytes(ids) + at.batch * nbytes(layer.weight, layer.weight.SCB, W) // at.rows
    return Case(layer, (ids,), moved, "embedding", lambda ids: torch.nn.functional.embedding(ids, W))
