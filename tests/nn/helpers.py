"""What the module tests share: seeded values, bitwise comparison, and a walk over every tensor of an object."""

import copy
from itertools import product

import torch

from bitsandbytes import functional as F

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
#: (quant_type, compress_statistics) of every kind of 4-bit weight.
KINDS_4BIT = tuple(product(("nf4", "fp4"), (False, True)))


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a, b):
    """Equal in class of storage, shape and every bit: NaN equals itself, 0 differs from -0."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def tensors_of_state(state):
    """Every tensor reachable from a QuantState, by name."""
    if state is None:
        return {}
    found = {name: value for name, value in vars(state).items() if isinstance(value, torch.Tensor)}
    return found | {f"state2.{name}": value for name, value in tensors_of_state(state.state2).items()}


def tensors_of_parameter(parameter):
    """The data of a quantised parameter and every tensor that its attributes reach."""
    found = {"data": parameter.data} | tensors_of_state(parameter.__dict__.get("quant_state"))
    found |= {name: value for name, value in vars(parameter).items() if isinstance(value, torch.Tensor)}
    return found


def snapshot(tensors):
    return {name: value.detach().clone() for name, value in tensors.items()}


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not same_bits(actual[name], expected[name])]
    assert not different, f"these tensors differ: {different}"


def assert_same_attributes(actual, expected):
    """The very same objects under the same names."""
    assert actual.keys() == expected.keys()
    different = [name for name in expected if actual[name] is not expected[name]]
    assert not different, f"these attributes are other objects: {different}"


def decoded(weight, dtype=None):
    """The weight that the codes stand for, rounded to `dtype` once; that of the original if None."""
    state = copy.copy(weight.quant_state)
    state.dtype = dtype or state.dtype
    return F.dequantize_4bit(weight.data, state)


def storages_of(tensors):
    return {value.untyped_storage().data_ptr() for value in tensors if value.numel()}


def fp32_bound(x, w, bias=None, dtype=torch.float32):
    """What a matmul accumulated in fp32 may differ by from the exact `x @ w.T + bias` in fp64, elementwise.

    2 * K * eps * sum|x||w| for the accumulation and one rounding to `dtype` of the result. A bf16 result may come from
    weights that were rounded to bf16 once (docs/numerics.md).
    """
    x, w = x.double(), w.double()
    exact = torch.nn.functional.linear(x, w, None if bias is None else bias.double())
    magnitude = torch.nn.functional.linear(x.abs(), w.abs(), None if bias is None else bias.double().abs())
    accumulation = 2 * x.shape[-1] * torch.finfo(torch.float32).eps * magnitude
    if dtype == torch.bfloat16:
        accumulation += torch.finfo(dtype).eps / 2 * magnitude
    smallest = torch.finfo(dtype).smallest_normal
    rounding = torch.finfo(dtype).eps / 2 * (exact.abs() + accumulation).clamp_min(smallest)
    return exact, accumulation + rounding


def assert_within(actual, exact, bound):
    assert actual.shape == exact.shape
    excess = ((actual.double() - exact).abs() - bound).max() if actual.numel() else torch.tensor(0.0)
    assert excess <= 0, f"exceeds the bound by {excess:.3g}"
