"""The 4-bit functions: what they add to the operators."""

import copy

import pytest
import torch

import bitsandbytes as bnb
from bitsandbytes.errors import ArgumentError
import bitsandbytes.functional as F
from tests.helpers import (
    BLOCKSIZES,
    FLOATS,
    LAYOUTS,
    NESTED_OFFSET_RTOL,
    QUANT_TYPES,
    STORAGES,
    Unchanged,
    assert_same,
    double,
    dynamic_map,
    oracle_dequantize_4bit,
    oracle_dequantize_blockwise,
    oracle_quantize_4bit,
    oracle_quantize_blockwise,
    randn,
    relaid,
)

every_type = pytest.mark.parametrize("quant_type", QUANT_TYPES)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
nested = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])


@every_type
@every_dtype
def test_the_state_describes_the_input(dtype, quant_type, device):
    x = randn(5, 70, dtype=dtype, device=device)
    packed, state = F.quantize_4bit(x, quant_type=quant_type)
    expected, absmax = oracle_quantize_4bit(x, 64, quant_type)
    assert_same(packed, expected)
    assert_same(state.absmax, absmax)
    assert (state.shape, state.dtype, state.blocksize, state.quant_type) == (x.shape, dtype, 64, quant_type)
    assert (state.nested, state.offset, state.state2) == (False, None, None)
    assert_same(state.code, F.get_4bit_type(quant_type, device=device))
    assert {packed.device, state.absmax.device, state.code.device} == {x.device}


@every_type
@pytest.mark.parametrize("blocksize", [None, *BLOCKSIZES])
def test_round_trip_for_every_blocksize(blocksize, quant_type, device):
    x = randn(3, 50, 7, device=device)
    packed, state = F.quantize_4bit(x, blocksize=blocksize, quant_type=quant_type)
    assert state.blocksize == (blocksize or 64)
    decoded = F.dequantize_4bit(packed, state)
    assert_same(decoded, oracle_dequantize_4bit(packed, state.absmax, blocksize or 64, quant_type, x.shape))


def test_named_variants_and_defaults(device):
    x = randn(4, 64, device=device)
    for quantize, quant_type in ((F.quantize_nf4, "nf4"), (F.quantize_fp4, "fp4"), (F.quantize_4bit, "fp4")):
        packed, state = quantize(x)
        assert state.quant_type == quant_type
        assert_same(packed, oracle_quantize_4bit(x, 64, quant_type)[0])
    for dequantize, quant_type in ((F.dequantize_nf4, "nf4"), (F.dequantize_fp4, "fp4")):
        packed, state = F.quantize_4bit(x, quant_type=quant_type)
        assert_same(dequantize(packed, state), F.dequantize_4bit(packed, state))


# bitsandbytes#1567: NF4 weights decoded as FP4, the default of the argument.
class TestTheTypeOfTheStateWins:
    def test_over_the_default_of_the_argument(self, device):
        x = randn(4, 64, device=device)
        packed, state = F.quantize_4bit(x, quant_type="nf4")
        expected = oracle_dequantize_4bit(packed, state.absmax, 64, "nf4", x.shape)
        assert_same(F.dequantize_4bit(packed, state), expected)
        assert_same(F.dequantize_4bit(packed, quant_state=state, quant_type="nf4"), expected)

    @pytest.mark.parametrize(("has", "asked"), [("nf4", "fp4"), ("fp4", "nf4")])
    def test_and_an_explicit_conflict_is_refused(self, has, asked, device):
        packed, state = F.quantize_4bit(randn(4, 64, device=device), quant_type=has)
        conflicts = [
            lambda: F.dequantize_4bit(packed, state, quant_type=asked),
            lambda: getattr(F, f"dequantize_{asked}")(packed, state),
        ]
        for call in conflicts:
            with pytest.raises(ArgumentError, match=f"quant_type must be '{has}'.*got '{asked}'"):
                call()

    def test_and_so_does_its_blocksize(self, device):
        packed, state = F.quantize_4bit(randn(4, 64, device=device), blocksize=128)
        assert_same(F.dequantize_4bit(packed, state, blocksize=128), F.dequantize_4bit(packed, state))
        with pytest.raises(ArgumentError, match=r"blocksize must be 128.*got 64"):
            F.dequantize_4bit(packed, state, blocksize=64)


@every_type
def test_decoding_without_a_state(quant_type, device):
    x = randn(4, 64, dtype=torch.float16, device=device)
    packed, state = F.quantize_4bit(x, quant_type=quant_type, blocksize=32)
    out = torch.empty_like(x)
    result = F.dequantize_4bit(packed, absmax=state.absmax, out=out, blocksize=32, quant_type=quant_type)
    assert result is out
    assert_same(out, F.dequantize_4bit(packed, state))


class TestNestedStatistics:
    @every_type
    @pytest.mark.parametrize("shape", [(5, 70), (1,), (300, 64), (256, 64), (64, 300), (7, 4096)], ids=str)
    def test_follow_the_rules_given_the_offset(self, shape, quant_type, device):
        x = randn(*shape, device=device)
        packed, state = F.quantize_4bit(x, quant_type=quant_type, compress_statistics=True)
        plain_packed, absmax = oracle_quantize_4bit(x, 64, quant_type)
        assert_same(packed, plain_packed)
        assert state.nested
        assert state.offset.shape == ()
        assert state.offset.dtype == torch.float32
        torch.testing.assert_close(state.offset.cpu().double(), absmax.double().mean(), rtol=NESTED_OFFSET_RTOL, atol=0)
        codes, scales = oracle_quantize_blockwise(absmax - state.offset.cpu(), dynamic_map(), 256)
        assert_same(state.absmax, codes)
        assert_same(state.state2.absmax, scales)
        assert_same(state.state2.code, dynamic_map())
        assert (state.state2.blocksize, state.state2.dtype) == (256, torch.float32)
        decoded = oracle_dequantize_blockwise(codes, scales, dynamic_map(), 256) + state.offset.cpu()
        assert_same(F.dequantize_4bit(packed, state), oracle_dequantize_4bit(packed, decoded, 64, quant_type, shape))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_value_that_is_not_finite_shows_in_the_whole_tensor(self, value, device):
        x = randn(8, 64, device=device)
        x[3, 3] = value
        packed, state = F.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
        assert not state.offset.isfinite()
        assert not F.dequantize_4bit(packed, state).isfinite().any()

    def test_of_an_empty_tensor(self, device):
        x = torch.zeros(0, 64, device=device)
        packed, state = F.quantize_4bit(x, compress_statistics=True)
        assert F.dequantize_4bit(packed, state).shape == (0, 64)
        state.as_dict(packed=True)

    def test_of_zeros_are_exact(self, device):
        packed, state = F.quantize_4bit(torch.zeros(8, 64, device=device), quant_type="nf4", compress_statistics=True)
        assert_same(F.dequantize_4bit(packed, state), torch.zeros(8, 64))


@nested
@every_type
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_storage_dtypes_change_bytes_nowhere(storage, quant_type, nested, device):
    x = randn(32, 64, device=device)
    reference, _ = F.quantize_4bit(x, quant_type=quant_type, compress_statistics=nested)
    packed, state = F.quantize_4bit(x, quant_type=quant_type, compress_statistics=nested, quant_storage=storage)
    assert packed.dtype == storage
    assert packed.shape == (32 * 32 // storage.itemsize, 1)
    assert_same(packed.view(torch.uint8).view(-1, 1), reference)
    assert_same(F.dequantize_4bit(packed, state), F.dequantize_4bit(reference, state))


# bitsandbytes#1690, #1995
@nested
@every_type
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_never_matter_in_either_direction(layout, quant_type, nested, device):
    x = randn(2, 6, 8, 10, dtype=torch.float16, device=device)
    expected, state = F.quantize_4bit(x, quant_type=quant_type, compress_statistics=nested)
    view = relaid(x, layout)
    with Unchanged(view):
        packed, view_state = F.quantize_4bit(view, quant_type=quant_type, compress_statistics=nested)
    assert_same(packed, expected)
    assert view_state == state
    sliced = relaid(packed, layout)
    with Unchanged(sliced):
        decoded = F.dequantize_4bit(sliced, state)
    assert_same(decoded, F.dequantize_4bit(expected, state))
    out = relaid(torch.zeros_like(x), layout)
    assert F.dequantize_4bit(packed, state, out=out) is out
    assert_same(out, decoded)


@nested
def test_results_land_in_the_callers_tensors(nested, device):
    x = randn(8, 64, device=device)
    expected, expected_state = F.quantize_4bit(x, compress_statistics=nested)
    out = torch.zeros_like(expected)
    absmax = torch.zeros_like(expected_state.absmax)
    packed, state = F.quantize_4bit(x, absmax=absmax, out=out, compress_statistics=nested)
    assert packed is out
    assert state.absmax is absmax
    assert_same(out, expected)
    assert_same(absmax, expected_state.absmax)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_a_transposed_packed_vector_decodes_to_the_transposed_result(storage, device):
    x = randn(6, 64, device=device)
    packed, state = F.quantize_4bit(x, quant_type="nf4", quant_storage=storage)
    assert packed.t().shape[0] == 1
    assert_same(F.dequantize_4bit(packed.t(), state), F.dequantize_4bit(packed, state).t().contiguous())


@pytest.mark.parametrize(
    "shape", [(), (1,), (2,), (127,), (128,), (1, 2), (2, 1), (0,), (0, 64), (4, 0), (2, 3, 4, 5)], ids=str
)
def test_every_shape_comes_back(shape, device):
    """Also (2,) and (128,), which upstream gives back as (2, 1) and (1, 128)."""
    x = randn(*shape, device=device)
    packed, state = F.quantize_4bit(x, quant_type="nf4")
    decoded = F.dequantize_4bit(packed, state)
    assert decoded.shape == x.shape
    assert_same(decoded, oracle_dequantize_4bit(packed, state.absmax, 64, "nf4", shape))


def test_absmax_in_bfloat16_decodes(device):
    """Upstream saves it so for layers that ran on some CPUs."""
    packed, state = F.quantize_4bit(randn(4, 64, device=device), quant_type="nf4")
    state.absmax = state.absmax.bfloat16()
    assert_same(
        F.dequantize_4bit(packed, state), oracle_dequantize_4bit(packed, state.absmax.float(), 64, "nf4", (4, 64))
    )


@nested
def test_a_parameter_quantises_to_a_state_without_gradients(nested, device):
    """A state is copied and saved, which PyTorch refuses for tensors inside a graph."""
    weight = torch.nn.Parameter(randn(4, 64, device=device))
    packed, state = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    tensors = [packed, *(v for v in state.as_dict().values() if isinstance(v, torch.Tensor))]
    assert not any(t.requires_grad for t in tensors)
    assert copy.deepcopy(state) == state


class TestGemv:
    @nested
    @every_type
    @every_dtype
    @pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.float32], ids=str)
    def test_equals_linear_with_the_decoded_weight(self, storage, dtype, quant_type, nested, device):
        w = randn(8, 96, dtype=dtype, device=device)
        packed, state = F.quantize_4bit(w, quant_type=quant_type, compress_statistics=nested, quant_storage=storage)
        x = randn(2, 1, 96, dtype=dtype, device=device, seed=1)
        decoded = double(F.dequantize_4bit(packed, state))
        expected = torch.nn.functional.linear(double(x), decoded)
        scale = torch.nn.functional.linear(double(x).abs(), decoded.abs())
        for weight in (packed, packed.t()):
            result = F.gemv_4bit(x, weight, state=state)
            assert result.dtype == dtype
            assert result.shape == (2, 1, 8)
            assert ((double(result) - expected).abs() <= 2 * torch.finfo(dtype).eps * scale).all()

    def test_out(self, device):
        packed, state = F.quantize_4bit(randn(8, 64, device=device), quant_type="nf4")
        x = randn(1, 64, device=device)
        out = relaid(torch.zeros(1, 8, device=device), "every other")
        assert F.gemv_4bit(x, packed, out=out, state=state) is out
        assert_same(out, F.gemv_4bit(x, packed, state=state))

    # bitsandbytes#1862
    @every_dtype
    def test_one_row_and_many_rows_agree_with_matmul_4bit(self, dtype, device):
        packed, state = F.quantize_4bit(randn(40, 64, dtype=dtype, device=device), quant_type="nf4")
        x = randn(1, 64, dtype=dtype, device=device, seed=1)
        many = bnb.matmul_4bit(x.repeat(8, 1), packed.t(), quant_state=state)
        # The weights of many bf16 rows may be rounded to bf16 (docs/numerics.md).
        magnitude = (x.abs() @ F.dequantize_4bit(packed, state).abs().t()).max().item()
        atol = torch.finfo(dtype).eps / 2 * magnitude if dtype == torch.bfloat16 else 1e-5
        for one in (F.gemv_4bit(x, packed, state=state), bnb.matmul_4bit(x, packed.t(), quant_state=state)):
            torch.testing.assert_close(many[:1], one, rtol=2 * torch.finfo(dtype).eps, atol=atol)
