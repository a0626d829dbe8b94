"""The 8-bit blockwise functions: what they add to the operators."""

import copy

import pytest
import torch

import bitsandbytes.functional as F
from tests.helpers import (
    FLOATS,
    LAYOUTS,
    NESTED_OFFSET_RTOL,
    Unchanged,
    assert_same,
    dynamic_map,
    golden_maps,
    oracle_dequantize_blockwise,
    oracle_quantize_blockwise,
    randn,
    relaid,
)

every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
LINEAR = "linear signed=True total_bits=8 add_zero=True"


@every_dtype
@pytest.mark.parametrize("blocksize", [None, 1, 100, 256])
@pytest.mark.parametrize("shape", [(), (5,), (3, 70), (2, 3, 4, 5), (0,), (0, 4)], ids=str)
def test_round_trip(shape, blocksize, dtype, device):
    x = randn(*shape, dtype=dtype, device=device)
    size = {} if blocksize is None else {"blocksize": blocksize}
    codes, state = F.quantize_blockwise(x, **size)
    expected, absmax = oracle_quantize_blockwise(x, dynamic_map(), blocksize or 4096)
    assert_same(codes, expected)
    assert_same(state.absmax, absmax)
    assert_same(state.code, dynamic_map())
    assert (state.blocksize, state.dtype, state.quant_type) == (blocksize or 4096, dtype, None)
    decoded = F.dequantize_blockwise(codes, state)
    assert_same(decoded, oracle_dequantize_blockwise(codes, absmax, dynamic_map(), blocksize or 4096, dtype))


def test_a_map_of_the_callers(device):
    x, code = randn(300, device=device), golden_maps()[LINEAR].to(device)
    codes, state = F.quantize_blockwise(x, code=code, blocksize=64)
    expected, absmax = oracle_quantize_blockwise(x, code, 64)
    assert_same(codes, expected)
    decoded = oracle_dequantize_blockwise(expected, absmax, code, 64)
    assert_same(F.dequantize_blockwise(codes, state), decoded)
    assert_same(F.dequantize_blockwise(codes, absmax=state.absmax, code=code, blocksize=64), decoded)


def test_decoding_without_a_state_gives_fp32(device):
    x = randn(300, dtype=torch.float16, device=device)
    codes, state = F.quantize_blockwise(x)
    decoded = F.dequantize_blockwise(codes, absmax=state.absmax)
    assert_same(decoded, oracle_dequantize_blockwise(codes, state.absmax, dynamic_map(), 4096))


def test_the_state_wins_over_other_arguments(device):
    codes, state = F.quantize_blockwise(randn(300, device=device), blocksize=64)
    other = golden_maps()[LINEAR].to(device)
    decoded = F.dequantize_blockwise(codes, state, absmax=torch.ones(9, device=device), code=other, blocksize=7)
    assert_same(decoded, F.dequantize_blockwise(codes, state))


@pytest.mark.parametrize("numel", [1, 255, 4096, 70000])
def test_nested_statistics_follow_the_rules_given_the_offset(numel, device):
    x = randn(numel, device=device)
    codes, state = F.quantize_blockwise(x, blocksize=64, nested=True)
    expected, absmax = oracle_quantize_blockwise(x, dynamic_map(), 64)
    assert_same(codes, expected)
    torch.testing.assert_close(state.offset.cpu().double(), absmax.double().mean(), rtol=NESTED_OFFSET_RTOL, atol=0)
    scale_codes, scales = oracle_quantize_blockwise(absmax - state.offset.cpu(), dynamic_map(), 64)
    assert_same(state.absmax, scale_codes)
    assert_same(state.state2.absmax, scales)
    decoded = oracle_dequantize_blockwise(scale_codes, scales, dynamic_map(), 64) + state.offset.cpu()
    assert_same(F.dequantize_blockwise(codes, state), oracle_dequantize_blockwise(codes, decoded, dynamic_map(), 64))


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_results_land_in_the_callers_tensors(nested, device):
    x = randn(6, 100, dtype=torch.float16, device=device)
    expected, expected_state = F.quantize_blockwise(x, blocksize=64, nested=nested)
    out, absmax = torch.zeros_like(expected), torch.zeros_like(expected_state.absmax)
    codes, state = F.quantize_blockwise(x, blocksize=64, nested=nested, out=out, absmax=absmax)
    assert codes is out
    assert state.absmax is absmax
    assert_same(out, expected)
    assert_same(absmax, expected_state.absmax)
    decoded = torch.zeros_like(x)
    assert F.dequantize_blockwise(codes, state, out=decoded) is decoded
    assert_same(decoded, F.dequantize_blockwise(expected, expected_state))


# bitsandbytes#1342, #1690
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_never_matter_in_either_direction(layout, device):
    x = randn(2, 6, 8, 10, dtype=torch.float16, device=device)
    expected, state = F.quantize_blockwise(x, blocksize=64)
    view = relaid(x, layout)
    with Unchanged(view):
        codes, view_state = F.quantize_blockwise(view, blocksize=64)
    assert_same(codes, expected)
    assert view_state == state
    sliced = relaid(codes, layout)
    with Unchanged(sliced):
        assert_same(F.dequantize_blockwise(sliced, state), F.dequantize_blockwise(expected, state))
    for target in (relaid(torch.zeros_like(codes), layout),):
        assert F.quantize_blockwise(x, blocksize=64, out=target)[0] is target
        assert_same(target, expected)


def test_a_parameter_quantises_to_a_state_without_gradients(device):
    codes, state = F.quantize_blockwise(torch.nn.Parameter(randn(300, device=device)))
    assert not codes.requires_grad
    assert not state.absmax.requires_grad
    assert copy.deepcopy(state) == state
