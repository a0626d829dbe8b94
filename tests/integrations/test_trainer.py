"""transformers.Trainer and trl with the optimizers of this package."""

import pytest
import torch

import bitsandbytes as bnb

from . import models
from .models import DEVICE, DTYPE

pytest.importorskip("accelerate")
pytestmark = pytest.mark.integration
STEPS = 3

#: Names that transformers gives to the optimizers, and whether large states have 8 bits.
OPTIMIZERS = {
    "adamw_bnb_8bit": True,
    "adamw_8bit": True,
    "paged_adamw_8bit": True,
    "paged_adamw_32bit": False,
    "lion_8bit": True,
    "lion_32bit": False,
    "paged_lion_8bit": True,
    "paged_lion_32bit": False,
    "ademamix": False,
    "ademamix_8bit": True,
    "paged_ademamix_8bit": True,
    "paged_ademamix_32bit": False,
    "rmsprop_bnb": False,
    "rmsprop_bnb_8bit": True,
    "rmsprop_bnb_32bit": False,
}


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = (torch.arange(16) * (index % 5 + 1) + 3) % 500 + 3
        return {"input_ids": ids, "labels": ids}


def float_model():
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(models.llama_config())


def run(directory, optimizer, model=None, steps=STEPS, resume=None, **kwargs):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=2,
        optim=optimizer,
        learning_rate=1e-3,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=DEVICE.type == "cpu",
        dataloader_pin_memory=False,
        **{"save_strategy": "no", **kwargs},
    )
    trainer = Trainer(model=model or float_model(), args=arguments, train_dataset=Sequences())
    trainer.train(resume_from_checkpoint=resume)
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == steps or resume
    assert all(loss == loss for loss in losses)
    return trainer, losses


def check_states(trainer, eight_bits):
    """Large states have the right width, except those of the embedding, which transformers asks to keep in 32 bits."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    embedding = trainer.model.get_input_embeddings().weight
    dtypes = {state["state1"].dtype for p, state in optimizer.state.items() if p is not embedding and p.numel() >= 4096}
    assert dtypes == {torch.uint8 if eight_bits else torch.float32}
    assert optimizer.state[embedding]["state1"].dtype == torch.float32


@pytest.mark.parametrize(
    "name",
    [name if name in ("adamw_bnb_8bit",) else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS],
)
def test_every_optimizer_of_the_trainer(tmp_path, name):
    trainer, losses = run(tmp_path, name)
    check_states(trainer, OPTIMIZERS[name])
    assert losses[-1] < losses[0] + 0.5


@pytest.mark.slow
def test_training_resumes_where_it_stopped(tmp_path):
    options = {"steps": 4, "save_strategy": "steps", "save_steps": 2}
    _, whole = run(tmp_path / "first", "adamw_bnb_8bit", **options)
    resumed, second = run(
        tmp_path / "second", "adamw_bnb_8bit", resume=str(tmp_path / "first" / "checkpoint-2"), **options
    )
    assert resumed.state.global_step == 4 and abs(second[-1] - whole[-1]) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "bf16", [False, pytest.param(True, marks=pytest.mark.skipif(DTYPE is not torch.bfloat16, reason="needs bfloat16"))]
)
def test_qlora(tmp_path, llama, bf16):
    model = models.lora(llama, models.nf4())
    _, losses = run(tmp_path, "paged_adamw_8bit", model, bf16=bf16, gradient_checkpointing=bf16)
    assert losses[-1] < losses[0] + 0.5


@pytest.mark.slow
def test_a_whole_quantised_model_resumes_from_a_checkpoint_with_its_adapter(tmp_path, llama):
    options = {"steps": 2, "save_strategy": "steps", "save_steps": 1}
    _, whole = run(tmp_path / "first", "adamw_bnb_8bit", models.lora(llama, models.nf4()), **options)
    checkpoint = str(tmp_path / "first" / "checkpoint-1")
    model = models.lora(llama, models.nf4())
    _, second = run(tmp_path / "second", "adamw_bnb_8bit", model, resume=checkpoint, **options)
    assert abs(second[-1] - whole[-1]) < 1e-2


@pytest.mark.slow
def test_the_trainer_refuses_a_quantised_model_without_an_adapter(tmp_path, llama, kind):
    with pytest.raises(ValueError, match="purely quantized"):
        run(tmp_path, "adamw_bnb_8bit", models.load(llama, kind.config()))


@pytest.mark.slow
@pytest.mark.skipif(DTYPE is not torch.bfloat16, reason="trl casts the adapters of a quantised model to bfloat16")
def test_supervised_fine_tuning_with_trl(tmp_path, llama):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    peft = pytest.importorskip("peft")
    sequence = list(range(3, 19))
    trainer = trl.SFTTrainer(
        model=models.load(llama, models.nf4()),
        args=trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            optim="paged_adamw_8bit",
            report_to=[],
            use_cpu=DEVICE.type == "cpu",
            bf16=True,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_list([{"input_ids": sequence, "labels": sequence}] * 16),
        processing_class=models.tokenizer(),
        peft_config=peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert models.layers_of(trainer.model, bnb.nn.Linear4bit)
