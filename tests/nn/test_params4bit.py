"""`Params4bit`: construction as other libraries do it, moves, copies, and pickling."""

import copy
import io
import pickle

import pytest
import torch

import bitsandbytes as bnb
from bitsandbytes import functional as F
from bitsandbytes.nn import Linear4bit, Params4bit
from bitsandbytes.nn._parameter import QuantizedParameter

from .helpers import (
    KINDS_4BIT,
    STORAGES,
    assert_same_attributes,
    assert_same_tensors,
    decoded,
    randn,
    same_bits,
    snapshot,
    storages_of,
    tensors_of_parameter,
    tensors_of_state,
)

ARGUMENTS = {
    "blocksize",
    "compress_statistics",
    "quant_type",
    "quant_state",
    "quant_storage",
    "bnb_quantized",
    "module",
}
# 96 * 130 elements are 195 blocks of 64: a short last block in the nested statistics.
SHAPE = (96, 130)


def floating(shape=SHAPE, **kwargs):
    return Params4bit(randn(*shape), **{"quant_type": "nf4", **kwargs})


def quantized(shape=SHAPE, **kwargs):
    return floating(shape, **kwargs).to("cpu")


every_kind = pytest.mark.parametrize("quant_type, nested", KINDS_4BIT)
every_storage = pytest.mark.parametrize("storage", STORAGES, ids=str)


# Construction


def test_defaults_are_those_downstream_relies_on():
    p = Params4bit(randn(4, 64))
    assert not p.requires_grad  # PEFT passes no requires_grad when it re-creates a weight
    expected = {
        "blocksize": 64,
        "compress_statistics": True,
        "quant_type": "fp4",
        "quant_state": None,
        "quant_storage": torch.uint8,
        "bnb_quantized": False,
        "module": None,
    }
    assert vars(p) == expected
    assert Params4bit().shape == (0,)


def test_constructor_takes_its_arguments_by_position():
    state = quantized().quant_state
    module = torch.nn.Module()
    p = Params4bit(randn(2, 2), False, state, 128, False, "nf4", torch.bfloat16, module, True)
    assert (p.quant_state, p.blocksize, p.compress_statistics, p.quant_type) == (state, 128, False, "nf4")
    assert (p.quant_storage, p.module, p.bnb_quantized) == (torch.bfloat16, module, True)


def test_unknown_keyword_arguments_are_ignored():
    p = Params4bit(randn(4, 64), requires_grad=False, _is_hf_initialized=True, _original_shape=(4, 64))
    assert vars(p).keys() == ARGUMENTS


@pytest.mark.parametrize("make", [floating, quantized])
def test_its_dict_builds_another_parameter(make):
    p = make(compress_statistics=False, blocksize=128)
    p._is_hf_initialized = True
    assert vars(p).keys() == ARGUMENTS | {"_is_hf_initialized"}  # neither data nor requires_grad
    other = Params4bit(p.data, requires_grad=False, **p.__dict__)
    assert {name: vars(other)[name] for name in ARGUMENTS} == {name: vars(p)[name] for name in ARGUMENTS}


def test_attributes_can_be_written_through_the_live_dict():
    """PEFT does this when it merges adapters."""
    p = quantized()
    p.__dict__["bnb_quantized"] = False
    p.__dict__["requires_grad"] = False
    assert p.bnb_quantized is False
    kwargs = p.__dict__
    again = Params4bit(randn(*SHAPE, seed=1), **kwargs).to("cpu")
    assert again.bnb_quantized and not again.requires_grad


def test_empty_weights_re_creation_on_meta():
    """accelerate.init_empty_weights writes requires_grad into the live dict and passes it on."""
    p = floating()
    kwargs = p.__dict__
    kwargs["requires_grad"] = p.requires_grad
    empty = type(p)(p.to("meta"), **kwargs)
    assert empty.is_meta and not empty.bnb_quantized and empty.quant_state is None
    assert empty.shape == SHAPE
    assert not p.is_meta and not p.bnb_quantized


def test_construction_and_moves_on_meta_do_not_quantize():
    with torch.device("meta"):
        layer = Linear4bit(64, 96, quant_type="nf4")
    assert layer.weight.is_meta and not layer.weight.bnb_quantized
    layer.to("meta")
    assert layer.weight.shape == (96, 64) and not layer.weight.bnb_quantized
    layer.weight.data = torch.empty(3, 5, dtype=torch.int8, device="meta")  # another dtype and shape is fine
    assert layer.weight.shape == (3, 5)


def test_re_quantizing_with_the_stale_attributes_of_a_merged_weight():
    """PEFT merges into floating point and passes the old attributes with bnb_quantized False."""
    old = quantized(compress_statistics=True)
    merged = randn(*SHAPE, seed=5)
    kwargs = {**old.__dict__, "bnb_quantized": False}
    new = Params4bit(merged.to("cpu"), requires_grad=False, **kwargs).to(old.device)
    fresh = Params4bit(merged, quant_type="nf4").to("cpu")
    assert_same_tensors(tensors_of_parameter(new), tensors_of_parameter(fresh))
    assert new.quant_state is not old.quant_state


@every_storage
def test_floating_data_of_the_original_shape_is_quantized_although_marked_quantized(storage):
    """PEFT's RandLora and PVeRA merges forget to reset bnb_quantized."""
    old = quantized(quant_storage=storage)
    merged = randn(*SHAPE, seed=5)
    new = Params4bit(merged, requires_grad=False, **old.__dict__).to(old.device)
    fresh = Params4bit(merged, quant_type="nf4", quant_storage=storage).to("cpu")
    assert_same_tensors(tensors_of_parameter(new), tensors_of_parameter(fresh))


@pytest.mark.parametrize("prefix", ["", "weight.", "model.layers.0.self_attn.q_proj.weight."])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@every_kind
def test_from_prequantized(prefix, storage, quant_type, nested):
    p = quantized(quant_type=quant_type, compress_statistics=nested, quant_storage=storage)
    stats = {prefix + name: value for name, value in p.quant_state.as_dict(packed=True).items()}
    names = list(stats)
    module = torch.nn.Module()
    q = Params4bit.from_prequantized(
        data=p.data, quantized_stats=stats, requires_grad=False, device="cpu", module=module, anything=1
    )
    assert list(stats) == names
    assert q.quant_state == p.quant_state and same_bits(decoded(q), decoded(p))
    assert module.quant_state is q.quant_state and q.module is module
    assert q.bnb_quantized and not q.requires_grad
    assert (q.compress_statistics, q.quant_type, q.blocksize, q.quant_storage) == (nested, quant_type, 64, storage)


# Quantisation


@pytest.mark.parametrize(
    "move",
    [
        lambda p: p.to("cpu"),
        lambda p: p.to(torch.device("cpu")),
        lambda p: p.to(device="cpu", non_blocking=True),
        lambda p: p.to("cpu", torch.float16),
        lambda p: p.to(torch.empty(1)),
        lambda p: p.cpu(),
    ],
)
@every_kind
def test_a_move_quantizes_data_that_is_on_the_device_already(move, quant_type, nested):
    p = floating(quant_type=quant_type, compress_statistics=nested, blocksize=128)
    q = move(p)
    packed, state = F.quantize_4bit(p.data, blocksize=128, compress_statistics=nested, quant_type=quant_type)
    assert type(q) is Params4bit and q.bnb_quantized and same_bits(q.data, packed)
    assert_same_tensors(tensors_of_state(q.quant_state), tensors_of_state(state))
    assert q.quant_state == state and not q.requires_grad


@every_storage
@pytest.mark.parametrize("shape", [(64, 64), (7, 24), (8, 1), (3, 4, 50)])
def test_packed_shape_and_element_count(storage, shape):
    q = quantized(shape, quant_storage=storage)
    numel = torch.Size(shape).numel()
    assert q.shape == (numel // (2 * storage.itemsize), 1) and q.dtype == storage
    assert q.is_floating_point() == (storage != torch.uint8)  # what FSDP2 loaders test
    assert q.numel() * 2 * q.element_size() == numel  # how transformers and PEFT count parameters


@pytest.mark.parametrize("shape", [(7, 13), (5, 1), (1,)])
def test_an_odd_element_takes_a_whole_byte(shape):
    assert quantized(shape).shape == (-(-torch.Size(shape).numel() // 2), 1)


@every_storage
def test_an_empty_weight(storage):
    q = quantized((0, 64), quant_storage=storage)
    assert q.shape == (0, 1) and decoded(q).shape == (0, 64)


@every_storage
def test_bytes_are_the_same_for_every_storage(storage):
    packed = quantized(quant_storage=storage).data.view(torch.uint8)
    assert torch.equal(packed.view(-1, 1), quantized().data)


@every_storage
def test_moves_never_quantize_again(storage):
    q = quantized(quant_storage=storage)
    before = snapshot(tensors_of_parameter(q))
    for _ in range(3):
        q = q.to("cpu").cpu().to(device="cpu", copy=True)
    assert type(q) is Params4bit and q.bnb_quantized
    assert_same_tensors(tensors_of_parameter(q), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_dtype_alone_does_not_quantize(dtype):
    p = floating().to(dtype)
    assert type(p) is Params4bit and p.dtype == dtype and not p.bnb_quantized and p.quant_type == "nf4"
    assert same_bits(p.data, randn(*SHAPE).to(dtype))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
@every_storage
def test_casts_leave_packed_codes_alone(storage, cast):
    """Packed bytes in a floating storage dtype are not numbers; a cast would turn them into noise."""
    q = quantized(quant_storage=storage)
    before = snapshot(tensors_of_parameter(q))
    assert_same_tensors(tensors_of_parameter(getattr(q, cast)()), before)
    assert_same_tensors(tensors_of_parameter(q.to(getattr(torch, cast, torch.float64))), before)

    layer = torch.nn.Sequential(Linear4bit(130, 96, quant_type="nf4", quant_storage=storage))
    layer[0].weight = Params4bit(randn(*SHAPE), quant_type="nf4", quant_storage=storage, module=layer[0])
    layer.to("cpu")
    getattr(layer, cast)()
    assert_same_tensors(tensors_of_parameter(layer[0].weight), before)
    assert layer[0].bias.dtype == getattr(torch.empty(0), cast)().dtype


# Moves


def test_a_module_move_fills_the_parameter_that_the_module_holds():
    layer = Linear4bit(130, 96, quant_type="nf4")
    weight = layer.weight
    torch.nn.Sequential(layer).to("cpu")
    assert layer.weight is weight and weight.bnb_quantized and weight.dtype == torch.uint8
    assert layer.quant_state is weight.quant_state is not None


def test_quantizing_leaves_the_source_as_it_is():
    p = floating()
    before, attributes = p.data.clone(), dict(p.__dict__)
    q = p.to("cpu")
    assert same_bits(p.data, before) and p.__dict__ == attributes and not p.bnb_quantized
    assert not storages_of([q.data]) & storages_of([p.data])


@every_storage
@every_kind
def test_every_tensor_of_the_state_follows_a_move_and_the_source_stays(storage, quant_type, nested):
    q = quantized(quant_type=quant_type, compress_statistics=nested, quant_storage=storage)
    attributes, before = dict(q.__dict__), tensors_of_parameter(q)
    values = snapshot(before)
    moved = q.to("meta")
    reached = tensors_of_parameter(moved)
    assert reached.keys() == before.keys()
    assert {name: value.device.type for name, value in reached.items()} == dict.fromkeys(reached, "meta")
    assert moved.bnb_quantized and moved.quant_state.shape == SHAPE and moved.quant_storage == storage
    assert q.__dict__ == attributes
    assert_same_tensors(tensors_of_parameter(q), values)


def test_moving_a_module_moves_its_state_and_leaves_other_holders_alone():
    layer = Linear4bit(130, 96, quant_type="nf4").to("cpu")
    state = layer.weight.quant_state
    values = snapshot(tensors_of_state(state))
    layer.to("meta")
    assert {t.device.type for t in tensors_of_parameter(layer.weight).values()} == {"meta"}
    assert layer.quant_state is layer.weight.quant_state
    assert_same_tensors(tensors_of_state(state), values)


def test_assigning_plain_data_keeps_the_state():
    q = quantized()
    state = q.quant_state
    q.data = q.data.clone()
    assert q.quant_state is state and q.bnb_quantized


def test_requires_grad_can_be_switched_off_on_integer_codes():
    assert not quantized().requires_grad_(False).requires_grad


# Functions that keep class and state


KEEPING = {
    "torch.chunk": lambda p: torch.chunk(p, 2, dim=0),
    "torch.split": lambda p: torch.split(p, 100),
    "torch.split sizes": lambda p: torch.split(p, [10, p.shape[0] - 10]),
    "torch.detach": lambda p: (torch.detach(p),),
    "torch.clone": lambda p: (torch.clone(p),),
    "chunk": lambda p: p.chunk(3),
    "split": lambda p: p.split(7),
    "detach": lambda p: (p.detach(),),
    "clone": lambda p: (p.clone(),),
    "view": lambda p: (p.view(-1),),
}


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", KEEPING.values(), ids=KEEPING)
def test_class_and_state_survive(function, storage):
    q = quantized(quant_storage=storage)
    for part, plain in zip(function(q), function(q.data), strict=True):
        assert type(part) is Params4bit and type(plain) is torch.Tensor
        assert vars(part) == vars(q) and part.quant_state is q.quant_state
        assert same_bits(part.data, plain)


def test_a_clone_of_a_floating_weight_is_a_plain_tensor():
    """A copy taken before the model moves must not be quantised when it moves itself."""
    p = floating()
    assert type(p.clone()) is torch.Tensor and p.clone().to("cpu").dtype == torch.float32
    for part in (p.detach(), *p.chunk(2), *p.split(10)):
        assert type(part) is Params4bit and not part.bnb_quantized


def test_other_functions_give_plain_tensors():
    q = quantized(quant_storage=torch.bfloat16)
    for result in (q + 0, q.t(), q.reshape(-1), q.view(torch.uint8)):
        assert type(result) is torch.Tensor


def test_works_without_the_torch_function_hook(monkeypatch):
    """unsloth_zoo deletes it from the class."""
    owner = next(c for c in Params4bit.__mro__ if "__torch_function__" in vars(c))
    assert owner is QuantizedParameter
    monkeypatch.setattr(owner, "__torch_function__", torch._C._disabled_torch_function_impl)
    layer = Linear4bit(130, 96, quant_type="nf4", compute_dtype=torch.float32)
    expected = decoded(Params4bit(layer.weight.data.clone(), quant_type="nf4").to("cpu"))
    layer.to("cpu").to("cpu")
    assert torch.allclose(layer(torch.eye(130)) - layer.bias, expected.t(), atol=1e-6)


# Copies


def test_copy_shares_the_data_and_the_state():
    q = quantized()
    other = copy.copy(q)
    assert type(other) is Params4bit and other is not q and vars(other) == vars(q)
    assert other.data_ptr() == q.data_ptr()
    other.bnb_quantized = False
    assert q.bnb_quantized


@every_kind
def test_deepcopy_shares_no_storage_and_leaves_the_source_alone(quant_type, nested):
    q = quantized(quant_type=quant_type, compress_statistics=nested)
    attributes = dict(q.__dict__)
    other = copy.deepcopy(q)
    assert_same_attributes(vars(q), attributes)
    assert type(other) is Params4bit and other.quant_state is not q.quant_state
    assert other.quant_state == q.quant_state
    assert_same_tensors(tensors_of_parameter(other), tensors_of_parameter(q))
    assert not storages_of(tensors_of_parameter(other).values()) & storages_of(tensors_of_parameter(q).values())


def test_deepcopy_of_a_parameter_does_not_copy_its_layer_but_that_of_a_layer_does():
    layer = Linear4bit(64, 64, quant_type="nf4").to("cpu")
    assert copy.deepcopy(layer.weight).module is layer
    model = copy.deepcopy(torch.nn.Sequential(layer))
    assert model[0] is not layer and model[0].weight.module is model[0]
    assert model[0].quant_state is model[0].weight.quant_state


def test_deepcopy_keeps_a_shared_parameter_shared():
    first, second = Linear4bit(64, 64).to("cpu"), Linear4bit(64, 64)
    second.weight = first.weight
    copied = copy.deepcopy(torch.nn.ModuleList([first, second]))
    assert copied[0].weight is copied[1].weight


def saved_and_loaded(value, **kwargs):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False, **kwargs)


ROUND_TRIPS = {
    **{f"pickle {n}": lambda v, n=n: pickle.loads(pickle.dumps(v, n)) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    "torch.save": saved_and_loaded,
    "torch.save map_location": lambda v: saved_and_loaded(v, map_location="cpu"),
}


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
@pytest.mark.parametrize("make", [floating, quantized])
@pytest.mark.parametrize("nested", [False, True])
def test_pickling_keeps_everything_and_leaves_the_source_alone(round_trip, make, nested):
    p = make(compress_statistics=nested, quant_storage=torch.float16)
    attributes = dict(p.__dict__)
    other = round_trip(p)
    assert_same_attributes(vars(p), attributes)
    assert type(other) is Params4bit and other.requires_grad == p.requires_grad
    assert vars(other) == vars(p)
    assert_same_tensors(tensors_of_parameter(other), tensors_of_parameter(p))


# Attributes that FSDP looks up


@pytest.mark.parametrize("nested", [False, True])
def test_every_state_dict_key_resolves_attribute_by_attribute(nested):
    layer = Linear4bit(64, 96, quant_type="nf4", compress_statistics=nested).to("cpu")
    for key, value in layer.state_dict().items():
        found = layer
        for name in key.split("."):
            found = getattr(found, name)
        assert torch.equal(found.detach(), value), key


def test_attributes_that_read_through_to_the_state():
    q = quantized(compress_statistics=True)
    state = q.quant_state
    expected = {
        "absmax": state.absmax,
        "code": state.code,
        "quant_map": state.code,
        "offset": state.offset,
        "state2": state.state2,
        "nested_absmax": state.state2.absmax,
        "nested_blocksize": 256,
        "nested_quant_map": state.state2.code,
        "nested_dtype": torch.float32,
        "nested_offset": state.offset,
    }
    for name, value in expected.items():
        found = getattr(q, name)
        assert found is value or found == value, name
    assert not hasattr(floating(), "absmax")
    plain = quantized(compress_statistics=False)
    assert hasattr(plain, "absmax") and not hasattr(plain, "nested_absmax")


def test_class_name_is_what_downstream_compares():
    assert bnb.nn.modules.Params4bit is bnb.nn.Params4bit and Params4bit.__name__ == "Params4bit"
    assert isinstance(floating(), torch.nn.Parameter)
