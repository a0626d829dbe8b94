"""Chips without bfloat16: the layers work in float16, and say so in one error where bfloat16 is asked for."""

import logging
import os
from pathlib import Path
import subprocess
import sys

import pytest
import torch

import bitsandbytes as bnb
from bitsandbytes.errors import UnsupportedError
from bitsandbytes.nn import Linear4bit, Linear8bitLt

from . import models
from .models import DEVICE, DTYPE

pytestmark = pytest.mark.integration
without_bf16 = pytest.mark.skipif(DTYPE is torch.bfloat16, reason="the device has bfloat16")
SAYS_WHAT_WORKS = r"^\w+: {} has no bfloat16; use torch\.float16"


@pytest.mark.slow
@pytest.mark.skipif(
    DEVICE.type != "npu" or DTYPE is not torch.bfloat16 or not getattr(sys.modules["torch_npu"], "is_simulated", False),
    reason="chooses the chip of a simulated device",
)
@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend310P3"])
def test_the_tests_of_this_file_on_a_chip_without_bf16(chip):
    environment = os.environ | {"BNB_SIMULATOR_CHIP": chip}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", __file__]
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout and "skipped" not in result.stdout


def refused():
    return pytest.raises(UnsupportedError, match=SAYS_WHAT_WORKS.format(torch.npu.get_device_name()))


@without_bf16
def test_the_compute_dtype_is_that_of_the_input_by_default():
    layer = Linear4bit(64, 64, quant_type="nf4").to(DEVICE)
    x = torch.randn(3, 64).half()
    weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).cpu()
    result = layer(x.to(DEVICE))
    assert result.dtype == torch.float16
    expected = torch.nn.functional.linear(x.float(), weight, layer.bias.cpu())
    assert models.relative_error(result.cpu(), expected) < 2e-3


@without_bf16
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bf16_inputs_are_refused(compute, training):
    x = torch.randn(3, 64, dtype=torch.bfloat16).to(DEVICE).requires_grad_(training)
    layers = Linear4bit(64, 64, compute_dtype=compute), Linear8bitLt(64, 64, has_fp16_weights=False)
    for layer in layers:
        layer = layer.to(DEVICE).train(training)
        with refused():
            layer(x)


@without_bf16
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_bf16_compute_dtype_is_refused(dtype):
    layer = Linear4bit(64, 64, compute_dtype=torch.bfloat16).to(DEVICE)
    with refused():
        layer(torch.randn(3, 64, dtype=dtype).to(DEVICE))


@without_bf16
def test_a_model_in_bf16_is_refused_when_it_is_loaded(llama, kind, caplog, monkeypatch):
    """transformers collects what goes wrong while it loads, logs it, and raises an error that refers to the log."""
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        models.load(llama, kind.config(), dtype=torch.bfloat16)
    assert f"{torch.npu.get_device_name()} has no bfloat16; use torch.float16" in caplog.text


@without_bf16
def test_a_model_trains_in_fp16(llama, kind):
    model = models.lora(llama, kind.config())
    losses = models.train(model, bnb.optim.AdamW8bit(models.trainable(model), lr=4e-3), 4)
    assert losses[-1] < losses[0]


@without_bf16
def test_a_checkpoint_from_a_chip_with_bf16_computes_and_has_gradients(tmp_path):
    """Its weights say that they were bfloat16; the codes and scales do not depend on it."""
    weight = torch.randn(64, 64)
    packed, state = bnb.functional.quantize_4bit(weight.bfloat16(), quant_type="nf4", compress_statistics=True)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float16, quant_type="nf4", device="meta")
    saved = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    layer.weight = bnb.nn.Params4bit.from_prequantized(packed, saved, device=DEVICE, module=layer)
    assert layer.weight.quant_state.dtype == torch.bfloat16
    x = torch.randn(3, 64).half()
    on_device = x.to(DEVICE).requires_grad_()
    result = layer(on_device)
    result.sum().backward()
    decoded = bnb.functional.dequantize_4bit(packed, state).float()
    assert models.relative_error(result.cpu(), x.float() @ decoded.t()) < 5e-3
    assert models.relative_error(on_device.grad.cpu(), decoded.sum(0).expand(3, 64)) < 5e-3
