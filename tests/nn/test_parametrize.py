"""`replace_parameter_4bit`: any parameter of any module, fused experts in particular."""

import copy
import pickle

import pytest
import torch
from torch import nn
import torch.nn.utils.parametrize as P
from torch.utils.checkpoint import checkpoint

from bitsandbytes import functional as F
from bitsandbytes.nn.parametrize import replace_parameter_4bit, replace_parameter_4bit_prequantized

from .helpers import FLOATS, KINDS_4BIT, assert_same_tensors, randn, same_bits, snapshot, tensors_of_state

EXPERTS, HIDDEN, INNER = 3, 16, 40
every_kind = pytest.mark.parametrize("quant_type, nested", KINDS_4BIT)


class Experts(nn.Module):
    """Fused expert weights, as transformers 5 keeps them."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        scale = torch.tensor([1.0, 100.0, 0.01]).view(-1, 1, 1)  # of each expert: blocks that crossed would show
        self.gate_up = nn.Parameter((randn(EXPERTS, 2 * INNER, HIDDEN, seed=seed) * scale).to(dtype))
        self.down = nn.Parameter((randn(EXPERTS, HIDDEN, INNER, seed=seed + 1) * scale).to(dtype))
        self.bias = nn.Parameter(randn(HIDDEN, seed=seed + 2).to(dtype))
        self.reads = 0

    def forward(self, x, fail=False):
        up = torch.einsum("bh,eih->bei", x, self.gate_up)
        if fail:
            raise RuntimeError("on purpose")
        inner = torch.nn.functional.silu(up[..., :INNER]) * up[..., INNER:]
        return torch.einsum("bei,ehi->bh", inner, self.down) + self.bias


def quantized(seed=0, dtype=torch.float32, **kwargs):
    module = Experts(seed, dtype)
    for name in ("gate_up", "down"):
        replace_parameter_4bit(module, name, **kwargs)
    return module


def state_of(module, name):
    return module.parametrizations[name][0].quant_state


@pytest.fixture(autouse=True)
def the_cache_is_left_off_and_empty():
    yield
    assert P._cache_enabled == 0 and P._cache == {}


@every_kind
def test_reading_the_attribute_decodes_it(quant_type, nested):
    original = Experts()
    module = quantized(quant_type=quant_type, compress_statistics=nested)
    for name, blocksize in (("gate_up", 64), ("down", 64)):
        value = getattr(original, name).data
        packed, state = F.quantize_4bit(value, blocksize=blocksize, quant_type=quant_type, compress_statistics=nested)
        read = getattr(module, name)
        assert same_bits(read, F.dequantize_4bit(packed, state)) and not read.requires_grad
        assert read.shape == value.shape and read.dtype == value.dtype
        assert state_of(module, name).nested == nested


def test_it_saves_three_quarters_of_the_memory():
    original, module = Experts(), quantized()
    packed = sum(p.nbytes for p in module.parameters()) - module.bias.nbytes
    assert packed * 8 == original.gate_up.nbytes + original.down.nbytes
    assert module.bias.dtype == torch.float32 and len(list(module.parameters())) == 3


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_blocks_never_cross_experts(quant_type):
    """Each expert decodes to what it does on its own, however different the scale of its neighbours."""
    for inner, blocksize in ((40, 64), (6, 32), (64, 64)):
        weight = nn.Module()
        value = randn(EXPERTS, HIDDEN, inner) * torch.tensor([1.0, 1e4, 1e-4]).view(-1, 1, 1)
        weight.experts = nn.Parameter(value.clone())
        replace_parameter_4bit(weight, "experts", quant_type=quant_type)
        assert state_of(weight, "experts").blocksize == blocksize
        for expert in range(EXPERTS):
            packed, state = F.quantize_4bit(value[expert], blocksize=blocksize, quant_type=quant_type)
            assert same_bits(weight.experts[expert], F.dequantize_4bit(packed, state))


@pytest.mark.parametrize("shape, blocksize", [((3, 5, 7), None), ((3, 4, 8), 64), ((2, 3, 16, 24), 256)])
def test_blocks_that_would_cross_experts_are_an_error(shape, blocksize):
    module = nn.Module()
    module.w = nn.Parameter(randn(*shape))
    before = module.w
    with pytest.raises(ValueError, match=r"blocksize.*expert"):
        replace_parameter_4bit(module, "w", blocksize=blocksize)
    assert module.w is before and not P.is_parametrized(module)


@pytest.mark.parametrize("shape", [(5, 7), (9,), (64, 64)])
def test_parameters_without_experts_take_any_shape(shape):
    module = nn.Module()
    module.w = nn.Parameter(randn(*shape))
    replace_parameter_4bit(module, "w", blocksize=32)
    assert module.w.shape == shape and state_of(module, "w").blocksize == 32


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_forward_is_that_of_the_decoded_weights(dtype):
    module, reference = quantized(dtype=dtype), Experts(dtype=dtype)
    reference.gate_up.data, reference.down.data = module.gate_up, module.down
    x = randn(5, HIDDEN, dtype=dtype)
    assert same_bits(module(x), reference(x))


def test_input_gradients_flow():
    module, reference = quantized(), Experts()
    reference.gate_up.data, reference.down.data = module.gate_up, module.down
    x, y = (randn(5, HIDDEN).requires_grad_() for _ in range(2))
    module(x).square().sum().backward()
    reference(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(module.bias.grad, reference.bias.grad)


def test_wrong_names_are_errors():
    module = Experts()
    with pytest.raises(AttributeError, match="does not have parameter 'other'"):
        replace_parameter_4bit(module, "other")
    with pytest.raises(TypeError, match=r"'reads' is not an instance of nn.Parameter"):
        replace_parameter_4bit(module, "reads")
    for name in ("other", "reads"):
        with pytest.raises((AttributeError, TypeError)):
            replace_parameter_4bit_prequantized(module, name, {}, torch.device("cpu"))


# State dicts


@pytest.mark.parametrize("prefix", ["", "layers.0."])
@every_kind
def test_state_dicts_have_the_keys_of_a_linear4bit_and_load_strictly(prefix, quant_type, nested):
    def model(seed):
        experts = quantized(seed, quant_type=quant_type, compress_statistics=nested)
        return nn.ModuleDict({"layers": nn.ModuleList([experts])}) if prefix else experts

    source, target = model(0), model(7)
    state = source.state_dict()
    names = ["absmax", "quant_map", f"quant_state.bitsandbytes__{quant_type}"]
    names += ["nested_absmax", "nested_quant_map"] if nested else []
    expected = {f"{prefix}{p}{s}" for p in ("gate_up", "down") for s in ["", *("." + name for name in names)]}
    assert state.keys() == expected | {prefix + "bias"}
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    before = snapshot(state)
    for order in (list(state), sorted(state, reverse=True)):
        result = target.load_state_dict({name: state[name] for name in order}, strict=True)
        assert not result.missing_keys and not result.unexpected_keys
        assert_same_tensors(target.state_dict(), before)
        assert_same_tensors(state, before)  # the caller's dict keeps what it had


def test_loading_shares_nothing_with_the_source():
    source, target = quantized(0), quantized(7)
    state = source.state_dict()
    target.load_state_dict(state)
    expected = snapshot(target.state_dict())
    for value in state.values():
        value.zero_()
    assert_same_tensors(target.state_dict(), expected)


WRONG = {
    "codes alone": lambda s: {k: v for k, v in s.items() if not k.startswith("down.")},
    "statistics alone": lambda s: {k: v for k, v in s.items() if k != "down"},
    "another shape": lambda s: s | {k.replace("gate_up", "down"): v for k, v in s.items() if "gate_up" in k},
    "no absmax": lambda s: {k: v for k, v in s.items() if k != "down.absmax"},
    "too few codes": lambda s: {**s, "down": s["down"][:-1]},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_state_dict_that_does_not_fit_is_an_error_that_names_the_parameter(change):
    module = nn.ModuleDict({"mlp": quantized()})
    before = snapshot(module.state_dict())
    state = change(dict(quantized(7).state_dict()))
    with pytest.raises(RuntimeError, match=r"mlp\.(down|parametrizations\.down)"):
        module.load_state_dict({f"mlp.{name}": value for name, value in state.items()})
    after = {name: value for name, value in module.state_dict().items() if ".down" in name}
    assert_same_tensors(after, {name: value for name, value in before.items() if ".down" in name})


@every_kind
def test_codes_that_are_packed_already(quant_type, nested):
    source = quantized(quant_type=quant_type, compress_statistics=nested)
    state = source.state_dict()
    module = Experts(9)
    for name in ("gate_up", "down"):
        setattr(module, name, nn.Parameter(state[name].clone(), requires_grad=False))
        stats = {k.removeprefix(name + "."): v for k, v in state.items() if k.startswith(name + ".")}
        replace_parameter_4bit_prequantized(module, name, stats, torch.device("cpu"))
        assert same_bits(getattr(module, name), getattr(source, name))
    module.bias.data = source.bias.data
    assert_same_tensors(module.state_dict(), state)


# Moves and copies


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
@pytest.mark.parametrize("nested", [False, True])
def test_casts_leave_codes_and_statistics_alone(cast, nested):
    module = quantized(compress_statistics=nested)
    before = snapshot(tensors_of_state(state_of(module, "down")))
    codes, value = module.parametrizations.down.original.clone(), module.down
    getattr(nn.Sequential(module), cast)()
    module.to("cpu")
    assert_same_tensors(tensors_of_state(state_of(module, "down")), before)
    assert same_bits(module.parametrizations.down.original, codes) and same_bits(module.down, value)


@pytest.mark.parametrize("nested", [False, True])
def test_statistics_follow_a_move(nested):
    module = quantized(compress_statistics=nested)
    other = copy.deepcopy(module)
    nn.Sequential(module).to("meta")
    tensors = tensors_of_state(state_of(module, "down")) | {"codes": module.parametrizations.down.original}
    assert {value.device.type for value in tensors.values()} == {"meta"}
    assert {value.device.type for value in tensors_of_state(state_of(other, "down")).values()} == {"cpu"}


def test_deepcopy_is_independent():
    """Pickling a parametrized module is refused by torch.nn.utils.parametrize itself."""
    module = quantized()
    other = copy.deepcopy(module)
    x = randn(3, HIDDEN)
    expected = module(x)
    assert same_bits(other(x), expected)
    other.load_state_dict(quantized(7).state_dict())
    assert same_bits(module(x), expected) and not torch.equal(other(x), expected)
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(module)


# Decoding once per forward


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(randn(64, 64))

    def forward(self, x, fail=False):
        first, second = self.w, self.w
        assert first is second  # decoded once
        if fail:
            raise RuntimeError("on purpose")
        return x @ first


def counting():
    module = Counting()
    replace_parameter_4bit(module, "w")
    return module


def test_a_forward_decodes_once_and_keeps_nothing():
    module = counting()
    module(randn(2, 64))
    assert P._cache_enabled == 0 and P._cache == {}
    assert module.w is not module.w


def test_nested_modules_share_the_cache_until_the_outermost_returns():
    class Outer(Counting):
        def __init__(self):
            super().__init__()
            self.inner = counting()

        def forward(self, x):
            first = self.w
            y = self.inner(x)
            assert self.w is first and P._cache_enabled == 1
            return y @ first

    outer = Outer()
    replace_parameter_4bit(outer, "w")
    outer(randn(2, 64))


def test_an_exception_in_forward_turns_the_cache_off_again():
    module = counting()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            module(randn(2, 64), fail=True)
        assert P._cache_enabled == 0 and P._cache == {}
    module(randn(2, 64))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_turns_the_cache_off_again(use_reentrant):
    module = quantized()
    x, y = (randn(4, HIDDEN).requires_grad_() for _ in range(2))
    checkpoint(module, x, use_reentrant=use_reentrant).square().sum().backward()
    assert P._cache_enabled == 0 and P._cache == {}
    module(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_several_parameters_of_one_module_count_once_each():
    module = quantized()
    module(randn(2, HIDDEN))
    assert P._cache_enabled == 0
