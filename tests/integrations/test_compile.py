"""torch.compile on whole models: one graph, with and without adapters."""

import pytest
import torch

from . import models
from .models import DEVICE, INT8, KINDS, NF4

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("fresh_dynamo")]


@torch.no_grad()
def check(model, backend, tolerance=0.05):
    expected = models.logits(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        values = compiled(models.token_ids(), use_cache=False).logits
        assert models.relative_error(values, expected) < tolerance


def test_a_4_bit_model_in_one_graph(llama):
    check(models.load(llama, models.nf4()), "aot_eager")


@pytest.mark.slow
def test_an_int8_model_without_outliers_in_one_graph(llama):
    """With a threshold the number of outlier columns depends on the values, which no single graph can hold."""
    check(models.load(llama, models.int8(llm_int8_threshold=0.0)), "aot_eager")


def inductor_generates_code():
    """Whether PyTorch or what it loads registered a code generator for the device; torch_npu brings one with Triton."""
    from torch._inductor.codegen.common import device_codegens, init_backend_registration

    init_backend_registration()
    return DEVICE.type in device_codegens


@pytest.mark.slow
@pytest.mark.skipif(not inductor_generates_code(), reason="inductor generates no code for the device")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_inductor(llama, kind):
    config = kind.config(llm_int8_threshold=0.0) if kind is INT8 else kind.config()
    check(models.load(llama, config), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_training_with_lora(llama, kind):
    pytest.importorskip("peft")
    model = models.lora(llama, kind.config(), prepare=False).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=kind is NF4)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(input_ids=models.token_ids(), labels=models.token_ids(), use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.reshape(-1).float() for p in models.trainable(model)]))
    assert models.relative_error(gradients[1], gradients[0]) < 0.05


@pytest.mark.slow
def test_generation_with_a_static_cache(llama):
    model = models.load(llama, models.nf4())
    expected = models.generate(model)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    generated = model.generate(models.token_ids(), max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(generated, expected)
