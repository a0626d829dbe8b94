"""accelerate: loading, offloading, and training state of quantised models."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bitsandbytes as bnb
from bitsandbytes.nn import Linear4bit, Linear8bitLt

from . import models
from .models import DEVICE, DTYPE

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.integration
QUANTIZED = {4: (Linear4bit, torch.uint8), 8: (Linear8bitLt, torch.int8)}


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(128, 256)
        self.fc2 = nn.Linear(256, 128)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 16)

    def forward(self, x):
        return self.head(self.norm(self.fc2(torch.relu(self.fc1(x)))))


def config(bits):
    from accelerate.utils import BnbQuantizationConfig

    if bits == 8:
        return BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=6, torch_dtype=DTYPE)
    return BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=DTYPE,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        torch_dtype=DTYPE,
    )


class TorchWithXpu:
    """torch as accelerate's bitsandbytes module sees it: with the device under test in the place of an XPU."""

    xpu = SimpleNamespace(is_available=lambda: True, current_device=lambda: DEVICE)

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def open_gate(monkeypatch):
    """accelerate quantises on CUDA and XPU alone; it sends the model to the device under test instead.

    On an NPU as users open the gate, and on the CPU, where users cannot, here.
    """
    if DEVICE.type == "npu":
        import bitsandbytes.integrations.accelerate  # noqa: F401

        return
    from accelerate.utils import bnb as module

    monkeypatch.setattr(module, "get_quantized_model_device_map", lambda *args, **kwargs: {"": DEVICE})
    monkeypatch.setattr(module, "torch", TorchWithXpu())


def check(model, bits, source):
    layer, dtype = QUANTIZED[bits]
    layers = models.layers_of(model, layer)
    assert layers.keys() == {"fc1", "fc2"} and type(model.head) is nn.Linear
    assert all(module.weight.dtype == dtype for module in layers.values())
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.allclose(layers["fc1"].bias.float().cpu(), source.fc1.bias.float(), atol=1e-3)
    x = torch.randn(4, 128)
    reference = source.float()(x)
    with torch.no_grad():
        assert models.relative_error(model(x.to(DEVICE, DTYPE)).cpu(), reference) < 0.25


@pytest.mark.parametrize("bits", [4, 8])
def test_an_empty_model_and_a_file_of_weights(bits, tmp_path, open_gate):
    source = Toy().to(DTYPE)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    with accelerate.init_empty_weights():
        empty = Toy()
    model = accelerate.utils.load_and_quantize_model(empty, config(bits), weights_location=str(tmp_path))
    check(model, bits, source)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_loaded_model(bits, open_gate):
    source = Toy().to(DTYPE)
    model = accelerate.utils.load_and_quantize_model(copy.deepcopy(source), config(bits))
    check(model, bits, source)


def test_layers_are_recognised_by_name():
    assert accelerate.utils.has_4bit_bnb_layers(nn.Sequential(Linear4bit(64, 64)))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_single_weight_is_set_from_meta(bits):
    if bits == 4:
        layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4", device="meta")
    else:
        layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, device="meta")
    model = nn.Sequential(layer)
    value = torch.randn(64, 64)
    accelerate.utils.set_module_tensor_to_device(model, "0.weight", DEVICE, value=value)
    assert model[0].weight.dtype == QUANTIZED[bits][1]
    x = torch.randn(2, 64)
    assert models.relative_error(model(x.to(DEVICE)).cpu(), x @ value.t()) < 0.15


def quantised_toy():
    """A 4-bit and an int8 layer, one after the other."""
    first = Linear4bit(128, 256, quant_type="nf4", compute_dtype=torch.float32)
    second = Linear8bitLt(256, 128, has_fp16_weights=False)
    return nn.Sequential(first, nn.ReLU(), second).to(DEVICE).eval()


@torch.no_grad()
def test_modules_come_and_go_between_devices():
    """The cycle of CPU offload hooks (bug class: 4-bit modules could be offloaded and int8 ones could not)."""
    model = quantised_toy()
    x = torch.randn(3, 128, device=DEVICE)
    expected = model(x)
    hooks = [accelerate.cpu_offload_with_hook(module, DEVICE)[1] for module in (model[0], model[2])]
    for _ in range(2):
        assert torch.equal(model(x), expected)
        for hook in hooks:
            hook.offload()
            held = {p.device.type for p in hook.model.parameters()}
            assert held == {"cpu"}
    assert torch.equal(model(x), expected)


def test_prepare_training_save_and_load_the_state(llama, tmp_path):
    pytest.importorskip("peft")
    from accelerate.state import AcceleratorState, PartialState

    accelerator = accelerate.Accelerator(cpu=DEVICE.type == "cpu")
    try:
        model = models.lora(llama, models.nf4())
        optimizer = bnb.optim.AdamW8bit(models.trainable(model), lr=4e-3)
        model, optimizer = accelerator.prepare(model, optimizer)

        def step():
            loss = model(input_ids=models.token_ids(), labels=models.token_ids()).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        step()
        accelerator.save_state(str(tmp_path))
        expected = step(), step()
        accelerator.load_state(str(tmp_path))  # the whole quantised model, and the 8-bit optimizer
        assert (step(), step()) == pytest.approx(expected, rel=1e-3)
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
