"""`QuantState`: its forms, copies and moves."""

import copy
import io
import json
import pickle

import pytest
import torch

import bitsandbytes.functional as F
from tests.helpers import QUANT_TYPES, assert_same, randn

nested = pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
every_type = pytest.mark.parametrize("quant_type", QUANT_TYPES)
packed = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])


def make(nested=False, quant_type="nf4", dtype=torch.float16, shape=(5, 70), device="cpu"):
    return F.quantize_4bit(randn(*shape, dtype=dtype, device=device), quant_type=quant_type, compress_statistics=nested)


def tensors_of(state):
    found = [state.absmax, state.code]
    return found + ([state.offset, *tensors_of(state.state2)] if state.nested else [])


PLAIN_KEYS = ["quant_type", "absmax", "blocksize", "quant_map", "dtype", "shape"]
NESTED_KEYS = ["nested_absmax", "nested_blocksize", "nested_quant_map", "nested_dtype", "nested_offset"]


class TestForms:
    @nested
    @every_type
    def test_unpacked(self, quant_type, nested):
        _, state = make(nested, quant_type)
        items = state.as_dict()
        assert list(items) == PLAIN_KEYS + (NESTED_KEYS if nested else [])
        assert (items["quant_type"], items["blocksize"], items["dtype"]) == (quant_type, 64, "float16")
        assert items["shape"] == (5, 70)
        if nested:
            assert (items["nested_blocksize"], items["nested_dtype"]) == (256, "float32")
            assert items["nested_offset"] == state.offset.item()

    @nested
    @every_type
    def test_packed_holds_tensors_only_and_json_as_upstream_writes_it(self, quant_type, nested):
        _, state = make(nested, quant_type)
        items = state.as_dict(packed=True)
        key = f"quant_state.bitsandbytes__{quant_type}"
        assert set(items) == {"absmax", "quant_map", key} | ({"nested_absmax", "nested_quant_map"} if nested else set())
        assert all(isinstance(v, torch.Tensor) for v in items.values())
        written = json.loads(bytes(items[key].tolist()))
        expected = {"quant_type": quant_type, "blocksize": 64, "dtype": "float16", "shape": [5, 70]}
        if nested:
            expected |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": state.offset.item()}
        assert list(written.items()) == list(expected.items())
        assert bytes(items[key].tolist()).decode() == json.dumps(expected)

    def test_layers_that_share_a_map_pack_to_tensors_of_their_own(self):
        """safetensors refuses tensors that share storage."""
        first, second = make(nested=True)[1], make(nested=True)[1]
        second.state2.code = first.state2.code
        maps = [state.as_dict(packed=True)["nested_quant_map"] for state in (first, second)]
        assert maps[0].data_ptr() != maps[1].data_ptr()
        assert_same(*maps)

    def test_of_a_state_without_a_type_is_the_unpacked_one(self):
        _, state = F.quantize_blockwise(randn(100))
        assert state.as_dict(packed=True).keys() == state.as_dict().keys()
        assert state.as_dict()["shape"] is None

    @packed
    @nested
    @every_type
    @pytest.mark.parametrize("prefix", ["", "weight.", "model.layers.0.mlp.up_proj.weight."])
    def test_round_trip_with_any_prefix(self, prefix, quant_type, nested, packed, device):
        data, state = make(nested, quant_type)
        items = {prefix + name: value for name, value in state.as_dict(packed=packed).items()}
        if not packed and prefix:
            items["quant_type"] = items.pop(prefix + "quant_type")
        before = dict(items)
        again = F.QuantState.from_dict(items, device=torch.device(device))
        assert items == before or all(items[k] is before[k] for k in before)
        assert list(items) == list(before)
        assert {t.device.type for t in tensors_of(again)} == {torch.device(device).type}
        assert again.to("cpu") == state
        assert again.shape == torch.Size((5, 70))
        assert again.dtype == torch.float16
        assert_same(F.dequantize_4bit(data, again), F.dequantize_4bit(data, state))

    @nested
    def test_survives_a_safetensors_file(self, nested, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch")
        data, state = make(nested)
        safetensors.save_file({"weight": data, **state.as_dict(packed=True)}, tmp_path / "w.safetensors")
        items = safetensors.load_file(tmp_path / "w.safetensors")
        data = items.pop("weight")
        again = F.QuantState.from_dict(items, device=torch.device("cpu"))
        assert again == state
        assert_same(F.dequantize_4bit(data, again), F.dequantize_4bit(data, state))

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda items: items.pop("quant_state.bitsandbytes__nf4"),
            lambda items: items.update({"quant_state.bitsandbytes__fp4": items["quant_state.bitsandbytes__nf4"]}),
            lambda items: items.update({"quant_state.bitsandbytes__int4": items.pop("quant_state.bitsandbytes__nf4")}),
            lambda items: items.update(surprise=torch.ones(1)),
        ],
        ids=["none", "two", "unknown type", "unknown key"],
    )
    def test_a_broken_dict_is_a_value_error(self, spoil):
        items = make()[1].as_dict(packed=True)
        spoil(items)
        with pytest.raises(ValueError):
            F.QuantState.from_dict(items, device=torch.device("cpu"))

    def test_dicts_pack_to_utf8_json_in_a_byte_tensor(self):
        source = {"a": 1, "b": [1.5, None], "c": "ä"}
        tensor = F.pack_dict_to_tensor(source)
        assert (tensor.dtype, tensor.device.type, tensor.dim()) == (torch.uint8, "cpu", 1)
        assert F.unpack_tensor_to_dict(tensor) == source


class TestListForm:
    @nested
    def test_items(self, nested):
        _, state = make(nested)
        assert state[0] is state.absmax
        assert [state[1], state[2], state[3], state[5]] == [torch.Size((5, 70)), torch.float16, 64, "nf4"]
        assert state[-1] == "nf4"
        if nested:
            assert state[4][0] is state.offset
            assert state[4][1] is state.state2
        else:
            assert state[4] is None
        assert len(state[:]) == 6
        with pytest.raises(IndexError):
            state[6]


class TestAttributePathOfFsdp:
    """FSDP resolves the key "weight.quant_state.bitsandbytes__nf4" attribute by attribute."""

    @nested
    @every_type
    def test_the_packed_item_is_an_attribute(self, quant_type, nested):
        _, state = make(nested, quant_type)
        name = f"bitsandbytes__{quant_type}"
        assert_same(getattr(state, name), state.as_dict(packed=True)["quant_state." + name])

    @pytest.mark.parametrize("name", ["bitsandbytes__fp4", "bitsandbytes__int4", "missing", "__deepcopy__"])
    def test_others_do_not_exist(self, name):
        assert not hasattr(make()[1], name)


class TestCopies:
    @nested
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"]
    )
    def test_are_equal_and_share_nothing(self, duplicate, nested):
        data, state = make(nested)
        before = dict(vars(state))
        again = duplicate(state)
        assert again == state
        assert all(vars(state)[name] is before[name] for name in before)
        pointers = {t.data_ptr() for t in tensors_of(state)}
        assert not pointers & {t.data_ptr() for t in tensors_of(again)}
        assert_same(F.dequantize_4bit(data, again), F.dequantize_4bit(data, state))

    @nested
    def test_survive_torch_save(self, nested):
        _, state = make(nested)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file, weights_only=False) == state

    def test_a_shallow_copy_shares(self):
        _, state = make(nested=True)
        again = copy.copy(state)
        assert again == state
        assert again.absmax is state.absmax


class TestMoves:
    # bitsandbytes#1527: the code table stayed behind.
    @nested
    def test_every_tensor_moves_in_place(self, nested):
        _, state = make(nested)
        assert state.to("meta") is state
        assert all(t.is_meta for t in tensors_of(state))

    @nested
    def test_a_shallow_copy_stays(self, nested):
        _, state = make(nested)
        other = copy.copy(state)
        other.to("meta")
        assert not any(t.is_meta for t in tensors_of(state))

    def test_a_round_trip_changes_nothing(self, device):
        _, state = make(nested=True)
        expected = copy.deepcopy(state)
        assert state.to(device).to("cpu") == expected

    def test_a_state_without_a_map_moves(self):
        state = F.QuantState(absmax=torch.ones(3))
        assert state.to("meta").absmax.is_meta


class TestEquality:
    @nested
    def test_equal(self, nested):
        assert make(nested)[1] == make(nested)[1]
        assert not make(nested)[1] != make(nested)[1]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("absmax", torch.zeros(6)),
            ("absmax", torch.zeros(7)),
            ("shape", (70, 5)),
            ("code", torch.zeros(16)),
            ("code", None),
            ("dtype", torch.float32),
            ("blocksize", 128),
            ("quant_type", "fp4"),
            ("offset", torch.tensor(1.0)),
            ("state2", F.QuantState(absmax=torch.ones(1))),
        ],
        ids=lambda v: v if isinstance(v, str) else "",
    )
    def test_every_field_counts(self, field, value):
        state, other = make()[1], make()[1]
        setattr(other, field, value)
        assert state != other
        assert other != state

    def test_the_second_level_counts(self):
        state, other = make(nested=True)[1], make(nested=True)[1]
        other.state2.absmax = other.state2.absmax + 1
        assert state != other

    @pytest.mark.parametrize("other", [None, 1, "nf4", object()])
    def test_other_things_are_not_equal(self, other):
        assert make()[1] != other

    def test_the_device_counts(self):
        assert make()[1] != make()[1].to("meta")


def test_defaults():
    state = F.QuantState(absmax=None)
    names = ("shape", "code", "dtype", "blocksize", "quant_type", "offset", "state2")
    assert [getattr(state, name) for name in names] == [None] * 7
    assert state.nested is False
    assert F.QuantState.valid_quant_types == ("fp4", "nf4")
    assert F.QuantState.valid_qs_type_keys == ["bitsandbytes__fp4", "bitsandbytes__nf4"]
    assert set(F.QuantState.valid_qs_keys) == {*PLAIN_KEYS, *NESTED_KEYS, "quant_state"}


def test_the_transposed_bfloat16_scales_of_a_layer_that_upstream_ran_before_saving(device):
    """Upstream's packed CPU layout leaves absmax as bfloat16 in the shape (in_features / blocksize, out_features)."""
    packed, state = F.quantize_4bit(torch.randn(8, 128, device=device), blocksize=64, quant_type="nf4")
    absmax = state.absmax.bfloat16()
    on_disk = state.as_dict(packed=True) | {"absmax": absmax.view(8, 2).t().contiguous()}
    read = F.QuantState.from_dict(on_disk, device=device)
    state.absmax = absmax.float()
    assert read == state
    assert torch.equal(F.dequantize_4bit(packed, read), F.dequantize_4bit(packed, state))
