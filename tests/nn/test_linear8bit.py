"""`Linear8bitLt`: results, training, the life of its codes and statistics, and state dicts."""

import copy
import io
from itertools import product
import warnings

import pytest
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
import torch

import bitsandbytes as bnb
from bitsandbytes import functional as F
from bitsandbytes.errors import NotQuantizedError
from bitsandbytes.nn import Int8Params, Linear8bitLt

from .helpers import (
    FLOATS,
    assert_same_tensors,
    assert_within,
    fp32_bound,
    randn,
    same_bits,
    snapshot,
    storages_of,
    tensors_of_parameter,
)

IN, OUT = 96, 40

every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_threshold = pytest.mark.parametrize("threshold", [0.0, 2.0, 6.0])


def unquantized(in_features=IN, out_features=OUT, seed=0, dtype=torch.float32, bias=True, **kwargs):
    layer = Linear8bitLt(in_features, out_features, bias, **{"has_fp16_weights": False, **kwargs})
    layer.weight.data = randn(out_features, in_features, seed=seed, dtype=dtype)
    if bias:
        layer.bias.data = randn(out_features, seed=seed + 100, dtype=dtype)
    return layer


def quantized(*args, **kwargs):
    return unquantized(*args, **kwargs).to("cpu")


def decoded(layer):
    return F.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)


def quantized_input(x, threshold):
    """What LLM.int8() multiplies: rows rounded to 127 levels, columns with outliers exact."""
    rows = x.reshape(-1, x.shape[-1])
    codes, statistics, outliers = F.int8_vectorwise_quant(rows, threshold=threshold)
    values = F.int8_vectorwise_dequant(codes, statistics)
    if outliers is not None:
        values[:, outliers] = rows[:, outliers].float()
    return values.reshape(x.shape)


def tensors_of_layer(layer):
    found = {f"weight.{name}": value for name, value in tensors_of_parameter(layer.weight).items()}
    found |= {f"state.{name}": v for name, v in vars(layer.state).items() if isinstance(v, torch.Tensor)}
    return found | {"bias": layer.bias}


# Results


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@every_float
@every_threshold
def test_forward_is_the_linear_of_quantized_inputs_and_the_decoded_weight(rank, dtype, threshold):
    layer = quantized(dtype=dtype, threshold=threshold).eval()
    x = randn(*(2, 3, 1, 2)[: rank - 1], IN, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (*x.shape[:-1], OUT)
    values = quantized_input(x, threshold)
    assert threshold != 2.0 or not torch.equal(values, quantized_input(x, 0.0))  # there are outliers
    assert_within(y, *fp32_bound(values, decoded(layer), layer.bias, dtype))


@every_float
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_training_computes_with_the_decoded_weight_and_exact_inputs(rank, dtype):
    layer = quantized(dtype=dtype, threshold=6.0).train()
    x = randn(*(2, 3, 2)[: rank - 1], IN, dtype=dtype)
    weight = decoded(layer).to(dtype)
    expected = torch.nn.functional.linear(x, weight, layer.bias)
    assert torch.allclose(layer(x), expected, rtol=2 * torch.finfo(dtype).eps, atol=IN * torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (130, 5)])
@every_threshold
def test_any_feature_count_works(shape, threshold):
    layer = quantized(*shape, threshold=threshold).eval()
    x = randn(5, shape[0])
    assert_within(layer(x), *fp32_bound(quantized_input(x, threshold), decoded(layer), layer.bias))


@pytest.mark.parametrize("shape", [(0, IN), (3, 0, IN)])
@pytest.mark.parametrize("train", [False, True])
@every_threshold
def test_an_empty_batch(shape, train, threshold):
    assert quantized(threshold=threshold).train(train)(torch.zeros(shape)).shape == (*shape[:-1], OUT)


@pytest.mark.parametrize("has_fp16_weights", [False, True])
@pytest.mark.parametrize("train", [False, True])
@every_threshold
def test_large_bfloat16_values_neither_warn_nor_go_through_float16(has_fp16_weights, train, threshold):
    layer = quantized(dtype=torch.bfloat16, threshold=threshold, has_fp16_weights=has_fp16_weights).train(train)
    x = randn(4, IN, dtype=torch.bfloat16) * 1e4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = layer(x)
    assert y.dtype == torch.bfloat16 and torch.isfinite(y).all() and y.abs().max() > 65504
    reference = torch.nn.functional.linear(x.float(), randn(OUT, IN), randn(OUT, seed=100))
    assert (y.float() - reference).norm() / reference.norm() < 0.03


@pytest.mark.parametrize("train", [False, True])
@every_threshold
def test_long_sums_in_float16_stay_finite(train, threshold):
    layer = quantized(16384, 8, dtype=torch.float16, threshold=threshold).train(train)
    x = torch.full((4, 16384), 5.9, dtype=torch.float16)
    reference = torch.nn.functional.linear(x.double(), randn(8, 16384).double(), layer.bias.double())
    y = layer(x)
    assert torch.isfinite(y).all()
    assert (y.double() - reference).norm() / reference.norm() < 0.02


def test_outlier_columns_are_computed_in_floating_point():
    layer = quantized(threshold=6.0).eval()
    x = randn(4, IN) / 10
    x[:, 5] = 60.0
    with_outliers = layer(x)
    exact = torch.nn.functional.linear(x, decoded(layer), layer.bias)
    layer.state.threshold = 0.0
    without = layer(x)
    assert (with_outliers - exact).norm() < (without - exact).norm() / 20


# State


def test_constructor_arguments():
    layer = Linear8bitLt(8, 4, False, False, 6.0, 17, None)
    assert layer.bias is None and layer.index == 17
    assert layer.state.threshold == 6.0 and layer.state.has_fp16_weights is False and layer.state.use_pool
    default = Linear8bitLt(8, 4)
    assert default.state.has_fp16_weights and default.weight.requires_grad and default.state.threshold == 0.0
    with torch.device("meta"):
        assert Linear8bitLt(8, 4, has_fp16_weights=False).weight.is_meta


def test_codes_and_statistics_before_and_after_a_forward():
    layer = quantized()
    assert layer.weight.dtype == torch.int8 and layer.weight.shape == (OUT, IN)
    codes, statistics, _ = F.int8_vectorwise_quant(randn(OUT, IN))
    for _ in range(2):
        assert same_bits(layer.weight.data, codes) and same_bits(layer.weight.CB, codes)
        # Readers take state.SCB and fall back on weight.SCB, so the first is None or right.
        assert layer.state.SCB is None or same_bits(layer.state.SCB, statistics)
        assert same_bits(layer.weight.SCB, statistics)
        layer(randn(2, IN))
    assert layer.state.CB.data_ptr() == layer.weight.data_ptr()


def test_init_8bit_state():
    layer = quantized()
    layer.init_8bit_state()
    assert layer.state.CB.data_ptr() == layer.weight.data_ptr() and layer.state.SCB is layer.weight.SCB


def test_a_replaced_weight_is_used_and_the_old_state_is_not():
    """PEFT replaces the weight when it merges, and calls reset_grads()."""
    layer = quantized().eval()
    x = randn(3, IN)
    layer(x)
    layer.weight = Int8Params(randn(OUT, IN, seed=9), requires_grad=False, has_fp16_weights=False).to("cpu")
    for _ in range(2):
        assert_within(layer(x), *fp32_bound(quantized_input(x, 0.0), decoded(layer), layer.bias))
        assert same_bits(layer.state.SCB, layer.weight.SCB)
        layer.state.reset_grads()
        assert layer.state.CB is None and layer.state.SCB is None
    assert same_bits(layer.state_dict()["SCB"], layer.weight.SCB)


def test_statistics_survive_a_weight_assigned_to_its_own_move():
    """PEFT's DoRA does `module.weight = module.weight.to(device)`."""
    layer = quantized()
    x = randn(3, IN)
    expected = layer.eval()(x)
    layer.weight = layer.weight.to("cpu")
    assert same_bits(layer(x), expected) and layer.weight.SCB is not None
    layer.train()(x.requires_grad_()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("state_is_set", [False, True])
def test_int8_codes_without_statistics(state_is_set):
    source = quantized().eval()
    layer = Linear8bitLt(IN, OUT, has_fp16_weights=False).eval()
    layer.bias.data = source.bias.data
    layer.weight = Int8Params(source.weight.data, requires_grad=False)
    if state_is_set:
        layer.state.SCB = source.weight.SCB  # some loaders set it here
        assert same_bits(layer(randn(2, IN)), source(randn(2, IN)))
        assert same_bits(layer.state_dict()["SCB"], source.weight.SCB)
    else:
        with pytest.raises(NotQuantizedError, match="SCB"):
            layer(randn(2, IN))


def test_a_layer_that_was_never_moved_still_computes():
    """Upstream quantises in the forward then; the weight stays in floating point."""
    layer = unquantized().eval()
    x = randn(3, IN)
    assert same_bits(layer(x), quantized().eval()(x))
    assert layer.weight.dtype == torch.float32 and layer.state_dict().keys() == {"weight", "bias"}


@every_threshold
def test_every_tensor_follows_a_move_through_a_parent(threshold):
    model = torch.nn.Sequential(quantized(threshold=threshold)).eval()
    x = randn(2, IN)
    x[:, 3] = 50
    expected = model(x)
    before = snapshot(tensors_of_layer(model[0]))
    model.to("cpu").cpu().to("cpu", torch.float32)
    assert_same_tensors(tensors_of_layer(model[0]), before)
    assert same_bits(model(x), expected)
    model.to("meta")
    held = {name: value.device.type for name, value in tensors_of_layer(model[0]).items() if name != "state.idx"}
    assert held == dict.fromkeys(held, "meta") and {"state.CB", "state.SCB", "weight.SCB"} <= held.keys()


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
def test_casting_the_model_leaves_codes_and_statistics_alone(cast):
    model = torch.nn.Sequential(quantized())
    before = snapshot(tensors_of_parameter(model[0].weight))
    getattr(model, cast)()
    assert_same_tensors(tensors_of_parameter(model[0].weight), before)
    assert model[0].bias.dtype == getattr(torch.empty(0), cast)().dtype


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_a_forward_changes_nothing_that_is_saved(train, threshold):
    layer = quantized(threshold=threshold).train(train)
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


# Floating-point weights


@every_threshold
@pytest.mark.parametrize("train", [False, True])
def test_floating_weights_stay_and_get_gradients(threshold, train):
    layer = quantized(has_fp16_weights=True, threshold=threshold).train(train)
    assert layer.weight.dtype == torch.float32 and layer.weight.requires_grad
    x = randn(2, 3, IN).requires_grad_()
    reference_weight = layer.weight.data.clone().requires_grad_()
    reference_x = x.detach().clone().requires_grad_()
    reference_bias = layer.bias.data.clone().requires_grad_()
    grad = randn(2, 3, OUT, seed=1)
    y = layer(x)
    y.backward(grad)
    reference = torch.nn.functional.linear(reference_x, reference_weight, reference_bias)
    reference.backward(grad)
    for actual, expected in (
        (y, reference),
        (layer.weight.grad, reference_weight.grad),
        (x.grad, reference_x.grad),
    ):
        assert (actual - expected).norm() / expected.norm() < 0.02  # the rounding to 127 levels
    assert torch.allclose(layer.bias.grad, reference_bias.grad, atol=1e-5)


@pytest.mark.parametrize("train", [False, True])
def test_the_next_forward_sees_an_optimizer_step(train):
    layer = quantized(has_fp16_weights=True)
    x = randn(3, IN)
    layer.train()(x).sum().backward()
    layer.train(train)(x)
    with torch.no_grad():
        layer.weight -= 10 * layer.weight.grad
    reference = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert (layer(x) - reference).norm() / reference.norm() < 0.02


# State dicts

TARGETS = {"not quantised": unquantized, "quantised": quantized}


@pytest.mark.parametrize("make_target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("after_forward", [False, True])
def test_loading_is_exact(make_target, assign, after_forward):
    source, target = quantized().eval(), make_target(seed=7).eval()
    x = randn(3, IN)
    if after_forward:
        source(x)
        target(x)
    state = source.state_dict()
    assert state.keys() == {"weight", "bias", "SCB", "weight_format"}
    assert int(state["weight_format"]) == 0 and state["weight_format"].dtype == torch.uint8
    result = target.load_state_dict(dict(sorted(state.items(), reverse=True)), strict=True, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert_same_tensors(target.state_dict(), state)
    assert same_bits(target(x), source(x))
    weights = [state["weight"], state["SCB"]]
    assert not storages_of(weights) & storages_of(tensors_of_parameter(target.weight).values())


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_a_layer_on_meta(assign):
    source = quantized(bias=False).eval()
    with torch.device("meta"):
        target = Linear8bitLt(IN, OUT, bias=False, has_fp16_weights=False).eval()
    target.load_state_dict(source.state_dict(), assign=assign)
    assert same_bits(target(randn(2, IN)), source(randn(2, IN)))


def test_loading_into_a_parent_and_after_a_move():
    source, target = (torch.nn.Sequential(quantized(seed=seed)).eval() for seed in (0, 7))
    target.to("cpu")(randn(1, IN))
    target.load_state_dict(source.state_dict())
    target.to("cpu")
    assert same_bits(target(randn(2, IN)), source(randn(2, IN)))


@pytest.mark.parametrize("layout", ["row", 0, torch.tensor(0, dtype=torch.uint8), None])
def test_files_that_name_the_layout_in_other_ways_load(layout):
    """Older versions wrote the word; the first ones wrote nothing."""
    source, target = quantized().eval(), quantized(seed=7).eval()
    state = dict(source.state_dict())
    state.pop("weight_format")
    if layout is not None:
        state["weight_format"] = layout
    assert not any(target.load_state_dict(state, strict=True))
    assert same_bits(target(randn(2, IN)), source(randn(2, IN)))


@pytest.mark.parametrize("layout", ["col32", "col_turing", 3, torch.tensor(2, dtype=torch.uint8)])
def test_other_layouts_are_an_error(layout):
    state = {**quantized().state_dict(), "weight_format": layout}
    with pytest.raises((RuntimeError, ValueError), match=r"weight_format.*row"):
        quantized().load_state_dict(state)


@pytest.mark.parametrize("make_target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_float_weight(make_target, assign):
    source, target = torch.nn.Linear(IN, OUT), make_target(seed=7).eval()
    target(randn(1, IN))
    target.load_state_dict(source.state_dict(), assign=assign)
    assert target.weight.dtype == (torch.int8 if make_target is quantized else torch.float32)
    assert type(target.weight) is Int8Params
    target.to("cpu")
    expected = Int8Params(source.weight.data, requires_grad=False).to("cpu")
    assert_same_tensors(tensors_of_parameter(target.weight), tensors_of_parameter(expected))
    x = randn(3, IN)
    assert_within(target(x), *fp32_bound(quantized_input(x, 0.0), decoded(target), source.bias))


WRONG = {
    "codes without statistics": lambda s: {k: v for k, v in s.items() if k != "SCB"},
    "statistics without codes": lambda s: {**s, "weight": randn(OUT, IN)},
    "another shape": lambda s: {**s, "weight": s["weight"][:, :-1]},
    "statistics of another length": lambda s: {**s, "SCB": s["SCB"][:-1]},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("make_target", TARGETS.values(), ids=TARGETS)
def test_a_state_dict_that_does_not_fit_is_an_error_that_names_the_weight(change, make_target):
    target = torch.nn.Sequential(make_target(seed=7))
    before = snapshot(tensors_of_parameter(target[0].weight))
    state = change(dict(quantized().state_dict()))
    with pytest.raises(RuntimeError, match=r"0\.(weight|SCB)"):
        target.load_state_dict({f"0.{name}": value for name, value in state.items()})
    assert_same_tensors(tensors_of_parameter(target[0].weight), before)


def test_missing_keys_are_reported():
    state = dict(quantized().state_dict())
    bias = {"bias": state["bias"]}
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        quantized().load_state_dict(bias)
    assert quantized().load_state_dict(bias, strict=False).missing_keys == ["weight"]


@pytest.mark.parametrize("after_forward", [False, True])
def test_state_dicts_hold_plain_independent_tensors_that_every_format_takes(after_forward):
    model = torch.nn.Sequential(quantized(), quantized(OUT, 8)).eval()
    x = randn(2, IN)
    if after_forward:
        model(x)
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    for loaded in (torch.load(buffer, weights_only=True), load_safetensors(save_safetensors(dict(state)))):
        assert_same_tensors(dict(loaded), dict(state))
        other = torch.nn.Sequential(unquantized(seed=7), unquantized(OUT, 8, seed=8)).eval()
        other.load_state_dict(loaded)
        assert same_bits(other(x), model(x))


def test_keep_vars_keeps_the_parameters():
    layer = quantized()
    state = layer.state_dict(keep_vars=True)
    assert state["weight"] is layer.weight and state["SCB"] is layer.weight.SCB


# Whole modules


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("has_fp16_weights", [False, True])
@pytest.mark.parametrize("map_location", [None, "cpu"])
def test_copies_and_saved_modules_compute_the_same(after_forward, has_fp16_weights, map_location):
    layer = quantized(threshold=6.0, has_fp16_weights=has_fp16_weights).eval()
    x = randn(3, IN)
    if after_forward:
        layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (torch.load(buffer, weights_only=False, map_location=map_location), copy.deepcopy(layer)):
        assert type(other.weight) is Int8Params and other.state is not layer.state
        assert same_bits(other(x), layer(x)) and same_bits(other.to("cpu")(x), layer(x))
        assert not storages_of(tensors_of_parameter(other.weight).values()) & storages_of(
            tensors_of_parameter(layer.weight).values()
        )


def test_training_of_a_frozen_layer_gives_input_and_bias_gradients_alone():
    layer = quantized(threshold=6.0).train()
    x = randn(2, 3, IN).requires_grad_()
    grad = randn(2, 3, OUT, seed=1)
    layer(x).backward(grad)
    assert torch.allclose(x.grad, grad @ decoded(layer), atol=1e-4)
    assert torch.allclose(layer.bias.grad, grad.sum((0, 1)), atol=1e-5) and layer.weight.grad is None


def test_names_that_downstream_reads():
    layer = quantized()
    assert isinstance(layer, torch.nn.Linear) and type(layer).__name__ == "Linear8bitLt"
    assert isinstance(layer.state, bnb.MatmulLtState)
    assert (layer.in_features, layer.out_features) == (IN, OUT)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_float_weight_to_train_fills_the_parameter_that_an_optimizer_holds(assign):
    layer = unquantized(has_fp16_weights=True)
    weight = layer.weight
    source = torch.nn.Linear(IN, OUT)
    layer.load_state_dict(source.state_dict(), assign=assign)
    assert same_bits(layer.weight.data, source.weight.data) and (layer.weight is weight) == (not assign)
    assert type(layer.weight) is Int8Params and layer.weight.has_fp16_weights and layer.weight.requires_grad
