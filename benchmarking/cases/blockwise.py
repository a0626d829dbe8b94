"""8-bit blockwise quantisation with the block size of the optimizers."""

from bitsandbytes import functional as F

from . import Case, Setting, nbytes, operation

_BLOCKSIZE = 256


@operation("quantize_blockwise")
def quantize_blockwise(at: Setting) -> Case:
    A = at.randn(at.rows, at.columns)
    codes, state = F.quantize_blockwise(A, blocksize=_BLOCKSIZE)
    return Case(lambda A: F.quantize_blockwise(A, blocksize=_BLOCKSIZE), (A,), nbytes(A, codes, state.absmax))


@operation("dequantize_blockwise")
def dequantize_blockwise(at: Setting) -> Case:
    A = at.randn(at.rows, at.columns)
    codes, state = F.quantize_blockwise(A, blocksize=_BLOCKSIZE)
    return Case(lambda codes: F.dequantize_blockwise(codes, state), (codes,), nbytes(A, codes, state.absmax))
