"""Tiny random models of the libraries under test, and how to load, run and compare them."""

from collections.abc import Callable
from dataclasses import dataclass
import os
from pathlib import Path

from safetensors.torch import load_file
import torch
from torch import nn

import bitsandbytes as bnb

DEVICE = torch.device(os.environ.get("BNB_TEST_DEVICE", "cpu"))
# Chips without bfloat16 are tested with float16.
DTYPE = torch.bfloat16 if DEVICE.type != "npu" or torch.npu.is_bf16_supported() else torch.float16
LAYERS = 2
LINEARS = 7 * LAYERS  # of `save_llama`'s model, without the head


def nf4(**kwargs):
    from transformers import BitsAndBytesConfig

    defaults = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": DTYPE,
    }
    return BitsAndBytesConfig(**(defaults | kwargs))


def int8(**kwargs):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True, **kwargs)


@dataclass(frozen=True)
class Kind:
    """One way to quantise a model.

    Attributes:
        bits: 4 or 8.
        config: Makes the transformers configuration.
        layer: Class of the quantised layers.
        error: Relative error of a small random model's logits that is still right; a wrong scale gives 1 or more.
    """

    bits: int
    config: Callable
    layer: type
    error: float

    def __str__(self):
        return f"{self.bits}bit"


NF4 = Kind(4, nf4, bnb.nn.Linear4bit, 0.35)
INT8 = Kind(8, int8, bnb.nn.Linear8bitLt, 0.1)
KINDS = (NF4, INT8)


def llama_config(**kwargs):
    from transformers import LlamaConfig

    defaults = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(defaults | kwargs))


def save(model: nn.Module, directory: Path) -> Path:
    model.to(DTYPE).save_pretrained(directory)
    return directory


def save_llama(directory: Path, **kwargs) -> Path:
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    return save(LlamaForCausalLM(llama_config(**kwargs)), directory)


def load(directory: Path, config=None, *, dtype=DTYPE, device_map=None, cls=None, **kwargs):
    """`from_pretrained` on the device under test. A quantised directory needs no config."""
    from transformers import AutoModelForCausalLM

    if config is not None:
        kwargs["quantization_config"] = config
    device_map = {"": DEVICE} if device_map is None else device_map
    return (cls or AutoModelForCausalLM).from_pretrained(directory, dtype=dtype, device_map=device_map, **kwargs)


def token_ids() -> torch.Tensor:
    return torch.arange(3, 35, device=DEVICE).view(2, 16)


@torch.no_grad()
def logits(model: nn.Module, input_ids=None) -> torch.Tensor:
    model.eval()
    return model(token_ids() if input_ids is None else input_ids).logits.detach().clone()


def generate(model: nn.Module) -> torch.Tensor:
    return model.generate(token_ids(), max_new_tokens=6, do_sample=False)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().float(), expected.detach().float()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit; packed codes in a floating dtype may be NaN."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def layers_of(model: nn.Module, cls: type) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, cls)}


def saved_tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        found |= load_file(file)
    return found


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses of a causal language model that learns one batch by heart."""
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=token_ids(), labels=token_ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lora(directory: Path, config, *, prepare=True, reentrant=False):
    """A quantised Llama with LoRA on every Linear layer, prepared for training as PEFT says."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    torch.manual_seed(3)
    model = load(directory, config)
    if prepare:
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
    adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapter)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, 512))]
    words = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
