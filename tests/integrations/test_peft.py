"""PEFT: (Q)LoRA training, adapters, merging, and the other tuners, on 4-bit and int8 models."""

import copy
import warnings

import pytest
import torch

import bitsandbytes as bnb

from . import models
from .models import DEVICE, DTYPE, KINDS, NF4

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.integration

UP = "base_model.model.model.layers.0.mlp.up_proj"


def adapted(llama, kind, **kwargs):
    config = peft.LoraConfig(**{"r": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], **kwargs})
    return peft.get_peft_model(models.load(llama, kind.config()), config)


@pytest.fixture
def no_cuda(monkeypatch):
    """Any use of torch.cuda fails: nothing may take a detour through another device to decode a weight."""

    def refuse(*args, **kwargs):
        raise AssertionError("torch.cuda was used")

    for name in ("_lazy_init", "current_device", "set_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.Tensor, "cuda", refuse)
    monkeypatch.setattr(torch.nn.Module, "cuda", refuse)


def states_are_8_bit(optimizer):
    states = [state for p, state in optimizer.state.items() if p.numel() >= 4096]
    return bool(states) and all(state["state1"].dtype == torch.uint8 for state in states)


# Training


def check_training(model, optimizer_class, lr, steps, fall):
    layer = model.get_submodule(UP).base_layer
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    optimizer = optimizer_class(models.trainable(model), lr=lr)
    losses = models.train(model, optimizer, steps)
    assert losses[-1] < losses[0] - fall, losses
    after = layer.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    return optimizer


def test_training_on_a_quantised_model(llama, kind):
    model = models.lora(llama, kind.config())
    assert kind.layer.__name__ in type(model.get_submodule(UP)).__name__
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(cast|float16|dtype).*")
        optimizer = check_training(model, bnb.optim.AdamW8bit, 4e-3, 6, 0.02)
    assert states_are_8_bit(optimizer)
    resumed = bnb.optim.AdamW8bit(models.trainable(model), lr=1e-4)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert states_are_8_bit(resumed)
    models.train(model, resumed, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdamW32bit", "Lion8bit", "AdEMAMix8bit"])
def test_other_optimizers(llama, name):
    optimizer = check_training(
        models.lora(llama, models.nf4()), getattr(bnb.optim, name), 2e-4 if "Lion" in name else 4e-3, 5, 0.005
    )
    assert states_are_8_bit(optimizer) == ("8bit" in name)


@pytest.mark.slow
def test_reentrant_gradient_checkpointing(llama, kind):
    check_training(models.lora(llama, kind.config(), reentrant=True), bnb.optim.AdamW8bit, 4e-3, 4, 0.0)


@pytest.mark.slow
def test_learning_rates_of_loraplus_and_its_32_bit_overrides(llama):
    from peft.optimizers import create_loraplus_optimizer

    model = models.lora(llama, models.nf4())
    optimizer = create_loraplus_optimizer(model, bnb.optim.AdamW8bit, lr=1e-3, loraplus_lr_ratio=4)
    losses = models.train(model, optimizer, 3)
    assert losses[-1] < losses[0]


# Adapters


@pytest.fixture(scope="module", params=KINDS, ids=str)
def trained(request, llama):
    """(kind, logits of a trained adapter, where it is saved) of both kinds; each test loads its own model."""
    kind = request.param
    model = models.lora(llama, kind.config())
    models.train(model, bnb.optim.AdamW8bit(models.trainable(model), lr=4e-3), 6)
    path = llama.parent / f"adapter{kind.bits}"
    model.save_pretrained(path)
    return kind, models.logits(model), path


def load_adapter(llama, kind, path):
    return peft.PeftModel.from_pretrained(models.load(llama, kind.config()), path)


def test_an_adapter_saves_loads_merges_and_unmerges(llama, trained):
    kind, expected, path = trained
    model = load_adapter(llama, kind, path)
    base = models.logits(models.load(llama, kind.config()))
    assert models.relative_error(base, expected) > 0.1  # the adapter matters
    values = models.logits(model)
    assert models.relative_error(values, expected) < 0.05
    model.merge_adapter()
    assert models.relative_error(models.logits(model), values) < kind.error
    model.unmerge_adapter()
    assert models.relative_error(models.logits(model), values) < kind.error


def test_a_merged_model_unloads_saves_and_loads(llama, trained, tmp_path):
    kind, expected, path = trained
    merged = load_adapter(llama, kind, path).merge_and_unload()
    assert len(models.layers_of(merged, kind.layer)) == models.LINEARS
    layer = merged.model.layers[0].mlp.up_proj
    assert layer.weight.dtype == (torch.uint8 if kind is NF4 else torch.int8)
    values = models.logits(merged)
    assert models.relative_error(values, expected) < kind.error
    merged.save_pretrained(tmp_path)
    assert models.relative_error(models.logits(models.load(tmp_path)), values) < 0.02


# Initialisations that decode the weight, and other tuners


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "olora"}], ids=["dora", "olora"])
def test_initialisations_that_decode_the_weight_where_it_is(llama, kind, options, no_cuda):
    model = adapted(llama, kind, **options)
    values = models.logits(model)
    assert torch.isfinite(values).all()
    losses = models.train(model, bnb.optim.AdamW8bit(models.trainable(model), lr=1e-3), 2)
    assert all(loss == loss for loss in losses)
    values = models.logits(model)
    merged = model.merge_and_unload()
    assert models.relative_error(models.logits(merged), values) < max(kind.error, 0.2)


TUNERS = {
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "AdaLora": lambda: peft.AdaLoraConfig(
        init_r=6,
        target_r=4,
        total_step=10,
        tinit=1,
        tfinal=2,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
    ),
    "VeRA": lambda: peft.VeraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"]),
    "RoAd": lambda: peft.RoadConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
    "RandLora": lambda: peft.RandLoraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNERS)
def test_other_tuners(llama, kind, name):
    model = peft.get_peft_model(models.load(llama, kind.config()), TUNERS[name]())
    with torch.autocast(DEVICE.type, DTYPE):
        assert torch.isfinite(models.logits(model)).all()
        models.train(model, bnb.optim.AdamW8bit(models.trainable(model), lr=1e-3), 2)
        values = models.logits(model)
        # PEFT does not merge the first two into quantised layers, and for RandLora it multiplies the bases of the
        # update in the wrong order when the layer is quantised.
        if name in ("IA3", "AdaLora", "RandLora"):
            return
        merged = model.merge_and_unload()
        assert models.relative_error(models.logits(merged), values) < 0.5


@pytest.mark.slow
def test_mixed_adapters_in_one_batch(llama, kind):
    model = adapted(llama, kind, init_lora_weights=False)
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with torch.no_grad():
        model.eval()
        mixed = model(models.token_ids(), adapter_names=["default", "other"]).logits
        alone = {}
        for name in ("default", "other"):
            model.set_adapter(name)
            alone[name] = model(models.token_ids()).logits
    assert models.relative_error(mixed[0], alone["default"][0]) < 0.05
    assert models.relative_error(mixed[1], alone["other"][1]) < 0.05


# LoftQ: PEFT computes it on CUDA or an XPU, by name


@pytest.mark.skipif(DEVICE.type != "npu", reason="PEFT does this on no CPU, and only the gate for NPUs is ours")
class TestLoftQ:
    @pytest.fixture(autouse=True)
    def open_gate(self):
        import bitsandbytes.integrations.peft  # noqa: F401

    def test_an_initialisation_with_it_is_closer_to_the_model(self, llama, llama_logits):
        """The adapter makes up for part of what quantising the weights took away."""
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=32,
            init_lora_weights="loftq",
            loftq_config=peft.LoftQConfig(loftq_bits=4, loftq_iter=2),
        )
        model = peft.get_peft_model(models.load(llama), config)
        quantized = models.logits(models.load(llama, models.nf4(bnb_4bit_use_double_quant=False)))
        error = models.relative_error(models.logits(model), llama_logits)
        assert error < 0.9 * models.relative_error(quantized, llama_logits)

    @pytest.mark.slow
    def test_an_adapter_of_a_quantised_model_is_replaced(self, llama, llama_logits):
        model = adapted(llama, NF4, target_modules="all-linear", r=32)
        before = models.relative_error(models.logits(model), llama_logits)
        peft.replace_lora_weights_loftq(model, str(llama))
        assert {parameter.device for parameter in models.trainable(model)} == {DEVICE}
        assert models.relative_error(models.logits(model), llama_logits) < 0.9 * before
