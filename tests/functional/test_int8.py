"""The int8 functions: what they add to the operators."""

import pytest
import torch

import bitsandbytes.functional as F
from tests.helpers import FLOATS, assert_all_same, assert_same, double, oracle_int8_rows, randint, randn, relaid

every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@every_dtype
@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_vectorwise_quant(threshold, dtype, device):
    x = randn(2, 3, 65, dtype=dtype, device=device)
    assert_all_same(F.int8_vectorwise_quant(x, threshold=threshold), oracle_int8_rows(x, threshold))


def test_round_trip_error_is_at_most_half_a_step(device):
    x = randn(20, 100, device=device)
    codes, stats, _ = F.int8_vectorwise_quant(x)
    error = (F.int8_vectorwise_dequant(codes, stats) - x).abs()
    assert (error <= stats.unsqueeze(1) / 127 * 0.5001).all()


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_double_quant_passes_the_threshold_on(threshold, device):
    x = randn(5, 64, device=device)
    expected = torch.ops.bitsandbytes.int8_double_quant(x, threshold)
    assert_all_same(F.int8_double_quant(x, threshold=threshold), expected)


@pytest.mark.parametrize("lead", [(1,), (4,), (2, 3), (0,)], ids=str)
def test_linear_matmul_into_a_given_tensor(lead, device):
    A, B = randint(-127, 128, (*lead, 70), device=device), randint(-127, 128, (5, 70), device=device)
    expected = F.int8_linear_matmul(A, B)
    assert_same(expected, (A.cpu().long().reshape(-1, 70) @ B.cpu().long().t()).view(*lead, 5).int())
    out = relaid(torch.zeros(*lead, 5, dtype=torch.int32, device=device), "every other")
    assert F.int8_linear_matmul(A, B, out=out) is out
    assert_same(out, expected)


@every_dtype
def test_mm_dequant_takes_the_dtype_of_out(dtype, device):
    A = randint(-(10**6), 10**6, (3, 5), torch.int32, device)
    row, column, bias = (randn(n, device=device, seed=n).abs() * 0.01 for n in (3, 5, 5))
    assert F.int8_mm_dequant(A, row, column).dtype == torch.float16
    out = torch.empty(3, 5, dtype=dtype, device=device)
    assert F.int8_mm_dequant(A, row, column, out=out, bias=bias) is out
    assert_same(out, torch.ops.bitsandbytes.int8_mm_dequant(A, row, column, dtype, bias))


@every_dtype
def test_a_quantised_matmul_is_close_to_the_floating_one(dtype, device):
    x, w = randn(16, 256, dtype=dtype, device=device), randn(8, 256, dtype=dtype, device=device, seed=1)
    CA, SCA, _ = F.int8_vectorwise_quant(x)
    CB, SCB, _ = F.int8_vectorwise_quant(w)
    result = F.int8_mm_dequant(F.int8_linear_matmul(CA, CB), SCA, SCB)
    exact = double(x) @ double(w).t()
    assert (double(result) - exact).norm() < 0.02 * exact.norm()
