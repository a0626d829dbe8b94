"""`quantize_4bit` and `dequantize_4bit` against tables and an oracle."""

from itertools import pairwise

import pytest
import torch

from tests.cases.fourbit import CASES, FP4, NF4, PACKED, SHAPES, SIZES, ZERO_CODE, Case
from tests.helpers import (
    BLOCKSIZES,
    FLOATS,
    QUANT_TYPES,
    STORAGES,
    assert_same,
    bits,
    oracle_dequantize_4bit,
    oracle_quantize_4bit,
    pack,
    randint,
    randn,
    unpack,
    with_dtypes,
)

every_type = pytest.mark.parametrize("quant_type", QUANT_TYPES)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_blocksize = pytest.mark.parametrize("blocksize", BLOCKSIZES)


def quantize(target, x, blocksize, quant_type, storage=torch.uint8):
    return target.op("quantize_4bit")(x, blocksize, quant_type, storage)


def dequantize(target, packed, absmax, blocksize, quant_type, shape, dtype):
    return target.op("dequantize_4bit")(packed, absmax, blocksize, quant_type, shape, dtype)


def case_result(case: Case, target, dtype, blocksize, before: int, after: int):
    """Codes, absmax and decoded values of the case's block, with whole blocks of ones before and after it.

    A case without neighbours is a short block; with one after it, its block is filled up with zeros.
    """
    padding = blocksize - len(case.values) if after else 0
    values = [1.0] * (before * blocksize) + [*case.values, *[0.0] * padding] + [1.0] * (after * blocksize)
    x = torch.tensor(values, dtype=torch.float32).to(dtype).to(target.device)
    packed, absmax = quantize(target, x, blocksize, case.quant_type)
    decoded = dequantize(target, packed, absmax, blocksize, case.quant_type, x.shape, dtype)
    return unpack(packed, x.numel()).tolist(), absmax.cpu(), decoded.cpu(), padding


@every_blocksize
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (2, 1)], ids=["alone", "last", "between others"])
@pytest.mark.parametrize(("case", "dtype"), with_dtypes(CASES, lambda case: case.values))
def test_table(case, before, after, dtype, blocksize, target):
    codes, absmax, decoded, padding = case_result(case, target, dtype, blocksize, before, after)
    start, stop = before * blocksize, before * blocksize + len(case.values)

    assert_same(absmax, torch.tensor([1.0] * before + [case.absmax] + [1.0] * after))
    assert codes[start:stop] == list(case.codes)
    assert codes[stop : stop + padding] == [case.zero_code] * padding
    expected = case.decoded
    if expected is None:
        levels = torch.tensor(NF4 if case.quant_type == "nf4" else FP4, dtype=torch.float32)
        expected = (levels[list(case.codes)] * torch.tensor(case.absmax)).tolist()
    assert_same(decoded[start:stop], torch.tensor(expected).to(dtype), "decoded")
    assert_same(decoded[stop : stop + padding], torch.full((padding,), case.zero_decoded, dtype=dtype), "padding")
    # The neighbours never notice.
    one = {"nf4": 15, "fp4": 3}[case.quant_type]
    assert codes[:start] == [one] * start
    assert codes[stop + padding :] == [one] * (after * blocksize)
    assert_same(decoded[:start], torch.ones(start, dtype=dtype), "before")
    assert_same(decoded[stop + padding :], torch.ones(after * blocksize, dtype=dtype), "after")


@pytest.mark.parametrize(("quant_type", "values", "expected"), PACKED)
def test_the_first_element_of_a_pair_is_in_the_high_nibble(quant_type, values, expected, target):
    x = torch.tensor(values, dtype=torch.float32, device=target.device)
    packed, absmax = quantize(target, x, 64, quant_type)
    assert_same(packed, torch.tensor(expected, dtype=torch.uint8).view(-1, 1))
    assert absmax.shape == (1 if values else 0,)


@every_type
def test_every_code_decodes_to_its_level_bit_for_bit(quant_type, target):
    codes = torch.arange(16, dtype=torch.uint8)
    packed = torch.from_numpy(pack(codes.numpy(), 0)).view(-1, 1).to(target.device)
    decoded = dequantize(target, packed, torch.ones(1, device=target.device), 64, quant_type, (16,), torch.float32)
    assert_same(decoded, torch.tensor(NF4 if quant_type == "nf4" else FP4, dtype=torch.float32))


@every_blocksize
@every_dtype
@every_type
def test_codes_statistics_and_decoding_equal_the_oracle_for_every_size(quant_type, dtype, blocksize, target):
    for numel in SIZES:
        x = randn(numel, dtype=dtype, seed=numel, scale=3.0)
        packed, absmax = quantize(target, x.to(target.device), blocksize, quant_type)
        expected_packed, expected_absmax = oracle_quantize_4bit(x, blocksize, quant_type)
        assert_same(absmax, expected_absmax, f"absmax of {numel}")
        assert_same(packed, expected_packed, f"codes of {numel}")
        decoded = dequantize(target, packed, absmax, blocksize, quant_type, x.shape, dtype)
        expected = oracle_dequantize_4bit(packed, absmax, blocksize, quant_type, x.shape, dtype)
        assert_same(decoded, expected, f"values of {numel}")


@every_type
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_comes_back(shape, dtype, quant_type, target):
    x = randn(*shape, dtype=dtype)
    packed, absmax = quantize(target, x.to(target.device), 64, quant_type)
    assert packed.shape == ((x.numel() + 1) // 2, 1)
    expected_packed, expected_absmax = oracle_quantize_4bit(x, 64, quant_type)
    assert_same(packed, expected_packed)
    assert_same(absmax, expected_absmax)
    decoded = dequantize(target, packed, absmax, 64, quant_type, shape, dtype)
    assert_same(decoded, oracle_dequantize_4bit(packed, absmax, 64, quant_type, shape, dtype))


# bitsandbytes#1157: one kernel variant was built for the wrong dtype.
@every_type
@every_dtype
@every_blocksize
def test_a_block_larger_than_the_tensor_is_one_short_block(blocksize, dtype, quant_type, target):
    x = randn(16, dtype=dtype)
    packed, absmax = quantize(target, x.to(target.device), blocksize, quant_type)
    assert_same(absmax, x.float().abs().max().view(1))
    assert_same(packed, oracle_quantize_4bit(x, 4096, quant_type)[0])


# bitsandbytes#1884: the last block read past the end of the tensor.
@every_type
@pytest.mark.parametrize("shape", [(7, 13), (1, 63), (65,), (127, 129), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
def test_memory_after_the_tensor_does_not_spoil_the_last_block(blocksize, shape, quant_type, target):
    x = randn(*shape)
    beyond = torch.full((x.numel() + 8192,), 1e30, device=target.device)
    beyond[: x.numel()] = x.flatten().to(target.device)
    packed, absmax = quantize(target, beyond[: x.numel()].view(shape), blocksize, quant_type)
    expected_packed, expected_absmax = oracle_quantize_4bit(x, blocksize, quant_type)
    assert_same(packed, expected_packed)
    assert_same(absmax, expected_absmax)


# bitsandbytes#565: the error of FP4 jumped between block sizes 512 and 1024.
@every_type
def test_the_error_grows_slowly_with_the_blocksize(quant_type, target):
    x = randn(256, 1024)
    errors = []
    for blocksize in BLOCKSIZES:
        packed, absmax = quantize(target, x.to(target.device), blocksize, quant_type)
        decoded = dequantize(target, packed, absmax, blocksize, quant_type, x.shape, torch.float32)
        errors.append((x - decoded.cpu()).norm().item())
    assert all(small < large < 1.15 * small for small, large in pairwise(errors)), errors


@every_type
@every_dtype
def test_inputs_near_every_decision_point(quant_type, dtype, target):
    """Every finite 16-bit pattern in [-1, 1], or every fp32 number near a midpoint: no code is off by one."""
    if dtype == torch.float32:
        points = torch.tensor([(a + b) / 2 for a, b in zip(sorted(set(NF4)), sorted(set(NF4))[1:], strict=False)])
        points = torch.cat((points, -points, torch.tensor(FP4), torch.arange(1, 24) / 24.0))
        x = (points.float().view(torch.int32).unsqueeze(1) + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32)
        x = x[x.abs() <= 1].flatten()
    else:
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        x = x[x.abs() <= 1]
    for absmax in (1.0, 12.0, 0.75):
        scaled = (x.float() * absmax).to(dtype)
        blocks = torch.nn.functional.pad(scaled, (0, -scaled.numel() % 63)).view(-1, 63)
        blocks = torch.nn.functional.pad(blocks, (0, 1), value=absmax)
        packed, got = quantize(target, blocks.to(target.device), 64, quant_type)
        expected_packed, expected = oracle_quantize_4bit(blocks, 64, quant_type)
        assert_same(got, expected)
        assert_same(packed, expected_packed)


# bitsandbytes#1709: storage dtypes must never go through arithmetic or casts.
@every_type
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("shape", [(16,), (5, 64), (3, 17, 32), (0,)], ids=str)
def test_every_storage_dtype_holds_the_same_bytes(shape, storage, quant_type, target):
    x = randn(*shape)
    expected, _ = oracle_quantize_4bit(x, 64, quant_type)
    packed, absmax = quantize(target, x.to(target.device), 64, quant_type, storage)
    assert packed.dtype == storage
    assert packed.shape == (expected.numel() // storage.itemsize, 1)
    assert_same(packed.cpu().view(torch.uint8).view(-1, 1), expected)
    decoded = dequantize(target, packed, absmax, 64, quant_type, shape, torch.float32)
    assert_same(decoded, oracle_dequantize_4bit(expected, absmax, 64, quant_type, shape))


# bitsandbytes#1342, #1995: strided slices were taken in storage order.
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("numel", [16, 48, 4096, 9000])
def test_sliced_packed_tensors_of_every_storage_dtype_decode(numel, storage, target):
    numel -= numel % 16
    packed = randint(0, 256, (numel // 2,), torch.uint8).view(storage)
    absmax = randn(-(numel // -32)).abs()
    expected = oracle_dequantize_4bit(packed, absmax, 32, "nf4", (numel,))
    spread = torch.zeros(3 * packed.numel(), dtype=storage, device=target.device)
    spread[1::3] = packed.to(target.device)
    scales = torch.zeros(2 * absmax.numel(), device=target.device)
    scales[::2] = absmax.to(target.device)
    for view in (spread[1::3], spread[1::3].view(-1, 1), spread.view(-1, 3)[:, 1:2].t(), spread.view(-1, 3)[:, 1:2]):
        assert_same(
            dequantize(target, view, scales[::2], 32, "nf4", (numel,), torch.float32), expected, str(view.shape)
        )


VIEWS = {
    "every second row": lambda x: x[::2],
    "transposed": lambda x: x.transpose(0, -1),
    "every second of an inner dimension": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, *x.shape[1:]),
    "expanded inside": lambda x: x[:, :1].expand(-1, 9, *x.shape[2:]),
    "channels last": lambda x: x.view(*x.shape[:2], 4, -1).to(memory_format=torch.channels_last),
    "one column": lambda x: x[..., 3],
    "diagonal": lambda x: x.flatten()[: x.numel() // 2 * 2].view(2, -1).t()[3:-3],
    "permuted": lambda x: x.permute(2, 0, 1),
}


@every_type
@every_dtype
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_quantises_like_its_contiguous_copy(view, dtype, quant_type, target):
    x = VIEWS[view](randn(6, 10, 36, dtype=dtype, device=target.device))
    assert not x.is_contiguous()
    packed, absmax = quantize(target, x, 32, quant_type)
    expected_packed, expected_absmax = oracle_quantize_4bit(x, 32, quant_type)
    assert_same(packed, expected_packed)
    assert_same(absmax, expected_absmax)


@every_type
def test_random_bytes_decode_to_level_times_absmax_with_one_rounding(quant_type, target):
    packed = randint(0, 256, (4097, 1), torch.uint8)
    for dtype in FLOATS:
        for blocksize in BLOCKSIZES:
            absmax = randn(-(8193 // -blocksize), seed=blocksize).abs() * 100
            decoded = dequantize(
                target, packed.to(target.device), absmax.to(target.device), blocksize, quant_type, (8193,), dtype
            )
            assert_same(decoded, oracle_dequantize_4bit(packed, absmax, blocksize, quant_type, (8193,), dtype))


def test_the_low_nibble_after_an_odd_number_of_elements_is_not_read(target):
    absmax = torch.ones(1, device=target.device)
    for byte in range(256):
        packed = torch.tensor([[byte]], dtype=torch.uint8, device=target.device)
        decoded = dequantize(target, packed, absmax, 64, "nf4", (1,), torch.float32)
        assert decoded.item() == pytest.approx(NF4[byte >> 4], abs=0)


@every_type
def test_negative_zero_never_comes_back(quant_type, target):
    x = torch.tensor([-0.0, 0.0, -1e-30, 1e-30, 1.0, -0.0], device=target.device)
    packed, absmax = quantize(target, x, 64, quant_type)
    decoded = dequantize(target, packed, absmax, 64, quant_type, x.shape, torch.float32)
    assert (bits(decoded[:4]) == 0).all()
    assert unpack(packed, 6).tolist()[:2] == [ZERO_CODE[quant_type]] * 2
