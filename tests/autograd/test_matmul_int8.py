"""`matmul` (LLM.int8()): results, gradients, the state, and what it keeps for the backward."""

from contextlib import nullcontext
import warnings

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import bitsandbytes as bnb
from bitsandbytes import functional as F
from bitsandbytes.autograd._functions import GlobalOutlierPooler

IN, OUT = 96, 40
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

every_rank = pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_threshold = pytest.mark.parametrize("threshold", [0.0, 3.0])
train_or_not = pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leading(rank):
    return (2, 3, 1, 2)[: rank - 1]


def frozen(threshold=0.0, train=False, weight=None):
    """A state as a frozen layer has it, and the weight it stands for."""
    state = bnb.MatmulLtState()
    state.CB, state.SCB, _ = F.int8_vectorwise_quant(randn(OUT, IN) if weight is None else weight)
    state.has_fp16_weights, state.threshold, state.is_training = False, threshold, train
    return state, F.int8_vectorwise_dequant(state.CB, state.SCB)


def floating(threshold=0.0, train=False):
    state = bnb.MatmulLtState()
    state.threshold, state.is_training = threshold, train
    return state


def relative(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@every_rank
@every_float
@every_threshold
@train_or_not
def test_frozen_result_and_gradients(rank, dtype, threshold, train):
    state, weight = frozen(threshold, train)
    x = randn(*leading(rank), IN, dtype=dtype).requires_grad_()
    bias = randn(OUT, seed=3, dtype=dtype).requires_grad_()
    grad = randn(*leading(rank), OUT, seed=4, dtype=dtype)
    y = bnb.matmul(x, state.CB, state=state, bias=bias)
    y.backward(grad)
    assert y.dtype == dtype and x.grad.dtype == dtype
    exact = torch.nn.functional.linear(x.detach().float(), weight, bias.detach().float())
    rounding = torch.finfo(dtype).eps
    assert relative(y.detach(), exact) < (4 * rounding if train else 0.015)  # inputs are rounded in inference alone
    assert relative(x.grad, grad.float() @ weight) < 4 * rounding
    assert relative(bias.grad, grad.float().reshape(-1, OUT).sum(0)) < 4 * rounding


@every_rank
@every_float
@train_or_not
def test_a_floating_weight_has_a_gradient(rank, dtype, train):
    state = floating(train=train)
    x, weight = randn(*leading(rank), IN, dtype=dtype), randn(OUT, IN, seed=1, dtype=dtype)
    x.requires_grad_(), weight.requires_grad_()
    grad = randn(*leading(rank), OUT, seed=4, dtype=dtype)
    y = bnb.matmul(x, weight, state=state)
    y.backward(grad)
    rows, rows_grad = x.detach().float().reshape(-1, IN), grad.float().reshape(-1, OUT)
    assert weight.grad.dtype == dtype
    assert relative(y.detach(), x.detach().float() @ weight.detach().float().t()) < 0.02
    assert relative(weight.grad, rows_grad.t() @ rows) < 4 * torch.finfo(dtype).eps
    assert relative(x.grad, grad.float() @ weight.detach().float()) < 0.015


@train_or_not
def test_a_floating_weight_is_quantized_anew_in_every_call(train):
    state, weight, x = floating(train=train), randn(OUT, IN), randn(3, IN)
    bnb.matmul(x, weight, state=state)
    weight.mul_(-2)
    assert relative(bnb.matmul(x, weight, state=state), x @ weight.t()) < 0.02


@every_threshold
def test_inference_multiplies_int8_codes_exactly(threshold):
    state, weight = frozen(threshold)
    x = randn(4, IN)
    codes, statistics, outliers = F.int8_vectorwise_quant(x, threshold=threshold)
    values = F.int8_vectorwise_dequant(codes, statistics)
    if threshold:
        assert outliers.numel()
        values[:, outliers] = x[:, outliers]
    y = bnb.matmul(x, state.CB, state=state)
    assert relative(y, (values.double() @ weight.double().t()).float()) < 1e-6
    assert (state.idx is None) == (threshold == 0.0)
    if threshold:
        assert torch.equal(state.idx, outliers)


def test_the_threshold_argument_sets_that_of_the_state():
    state, _ = frozen()
    x = randn(4, IN)
    other, _ = frozen(3.0)
    y = bnb.matmul(x, state.CB, state=state, threshold=3.0)
    assert state.threshold == 3.0 and torch.equal(y, bnb.matmul(x, other.CB, state=other))
    bnb.matmul(x, state.CB, state=state)
    assert state.threshold == 3.0


def test_no_state_means_a_floating_weight_in_training():
    x, weight = randn(3, IN), randn(OUT, IN, seed=1)
    assert relative(bnb.matmul(x, weight), x @ weight.t()) < 0.01


@every_rank
@train_or_not
def test_out_receives_the_result_and_is_returned(rank, train):
    state, _ = frozen(train=train)
    x = randn(*leading(rank), IN)
    out = torch.full((*leading(rank), OUT), float("nan"))
    assert bnb.matmul(x, state.CB, out, state) is out
    assert torch.equal(out, bnb.matmul(x, state.CB, state=state))


@pytest.mark.parametrize("out", [torch.zeros(3, OUT + 1), torch.zeros(3, OUT, dtype=torch.bfloat16)])
def test_an_out_that_does_not_fit_is_an_error(out):
    state, _ = frozen()
    with pytest.raises(ValueError, match="out"):
        bnb.matmul(randn(3, IN), state.CB, out=out, state=state)
    assert out.count_nonzero() == 0


def test_codes_without_statistics_are_an_error():
    state, _ = frozen()
    state.SCB = None
    with pytest.raises(ValueError, match="SCB"):
        bnb.matmul(randn(3, IN), state.CB, state=state)


def saved_by(function):
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        function().sum().backward()
    return saved


@every_threshold
@train_or_not
def test_a_frozen_weight_saves_no_activation(threshold, train):
    state, _ = frozen(threshold, train)
    x = randn(1000, IN).requires_grad_()
    saved = saved_by(lambda: bnb.matmul(x, state.CB, state=state))
    assert sum(tensor.nbytes for tensor in saved) == state.CB.nbytes + state.SCB.nbytes
    assert {tensor.dtype for tensor in saved} == {torch.int8, torch.float32}


@train_or_not
def test_a_trained_weight_saves_the_input(train):
    x, weight = randn(3, IN).requires_grad_(), randn(OUT, IN).requires_grad_()
    saved = saved_by(lambda: bnb.matmul(x, weight, state=floating(train=train)))
    assert any(tensor.shape == x.shape and torch.equal(tensor, x) for tensor in saved)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
@train_or_not
def test_without_gradients(context, train):
    state, _ = frozen(train=train)
    expected = bnb.matmul(randn(3, IN), state.CB, state=state)
    with context():
        y = bnb.matmul(randn(3, IN), state.CB, state=state)
    assert not y.requires_grad and torch.equal(y, expected)


@every_threshold
@train_or_not
def test_large_bfloat16_inputs_stay_finite_and_silent(threshold, train):
    state, weight = frozen(threshold, train)
    x = randn(4, IN, dtype=torch.bfloat16) * 1e4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = bnb.matmul(x, state.CB, state=state)
    assert torch.isfinite(y).all() and y.abs().max() > 65504 and relative(y, x.float() @ weight.t()) < 0.02


def test_long_sums_do_not_overflow_float16():
    state, weight = frozen(weight=randn(8, 16384, dtype=torch.float16))
    x = torch.full((4, 16384), 5.9, dtype=torch.float16)
    y = bnb.matmul(x, state.CB, state=state)
    assert torch.isfinite(y).all() and relative(y, x.float() @ weight.t()) < 2e-3


@train_or_not
def test_an_empty_batch(train):
    state, _ = frozen(train=train)
    x = torch.zeros(0, IN, requires_grad=True)
    y = bnb.matmul(x, state.CB, state=state)
    y.sum().backward()
    assert y.shape == (0, OUT) and x.grad.shape == (0, IN)


def test_state_fields_that_callers_set():
    state = bnb.MatmulLtState(force_no_igemmlt=True, idx=torch.tensor([1]))
    assert state.threshold == 0.0 and state.has_fp16_weights and state.is_training and not state.use_pool
    assert state.force_no_igemmlt and state.outlier_pool is None and not state.has_accumulated_gradients
    state, _ = frozen()
    state.CBt = state.SBt = state.SB = state.CB
    state.reset_grads()
    assert all(getattr(state, name) is None for name in ("CB", "SCB", "SB", "CBt", "SBt"))


def test_the_outlier_pool_collects_columns_of_one_width(monkeypatch):
    monkeypatch.setattr(GlobalOutlierPooler, "_instance", None)
    pool = GlobalOutlierPooler.get_instance()
    assert GlobalOutlierPooler.get_instance() is pool
    pool.add_outliers(torch.tensor([7, 3]), 64)
    pool.add_outliers(torch.tensor([3, 1]), 64)
    pool.add_outliers(torch.tensor([99]), 128)
    assert pool.get_current_outlier_idx().tolist() == [1, 3, 7]
    with pytest.raises(RuntimeError, match="get_instance"):
        GlobalOutlierPooler()
