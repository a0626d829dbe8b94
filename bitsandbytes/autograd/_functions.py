"""`matmul_4bit` and `matmul` (LLM.int8()) and their gradients.

Weights are saved with `save_for_backward`, so that saved-tensor hooks (activation offloading, FSDP) see them.
"""

import copy
from dataclasses import dataclass
from typing import Any
import warnings

import torch

from .. import backends
from .. import functional as F
from .._ops import _checks as check
from ..errors import ArgumentError
from ..formats import NESTED_BLOCKSIZE


class GlobalOutlierPooler:
    """Outlier dimensions of all layers of the model's hidden size. Use `get_instance()`."""

    _instance = None

    def __init__(self):
        raise RuntimeError("GlobalOutlierPooler: call get_instance() instead")

    def initialize(self):
        self.outliers = set()
        self.model_dim = None

    @classmethod
    def get_instance(cls):
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.initialize()
        return cls._instance

    def add_outliers(self, outlier_idx, feature_dim):
        """Add indices; those of layers with another input size than the first are not kept."""
        if self.model_dim is None:
            self.model_dim = feature_dim
        if feature_dim == self.model_dim:
            self.outliers.update(outlier_idx.tolist())

    def get_current_outlier_idx(self):
        return torch.tensor(sorted(self.outliers), dtype=torch.int64)


@dataclass
class MatmulLtState:
    """The weight of an int8 matmul and its settings.

    Attributes:
        CB: int8 weight, (out_features, in_features).
        SCB: fp32 absolute maxima of its rows.
        threshold: Outlier threshold of the inputs; 0 turns outliers off.
        has_fp16_weights: The weight is kept in floating point and quantised in each call.
        is_training: Compute with the decoded weight, without quantising the inputs.
        idx: Outlier columns of the last call.

    The other fields exist because callers set them.
    """

    force_no_igemmlt: bool = False
    CB: torch.Tensor | None = None
    SB: torch.Tensor | None = None
    SCB: torch.Tensor | None = None
    SBt: torch.Tensor | None = None
    CBt: torch.Tensor | None = None
    subB: torch.Tensor | None = None
    outlier_pool: GlobalOutlierPooler | None = None
    idx: torch.Tensor | None = None

    # Without annotations: attributes, but not arguments of the constructor.
    has_accumulated_gradients = False
    threshold = 0.0
    is_training = True
    has_fp16_weights = True
    use_pool = False

    def reset_grads(self):
        """Forget the quantised weight. Call it after the weight was replaced."""
        self.CB = self.SB = self.SCB = self.SBt = self.CBt = None


def _quantized_weight(B: torch.Tensor, state: MatmulLtState) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 weight and its statistics: those of the state, or B quantised now if B is in floating point."""
    if state.has_fp16_weights or state.CB is None:
        # Quantised anew in every call: an optimizer may have changed B since the last one.
        state.CB, state.SCB, _ = F.int8_vectorwise_quant(B)
    if state.SCB is None:
        raise ArgumentError("matmul", "state.SCB", "the row statistics of state.CB", None)
    return state.CB, state.SCB


def _decoded(CB: torch.Tensor, SCB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return F.int8_vectorwise_dequant(CB, SCB).to(dtype)


def _save_int8(ctx: Any, A: torch.Tensor, CB: torch.Tensor, SCB: torch.Tensor) -> None:
    # The activations are needed for the gradient of a floating weight alone.
    ctx.save_for_backward(CB, SCB, A if ctx.needs_input_grad[1] else None)


def _int8_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of A, B and bias for `A @ W.T + bias` with the decoded weight W."""
    CB, SCB, A = ctx.saved_tensors
    grad_A = grad_B = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_A = grad_output @ _decoded(CB, SCB, grad_output.dtype)
    if ctx.needs_input_grad[1]:
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_B = rows.t() @ A.reshape(-1, A.shape[-1]).to(rows.dtype)
    if ctx.needs_input_grad[3]:
        grad_bias = _sum_rows(grad_output)
    return grad_A, grad_B, None, grad_bias, None


def _sum_rows(grad_output: torch.Tensor) -> torch.Tensor:
    return grad_output.reshape(-1, grad_output.shape[-1]).sum(0)


class MatMul8bitLt(torch.autograd.Function):
    """LLM.int8(): inputs quantised by row, exact int8 matmul, outlier columns in floating point."""

    @staticmethod
    def forward(ctx, A, B, out=None, bias=None, state=None):
        CB, SCB = _quantized_weight(B, state)
        ops = torch.ops.bitsandbytes
        CA, SCA, outlier_cols = ops.int8_vectorwise_quant(A, state.threshold)
        if state.threshold > 0.0:
            state.idx = outlier_cols
            result, _ = ops.int8_mixed_scaled_mm(A, CA, CB, SCA, SCB, outlier_cols, bias)
        else:
            result = ops.int8_scaled_mm(CA, CB, SCA, SCB, bias, A.dtype)
        _save_int8(ctx, A, CB, SCB)
        return result

    @staticmethod
    def backward(ctx, grad_output):
        return _int8_backward(ctx, grad_output)


class MatMul8bitFp(torch.autograd.Function):
    """The int8 weight decoded to the inputs' dtype: more exact than `MatMul8bitLt`, which suits training."""

    @staticmethod
    def forward(ctx, A, B, out=None, bias=None, state=None):
        CB, SCB = _quantized_weight(B, state)
        _save_int8(ctx, A, CB, SCB)
        return torch.nn.functional.linear(A, _decoded(CB, SCB, A.dtype), None if bias is None else bias.to(A.dtype))

    @staticmethod
    def backward(ctx, grad_output):
        return _int8_backward(ctx, grad_output)


def _is_transposed(K: int, shape: torch.Size) -> bool:
    """Whether a weight was quantised as (in_features, out_features). A square one counts as the usual layout."""
    return K == shape[0] != shape[1]


def _linear_4bit(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, quant_state: F.QuantState
) -> torch.Tensor:
    if bias is not None:
        bias = bias.to(A.dtype)
    if _is_transposed(A.shape[-1], quant_state.shape):
        return torch.nn.functional.linear(A, _weight(B, quant_state, A.dtype).t(), bias)
    gemm = torch.ops.bitsandbytes.gemm_4bit
    args = (quant_state.blocksize, quant_state.quant_type, bias)
    state2 = quant_state.state2
    if quant_state.nested and state2.blocksize == NESTED_BLOCKSIZE:
        codes, offset = quant_state.absmax, quant_state.offset
        return gemm(A, B, quant_state.shape, state2.absmax, *args, codes, state2.code, offset)
    return gemm(A, B, quant_state.shape, F.blockwise.decoded_absmax(quant_state), *args)


def _weight(B: torch.Tensor, quant_state: F.QuantState, dtype: torch.dtype) -> torch.Tensor:
    """The decoded weight in `quant_state.shape`, whichever way the packed vector lies."""
    if quant_state.dtype != dtype:  # decoded into `dtype` at once: the device may not have the other
        quant_state = copy.copy(quant_state)
        quant_state.dtype = dtype
    return F.dequantize_4bit(B.reshape(-1, 1), quant_state)


class MatMul4Bit(torch.autograd.Function):
    """`A @ W.T + bias` with a packed 4-bit W, which has no gradient of its own."""

    @staticmethod
    def forward(ctx, A, B, out=None, bias=None, quant_state=None):
        ctx.save_for_backward(B)
        ctx.quant_state = quant_state
        ctx.in_features = A.shape[-1]
        return _linear_4bit(A, B, bias, quant_state)

    @staticmethod
    def backward(ctx, grad_output):
        (B,) = ctx.saved_tensors
        grad_A = grad_bias = None
        if ctx.needs_input_grad[0]:
            W = _weight(B, ctx.quant_state, grad_output.dtype)
            grad_A = grad_output @ (W.t() if _is_transposed(ctx.in_features, W.shape) else W)
        if ctx.needs_input_grad[3]:
            grad_bias = _sum_rows(grad_output)
        return grad_A, None, None, grad_bias, None


def matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    state: MatmulLtState | None = None,
    threshold=0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`A @ B.T + bias` with an int8 weight (LLM.int8(), arXiv:2208.07339). Differentiable in A, bias and a floating B.

    Args:
        A: (..., in_features); float32, float16 or bfloat16.
        B: (out_features, in_features) in floating point; only its gradient matters when the state holds the weight.
        out: (..., out_features) in A's dtype; receives the result.
        state: The quantised weight and settings.
        threshold: Outlier threshold; 0 takes that of the state.
        bias: (out_features,).

    Returns:
        (..., out_features) in A's dtype.
    """
    state = state or MatmulLtState()
    if threshold > 0.0:
        state.threshold = threshold
    if out is not None:
        rows = (state.CB if state.CB is not None else B).shape[0]
        check.out_like("matmul", out, (*A.shape[:-1], rows), A.dtype, A.device)
    if state.is_training:  # multiplied by PyTorch, whose errors do not say what works
        backends.check_dtype("matmul", A.device, A.dtype)
    function = MatMul8bitFp if state.is_training else MatMul8bitLt
    result = function.apply(A, B, None, bias, state)
    return result if out is None else out.copy_(result)


def matmul_4bit(
    A: torch.Tensor,
    B: torch.Tensor,
    quant_state: F.QuantState,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`A @ W.T + bias` with a packed 4-bit weight, accumulated in fp32. Differentiable in A and bias.

    Args:
        A: (..., in_features); float32, float16 or bfloat16.
        B: Packed W as a column or a row.
        quant_state: The state of W, of shape (out_features, in_features). The transposed shape works too, but slowly.
        out: (..., out_features) in A's dtype; receives the result.
        bias: (out_features,).

    Returns:
        (..., out_features) in A's dtype.

    Raises:
        ArgumentError: (a ValueError) there is no state, its weight is not a matrix, or a shape does not fit.
    """
    op = "matmul_4bit"
    if quant_state is None:
        raise ArgumentError(op, "quant_state", "the QuantState of B", None)
    if len(quant_state.shape) != 2:
        raise ArgumentError(op, "quant_state.shape", "2-D (out_features, in_features)", tuple(quant_state.shape))
    transposed = _is_transposed(A.shape[-1], quant_state.shape)
    if transposed and not torch.compiler.is_compiling():
        warnings.warn(
            f"matmul_4bit: the weight was quantised in the shape {tuple(quant_state.shape)} (in_features, "
            "out_features), which is slow. Re-quantize from the weight in the shape (out_features, in_features).",
            DeprecationWarning,
            stacklevel=2,
        )
    if out is not None:
        columns = quant_state.shape[1 if transposed else 0]
        check.out_like(op, out, (*A.shape[:-1], columns), A.dtype, A.device)
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and (A.requires_grad or (bias is not None and bias.requires_grad))
    ):
        result = MatMul4Bit.apply(A, B, None, bias, quant_state)
    else:
        # Nothing to differentiate, and a parameter is as good as its tensor here: going around autograd and the
        # subclass saves 9 us a call, where the whole call of a small layer takes 16.
        with torch._C.DisableTorchFunctionSubclass():
            result = _linear_4bit(A, B, bias, quant_state)
    return result if out is None else out.copy_(result)
