"""Checkpoints that upstream's wheel saved through transformers, and ours."""

import json

import pytest
from safetensors.torch import load_file
import torch

import bitsandbytes.functional as F
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from tests.helpers import GOLDEN, LOGITS_RTOL, assert_same, unpack

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.integration

FOLDER = GOLDEN / "ckpt"
FOUR_BIT = ("nf4", "nf4_double", "fp4", "nf4_bf16_storage")
KINDS = (*FOUR_BIT, "int8")
#: An int8 forward also quantises its inputs.
INT8_FORWARD_RTOL = 3e-2


def config_of(kind: str):
    saved = json.loads((FOLDER / kind / "config.json").read_text())["quantization_config"]
    return transformers.BitsAndBytesConfig(
        **{k: v for k, v in saved.items() if not k.startswith("_") and k != "quant_method"}
    )


def load(path, device, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, device_map={"": device}, dtype=torch.float32, **kwargs
    ).eval()


def logits_error(model, kind, device) -> float:
    """Largest difference to the recorded logits, relative to the largest of them."""
    expected = load_file(FOLDER / kind / "expected.safetensors")
    with torch.no_grad():
        logits = model(expected["input_ids"].to(device)).logits.cpu()
    recorded = expected["logits_of_dequantized_weights_fp32"]
    return ((logits - recorded).abs().max() / recorded.abs().max()).item()


def quantised_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, (Linear4bit, Linear8bitLt))}


def saved_tensors(folder):
    return load_file(folder / "model.safetensors")


def state_of(model) -> dict:
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def check_same_tensors(actual: dict, expected: dict):
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert_same(actual[name], tensor, name)


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_a_4bit_checkpoint_gives_the_recorded_logits(kind, device):
    model = load(FOLDER / kind, device)
    assert len(quantised_layers(model)) == 14
    assert logits_error(model, kind, device) <= LOGITS_RTOL
    # And again: a forward changes nothing.
    assert logits_error(model, kind, device) <= LOGITS_RTOL


# bitsandbytes#1775: int8 models saved earlier generated nonsense.
def test_an_int8_checkpoint_gives_the_recorded_logits(device):
    model = load(FOLDER / "int8", device)
    assert len(quantised_layers(model)) == 14
    assert logits_error(model, "int8", device) <= INT8_FORWARD_RTOL
    decoded = model.dequantize()
    assert not quantised_layers(decoded)
    assert logits_error(decoded, "int8", device) <= LOGITS_RTOL


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_checkpoint_has_the_state_of_the_file_byte_for_byte(kind, device):
    model = load(FOLDER / kind, device)
    expected = saved_tensors(FOLDER / kind)
    check_same_tensors(state_of(model), expected)
    logits_error(model, kind, device)
    check_same_tensors(state_of(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_quantisation_is_saved_and_read_back_byte_for_byte(kind, device, tmp_path):
    model = load(FOLDER / "float", device, quantization_config=config_of(kind))
    model.save_pretrained(tmp_path / "first")
    again = load(tmp_path / "first", device)
    check_same_tensors(saved_tensors(tmp_path / "first"), state_of(model))
    check_same_tensors(state_of(again), state_of(model))
    assert logits_error(again, kind, device) <= (INT8_FORWARD_RTOL if kind == "int8" else LOGITS_RTOL)


def check_nested(name, ours, theirs):
    """The offset is a mean, in any order; the 8-bit codes upstream's CPU kernel takes are not the nearest."""
    key = name + ".quant_state.bitsandbytes__nf4"
    mine, recorded = (F.unpack_tensor_to_dict(items[key]) for items in (ours, theirs))
    assert mine.pop("nested_offset") == pytest.approx(recorded.pop("nested_offset"), rel=1e-6)
    assert mine == recorded
    torch.testing.assert_close(ours[name + ".nested_absmax"], theirs[name + ".nested_absmax"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_a_fresh_quantisation_is_upstreams(kind, device, tmp_path):
    load(FOLDER / "float", device, quantization_config=config_of(kind)).save_pretrained(tmp_path)
    ours, theirs = saved_tensors(tmp_path), saved_tensors(FOLDER / kind)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        if kind == "nf4_double" and "absmax" in name:
            continue
        if kind == "nf4_double" and "quant_state" in name:
            check_nested(name.partition(".quant_state")[0], ours, theirs)
        elif kind == "fp4" and tensor.dtype == torch.uint8 and name.endswith(".weight"):
            mine, recorded = (unpack(t, t.numel() * 2) for t in (ours[name], tensor))
            assert (mine % 8)[mine != recorded].tolist() == [0] * (mine != recorded).sum(), name  # zeros of both signs
        else:
            assert_same(ours[name], tensor, name)


def test_int8_codes_of_the_same_weights_are_upstreams(device):
    """Upstream rounds weights to fp16 first, and 127/absmax twice: a few codes at ties are one apart."""
    source, recorded = saved_tensors(FOLDER / "float"), saved_tensors(FOLDER / "int8")
    layers = [name.removesuffix("SCB") for name in recorded if name.endswith("SCB")]
    assert len(layers) == 14
    different = total = 0
    for layer in layers:
        codes, stats, _ = F.int8_vectorwise_quant(source[layer + "weight"].half().to(device))
        assert_same(stats, recorded[layer + "SCB"], layer)
        distance = (codes.cpu().int() - recorded[layer + "weight"].int()).abs()
        assert distance.max() <= 1
        different, total = different + int(distance.sum()), total + distance.numel()
    assert different <= total / 1000
