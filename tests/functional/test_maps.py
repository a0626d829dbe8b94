"""Maps against values recorded from upstream 0.50.2, and their properties."""

from hashlib import sha256

import pytest
import torch

from bitsandbytes.errors import UnsupportedError
import bitsandbytes.functional as F
from tests.helpers import assert_same, golden_maps

MAKERS = {
    "linear": F.create_linear_map,
    "dynamic": F.create_dynamic_map,
    "fp8": F.create_fp8_map,
    "normal": F.create_normal_map,
    "4bit": lambda typename: F.get_4bit_type(typename, device="cpu"),
}


def arguments(words: list[str]) -> dict:
    """`signed=True total_bits=8` as keyword arguments."""
    constants = {"True": True, "False": False}
    result = {}
    for word in words:
        key, _, text = word.partition("=")
        number = text.replace(".", "").isdigit()
        result[key] = constants.get(text, (float(text) if "." in text else int(text)) if number else text)
    return result


@pytest.mark.parametrize("name", golden_maps())
def test_map_equals_upstreams(name):
    maker, *words = name.split()
    made = MAKERS[maker](**arguments(words))
    assert made.device.type == "cpu"
    # Adding 0 makes -0 into 0: sorting leaves the order of the two open.
    assert_same(made + 0.0, golden_maps()[name] + 0.0)


@pytest.mark.parametrize(
    ("signed", "digest"),
    [
        (True, "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"),
        (False, "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398"),
    ],
)
def test_the_dynamic_map_has_these_bytes(signed, digest):
    assert sha256(F.create_dynamic_map(signed).numpy().tobytes()).hexdigest() == digest


def test_properties_of_the_dynamic_maps():
    signed, unsigned = F.create_dynamic_map(True), F.create_dynamic_map(False)
    for levels in (signed, unsigned):
        assert levels.shape == (256,)
        assert levels.unique().numel() == 256
        assert (levels.diff() > 0).all()
        assert levels[-1] == 1
    assert signed[127] == 0
    assert unsigned[0] == 0
    assert_same(signed[:127], -signed[128:-1].flip(0))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("maker", [F.create_dynamic_map, F.create_linear_map])
def test_maps_of_fewer_bits_have_that_many_levels_and_zero(maker, bits):
    levels = maker(signed=True, total_bits=bits)
    assert levels.shape == (256,)
    assert levels.unique().numel() in (2**bits, 2**bits - 1)
    assert (levels == 0).any()


def test_names_of_the_8_bit_maps():
    assert_same(F.name2qmap["dynamic"], F.create_dynamic_map(True))
    assert_same(F.name2qmap["udynamic"], F.create_dynamic_map(False))


def test_a_returned_table_is_the_callers_own():
    """Writing to it changes nothing for later calls."""
    for make in (lambda: F.get_4bit_type("nf4", device="cpu"), F.create_dynamic_map):
        first = make()
        expected = first.clone()
        first.fill_(7)
        assert_same(make(), expected)
    state = F.quantize_4bit(torch.ones(64), quant_type="nf4")[1]
    state.code.fill_(7)
    assert_same(F.quantize_4bit(torch.ones(64), quant_type="nf4")[1].code, F.get_4bit_type("nf4", device="cpu"))
    state = F.quantize_blockwise(torch.ones(64))[1]
    state.code.fill_(7)
    assert_same(F.quantize_blockwise(torch.ones(64))[1].code, F.create_dynamic_map())


@pytest.mark.parametrize("call", [lambda: F.get_4bit_type("nf5"), lambda: F.get_4bit_type("af4", blocksize=128)])
def test_a_type_that_does_not_exist_is_named(call):
    with pytest.raises(UnsupportedError, match="get_4bit_type") as caught:
        call()
    assert isinstance(caught.value, NotImplementedError)


def test_fp8_bits_must_add_up():
    with pytest.raises(ValueError, match="total_bits"):
        F.create_fp8_map(True, 5, 3, 8)
