"""Calls that vLLM, SGLang, Lightning, torchtune and unsloth make, written out without these libraries."""

import copy

import pytest
import torch
from torch import nn

import bitsandbytes as bnb
from bitsandbytes import functional as F

from .models import DEVICE, DTYPE, relative_error

pytestmark = pytest.mark.integration


def quantized():
    torch.manual_seed(0)
    weight = torch.randn(256, 128).to(DEVICE, DTYPE)
    packed, state = F.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    return weight, packed, state


def x(rows=5, dtype=DTYPE):
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def test_quantizing_a_weight():
    weight, packed, state = quantized()
    assert isinstance(state, F.QuantState) and state.nested and tuple(state.shape) == (256, 128)
    decoded = F.dequantize_4bit(packed, state)
    assert decoded.dtype == DTYPE and relative_error(decoded, weight) < 0.15


@pytest.mark.parametrize("as_packed, prefix", [(True, ""), (True, "model.layers.0.mlp.up_proj.weight."), (False, "")])
def test_a_state_through_a_dict(as_packed, prefix):
    _, packed, state = quantized()
    items = state.as_dict(packed=as_packed)
    if as_packed:
        assert items.keys() == {
            "absmax",
            "quant_map",
            "nested_absmax",
            "nested_quant_map",
            "quant_state.bitsandbytes__nf4",
        }
        # Loaders hand the packed item over on the CPU.
        items = {prefix + name: v.cpu() if "bitsandbytes" in name else v for name, v in items.items()}
    again = F.QuantState.from_dict(items, device=DEVICE.type)
    assert torch.equal(F.dequantize_4bit(packed, again), F.dequantize_4bit(packed, state))


def test_statistics_decoded_by_the_caller():
    """vLLM decodes nested statistics once and writes the state's fields."""
    _, packed, nested = quantized()
    state = copy.deepcopy(nested)
    absmax = F.dequantize_blockwise(state.absmax, state.state2)
    absmax += state.offset
    assert absmax.dtype == torch.float32
    state.absmax, state.nested, state.offset, state.state2 = absmax, False, None, None
    weight = F.dequantize_4bit(packed, nested)
    for rows in (1, 5):
        y = bnb.matmul_4bit(x(rows), packed.t(), state)
        assert y.shape == (rows, 256) and relative_error(y, x(rows) @ weight.t()) < 0.02


def test_a_state_put_together_for_fused_experts():
    _, packed, state = quantized()
    absmax = F.dequantize_blockwise(state.absmax, state.state2) + state.offset
    fused = F.QuantState(
        absmax=torch.cat([absmax, absmax]),
        shape=(512, 128),  # a plain tuple
        code=state.code,
        blocksize=state.blocksize,
        quant_type="nf4",
        dtype=state.dtype,
    )
    decoded = F.dequantize_4bit(torch.cat([packed, packed], 0), fused)
    assert decoded.shape == (512, 128) and torch.equal(decoded[:256], decoded[256:])
    assert torch.equal(decoded[:256], F.dequantize_4bit(packed, state))


def test_slices_of_a_fused_weight():
    """Each shard of a merged q/k/v weight has a state of its own; the slice is passed transposed."""
    parts = [torch.randn(n, 128).to(DEVICE, DTYPE) for n in (64, 32, 32)]
    packed, states = zip(*(F.quantize_4bit(part, quant_type="nf4") for part in parts), strict=True)
    fused, start, columns = torch.cat(packed), 0, []
    for part, state in zip(packed, states, strict=True):
        columns.append(bnb.matmul_4bit(x(), fused[start : start + len(part)].t(), state))
        start += len(part)
    weight = torch.cat([F.dequantize_4bit(p, s) for p, s in zip(packed, states, strict=True)])
    assert relative_error(torch.cat(columns, 1), x() @ weight.t()) < 0.01


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_an_int8_matmul_with_a_state_filled_by_the_caller(threshold):
    weight = torch.randn(256, 128).to(DEVICE, torch.float16)
    codes, statistics, _ = F.int8_vectorwise_quant(weight)
    state = bnb.MatmulLtState()
    state.CB, state.SCB = codes, statistics
    state.threshold, state.has_fp16_weights, state.is_training = threshold, False, False
    state.use_pool = threshold > 0.0
    inputs = x(dtype=torch.float16)
    inputs[:, 3] = 20.0
    y = bnb.matmul(inputs, codes, state=state)
    assert relative_error(y, inputs @ weight.t()) < 0.06


def test_decoding_int8_rows():
    weight = torch.randn(64, 128).to(DEVICE, torch.float16)
    codes, statistics, _ = F.int8_vectorwise_quant(weight)
    assert codes.dtype == torch.int8 and statistics.dtype == torch.float32 and statistics.shape == (64,)
    decoded = F.int8_vectorwise_dequant(codes, statistics)
    assert decoded.dtype == torch.float32 and relative_error(decoded, weight) < 0.02


def test_a_layer_filled_by_the_caller():
    """Lightning subclasses the layers and quantises itself."""

    class Subclass(bnb.nn.Linear4bit):
        pass

    layer = Subclass(64, 64, compute_dtype=DTYPE, compress_statistics=False, quant_type="fp4")
    old = layer.weight
    settings = {
        "blocksize": old.blocksize,
        "compress_statistics": old.compress_statistics,
        "quant_type": old.quant_type,
        "quant_storage": old.quant_storage,
    }
    weight = torch.randn(64, 64).to(DEVICE, DTYPE)
    packed, state = F.quantize_4bit(weight, **settings)
    layer.weight = bnb.nn.Params4bit(
        packed, requires_grad=False, quant_state=state, module=layer, bnb_quantized=True, **settings
    )
    layer.quant_state = state
    layer.bias = nn.Parameter(layer.bias.detach().to(DEVICE))
    inputs = torch.randn(2, 64).to(DEVICE, DTYPE)
    y = layer(inputs)
    expected = nn.functional.linear(inputs.float(), F.dequantize_4bit(packed, state).float(), layer.bias)
    assert relative_error(y, expected) < 0.02


def test_a_weight_whose_data_is_assigned():
    """Lightning re-assigns `.data` of an int8 layer in place."""
    layer = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False, threshold=6.0)
    codes, statistics, _ = F.int8_vectorwise_quant(torch.randn(32, 64))
    layer.weight.data = codes.to(DEVICE)
    layer.weight.CB, layer.weight.SCB = layer.weight.data, statistics.to(DEVICE)
    inputs = torch.randn(3, 64).to(DEVICE)
    weight = F.int8_vectorwise_dequant(codes, statistics).to(DEVICE)
    assert relative_error(layer.eval()(inputs), inputs @ weight.t()) < 0.02


def test_a_3d_weight():
    weight = torch.randn(4, 64, 128).to(DEVICE, DTYPE)
    packed, state = F.quantize_4bit(weight, quant_type="nf4")
    assert relative_error(F.dequantize_4bit(packed, state), weight) < 0.15


def test_a_decoded_weight_written_into_the_callers_buffer():
    """unsloth keeps one buffer for all layers."""
    _, packed, state = quantized()
    buffer = torch.empty(256, 128, device=DEVICE, dtype=DTYPE)
    expected = F.dequantize_4bit(packed, state)
    result = F.dequantize_4bit(packed, state, out=buffer)
    assert result.data_ptr() == buffer.data_ptr() and torch.equal(buffer, expected)
    state._unsloth_plan = "anything"
    assert state[0] is state.absmax and state[3] == 64 and tuple(state[1]) == (256, 128)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit"])
def test_optimizer_attributes_that_others_read(name):
    parameter = nn.Parameter(torch.randn(128, 64).to(DEVICE))
    optimizer = getattr(bnb.optim, name)(
        [parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, min_8bit_size=4096
    )
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert optimizer.is_paged == name.startswith("Paged") and optimizer.args.optim_bits == 8
    state = optimizer.state[parameter]
    assert state["state1"].dtype == torch.uint8
    assert {"step", "state1", "qmap1", "absmax1", "state2", "qmap2", "absmax2"} <= state.keys()
    assert "bitsandbytes" in str(type(optimizer))
    mro = type(optimizer).__mro__
    assert all(c.__module__.startswith("bitsandbytes.") for c in mro[: mro.index(torch.optim.Optimizer)])
