"""Properties over random shapes, dtypes, block sizes, strides and special values: equality with the oracle."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import torch

from tests.helpers import (
    BLOCKSIZES,
    FLOATS,
    LAYOUTS,
    QUANT_TYPES,
    Unchanged,
    assert_same,
    dynamic_map,
    oracle_dequantize_4bit,
    oracle_dequantize_blockwise,
    oracle_int8_rows,
    oracle_quantize_4bit,
    oracle_quantize_blockwise,
    relaid,
)

SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 2e-39, 1e-38, 65504.0, 3.3895e38, -1.0)

dtypes = st.sampled_from(FLOATS)
layouts = st.sampled_from(["contiguous", *LAYOUTS])
shapes = st.lists(st.integers(0, 40), min_size=0, max_size=4).filter(lambda s: np.prod(s, dtype=int) <= 6000)


@st.composite
def tensors(draw, shapes=shapes):
    """A tensor of any dtype, shape and layout; magnitudes from subnormal to huge, some values special."""
    shape, seed = draw(shapes), draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape) * 10.0 ** draw(st.integers(-42, 37))
    x = torch.from_numpy(np.asarray(values)).float()
    for value, share in draw(
        st.lists(st.tuples(st.sampled_from(SPECIAL), st.sampled_from([0.001, 0.05, 0.5])), max_size=3)
    ):
        x = torch.where(torch.from_numpy(np.asarray(generator.random(shape) < share)), value, x)
    x = x.to(draw(dtypes))
    layout = draw(layouts)
    return x if layout == "contiguous" else relaid(x, layout)


@given(x=tensors(), blocksize=st.sampled_from(BLOCKSIZES), quant_type=st.sampled_from(QUANT_TYPES), result=dtypes)
def test_4bit(target, x, blocksize, quant_type, result):
    x = x.to(target.device)
    with Unchanged(x):
        packed, absmax = target.op("quantize_4bit")(x, blocksize, quant_type, torch.uint8)
    expected_packed, expected_absmax = oracle_quantize_4bit(x, blocksize, quant_type)
    assert_same(absmax, expected_absmax)
    assert_same(packed, expected_packed)
    with Unchanged(packed, absmax):
        decoded = target.op("dequantize_4bit")(packed, absmax, blocksize, quant_type, list(x.shape), result)
    assert_same(decoded, oracle_dequantize_4bit(packed, absmax, blocksize, quant_type, x.shape, result))


@given(x=tensors(), blocksize=st.integers(1, 700) | st.sampled_from([4096, 2**40]), signed=st.booleans(), result=dtypes)
def test_blockwise(target, x, blocksize, signed, result):
    x, code = x.to(target.device), dynamic_map(signed).to(target.device)
    with Unchanged(x, code):
        codes, absmax = target.op("quantize_blockwise")(x, code, blocksize)
    expected_codes, expected_absmax = oracle_quantize_blockwise(x, code, blocksize)
    assert_same(absmax, expected_absmax)
    assert_same(codes, expected_codes)
    with Unchanged(codes, absmax):
        decoded = target.op("dequantize_blockwise")(codes, absmax, code, blocksize, result)
    assert_same(decoded, oracle_dequantize_blockwise(codes, absmax, code, blocksize, result))


@given(x=tensors(shapes.filter(len)), threshold=st.sampled_from([0.0, 1e-3, 1.0, 6.0, float("inf")]))
def test_int8_rows(target, x, threshold):
    x = x.to(target.device)
    with Unchanged(x):
        codes, stats, outliers = target.op("int8_vectorwise_quant")(x, threshold)
    expected_codes, expected_stats, expected_outliers = oracle_int8_rows(x, threshold)
    assert_same(stats, expected_stats)
    assert_same(codes, expected_codes)
    assert (codes != -128).all()
    if threshold:
        assert_same(outliers, expected_outliers)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 256),
    low=st.integers(-20, 0),
    others=st.sampled_from([500, 5000]),  # long inputs may be encoded in another way
)
def test_blockwise_with_any_ascending_map(target, seed, size, low, others):
    """Levels with many different exponents, padded by repeating 0, as the smaller maps are."""
    generator = np.random.default_rng(seed)
    levels = generator.uniform(-1, 1, size) * 2.0 ** generator.integers(low, 1, size)
    padded = np.sort(np.concatenate((levels, np.zeros(256 - size)))).astype(np.float32)
    code = torch.from_numpy(padded)
    exact = torch.from_numpy(((padded[1:].astype(np.float64) + padded[:-1]) / 2).astype(np.float32))
    x = torch.cat((exact, code, torch.from_numpy(generator.uniform(-1, 1, others).astype(np.float32)), torch.ones(1)))
    codes, _ = target.op("quantize_blockwise")(x.to(target.device), code.to(target.device), 10**6)
    assert_same(codes, oracle_quantize_blockwise(x, code, 10**6)[0])


@given(x=tensors(), quant_type=st.sampled_from(QUANT_TYPES), blocksize=st.sampled_from([32, 64]))
def test_quantising_what_was_decoded_changes_nothing(target, x, quant_type, blocksize):
    """Every level encodes as itself, at any scale that fp32 does not round away."""
    x = x.to(target.device).float().nan_to_num(0.0, 0.0, 0.0).clamp(-1e30, 1e30)
    x = torch.where(x.abs() < 1e-30, 0.0, x)
    packed, absmax = target.op("quantize_4bit")(x, blocksize, quant_type, torch.uint8)
    decoded = target.op("dequantize_4bit")(packed, absmax, blocksize, quant_type, list(x.shape), torch.float32)
    packed2, absmax2 = target.op("quantize_4bit")(decoded, blocksize, quant_type, torch.uint8)
    decoded2 = target.op("dequantize_4bit")(packed2, absmax2, blocksize, quant_type, list(x.shape), torch.float32)
    assert_same(absmax2, absmax)
    assert_same(decoded2, decoded)
