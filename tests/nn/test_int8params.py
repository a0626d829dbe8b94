"""`Int8Params`: construction as other libraries do it, moves, copies, and pickling."""

import copy
import io
import pickle

import pytest
import torch

from bitsandbytes import functional as F
from bitsandbytes.nn import Int8Params

from .helpers import (
    FLOATS,
    assert_same_attributes,
    assert_same_tensors,
    randn,
    same_bits,
    snapshot,
    storages_of,
    tensors_of_parameter,
)

SHAPE = (24, 40)


def floating(**kwargs):
    return Int8Params(randn(*SHAPE), **{"requires_grad": False, **kwargs})


def quantized(**kwargs):
    return floating(**kwargs).to("cpu")


def assert_consistent(p):
    """The attributes are the constructor's arguments, and CB is the data itself wherever there are codes."""
    assert vars(p).keys() == {"CB", "SCB", "has_fp16_weights"}
    assert (p.CB is None) == (p.dtype != torch.int8)
    if p.CB is not None:
        assert p.CB.data_ptr() == p.data_ptr() and p.CB.shape == p.shape and type(p.CB) is torch.Tensor


def test_defaults():
    p = Int8Params(randn(*SHAPE))
    assert vars(p) == {"CB": None, "SCB": None, "has_fp16_weights": False}
    assert p.requires_grad
    assert not Int8Params(torch.zeros(2, 2, dtype=torch.int8)).requires_grad  # codes cannot have a gradient
    assert Int8Params().shape == (0,)


def test_constructor_takes_its_arguments_by_position_and_ignores_unknown_ones():
    codes, statistics = torch.ones(2, 2, dtype=torch.int8), torch.ones(2)
    p = Int8Params(codes, False, True, codes, statistics, _is_hf_initialized=True)
    assert_consistent(p)
    assert p.SCB is statistics and p.has_fp16_weights and p.data_ptr() == codes.data_ptr()


@pytest.mark.parametrize("make", [floating, quantized])
def test_its_dict_builds_another_parameter(make):
    p = make()
    p._is_hf_initialized = True
    other = Int8Params(p.data, requires_grad=False, **p.__dict__)
    assert_consistent(other)
    assert other.SCB is p.SCB and other.has_fp16_weights == p.has_fp16_weights


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "move",
    [lambda p: p.to("cpu"), lambda p: p.cpu(), lambda p: p.to(device="cpu", non_blocking=True)],
)
def test_a_move_quantizes_data_that_is_on_the_device_already(dtype, move):
    source = randn(*SHAPE, dtype=dtype)
    p = Int8Params(source, requires_grad=False)
    q = move(p)
    codes, statistics, _ = F.int8_vectorwise_quant(source)
    assert type(q) is Int8Params and same_bits(q.data, codes) and same_bits(q.SCB, statistics)
    assert q.CB.data_ptr() == q.data_ptr() and not q.requires_grad
    assert same_bits(p.data, source) and p.CB is None and p.SCB is None


def test_large_bfloat16_weights_are_quantized_in_their_own_dtype():
    """Through float16 they would become infinite."""
    source = randn(*SHAPE, dtype=torch.bfloat16) * 1e6
    q = Int8Params(source, requires_grad=False).to("cpu")
    assert torch.isfinite(q.SCB).all() and torch.equal(q.SCB, source.float().abs().amax(1))


def test_floating_weights_stay_when_they_should():
    p = floating(has_fp16_weights=True, requires_grad=True)
    assert p.to("cpu") is p
    moved = p.to(torch.float16)
    assert type(moved) is Int8Params and moved.has_fp16_weights and moved.dtype == torch.float16


def test_meta_does_not_quantize():
    p = floating().to("meta")
    assert p.is_meta and p.dtype == torch.float32 and p.SCB is None
    kwargs = p.__dict__
    kwargs["requires_grad"] = False
    assert type(p)(p.to("meta"), **kwargs).is_meta


def test_codes_of_a_checkpoint_keep_their_statistics():
    """transformers: Int8Params(int8, CB=None, SCB=statistics).to(device)."""
    q = quantized()
    loaded = Int8Params(q.data, requires_grad=False, has_fp16_weights=False, CB=None, SCB=q.SCB).to("cpu")
    assert same_bits(loaded.CB, q.data) and same_bits(loaded.SCB, q.SCB)
    assert loaded.CB.data_ptr() == loaded.data_ptr()


def test_re_creation_from_the_live_dict_without_statistics():
    """transformers pops SCB from the live dict, then quantises the float value of a checkpoint."""
    old = quantized()
    kwargs = old.__dict__
    kwargs.pop("SCB", None)
    value = randn(*SHAPE, seed=3)
    new = Int8Params(value.to("cpu"), requires_grad=False, **kwargs).to("cpu")
    assert_same_tensors(tensors_of_parameter(new), tensors_of_parameter(Int8Params(value).to("cpu")))


def test_moves_never_quantize_again():
    q = quantized()
    before = snapshot(tensors_of_parameter(q))
    for _ in range(3):
        q = q.to("cpu").cpu().to("cpu", copy=True)
    assert_same_tensors(tensors_of_parameter(q), before)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_casts_leave_codes_alone(cast):
    q = quantized()
    before = snapshot(tensors_of_parameter(q))
    assert_same_tensors(tensors_of_parameter(getattr(q, cast)()), before)
    assert_same_tensors(tensors_of_parameter(q.to(torch.float16)), before)


def test_every_tensor_follows_a_move_and_the_source_stays():
    q = quantized()
    before = snapshot(tensors_of_parameter(q))
    moved = q.to("meta")
    assert tensors_of_parameter(moved).keys() == before.keys()
    assert {t.device.type for t in tensors_of_parameter(moved).values()} == {"meta"}
    assert_same_tensors(tensors_of_parameter(q), before)


@pytest.mark.parametrize(
    "function",
    [
        lambda p: (p.clone(), p.detach(), p.view(-1)),
        lambda p: torch.chunk(p, 2),
        lambda p: torch.split(p, 5),
    ],
)
def test_class_and_attributes_survive(function):
    q = quantized()
    for part, plain in zip(function(q), function(q.data), strict=True):
        assert type(part) is Int8Params and same_bits(part.data, plain)
        assert_consistent(part)
        assert part.SCB is q.SCB and part.has_fp16_weights == q.has_fp16_weights


def test_copy_shares_the_data():
    q = quantized()
    other = copy.copy(q)
    assert type(other) is Int8Params and other.data_ptr() == q.data_ptr()
    assert_consistent(other)
    assert other.SCB is q.SCB


def torch_round_trip(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False, map_location="cpu")


@pytest.mark.parametrize("make", [floating, quantized])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v)), torch_round_trip])
def test_copies_share_nothing_and_leave_the_source_alone(make, copied):
    p = make()
    attributes = dict(p.__dict__)
    other = copied(p)
    assert_same_attributes(vars(p), attributes)
    assert type(other) is Int8Params and vars(other).keys() == vars(p).keys()
    assert other.has_fp16_weights == p.has_fp16_weights and other.requires_grad == p.requires_grad
    assert_same_tensors(tensors_of_parameter(other), tensors_of_parameter(p))
    assert not storages_of(tensors_of_parameter(other).values()) & storages_of(tensors_of_parameter(p).values())


def test_codes_and_data_stay_one_tensor_in_a_copy():
    """Two separate copies would double the memory of a copied model."""
    for copied in (copy.deepcopy(quantized()), torch_round_trip(quantized())):
        assert_consistent(copied)


def test_codes_follow_an_assignment_of_data():
    p = floating()
    p.data = quantized()
    assert_consistent(p)
    assert same_bits(p.SCB, quantized().SCB)


def test_a_clone_of_a_floating_weight_is_a_plain_tensor():
    """A copy taken before the model moves must not be quantised when it moves itself."""
    p = floating()
    assert type(p.clone()) is torch.Tensor and p.clone().to("cpu").dtype == torch.float32
    assert type(p.detach()) is Int8Params
