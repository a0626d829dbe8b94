"""Codes, statistics and decoded values that upstream's wheel recorded."""

import json

import pytest
from safetensors.torch import load_file
import torch

import bitsandbytes.functional as F
from tests.helpers import (
    GOLDEN,
    NESTED_OFFSET_RTOL,
    assert_same,
    dynamic_map,
    oracle_dequantize_4bit,
    oracle_quantize_blockwise,
    to_numpy,
    unpack,
)

QUANT4 = json.loads((GOLDEN / "quant4.json").read_text())
QUANT4_TENSORS = load_file(GOLDEN / "quant4.safetensors")
NESTED = json.loads((GOLDEN / "nested.json").read_text())
NESTED_TENSORS = load_file(GOLDEN / "nested.safetensors")

#: Codes in all cases together where a negative FP4 tie goes away from zero upstream and towards it here.
NEGATIVE_TIES = 63


def dtype_of(case: dict) -> torch.dtype:
    return getattr(torch, case["dtype"].removeprefix("torch."))


def tensors(case: dict) -> dict[str, torch.Tensor]:
    names = ("input", "packed", "absmax", "dequantized")
    return {name: QUANT4_TENSORS[f"{case['key']}.{name}"] for name in names}


def without_signed_zero(codes):
    """FP4 code 8 is zero with the sign bit."""
    codes = codes.copy()
    codes[codes == 8] = 0
    return codes


def quantize(case, x, device):
    return F.quantize_4bit(x.to(device), blocksize=case["blocksize"], quant_type=case["quant_type"])


def differing_codes(case, device):
    """Indices where our codes differ from the recorded ones, and both codes."""
    golden = tensors(case)
    packed, _ = quantize(case, golden["input"], device)
    numel = golden["input"].numel()
    ours, theirs = (without_signed_zero(unpack(p, numel)) for p in (packed, golden["packed"]))
    where = (ours != theirs).nonzero()[0]
    return where, ours[where], theirs[where]


@pytest.mark.parametrize("case", [c for c in QUANT4 if c["quant_type"] == "nf4"], ids=lambda c: c["key"])
def test_nf4_bytes_are_the_recorded_ones(case, device):
    golden = tensors(case)
    packed, state = quantize(case, golden["input"], device)
    assert_same(packed.view(-1), golden["packed"].view(-1), "codes")
    assert_same(state.absmax, golden["absmax"], "absmax")


@pytest.mark.parametrize("case", [c for c in QUANT4 if c["quant_type"] == "fp4"], ids=lambda c: c["key"])
def test_fp4_codes_are_the_recorded_ones_except_negative_ties(case, device):
    golden = tensors(case)
    _, state = quantize(case, golden["input"], device)
    assert_same(state.absmax, golden["absmax"], "absmax")
    where, ours, theirs = differing_codes(case, device)
    if where.size:
        assert dtype_of(case) != torch.float32
        values = to_numpy(golden["input"])[where]
        assert (values < 0).all()
        magnitudes = [0, 1, 6, 7, 4, 5, 2, 3]  # codes by magnitude
        for our, their in zip(ours, theirs, strict=True):
            assert magnitudes.index(their & 7) == magnitudes.index(our & 7) + 1


def test_the_number_of_negative_ties_is_pinned(device):
    assert sum(differing_codes(case, device)[0].size for case in QUANT4) == NEGATIVE_TIES


@pytest.mark.parametrize("case", QUANT4, ids=lambda c: c["key"])
def test_recorded_bytes_decode_to_the_recorded_values(case, device):
    golden = tensors(case)
    state = F.QuantState(
        absmax=golden["absmax"].to(device),
        shape=torch.Size(case["shape"]),
        blocksize=case["blocksize"],
        quant_type=case["quant_type"],
        dtype=dtype_of(case),
    )
    decoded = F.dequantize_4bit(golden["packed"].view(-1, 1).to(device), state)
    # The recorded values keep the sign of a zero; ours is +0.
    assert_same(decoded, golden["dequantized"].view(case["shape"]) + 0.0)


@pytest.mark.parametrize("case", NESTED, ids=lambda c: c["key"])
def test_nested_statistics_are_the_recorded_ones(case, device):
    golden = {
        k.removeprefix(case["key"] + "."): v for k, v in NESTED_TENSORS.items() if k.startswith(case["key"] + ".")
    }
    packed, state = F.quantize_4bit(golden["input"].to(device), quant_type=case["quant_type"], compress_statistics=True)
    assert (
        without_signed_zero(unpack(packed, golden["input"].numel())).tolist()
        == without_signed_zero(unpack(golden["packed"], golden["input"].numel())).tolist()
    )
    offset = golden["offset"].view(())
    torch.testing.assert_close(state.offset.cpu(), offset, rtol=NESTED_OFFSET_RTOL, atol=0)
    torch.testing.assert_close(state.state2.absmax.cpu(), golden["state2_absmax"], rtol=0, atol=2e-6 * offset.item())
    assert_same(state.state2.code, golden["state2_code"])

    # Everything after the offset is exact, given the offset.
    plain = golden["plain_absmax"]
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(
        (plain - offset).to(device), dynamic_map().to(device), 256
    )
    expected_codes, _ = oracle_quantize_blockwise(plain - offset, dynamic_map(), 256)
    assert_same(scales, golden["state2_absmax"])
    assert_same(codes, expected_codes)
    ours, _ = torch.ops.bitsandbytes.quantize_blockwise(
        (plain - state.offset.cpu()).to(device), dynamic_map().to(device), 256
    )
    assert_same(state.absmax, ours)


@pytest.mark.parametrize("case", QUANT4[:12], ids=lambda c: c["key"])
def test_the_oracle_of_these_tests_agrees_with_the_recorded_values(case):
    golden = tensors(case)
    args = (golden["packed"], golden["absmax"], case["blocksize"], case["quant_type"], case["shape"], dtype_of(case))
    assert_same(oracle_dequantize_4bit(*args), golden["dequantized"].view(case["shape"]) + 0.0)
