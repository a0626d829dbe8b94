"""What holds for every operator alike: strides never matter, inputs are never changed, modes never leak in."""

import warnings

import pytest
import torch

from tests.cases.samples import SAMPLES
from tests.helpers import (
    LAYOUTS,
    Unchanged,
    as_tuple,
    assert_all_same,
    assert_same,
    matmul_precision,
    relaid,
    storage_bytes,
)

LAYOUT_NAMES = tuple(LAYOUTS)


def run(target, sample, args):
    """The results; for an .out overload the content of `out`."""
    result = target.op(sample.op)(*args.values())
    return (args["out"],) if "out" in args else as_tuple(result)


def inputs(args):
    return [value for name, value in args.items() if name != "out"]


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_strides_of_inputs_never_matter_and_inputs_never_change(sample, layout, target):
    args = sample.args(target.device)
    expected = [None if r is None else r.clone() for r in run(target, sample, args)]
    moved = {name: value if name == "out" else relaid(value, layout) for name, value in args.items()}
    with Unchanged(*inputs(moved)):
        actual = run(target, sample, moved)
    assert_all_same(actual, expected, layout)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.op.endswith(".out")], ids=str)
def test_out_may_have_any_strides_and_its_surroundings_stay(sample, layout, target):
    args = sample.args(target.device)
    (expected,) = run(target, sample, args)
    out = relaid(torch.zeros_like(args["out"]), layout)
    before = storage_bytes(out)
    (actual,) = run(target, sample, args | {"out": out})
    assert actual is out
    assert_same(actual, expected, layout)
    out.zero_()
    assert torch.equal(storage_bytes(out), before), "memory beside out was written"


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.op.endswith(".out")], ids=str)
def test_out_equals_the_functional_overload(sample, target):
    args = sample.args(target.device)
    (actual,) = run(target, sample, args)
    plain = {name: value for name, value in args.items() if name != "out"}
    assert_same(actual, target.op(sample.op.removesuffix(".out"))(*plain.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_autocast_changes_no_bit(sample, dtype, target):
    args = sample.args(target.device)
    expected = [None if r is None else r.clone() for r in run(target, sample, args)]
    with torch.autocast(target.device, dtype=dtype):
        actual = run(target, sample, args)
    assert_all_same(actual, expected)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("sample", [s for s in SAMPLES if "mm" in s.op or "mv" in s.op or "matmul" in s.op], ids=str)
def test_reduced_matmul_precision_changes_no_bit_and_stays_set(sample, precision, target):
    args = sample.args(target.device)
    expected = [None if r is None else r.clone() for r in run(target, sample, args)]
    with matmul_precision(precision):
        actual = run(target, sample, args)
    assert_all_same(actual, expected)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_inference_mode_and_grad_mode_give_the_same(sample, target):
    args = sample.args(target.device)
    expected = [None if r is None else r.clone() for r in run(target, sample, args)]
    with torch.inference_mode():
        actual = run(target, sample, sample.args(target.device))
    assert_all_same(actual, expected)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_inputs_that_need_a_gradient_give_the_same_and_get_none(sample, target):
    """Weights are parameters. The operators are not differentiable: a backward must not go through their insides."""
    args = sample.args(target.device)
    expected = [None if r is None else r.clone() for r in run(target, sample, args)]
    wanting = {
        name: value.detach().requires_grad_()
        if name != "out" and isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in sample.args(target.device).items()
    }
    actual = run(target, sample, wanting)
    assert_all_same(actual, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that the operator has no gradient
        for result in actual:
            if result is not None and result.requires_grad:
                result.sum().backward()
    assert all(value.grad is None for value in wanting.values() if isinstance(value, torch.Tensor) and value.is_leaf)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_results_are_new_memory(sample, target):
    """A result never aliases an argument, nor a table that later calls read."""
    args = sample.args(target.device)
    first = [None if r is None else r.clone() for r in run(target, sample, args)]
    if "out" not in args:
        for result in as_tuple(target.op(sample.op)(*args.values())):
            if result is not None and result.numel():
                pointers = {v.untyped_storage().data_ptr() for v in args.values() if isinstance(v, torch.Tensor)}
                assert result.untyped_storage().data_ptr() not in pointers
                result.fill_(1)
    assert_all_same(run(target, sample, sample.args(target.device)), first)
