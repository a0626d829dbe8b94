"""`matmul_4bit`: results and gradients for every layout of the weight, and what it keeps for the backward."""

from contextlib import nullcontext
from itertools import product
import warnings

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import bitsandbytes as bnb
from bitsandbytes import functional as F

IN, OUT = 96, 40
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
KINDS = list(product(("nf4", "fp4"), (False, True)))

every_kind = pytest.mark.parametrize("quant_type, nested", KINDS)
every_rank = pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leading(rank):
    return (2, 3, 1, 2)[: rank - 1]


def quantized(out_features=OUT, in_features=IN, **kwargs):
    return F.quantize_4bit(randn(out_features, in_features), **{"quant_type": "nf4", **kwargs})


def compare(actual, expected, dtype):
    eps = torch.finfo(dtype).eps
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert torch.allclose(actual.float(), expected.float(), rtol=4 * eps, atol=8 * eps * IN**0.5)


def gradients(function, *inputs, grad):
    inputs = [None if value is None else value.detach().clone().requires_grad_() for value in inputs]
    y = function(*inputs)
    y.backward(grad.to(y.dtype))
    return y.detach(), *(None if value is None else value.grad for value in inputs)


@every_rank
@every_float
@pytest.mark.parametrize("with_bias", [False, True])
def test_result_and_gradients_are_those_of_the_decoded_weight(rank, dtype, with_bias):
    packed, state = quantized()
    weight = F.dequantize_4bit(packed, state)
    x = randn(*leading(rank), IN, dtype=dtype)
    bias = randn(OUT, seed=3, dtype=dtype) if with_bias else None
    grad = randn(*leading(rank), OUT, seed=4)
    ours = gradients(lambda x, b: bnb.matmul_4bit(x, packed, state, bias=b), x, bias, grad=grad)
    reference = gradients(
        lambda x, b: torch.nn.functional.linear(x, weight, b),
        x.float(),
        None if bias is None else bias.float(),
        grad=grad.to(dtype).float(),
    )
    for actual, expected in zip(ours, reference, strict=True):
        if expected is not None:
            compare(actual, expected, dtype)


@every_kind
@pytest.mark.parametrize("shape", [(64, 64), (7, 13), (1, 1), (5, 130), (33, 64)])
def test_any_shape_and_kind(quant_type, nested, shape):
    packed, state = quantized(*shape, quant_type=quant_type, compress_statistics=nested)
    weight = F.dequantize_4bit(packed, state)
    x, grad = randn(3, shape[1]), randn(3, shape[0], seed=1)
    ours = gradients(lambda x: bnb.matmul_4bit(x, packed, state), x, grad=grad)
    reference = gradients(lambda x: torch.nn.functional.linear(x, weight), x, grad=grad)
    for actual, expected in zip(ours, reference, strict=True):
        compare(actual, expected, torch.float32)


def test_gradients_agree_with_finite_differences():
    """The function is linear in each input, so a large step is exact up to the rounding in fp32."""
    packed, state = quantized(8, 12)
    x, bias = randn(3, 12).requires_grad_(), randn(8).requires_grad_()
    direction = randn(3, 8, seed=5)

    def value(x, bias):
        return (bnb.matmul_4bit(x, packed, state, bias=bias) * direction).sum()

    value(x, bias).backward()
    for tensor in (x, bias):
        for index in range(tensor.numel()):
            step = torch.zeros_like(tensor).view(-1).index_fill(0, torch.tensor(index), 0.5).view(tensor.shape)
            with torch.no_grad():
                ahead = value(x + step, bias) if tensor is x else value(x, bias + step)
                behind = value(x - step, bias) if tensor is x else value(x, bias - step)
            assert abs((ahead - behind).item() - tensor.grad.view(-1)[index].item()) < 1e-4


# Layouts

LAYOUTS = {
    "a column": lambda packed: packed,
    "a row": lambda packed: packed.t(),
    "a vector": lambda packed: packed.view(-1),
    "a strided column": lambda packed: torch.stack([packed, packed], 1)[:, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("out_features, in_features", [(OUT, IN), (64, 64), (IN, OUT)])
def test_one_row_and_many_agree_for_every_layout_of_the_codes(layout, out_features, in_features):
    packed, state = quantized(out_features, in_features)
    weight = F.dequantize_4bit(packed, state)
    x = randn(1, in_features)
    expected = x @ weight.t()
    for rows in (1, 2, 8, 33):
        y = bnb.matmul_4bit(x.repeat(rows, 1), layout(packed), state)
        compare(y, expected.repeat(rows, 1), torch.float32)
    x.requires_grad_()
    bnb.matmul_4bit(x, layout(packed), state).sum().backward()
    compare(x.grad, weight.sum(0, keepdim=True), torch.float32)


@every_kind
@every_rank
def test_a_weight_quantised_transposed_gives_the_right_result_and_a_warning(rank, quant_type, nested):
    packed, state = F.quantize_4bit(randn(IN, OUT), quant_type=quant_type, compress_statistics=nested)
    weight = F.dequantize_4bit(packed, state)  # (in_features, out_features)
    x, bias, grad = randn(*leading(rank), IN), randn(OUT, seed=3), randn(*leading(rank), OUT, seed=4)
    for B in (packed, packed.t()):
        with pytest.warns(DeprecationWarning, match="Re-quantize from the weight"):
            ours = gradients(lambda x, b, B=B: bnb.matmul_4bit(x, B, state, bias=b), x, bias, grad=grad)
        reference = gradients(lambda x, b: x @ weight + b, x, bias, grad=grad)
        for actual, expected in zip(ours, reference, strict=True):
            compare(actual, expected, torch.float32)


def test_the_usual_layout_gives_no_warning():
    packed, state = quantized()
    square, square_state = quantized(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnb.matmul_4bit(randn(3, IN), packed.t(), state)
        bnb.matmul_4bit(randn(3, 64), square.t(), square_state)


@pytest.mark.parametrize("blocksize", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("nested", [False, True])
def test_every_blocksize(blocksize, nested):
    packed, state = quantized(blocksize=blocksize, compress_statistics=nested)
    x = randn(3, IN)
    compare(bnb.matmul_4bit(x, packed, state), x @ F.dequantize_4bit(packed, state).t(), torch.float32)


@pytest.mark.parametrize("nested_blocksize", [16, 64, 4096])
def test_nested_statistics_in_blocks_of_another_size(nested_blocksize):
    """A checkpoint says which block size its statistics have; only 256 has a fused path."""
    packed, state = quantized(compress_statistics=False)
    offset = state.absmax.mean()
    codes, state2 = F.quantize_blockwise(state.absmax - offset, blocksize=nested_blocksize)
    nested = F.QuantState(
        absmax=codes,
        shape=state.shape,
        dtype=state.dtype,
        blocksize=state.blocksize,
        code=state.code,
        quant_type=state.quant_type,
        offset=offset,
        state2=state2,
    )
    weight = F.dequantize_4bit(packed, nested)
    assert not torch.equal(weight, F.dequantize_4bit(packed, state))
    x = randn(3, IN).requires_grad_()
    y = bnb.matmul_4bit(x, packed, nested)
    compare(y.detach(), (x @ weight.t()).detach(), torch.float32)
    y.sum().backward()
    compare(x.grad, weight.sum(0).expand(3, IN), torch.float32)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_storage_dtype_does_not_matter(storage):
    packed, state = quantized(quant_storage=storage)
    plain, plain_state = quantized()
    x = randn(3, IN)
    for B in (packed, packed.t()):
        assert torch.equal(bnb.matmul_4bit(x, B, state), bnb.matmul_4bit(x, plain, plain_state))


# out


@every_rank
@every_float
def test_out_receives_the_result_and_is_returned(rank, dtype):
    packed, state = quantized()
    x, bias = randn(*leading(rank), IN, dtype=dtype), randn(OUT, dtype=dtype)
    out = torch.full((*leading(rank), OUT), float("nan"), dtype=dtype)
    result = bnb.matmul_4bit(x, packed, state, out, bias)
    assert result is out and torch.equal(out, bnb.matmul_4bit(x, packed, state, bias=bias))


def test_out_for_a_weight_quantised_transposed():
    packed, state = F.quantize_4bit(randn(IN, OUT), quant_type="nf4")
    out = torch.empty(3, OUT)
    with pytest.warns(DeprecationWarning):
        bnb.matmul_4bit(randn(3, IN), packed, state, out=out)
    compare(out, randn(3, IN) @ F.dequantize_4bit(packed, state), torch.float32)


@pytest.mark.parametrize(
    "out",
    [torch.zeros(3, OUT + 1), torch.zeros(OUT, 3), torch.zeros(3, OUT, dtype=torch.float16), torch.zeros(3 * OUT)],
)
def test_an_out_that_does_not_fit_is_an_error_and_stays_as_it_was(out):
    packed, state = quantized()
    with pytest.raises(ValueError, match="out"):
        bnb.matmul_4bit(randn(3, IN), packed, state, out=out)
    assert out.count_nonzero() == 0


# Wrong arguments


@pytest.mark.parametrize(
    "x, change, message",
    [
        (randn(3, IN), lambda packed, state: (packed, None), "quant_state"),
        (randn(3, IN + 2), lambda packed, state: (packed, state), "96"),
        (randn(3, IN), lambda packed, state: (packed[:-1], state), "bytes"),
        (randn(3, IN).int(), lambda packed, state: (packed, state), "dtype"),
        (randn(4, 5), lambda packed, state: F.quantize_4bit(randn(2, 3, 5), quant_type="nf4"), "2-D"),
    ],
)
def test_wrong_arguments_are_errors(x, change, message):
    with pytest.raises(ValueError, match=message):
        bnb.matmul_4bit(x, *change(*quantized()))


def test_a_bias_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="bias"):
        bnb.matmul_4bit(randn(3, IN), *quantized(), bias=randn(OUT + 1))


# What is kept for the backward


def test_the_packed_weight_and_nothing_else_is_saved():
    """Hooks on saved tensors (activation offloading, FSDP) must see the weight; activations are not needed."""
    packed, state = quantized()
    saved = []
    x = randn(3, IN).requires_grad_()
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = bnb.matmul_4bit(x, packed, state, bias=randn(OUT).requires_grad_())
    assert [tensor.dtype for tensor in saved] == [torch.uint8]
    assert torch.equal(saved[0].reshape(-1), packed.view(-1))
    y.sum().backward()


def test_an_unpack_hook_may_hand_back_another_tensor():
    """A weight that was gathered for the forward and freed comes back elsewhere."""
    packed, state = quantized()
    x = randn(3, IN).requires_grad_()
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
        y = bnb.matmul_4bit(x, packed.clone(), state)
    y.sum().backward()
    compare(x.grad, F.dequantize_4bit(packed, state).sum(0).expand(3, IN), torch.float32)


def test_changing_the_weight_in_place_before_the_backward_is_noticed():
    packed, state = quantized()
    x = randn(3, IN).requires_grad_()
    y = bnb.matmul_4bit(x, packed, state)
    packed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_without_gradients(context):
    packed, state = quantized()
    x = randn(3, IN)
    with context():
        y = bnb.matmul_4bit(x, packed, state)
    assert not y.requires_grad
    compare(y, x @ F.dequantize_4bit(packed, state).t(), torch.float32)


def test_only_the_bias_needs_a_gradient():
    packed, state = quantized()
    bias = randn(OUT).requires_grad_()
    bnb.matmul_4bit(randn(2, 3, IN), packed, state, bias=bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((OUT,), 6.0))


def test_a_bias_of_another_dtype_gets_a_gradient_in_its_own():
    packed, state = quantized()
    bias = randn(OUT, dtype=torch.float32).requires_grad_()
    y = bnb.matmul_4bit(randn(3, IN, dtype=torch.bfloat16), packed, state, bias=bias)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert bias.grad.dtype == torch.float32 and torch.equal(bias.grad, torch.full((OUT,), 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_the_gradient_has_the_dtype_of_the_input(dtype):
    packed, state = quantized()
    x = randn(3, IN, dtype=dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = bnb.matmul_4bit(x, packed, state)
    y.float().sum().backward()
    weight = F.dequantize_4bit(packed, state)
    assert x.grad.dtype == dtype
    assert torch.allclose(x.grad.float(), weight.sum(0).expand(3, IN), rtol=0.02, atol=0.1)


def test_a_view_of_the_input_and_a_non_contiguous_gradient():
    packed, state = quantized()
    weight = F.dequantize_4bit(packed, state)
    x, grad = randn(IN, 6).t(), randn(OUT, 6, seed=1).t()
    ours = gradients(lambda x: bnb.matmul_4bit(x, packed, state), x, grad=grad)
    for actual, expected in zip(ours, (x @ weight.t(), grad @ weight), strict=True):
        compare(actual, expected, torch.float32)


def test_an_empty_batch_has_gradients_too():
    packed, state = quantized()
    x, bias = torch.zeros(0, IN, requires_grad=True), randn(OUT).requires_grad_()
    bnb.matmul_4bit(x, packed, state, bias=bias).sum().backward()
    assert x.grad.shape == (0, IN) and bias.grad.count_nonzero() == 0


def test_the_type_in_the_state_wins():
    """NF4 codes must never be decoded as FP4, the default of the functional interface."""
    for quant_type in ("nf4", "fp4"):
        packed, state = quantized(quant_type=quant_type)
        weight = F.dequantize_4bit(packed, state, quant_type=quant_type)
        compare(bnb.matmul_4bit(torch.eye(IN), packed, state), weight.t(), torch.float32)
