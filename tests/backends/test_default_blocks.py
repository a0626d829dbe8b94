"""The reference works in spans; small ones here, so that small tensors cross their boundaries."""

from hypothesis import given
from hypothesis import strategies as st
import pytest
import torch

from bitsandbytes.backends.default import _blocks, fourbit
from tests.helpers import (
    FLOATS,
    LAYOUTS,
    STORAGES,
    Unchanged,
    assert_same,
    dynamic_map,
    oracle_dequantize_4bit,
    oracle_dequantize_blockwise,
    oracle_int8_rows,
    oracle_quantize_4bit,
    oracle_quantize_blockwise,
    randint,
    randn,
    relaid,
)

SPANS = (64, 96, 100, 1000)
ops = torch.ops.bitsandbytes


@pytest.fixture(params=SPANS)
def span(request, monkeypatch):
    monkeypatch.setattr(_blocks, "SPAN", request.param)
    monkeypatch.setattr(fourbit, "SPAN", request.param)
    return request.param


@given(numel=st.integers(0, 5000), blocksize=st.integers(1, 700), size=st.integers(1, 300))
def test_spans_cover_every_element_once_and_never_share_a_block_unless_it_is_larger(numel, blocksize, size):
    saved, _blocks.SPAN = _blocks.SPAN, size
    try:
        spans = list(_blocks.spans(numel, blocksize))
    finally:
        _blocks.SPAN = saved
    position = 0
    for start, stop, first, last in spans:
        assert start == position
        assert 0 < stop - start <= size
        assert first == start // blocksize
        assert last == -(stop // -blocksize)
        assert last - first == 1 or start % blocksize == 0
        position = stop
    assert position == numel


@given(data=st.data(), shape=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_any_range_of_any_strided_tensor_reads_and_writes(data, shape):
    numel = torch.Size(shape).numel()
    x = torch.arange(numel, dtype=torch.float32).view(shape).permute(data.draw(st.permutations(range(len(shape)))))
    for axis in range(x.dim()):
        x = x[(slice(None),) * axis + (slice(None, None, data.draw(st.integers(1, 3))),)]
    if data.draw(st.booleans()):
        y = x.unsqueeze(0).expand(data.draw(st.integers(1, 4)), *x.shape)
    else:
        y = x
    start = data.draw(st.integers(0, y.numel()))
    stop = data.draw(st.integers(start, y.numel()))
    assert torch.equal(_blocks.read(y, start, stop, torch.float64), y.flatten()[start:stop].double())
    stop = min(stop, x.numel())
    start = min(start, stop)
    expected = x.flatten().clone()
    expected[start:stop] = -1
    _blocks.write(x, start, torch.full((stop - start,), -1.0))
    assert torch.equal(x.flatten(), expected)


@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096])
def test_4bit_across_spans(blocksize, quant_type, layout, span):
    for dtype in FLOATS:
        x = randn(3, 5, 7, 31, dtype=dtype)
        view = x if layout == "contiguous" else relaid(x, layout)
        with Unchanged(view):
            packed, absmax = ops.quantize_4bit(view, blocksize, quant_type, torch.uint8)
        expected_packed, expected_absmax = oracle_quantize_4bit(x, blocksize, quant_type)
        assert_same(packed, expected_packed)
        assert_same(absmax, expected_absmax)
        out = torch.zeros_like(view)
        ops.dequantize_4bit.out(packed, absmax, blocksize, quant_type, list(x.shape), dtype, out=out)
        assert_same(out, oracle_dequantize_4bit(packed, absmax, blocksize, quant_type, x.shape, dtype))


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_packed_tensors_of_every_storage_dtype_across_spans(storage, span):
    packed = randint(0, 256, (1600,), torch.uint8).view(storage)
    absmax = randn(100).abs()
    expected = oracle_dequantize_4bit(packed, absmax, 32, "nf4", (3200,))
    for layout in LAYOUTS:
        assert_same(ops.dequantize_4bit(relaid(packed, layout), absmax, 32, "nf4", [3200], torch.float32), expected)


@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
@pytest.mark.parametrize("blocksize", [1, 7, 64, 150, 4096, 2**40])
def test_blockwise_across_spans(blocksize, layout, span):
    x = randn(3, 5, 7, 31, dtype=torch.float16)
    x[0, 0, 0, 0], x[1, 2, 3, 4] = float("nan"), float("inf")
    view = x if layout == "contiguous" else relaid(x, layout)
    codes, absmax = ops.quantize_blockwise(view, dynamic_map(), blocksize)
    expected_codes, expected_absmax = oracle_quantize_blockwise(x, dynamic_map(), blocksize)
    assert_same(absmax, expected_absmax)
    assert_same(codes, expected_codes)
    decoded = ops.dequantize_blockwise(relaid(codes, "transposed"), absmax, dynamic_map(), blocksize, torch.float32)
    assert_same(decoded, oracle_dequantize_blockwise(codes, absmax, dynamic_map(), blocksize))


@pytest.mark.parametrize("threshold", [0.0, 2.0])
@pytest.mark.parametrize("shape", [(40, 7), (7, 150), (3, 2500), (2, 3, 65)], ids=str)
def test_int8_rows_across_spans(shape, threshold, span):
    x = randn(*shape)
    for view in (x, relaid(x, "every other"), relaid(x, "transposed")):
        codes, stats, outliers = ops.int8_vectorwise_quant(view, threshold)
        expected_codes, expected_stats, expected_outliers = oracle_int8_rows(x, threshold)
        assert_same(stats, expected_stats)
        assert_same(codes, expected_codes)
        if threshold:
            assert_same(outliers, expected_outliers)
    decoded = ops.int8_vectorwise_dequant(codes, stats)
    expected = codes.double() * stats.double().view(*shape[:-1], 1) / 127
    torch.testing.assert_close(decoded.double(), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("k", [1, 33, 64, 250])
def test_gemm_across_spans(k, span):
    packed, absmax = randint(0, 256, ((11 * k + 1) // 2, 1), torch.uint8), randn(-(11 * k // -32)).abs()
    x = randn(3, k)
    w = oracle_dequantize_4bit(packed, absmax, 32, "nf4", (11, k))
    result = ops.gemm_4bit(x, packed, [11, k], absmax, 32, "nf4")
    bound = 2 * k * torch.finfo(torch.float32).eps * (x.double().abs() @ w.double().abs().t())
    assert ((result.double() - x.double() @ w.double().t()).abs() <= bound).all()
