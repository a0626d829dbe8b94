"""4-bit quantisation, the layers with 4-bit weights, and a model made of them."""

from pathlib import Path
import tempfile
from typing import Any

import torch

import bitsandbytes as bnb
from bitsandbytes import functional as F

from . import Case, Setting, nbytes, operation


@operation("quantize_4bit", variants=("nf4", "fp4"))
def quantize_4bit(at: Setting) -> Case:
    A = at.randn(at.rows, at.columns)
    packed, state = F.quantize_4bit(A, quant_type=at.variant)
    return Case(lambda A: F.quantize_4bit(A, quant_type=at.variant), (A,), nbytes(A, packed, state.absmax))


@operation("dequantize_4bit", variants=("nf4", "fp4"))
def dequantize_4bit(at: Setting) -> Case:
    A = at.randn(at.rows, at.columns)
    packed, state = F.quantize_4bit(A, quant_type=at.variant)
    return Case(
        lambda packed: F.dequantize_4bit(packed, state, quant_type=at.variant),
        (packed,),
        nbytes(A, packed, state.absmax),
    )


def _weight_bytes(weight: Any) -> int:
    """A packed weight with its statistics. Nested ones are a byte a block and their own scales."""
    state = weight.quant_state
    return nbytes(weight, state.absmax) + (nbytes(state.state2.absmax) if state.nested else 0)


@operation("gemm_4bit", variants=("nf4", "nf4 nested"), batched=True)
def linear4bit(at: Setting) -> Case:
    W, x = at.randn(at.rows, at.columns), at.randn(at.batch, at.columns)
    layer = bnb.nn.Linear4bit(at.columns, at.rows, bias=False, compute_dtype=at.dtype, device="meta")
    layer.weight = bnb.nn.Params4bit(
        W.clone(), requires_grad=False, compress_statistics=at.variant.endswith("nested"), quant_type="nf4"
    )
    layer = layer.to(at.device).eval()
    moved = _weight_bytes(layer.weight) + nbytes(x) + at.batch * at.rows * x.element_size()
    return Case(layer, (x,), moved, "linear", lambda x: torch.nn.functional.linear(x, W))


@operation("dequantize_4bit", batched=True)
def embedding_4bit(at: Setting) -> Case:
    W, ids = at.randn(at.rows, at.columns), at.token_ids()
    layer = bnb.nn.Embedding4bit(at.rows, at.columns, dtype=at.dtype, quant_type="nf4", device="meta")
    layer.weight = bnb.nn.Params4bit(W.clone(), requires_grad=False, compress_statistics=False, quant_type="nf4")
    layer = layer.to(at.device)
    moved = nbytes(ids) + at.batch * (_weight_bytes(layer.weight) + nbytes(W)) // at.rows
    return Case(layer, (ids,), moved, "embedding", lambda ids: torch.nn.functional.embedding(ids, W))


def _prepare(folder: Path) -> None:
    """Make an ordinary model folder of SmolLM2-135M, once; only this package has what it takes."""
    if (folder / "config.json").is_file():
        return
    try:
        from bitsandbytes.cli import demo
    except ImportError:
        raise RuntimeError(f"there is no model in {folder}: run this once with bitsandbytes for Ascend") from None
    demo._require_packages(own_model=False)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        demo._convert_default_model(Path(scratch) / "model")
        (Path(scratch) / "model").rename(folder)  # complete or absent


@operation("gemm_4bit", variants=("nf4",), shapes=None)
def smollm2_tokens(at: Setting) -> Case:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    _prepare(at.model)

    def load(config: BitsAndBytesConfig | None):
        model = AutoModelForCausalLM.from_pretrained(
            at.model, quantization_config=config, dtype=at.dtype, device_map={"": at.device}, local_files_only=True
        )
        return model.eval()

    quantized, plain = (
        load(BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=at.dtype)),
        load(None),
    )
    prompt = torch.arange(2, 10, device=at.device).unsqueeze(0)  # which tokens they are does not matter
    weights = sum(_weight_bytes(p) if isinstance(p, bnb.nn.Params4bit) else nbytes(p) for p in quantized.parameters())

    def decode(model, prompt: torch.Tensor) -> torch.Tensor:
        # Greedy, and on behind the end of the answer.
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=at.tokens,
            max_new_tokens=at.tokens,
            pad_token_id=0,
        )

    return Case(
        lambda prompt: decode(quantized, prompt),
        (prompt,),
        weights,
        f"{plain.dtype} model".removeprefix("torch."),
        lambda prompt: decode(plain, prompt),
        units=at.tokens,
    )
