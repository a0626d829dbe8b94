"""The LLM.int8() operators: tables, an oracle, exact integers, and float64."""

import pytest
import torch

from tests.cases.int8 import CASES, SHAPES, THRESHOLDS
from tests.helpers import (
    EPILOGUE_STEPS,
    EPS32,
    FLOATS,
    GEMM_STEPS,
    assert_same,
    double,
    matmul_precision,
    one_rounding,
    oracle_int8_rows,
    randint,
    randn,
    with_dtypes,
)

every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def check_rows(target, x, threshold):
    codes, stats, outliers = target.op("int8_vectorwise_quant")(x.to(target.device), threshold)
    expected_codes, expected_stats, expected_outliers = oracle_int8_rows(x, threshold)
    assert_same(stats, expected_stats, "statistics")
    assert_same(codes, expected_codes, "codes")
    assert (outliers is None) == (threshold == 0)
    if outliers is not None:
        assert_same(outliers, expected_outliers, "outlier columns")


@pytest.mark.parametrize(("case", "dtype"), with_dtypes(CASES, lambda case: case.rows))
def test_table(case, dtype, target):
    x = torch.tensor(case.rows).to(dtype).to(target.device)
    codes, stats, outliers = target.op("int8_vectorwise_quant")(x, case.threshold)
    assert_same(stats, torch.tensor(case.stats), "statistics")
    assert_same(codes, torch.tensor(case.codes, dtype=torch.int8), "codes")
    if case.outliers is None:
        assert outliers is None
    else:
        assert_same(outliers, torch.tensor(case.outliers, dtype=torch.int64), "outlier columns")


@every_dtype
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_equal_the_oracle(shape, threshold, dtype, target):
    for seed in range(3):
        check_rows(target, randn(*shape, dtype=dtype, seed=seed, scale=2.0), threshold)


@every_dtype
def test_many_rows_of_every_magnitude_equal_the_oracle(dtype, target):
    """127/absmax has one rounding: a reciprocal times 127 has two, and moves codes at ties."""
    exponents = torch.arange(-24, 15).repeat_interleave(64)
    check_rows(target, (randn(exponents.numel(), 96) * torch.exp2(exponents.float()).unsqueeze(1)).to(dtype), 0.0)


@pytest.mark.parametrize("exponent", [-149, -140, -130, -127, -126, -125, -120, -119, -100, 100, 120, 126])
def test_rows_at_the_ends_of_fp32_equal_the_oracle(exponent, target):
    x = torch.ldexp(torch.rand(64, 65, dtype=torch.float64) * 2 - 1, torch.tensor(exponent)).float()
    check_rows(target, x, 0.0)


def test_ties_around_half_codes_equal_the_oracle(target):
    """Row maxima that make x * (127 / absmax) land near k + 1/2."""
    absmax = torch.arange(1, 400).float() / 3
    half = (torch.arange(-127, 127).float() + 0.5) / 127
    x = absmax.unsqueeze(1) * half
    check_rows(target, torch.cat((absmax.unsqueeze(1), x), dim=1), 0.0)


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_the_input_is_not_touched_even_for_a_moment(threshold, target):
    """Upstream zeroes outliers in the input and restores them; an input that cannot be written shows that."""
    x = randn(1, 64, device=target.device).expand(5, 64)
    codes, stats, outliers = target.op("int8_vectorwise_quant")(x, threshold)
    expected = oracle_int8_rows(x.cpu(), threshold)
    assert_same(codes, expected[0])
    assert_same(stats, expected[1])
    if threshold:
        assert_same(outliers, expected[2])


@every_dtype
@pytest.mark.parametrize("threshold", [0.0, 1.5])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 65), (1, 5), (0, 4)], ids=str)
def test_double_quant_is_rows_and_columns(shape, threshold, dtype, target):
    x = randn(*shape, dtype=dtype)
    by_row, by_column, row_stats, col_stats, outliers = target.op("int8_double_quant")(x.to(target.device), threshold)
    codes, stats, columns = oracle_int8_rows(x, threshold)
    assert_same(by_row, codes)
    assert_same(row_stats, stats)
    # An outlier's whole column is left out.
    kept = x.reshape(-1, shape[-1]).clone()
    if threshold:
        assert_same(outliers, columns)
        kept[:, columns] = 0
    else:
        assert outliers is None
    transposed_codes, transposed_stats, _ = oracle_int8_rows(kept.t().contiguous())
    assert_same(by_column.cpu().reshape(-1, shape[-1]), transposed_codes.t().contiguous())
    assert_same(col_stats, transposed_stats)


EXTREMES = {"127": (127, 127), "-127": (127, -127), "-128": (-128, -128), "mixed ends": (-128, 127)}


# bitsandbytes#165: a fallback multiplied unscaled integers in fp16 and overflowed.
@pytest.mark.parametrize("columns", [1, 3, 64, 1023, 1024, 1025, 2049, 4095, 16383, 16384, 65535])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_matmul_of_extreme_codes_is_exact(extreme, columns, target):
    a, b = EXTREMES[extreme]
    A = torch.full((3, columns), a, dtype=torch.int8, device=target.device)
    B = torch.full((2, columns), b, dtype=torch.int8, device=target.device)
    result = target.op("int8_linear_matmul")(A, B)
    assert_same(result, torch.full((3, 2), a * b * columns, dtype=torch.int32))


@pytest.mark.parametrize("columns", [1, 3, 1025, 5000, 16384])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (0,)], ids=str)
def test_matmul_of_random_codes_is_exact(lead, columns, target):
    A, B = randint(-128, 128, (*lead, columns)), randint(-128, 128, (7, columns), seed=1)
    expected = (A.long().reshape(-1, columns) @ B.long().t()).view(*lead, 7).int()
    assert_same(target.op("int8_linear_matmul")(A.to(target.device), B.to(target.device)), expected)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 63, 64, 65, 127, 129, 1025])
def test_matmul_of_few_rows_is_exact(columns, target):
    """Every rest of the tiles of a kernel, of which no code may read a neighbour's."""
    A, B = randint(-128, 128, (13, columns)), randint(-128, 128, (9, columns), seed=1)
    expected = (A.long() @ B.long().t()).int()
    A, B = A.to(target.device), B.to(target.device)
    matmul = target.op("int8_linear_matmul")
    for m in range(1, 14):
        for n in range(1, 10):
            assert_same(matmul(A[:m], B[:n]), expected[:m, :n], f"{m} x {n}")


@pytest.mark.parametrize(("m", "n", "k"), [(97, 65, 70), (193, 1, 129), (1, 193, 4163), (50, 128, 8300)])
def test_matmul_of_many_rows_is_exact(m, n, k, target):
    A, B = randint(-128, 128, (m, k)), randint(-128, 128, (n, k), seed=1)
    expected = (A.long() @ B.long().t()).int()
    assert_same(target.op("int8_linear_matmul")(A.to(target.device), B.to(target.device)), expected)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_products_large_enough_for_reduced_precision_stay_exact(precision, target):
    A, B = randint(-127, 128, (128, 1500), device=target.device), randint(-127, 128, (96, 1500), device=target.device)
    x = randn(128, 1500, device=target.device)
    outliers = torch.arange(0, 1500, 3, device=target.device)
    args = (x, A, B, randn(128, device=target.device), randn(96, device=target.device), outliers)
    product = target.op("int8_linear_matmul")(A, B)
    mixed, _ = target.op("int8_mixed_scaled_mm")(*args)
    with matmul_precision(precision):
        assert_same(target.op("int8_linear_matmul")(A, B), product)
        assert_same(target.op("int8_mixed_scaled_mm")(*args)[0], mixed)
    assert_same(product, (A.cpu().long() @ B.cpu().long().t()).int())


def test_matmul_without_columns_is_zero(target):
    A = torch.zeros(3, 0, dtype=torch.int8, device=target.device)
    B = torch.zeros(2, 0, dtype=torch.int8, device=target.device)
    assert_same(target.op("int8_linear_matmul")(A, B), torch.zeros(3, 2, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 65), (5,), (0, 4), (3, 0)], ids=str)
def test_vectorwise_dequant_is_code_times_statistic_over_127(shape, target):
    codes = randint(-127, 128, shape)
    stats = randn(torch.Size(shape[:-1]).numel()).abs()
    result = target.op("int8_vectorwise_dequant")(codes.to(target.device), stats.to(target.device)).cpu()
    assert result.dtype == torch.float32
    assert_same(result, codes.float() * stats.view(*shape[:-1], 1) * torch.tensor(1 / 127))
    exact = codes.double() * stats.double().view(*shape[:-1], 1) / 127
    assert ((result - exact).abs() <= 1.5 * EPS32 * exact.abs()).all()


@pytest.mark.parametrize("bias", [None, *FLOATS], ids=str)
@pytest.mark.parametrize("dtype", [None, *FLOATS], ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (0,)], ids=str)
def test_mm_dequant_scales_in_fp32_and_casts_once(lead, dtype, bias, target):
    """1/127**2 to fp32 precision: upstream's CPU constant is off by 1.8e-5. The bias is added before the cast."""
    A = randint(-(2**24), 2**24, (*lead, 33), torch.int32)
    row, column = randn(torch.Size(lead).numel(), seed=1).abs() * 1e-2, randn(33, seed=2).abs() * 1e-2
    b = None if bias is None else randn(33, dtype=bias, seed=3)
    moved = [None if t is None else t.to(target.device) for t in (A, row, column, b)]
    result = target.op("int8_mm_dequant")(*moved[:3], dtype, moved[3]).cpu()
    assert result.dtype == (dtype or torch.float16)
    steps = row.view(*lead, 1) * column * A.float() * torch.tensor(1 / 127**2)
    assert_same(result, (steps if b is None else steps + b.float()).to(result.dtype))
    product = A.double() * row.double().view(*lead, 1) * column.double() / 127**2
    exact = product + (0 if b is None else b.double())
    allowed = EPILOGUE_STEPS * EPS32 * (product.abs() + exact.abs()) + one_rounding(exact, result.dtype) * 1.01
    assert ((result.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("lead", "out"), [((2, 3), 5), ((100,), 70)], ids=str)
@every_dtype
def test_scaled_mm_is_the_matmul_and_its_dequantisation(dtype, lead, out, bias, target):
    A = randint(-127, 128, (*lead, 1500), device=target.device)
    B = randint(-127, 128, (out, 1500), device=target.device)
    row = randn(torch.Size(lead).numel(), device=target.device).abs()
    column = randn(out, device=target.device).abs() * 1e-3
    b = randn(out, dtype=dtype, device=target.device) if bias else None
    result = target.op("int8_scaled_mm")(A, B, row, column, b, dtype)
    product = target.op("int8_linear_matmul")(A, B)
    assert_same(result, target.op("int8_mm_dequant")(product, row, column, dtype, b))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(1,), (4,), (2, 3), (0,), (100,)], ids=str)
@pytest.mark.parametrize("columns", [5, 64, 1200])
@every_dtype
def test_mixed_matmul_adds_outlier_columns_in_floating_point(dtype, columns, lead, bias, target):
    A = randn(*lead, columns, dtype=dtype)
    A[..., ::3] *= 10
    CA, SCA, outliers = (t.cpu() for t in target.op("int8_vectorwise_quant")(A.to(target.device), 6.0))
    if A.numel():
        assert 0 < outliers.numel() < columns
    CB, SCB = randint(-127, 128, (70, columns)), randn(70, seed=2).abs()
    b = randn(70, dtype=dtype, seed=3) if bias else None
    args = [None if t is None else t.to(target.device) for t in (A, CA, CB, SCA, SCB, outliers, b)]
    result, sub = target.op("int8_mixed_scaled_mm")(*args)
    assert result.dtype == dtype
    assert result.shape == (*lead, 70)
    assert_same(sub, A.reshape(-1, columns)[:, outliers])

    rows = CA.double().reshape(-1, columns)
    integer = (rows @ CB.double().t()) * SCA.double().view(-1, 1) * SCB.double() / 127**2
    x = A.double().reshape(-1, columns)[:, outliers]
    w = (CB.double() * SCB.double().unsqueeze(1) / 127)[:, outliers]
    exact = integer + x @ w.t() + (0 if b is None else b.double())
    steps = EPILOGUE_STEPS * (integer.abs() + exact.abs()) + GEMM_STEPS * max(outliers.numel(), 2) * (
        x.abs() @ w.abs().t()
    )
    error = (result.cpu().double().view(-1, 70) - exact).abs()
    assert (error <= EPS32 * steps + one_rounding(exact, dtype) * 1.01).all()


def test_mixed_matmul_with_outliers_off_is_the_plain_one(target):
    A, CA, CB = randn(3, 64, device=target.device), randint(-127, 128, (3, 64)), randint(-127, 128, (7, 64))
    CA, CB = CA.to(target.device), CB.to(target.device)
    SCA, SCB = randn(3, device=target.device).abs(), randn(7, device=target.device).abs()
    result, sub = target.op("int8_mixed_scaled_mm")(A, CA, CB, SCA, SCB, None, None)
    assert sub is None
    assert_same(result, target.op("int8_scaled_mm")(CA, CB, SCA, SCB, None, torch.float32))
    empty = torch.zeros(0, dtype=torch.int64, device=target.device)
    result, sub = target.op("int8_mixed_scaled_mm")(A, CA, CB, SCA, SCB, empty, None)
    assert sub.shape == (3, 0)
    assert_same(result, target.op("int8_scaled_mm")(CA, CB, SCA, SCB, None, torch.float32))


# bitsandbytes#165
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_a_long_fp16_row_stays_finite(threshold, target):
    x = torch.full((4, 16384), 5.9, dtype=torch.float16, device=target.device)
    w = randn(8, 16384, dtype=torch.float16, scale=0.02, device=target.device)
    CB, SCB, _ = target.op("int8_vectorwise_quant")(w, 0.0)
    CA, SCA, outliers = target.op("int8_vectorwise_quant")(x, threshold)
    result, _ = target.op("int8_mixed_scaled_mm")(x, CA, CB, SCA, SCB, outliers, None)
    exact = double(x) @ (double(CB) * double(SCB).unsqueeze(1) / 127).t()
    assert result.isfinite().all()
    assert ((double(result) - exact).abs() <= 1e-3 * exact.abs().max()).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_shows_in_its_own_results_only(value, target):
    x = randn(4, 64, device=target.device)
    x[1, 5] = value
    w = randn(3, 64, device=target.device)
    CA, SCA, _ = target.op("int8_vectorwise_quant")(x, 0.0)
    CB, SCB, _ = target.op("int8_vectorwise_quant")(w, 0.0)
    result = target.op("int8_scaled_mm")(CA, CB, SCA, SCB, None, torch.float32)
    assert not result[1].isfinite().any()
    assert result[[0, 2, 3]].isfinite().all()
