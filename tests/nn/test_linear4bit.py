"""`Linear4bit`: results, state dicts, and everything that must not change them."""

import copy
import io
from itertools import product
import pickle
import warnings

import pytest
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
import torch

import bitsandbytes as bnb
from bitsandbytes.errors import NotQuantizedError
from bitsandbytes.nn import Linear4bit, LinearFP4, LinearNF4, Params4bit

from .helpers import (
    FLOATS,
    KINDS_4BIT,
    STORAGES,
    assert_same_tensors,
    assert_within,
    decoded,
    fp32_bound,
    randn,
    same_bits,
    snapshot,
    storages_of,
    tensors_of_parameter,
)

IN, OUT = 96, 40

every_kind = pytest.mark.parametrize("quant_type, nested", KINDS_4BIT)
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_storage = pytest.mark.parametrize("storage", STORAGES, ids=str)


def unquantized(in_features=IN, out_features=OUT, seed=0, dtype=torch.float32, bias=True, **kwargs):
    layer = Linear4bit(in_features, out_features, bias=bias, **{"quant_type": "nf4", **kwargs})
    with torch.no_grad():
        layer.weight.data = randn(out_features, in_features, seed=seed, dtype=dtype)
        if bias:
            layer.bias.data = randn(out_features, seed=seed + 100, dtype=dtype)
    return layer


def quantized(*args, **kwargs):
    return unquantized(*args, **kwargs).to("cpu")


# Results


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@every_float
@pytest.mark.parametrize("bias", [False, True])
def test_forward_is_the_linear_of_the_decoded_weight(rank, dtype, bias):
    layer = quantized(dtype=dtype, bias=bias)
    x = randn(*(2, 3, 1, 2)[: rank - 1], IN, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (*x.shape[:-1], OUT)
    exact, bound = fp32_bound(x, decoded(layer.weight, torch.float32), layer.bias, dtype)
    assert_within(y.detach(), exact, bound)


@every_kind
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (64, 33), (130, 5)])
def test_any_feature_count_works(quant_type, nested, shape):
    layer = quantized(*shape, quant_type=quant_type, compress_statistics=nested)
    for rows in (1, 5):
        x = randn(rows, shape[0], seed=rows)
        assert_within(layer(x).detach(), *fp32_bound(x, decoded(layer.weight), layer.bias))


@pytest.mark.parametrize("shape", [(0, IN), (3, 0, IN), (0, 4, IN)])
def test_an_empty_batch(shape):
    x = torch.zeros(shape, requires_grad=True)
    y = quantized()(x)
    assert y.shape == (*shape[:-1], OUT)
    y.sum().backward()
    assert x.grad.shape == shape


def test_a_wrong_feature_count_is_an_error():
    with pytest.raises(ValueError, match="96"):
        quantized()(randn(2, IN + 1))


def test_strides_of_the_input_do_not_matter():
    layer = quantized()
    x = randn(IN, 6).t()
    for view in (x, randn(1, IN).expand(6, IN), randn(12, IN)[::2], randn(6, 2 * IN)[:, ::2]):
        assert not view.is_contiguous()
        assert_within(layer(view).detach(), *fp32_bound(view, decoded(layer.weight), layer.bias))


@pytest.mark.parametrize("cls, quant_type", [(LinearNF4, "nf4"), (LinearFP4, "fp4")])
def test_subclasses_fix_the_type(cls, quant_type):
    layer = cls(64, 32, False, torch.bfloat16, False, torch.bfloat16).to("cpu")
    assert isinstance(layer, Linear4bit) and isinstance(layer, torch.nn.Linear)
    assert layer.weight.quant_state.quant_type == quant_type and layer.weight.dtype == torch.bfloat16
    assert layer.compute_dtype == torch.bfloat16 and layer.bias is None and not layer.weight.quant_state.nested


def test_in_features_that_no_fast_path_takes_give_no_warning():
    """In particular none per call."""
    layer = quantized(3420, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (1, 16):
            x = randn(rows, 3420).requires_grad_()
            layer(x).sum().backward()
    assert_within(layer(x).detach(), *fp32_bound(x.detach(), decoded(layer.weight), layer.bias))


# The dtype of the computation


@every_float
@pytest.mark.parametrize("compute_dtype", FLOATS, ids=str)
def test_compute_dtype_is_that_of_the_matmul_and_the_input_gives_that_of_the_result(dtype, compute_dtype):
    layer = quantized(compute_dtype=compute_dtype)
    x = randn(3, IN, dtype=dtype)
    expected = bnb.matmul_4bit(
        x.to(compute_dtype), layer.weight, layer.weight.quant_state, bias=layer.bias.to(compute_dtype)
    )
    y = layer(x)
    assert y.dtype == dtype and same_bits(y, expected.to(dtype))
    assert layer.compute_dtype == compute_dtype


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_the_first_input_settles_an_open_compute_dtype(first):
    layer = quantized()
    assert layer.compute_dtype is None and not layer.compute_type_is_set
    layer(randn(2, IN, dtype=first))
    assert layer.compute_dtype == first and layer.compute_type_is_set
    layer(randn(2, IN, dtype=torch.float16))
    assert layer.compute_dtype == first


def test_float16_inputs_leave_the_compute_dtype_open():
    layer = quantized()
    assert layer(randn(2, IN, dtype=torch.float16)).dtype == torch.float16
    assert layer.compute_dtype is None
    x = randn(2, IN, dtype=torch.bfloat16)
    assert same_bits(layer(x), bnb.matmul_4bit(x, layer.weight, layer.weight.quant_state, bias=layer.bias.bfloat16()))


def test_autocast_does_not_change_the_dtype_of_the_computation():
    """compute_dtype decides; an autocast region around the layer must not make the result less exact."""
    layer = quantized(compute_dtype=torch.float32)
    x = randn(3, IN)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert_within(y.detach(), *fp32_bound(x, decoded(layer.weight), layer.bias, y.dtype))


# What a forward must leave alone


@every_storage
@pytest.mark.parametrize("train", [False, True])
def test_a_forward_changes_nothing_that_is_saved(storage, train):
    layer = quantized(quant_storage=storage, compute_dtype=torch.bfloat16).train(train)
    weight, bias = layer.weight, layer.bias
    before = snapshot(layer.state_dict())
    for dtype, autocast in product(FLOATS, (False, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            x = randn(4, IN, dtype=dtype).requires_grad_(train)
            y = layer(x)
            if train:
                y.float().sum().backward()
    assert layer.weight is weight and layer.bias is bias
    assert_same_tensors(layer.state_dict(), before)


def test_the_result_survives_a_move_a_copy_a_save_and_a_forward_in_any_order():
    """No private layout of the weight may outlive the forward that made it."""
    layer = quantized(256, 64).eval()
    x = randn(1, 256)
    expected, weight = layer(x), decoded(layer.weight)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    fresh = Linear4bit(256, 64, quant_type="nf4")
    fresh.load_state_dict(layer.state_dict())
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
        fresh,
        layer.to("cpu").cpu().train().eval(),
    ):
        assert same_bits(decoded(other.weight), weight) and same_bits(other(x), expected)


# Not quantised yet


def test_a_layer_that_was_never_moved_says_so():
    layer = Linear4bit(64, 32)
    with pytest.raises(NotQuantizedError, match=r"Linear4bit.*move"):
        layer(randn(2, 64))
    with pytest.raises(RuntimeError):  # the same error under the type that callers may know
        layer(randn(2, 64))


def test_the_state_comes_back_from_the_layer_when_a_wrapper_replaced_the_parameter():
    """FSDP puts plain parameters in place of ours."""
    layer = quantized(quant_storage=torch.bfloat16)
    x, attributes = randn(2, IN), dict(vars(layer.weight))
    expected = layer(x)
    layer.weight = torch.nn.Parameter(layer.weight.data.clone(), requires_grad=False)
    assert not hasattr(layer.weight, "quant_state")
    assert same_bits(layer(x), expected)
    assert layer.weight.quant_state is attributes["quant_state"]


def test_the_repair_is_looked_up_where_others_patch_it(monkeypatch):
    calls = []
    original = bnb.nn.modules.fix_4bit_weight_quant_state_from_module

    def patched(module):
        calls.append(module)
        return original(module)

    monkeypatch.setattr(bnb.nn.modules, "fix_4bit_weight_quant_state_from_module", patched)
    layer = quantized()
    layer(randn(1, IN))
    table = bnb.nn.Embedding4bit(8, 64).to("cpu")
    table(torch.tensor([1]))
    assert calls == [layer, table]


def test_quantize_4bit_is_looked_up_where_others_patch_it(monkeypatch):
    calls = []
    original = bnb.functional.quantize_4bit
    monkeypatch.setattr(bnb.functional, "quantize_4bit", lambda *a, **k: calls.append(k) or original(*a, **k))
    quantized(quant_type="fp4")
    assert [call["quant_type"] for call in calls] == ["fp4"]


# State dicts

TARGETS = {
    "not quantised": lambda **kwargs: unquantized(seed=7, **kwargs),
    "quantised": lambda **kwargs: quantized(seed=7, **kwargs),
    "quantised otherwise": lambda **kwargs: quantized(seed=7, **kwargs | {"quant_type": "fp4"}),
    "moved": lambda **kwargs: quantized(seed=7, **kwargs).to("cpu", torch.float16),
}


def keys_of_state(nested, quant_type):
    names = ["absmax", "quant_map", f"quant_state.bitsandbytes__{quant_type}"]
    if nested:
        names += ["nested_absmax", "nested_quant_map"]
    return {"weight", "bias"} | {f"weight.{name}" for name in names}


def check_loaded(target, source, values):
    """`target` computes what `source` does, holds its own copies, and saves the same."""
    x = randn(3, IN)
    assert type(target.weight) is Params4bit and target.weight.bnb_quantized
    assert target.weight.quant_state is target.quant_state is not None
    assert target.weight.module is target
    assert same_bits(target.weight.data, source.weight.data)
    assert target.weight.quant_state == source.weight.quant_state
    source.compute_dtype = target.compute_dtype = torch.float32
    source.compute_type_is_set = target.compute_type_is_set = True
    assert torch.allclose(target(x), source(x), rtol=0, atol=0)
    assert_same_tensors({k: v for k, v in target.state_dict().items() if k != "bias"}, values)


@pytest.mark.parametrize("make_target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("assign", [False, True])
@every_storage
@every_kind
def test_loading_is_exact(make_target, assign, storage, quant_type, nested):
    kwargs = {"quant_type": quant_type, "compress_statistics": nested, "quant_storage": storage}
    source, target = quantized(**kwargs), make_target(**kwargs)
    state = source.state_dict()
    assert state.keys() == keys_of_state(nested, quant_type)
    values = snapshot({k: v for k, v in state.items() if k != "bias"})
    result = target.load_state_dict(state, strict=True, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    if target.bias.dtype != source.bias.dtype:
        target.bias.data = source.bias.data
    check_loaded(target, source, values)
    weights = [value for name, value in state.items() if name != "bias"]
    assert not storages_of(weights) & storages_of(tensors_of_parameter(target.weight).values())


@pytest.mark.parametrize("quant_type, nested", [("nf4", True), ("fp4", False)])
def test_the_order_of_the_keys_does_not_matter(quant_type, nested):
    source = quantized(quant_type=quant_type, compress_statistics=nested)
    state = source.state_dict()
    for names in (sorted(state), sorted(state, reverse=True), list(state)[3:] + list(state)[:3]):
        target = torch.nn.ModuleDict({"layer": quantized(seed=7, quant_type=quant_type, compress_statistics=nested)})
        target.load_state_dict({f"layer.{name}": state[name] for name in names}, strict=True)
        assert_same_tensors(target["layer"].state_dict(), state)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_a_layer_on_meta(assign):
    source = quantized(bias=False)
    with torch.device("meta"):
        target = Linear4bit(IN, OUT, bias=False, quant_type="nf4")
    target.load_state_dict(source.state_dict(), strict=True, assign=assign)
    check_loaded(target, source, snapshot(source.state_dict()))


def test_loading_after_loading():
    first, second = quantized(seed=1), quantized(seed=2, quant_type="fp4", compress_statistics=False)
    target = unquantized(seed=3)
    for source in (first, second, first):
        target.load_state_dict(source.state_dict())
        assert_same_tensors(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("nested", [False, True])
def test_loading_a_float_weight_into_a_quantised_layer_quantizes_it(nested):
    source = torch.nn.Linear(IN, OUT)
    target = quantized(seed=7, compress_statistics=nested, quant_storage=torch.bfloat16)
    target.load_state_dict(source.state_dict())
    expected = Params4bit(
        source.weight.data, quant_type="nf4", compress_statistics=nested, quant_storage=torch.bfloat16
    ).to("cpu")
    assert_same_tensors(tensors_of_parameter(target.weight), tensors_of_parameter(expected))
    assert target.quant_state is target.weight.quant_state and target.weight.module is target
    assert torch.equal(target.bias, source.bias)


def test_loading_a_float_weight_into_a_layer_not_yet_quantised():
    source, target = torch.nn.Linear(IN, OUT), unquantized(seed=7)
    target.load_state_dict(source.state_dict())
    assert not target.weight.bnb_quantized and same_bits(target.weight.data, source.weight.data)
    assert target.weight.data_ptr() != source.weight.data_ptr()
    target.to("cpu")
    assert target.weight.bnb_quantized


def tampered(**changes):
    state = dict(quantized(compress_statistics=True).state_dict())
    for name, value in changes.items():
        name = "weight" if name == "weight" else "weight." + name
        if value is None:
            del state[name]
        else:
            state[name] = value(state[name])
    return state


WRONG = {
    "other out_features": lambda: dict(quantized(IN, OUT + 1, bias=False).state_dict()),
    "other in_features": lambda: dict(quantized(IN + 64, OUT).state_dict()),
    "transposed": lambda: {**quantized(OUT, IN).state_dict(), "bias": torch.zeros(OUT)},
    "float of another shape": lambda: {"weight": randn(OUT, IN + 1), "bias": torch.zeros(OUT)},
    "codes alone": lambda: {k: v for k, v in tampered().items() if "." not in k},
    "no quant_state": lambda: {k: v for k, v in tampered().items() if "quant_state" not in k},
    "no absmax": lambda: tampered(absmax=None),
    "no quant_map": lambda: tampered(quant_map=None),
    "no nested_absmax": lambda: tampered(nested_absmax=None),
    "no nested_quant_map": lambda: tampered(nested_quant_map=None),
    "too few codes": lambda: tampered(weight=lambda v: v[:-1]),
    "too many codes": lambda: tampered(weight=lambda v: torch.cat([v, v])),
    "too few statistics": lambda: tampered(absmax=lambda v: v[:-1]),
    "an unknown statistic": lambda: {**tampered(), "weight.zero_point": torch.zeros(1)},
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("make_target", [unquantized, quantized])
def test_a_state_dict_that_does_not_fit_is_an_error_that_names_the_weight(make, make_target):
    target = torch.nn.Sequential(make_target(seed=7))
    before = snapshot(tensors_of_parameter(target[0].weight))
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        target.load_state_dict({f"0.{name}": value for name, value in make().items()})
    assert_same_tensors(tensors_of_parameter(target[0].weight), before)


def test_an_error_in_one_layer_is_collected_with_those_of_others():
    model = torch.nn.Sequential(quantized(), quantized())
    state = {k: v for k, v in model.state_dict().items() if "." not in k.split("weight", 1)[-1]}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    assert "0.weight" in str(error.value) and "1.weight" in str(error.value)


def test_missing_and_unexpected_keys_are_reported():
    state = quantized().state_dict()
    layer = quantized(seed=7)
    before = snapshot(tensors_of_parameter(layer.weight))
    bias = {"bias": state["bias"]}
    assert layer.load_state_dict(bias, strict=False).missing_keys == ["weight"]
    assert_same_tensors(tensors_of_parameter(layer.weight), before)
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        layer.load_state_dict(bias)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        layer.load_state_dict({**state, "other": torch.zeros(1)})


@every_storage
@every_kind
def test_state_dicts_hold_plain_independent_tensors_that_every_format_takes(storage, quant_type, nested):
    model = torch.nn.Sequential(
        *(quantized(quant_type=quant_type, compress_statistics=nested, quant_storage=storage, seed=i) for i in (0, 1))
    )
    for _ in range(2):
        state = model.state_dict()
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert all(value.is_contiguous() for value in state.values())
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        from_torch = torch.load(buffer, weights_only=True)
        from_safetensors = load_safetensors(save_safetensors(dict(state)))  # refuses shared storage
        for loaded in (from_torch, from_safetensors):
            assert_same_tensors(dict(loaded), dict(state))
            other = torch.nn.Sequential(*(unquantized(seed=7 + i) for i in (0, 1)))
            other.load_state_dict(loaded)
            assert_same_tensors(other.state_dict(), state)
        model(randn(2, IN)) if len(model) == 1 else model[0](randn(2, IN))


def test_keep_vars_keeps_the_parameters():
    layer = quantized()
    state = layer.state_dict(keep_vars=True)
    assert state["weight"] is layer.weight and state["bias"] is layer.bias


def test_a_layer_not_yet_quantised_saves_a_float_weight_alone():
    layer = unquantized()
    assert layer.state_dict().keys() == {"weight", "bias"}
    assert same_bits(layer.state_dict()["weight"], randn(OUT, IN))


# Whole modules


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("map_location", [None, "cpu"])
@every_kind
def test_a_saved_module_loads(after_forward, map_location, quant_type, nested):
    layer = quantized(quant_type=quant_type, compress_statistics=nested).eval()
    x = randn(3, IN)
    if after_forward:
        layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False, map_location=map_location)
    assert type(loaded.weight) is Params4bit and loaded.weight.module is loaded
    assert loaded.weight.quant_state is loaded.quant_state
    assert same_bits(loaded(x), layer(x))


def test_two_layers_in_training_get_gradients_only_where_they_should():
    model = torch.nn.Sequential(quantized(), torch.nn.ReLU(), quantized(OUT, 8))
    x = randn(4, IN).requires_grad_()
    model(x).square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert all((p.grad is not None) == (name.endswith("bias")) for name, p in model.named_parameters())


def test_requires_grad_of_the_whole_model_leaves_the_codes_without_one():
    layer = quantized()
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad and not layer.bias.requires_grad


def test_a_skipped_module_stays_an_ordinary_linear():
    model = torch.nn.Sequential()
    model.add_module("proj", torch.nn.Linear(8, 8))
    model.add_module("lm_head", torch.nn.Linear(8, 8))
    head = model.lm_head
    bnb.utils.replace_linear(model, lambda i, o, bias: Linear4bit(i, o, bias), skip_modules=["lm_head"])
    assert type(model.proj) is Linear4bit and model.lm_head is head and type(head) is torch.nn.Linear
