"""`gemm_4bit` and `gemv_4bit` against float64."""

import warnings

import pytest
import torch

from tests.helpers import (
    EPS32,
    FLOATS,
    GEMM_STEPS,
    LEVELS,
    QUANT_TYPES,
    assert_same,
    dynamic_map,
    matmul_precision,
    one_rounding,
    oracle_dequantize_4bit,
    oracle_dequantize_blockwise,
    randint,
    randn,
)

every_type = pytest.mark.parametrize("quant_type", QUANT_TYPES)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)

# leading dimensions of the input, K, N, block size
SHAPES = (
    ((3,), 64, 8, 64),
    ((1,), 96, 5, 64),  # K is no multiple of the block size
    ((), 128, 7, 64),
    ((2,), 33, 7, 32),  # odd K: rows of the weight begin inside a byte
    ((4,), 1, 3, 64),
    ((5,), 64, 1, 64),
    ((1,), 1, 1, 32),
    ((0,), 64, 4, 64),
    ((2, 3), 70, 5, 4096),
    ((2, 1, 2, 3), 65, 9, 128),
    ((2,), 3420, 4, 64),
    ((300,), 48, 40, 32),
    ((1,), 576, 9, 64),  # rows that end within a vector
    ((2,), 72, 6, 64),  # rows that begin within a block
    ((7,), 136, 5, 32),
    ((13,), 264, 11, 128),
    ((97,), 24, 6, 32),
    ((2,), 1000, 5, 4096),
)


def weight(n, k, blocksize, seed=0):
    """Random packed codes and scales."""
    packed = randint(0, 256, ((n * k + 1) // 2, 1), torch.uint8, seed=seed)
    return packed, randn(-(n * k // -blocksize), seed=seed + 1).abs() + 0.01


def rounds_weights(target, x):
    """Whether an implementation may round each weight once to the inputs' dtype (docs/numerics.md)."""
    few = x.numel() <= 2 * x.shape[-1]
    return target.implementation == "native" and x.dtype == torch.bfloat16 and not few


def check_against_float64(result, x, w, bias, target):
    """The bound: GEMM_STEPS * K * eps of the sum of magnitudes, and one rounding of the output.

    For bf16 inputs, native kernels may also round each weight.
    """
    k = x.shape[-1]
    rounding = torch.finfo(x.dtype).eps / 2 if rounds_weights(target, x) else 0.0
    assert result.dtype == x.dtype
    assert result.shape == (*x.shape[:-1], w.shape[0])
    x, w = x.double().reshape(-1, k), w.double()
    exact, magnitude = x @ w.t(), x.abs() @ w.abs().t()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    allowed = (GEMM_STEPS * k * EPS32 + rounding) * magnitude
    allowed = allowed + one_rounding(exact.abs() + allowed, result.dtype)
    error = (result.cpu().double().view(exact.shape) - exact).abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.2f} times the bound"


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("lead", "k", "n", "blocksize"), SHAPES, ids=str)
@every_dtype
@every_type
def test_gemm_is_within_the_bound(quant_type, dtype, lead, k, n, blocksize, bias, target):
    x, (packed, absmax) = randn(*lead, k, dtype=dtype), weight(n, k, blocksize)
    b = randn(n, dtype=dtype, seed=5) if bias else None
    result = target.op("gemm_4bit")(
        x.to(target.device), packed.to(target.device), [n, k], absmax.to(target.device), blocksize, quant_type,
        None if b is None else b.to(target.device),
    )  # fmt: skip
    check_against_float64(result, x, oracle_dequantize_4bit(packed, absmax, blocksize, quant_type, (n, k)), b, target)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("lead", "k", "n", "blocksize"), SHAPES, ids=str)
@every_dtype
def test_gemm_with_nested_statistics_is_within_the_bound(dtype, lead, k, n, blocksize, bias, target):
    x, (packed, plain) = randn(*lead, k, dtype=dtype), weight(n, k, blocksize)
    codes = randint(0, 256, (plain.numel(),), torch.uint8)
    scales, offset = randn(-(plain.numel() // -256), seed=3).abs(), torch.tensor(1.25)
    b = randn(n, dtype=dtype, seed=5) if bias else None
    moved = [None if t is None else t.to(target.device) for t in (b, codes, dynamic_map(), offset)]
    result = target.op("gemm_4bit")(
        x.to(target.device), packed.to(target.device), [n, k], scales.to(target.device), blocksize, "nf4", *moved
    )
    absmax = oracle_dequantize_blockwise(codes, scales, dynamic_map(), 256) + offset
    check_against_float64(result, x, oracle_dequantize_4bit(packed, absmax, blocksize, "nf4", (n, k)), b, target)


def test_gemm_takes_an_offset_of_one_element_like_a_scalar(target):
    x, (packed, plain) = randn(2, 64, device=target.device), weight(3, 64, 64)
    codes = randint(0, 256, (plain.numel(),), torch.uint8, device=target.device)
    args = (packed.to(target.device), [3, 64], torch.ones(1, device=target.device), 64, "nf4", None, codes)
    code = dynamic_map().to(target.device)
    results = [
        target.op("gemm_4bit")(x, *args, code, torch.full(shape, 1.5, device=target.device)) for shape in ((), (1,))
    ]
    assert_same(*results)


@pytest.mark.parametrize(("lead", "k", "n", "blocksize"), SHAPES, ids=str)
@every_dtype
@every_type
def test_gemv_is_within_the_bound(quant_type, dtype, lead, k, n, blocksize, target):
    x, (packed, absmax) = randn(*lead, k, dtype=dtype), weight(n, k, blocksize)
    code = torch.from_numpy(LEVELS[quant_type])
    args = [t.to(target.device) for t in (x, packed, absmax, code)]
    result = target.op("gemv_4bit")(args[0], args[1], [n, k], args[2], args[3], blocksize)
    check_against_float64(
        result, x, oracle_dequantize_4bit(packed, absmax, blocksize, quant_type, (n, k)), None, target
    )


def test_gemv_decodes_with_the_levels_it_is_given(target):
    """Also levels that are no 4-bit type of ours."""
    k, n = 34, 3
    x, (packed, absmax) = randn(2, k), weight(n, k, 64)
    code = randn(16, seed=9)
    codes = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), dim=1).flatten()
    w = (code[codes.long()].view(n, k).flatten() * absmax.repeat_interleave(64)[: n * k]).view(n, k)
    args = [t.to(target.device) for t in (x, packed, absmax, code)]
    check_against_float64(target.op("gemv_4bit")(args[0], args[1], [n, k], args[2], args[3], 64), x, w, None, target)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_product_large_enough_for_reduced_precision_stays_in_fp32(precision, target):
    """Smaller products never reach the kernels that these modes switch on."""
    x, (packed, absmax) = randn(128, 512), weight(128, 512, 64)
    args = (x.to(target.device), packed.to(target.device), [128, 512], absmax.to(target.device), 64, "nf4")
    expected = target.op("gemm_4bit")(*args)
    with matmul_precision(precision):
        actual = target.op("gemm_4bit")(*args)
    assert_same(actual, expected)


# bitsandbytes#1862: the vector path took another layout for granted.
@every_dtype
def test_one_row_and_many_rows_agree(dtype, target):
    x, (packed, absmax) = randn(8, 96, dtype=dtype), weight(7, 96, 64)
    w = oracle_dequantize_4bit(packed, absmax, 64, "nf4", (7, 96))
    args = (packed.to(target.device), [7, 96], absmax.to(target.device), 64, "nf4")
    for rows in (x, x[:1], x[0]):
        check_against_float64(target.op("gemm_4bit")(rows.to(target.device), *args), rows, w, None, target)


# bitsandbytes#2027: an inner size that is no multiple of 64 warned on every call.
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_an_odd_inner_size_gives_no_warning(rows, target):
    x, (packed, absmax) = randn(rows, 3420), weight(2, 3420, 64)
    args = (packed.to(target.device), [2, 3420], absmax.to(target.device), 64, "nf4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            result = target.op("gemm_4bit")(x.to(target.device), *args)
    check_against_float64(result, x, oracle_dequantize_4bit(packed, absmax, 64, "nf4", (2, 3420)), None, target)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_weight_without_columns_gives_the_bias(bias, target):
    b = torch.arange(4.0, device=target.device) if bias else None
    packed = torch.zeros(0, 1, dtype=torch.uint8, device=target.device)
    none = torch.zeros(0, device=target.device)
    result = target.op("gemm_4bit")(torch.zeros(3, 0, device=target.device), packed, [4, 0], none, 64, "nf4", b)
    assert_same(result, torch.arange(4.0).expand(3, 4).contiguous() if bias else torch.zeros(3, 4))


def test_a_weight_without_rows_gives_an_empty_result(target):
    packed = torch.zeros(0, 1, dtype=torch.uint8, device=target.device)
    none = torch.zeros(0, device=target.device)
    result = target.op("gemm_4bit")(torch.zeros(3, 64, device=target.device), packed, [0, 64], none, 64, "nf4")
    assert result.shape == (3, 0)


def test_a_result_beyond_fp16_is_infinite_and_nan_stays_in_its_row(target):
    packed = torch.full((32, 1), 0xFF, dtype=torch.uint8, device=target.device)
    absmax = torch.ones(1, device=target.device)
    x = torch.ones(3, 64, dtype=torch.float16, device=target.device)
    x[0] *= 60000
    x[1, 3] = float("nan")
    result = target.op("gemm_4bit")(x, packed, [1, 64], absmax, 64, "nf4").flatten().tolist()
    assert result[0] == float("inf")
    assert result[1] != result[1]
    assert result[2] == 64
