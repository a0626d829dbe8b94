"""diffusers: transformers of image models and pipelines, with only the library's own device gate open."""

import gc

import pytest
import torch

import bitsandbytes as bnb
from bitsandbytes.nn import Linear4bit, Linear8bitLt

from . import models
from .models import DEVICE, DTYPE

diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.integration, pytest.mark.slow]


def nf4():
    return diffusers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPE,
    )


def int8():
    return diffusers.BitsAndBytesConfig(load_in_8bit=True)


KINDS = {"4bit": (nf4, Linear4bit, 0.5), "8bit": (int8, Linear8bitLt, 0.15)}
every_kind = pytest.mark.parametrize("config, layer, error", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def open_gate(monkeypatch):
    """diffusers looks for CUDA or XPU before it quantises, and sends weights there; everything else is as it is.

    On an NPU as users open it, and on the CPU, where users cannot, here.
    """
    if DEVICE.type == "npu":
        import bitsandbytes.integrations.diffusers  # noqa: F401

        return
    from diffusers.quantizers.bitsandbytes import bnb_quantizer
    from diffusers.quantizers.bitsandbytes.utils import dequantize_and_replace

    def dequantize(self, model):
        return dequantize_and_replace(model, self.modules_to_not_convert, quantization_config=self.quantization_config)

    for cls in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
        monkeypatch.setattr(cls, "validate_environment", lambda self, *args, **kwargs: None)
        monkeypatch.setattr(cls, "update_device_map", lambda self, value: {"": DEVICE} if value is None else value)
        monkeypatch.setattr(cls, "_dequantize", dequantize)


def flux():
    torch.manual_seed(7)
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


def run(model):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

    return model(
        hidden_states=randn(1, 16, 4),
        encoder_hidden_states=randn(1, 8, 32),
        pooled_projections=randn(1, 32),
        timestep=torch.tensor([1.0]).to(DEVICE, DTYPE),
        img_ids=torch.zeros(16, 3).to(DEVICE, DTYPE),
        txt_ids=torch.zeros(8, 3).to(DEVICE, DTYPE),
        return_dict=False,
    )[0]


def load(path, config=None, cls=None):
    options = {} if config is None else {"quantization_config": config()}
    return (cls or diffusers.FluxTransformer2DModel).from_pretrained(path, torch_dtype=DTYPE, **options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return models.save(flux(), tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def reference(directory):
    with torch.no_grad():
        return run(load(directory).to(DEVICE))


@torch.no_grad()
@every_kind
def test_a_transformer_loads_computes_saves_and_moves(directory, reference, config, layer, error, tmp_path):
    model = load(directory, config)
    assert len(models.layers_of(model, layer)) > 10
    expected = run(model)
    assert models.relative_error(expected, reference) < error
    assert model.num_parameters() == load(directory).num_parameters()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert len(models.layers_of(loaded, layer)) == len(models.layers_of(model, layer))
    assert torch.equal(run(loaded), expected)
    for _ in range(2):
        model.to("cpu")
        model.to(DEVICE)
    assert torch.equal(run(model), expected)


@torch.no_grad()
@every_kind
@pytest.mark.parametrize("after_forward", [False, True])
def test_a_dequantised_transformer(directory, reference, config, layer, error, after_forward):
    model = load(directory, config)
    if after_forward:
        run(model)
    model.dequantize()
    assert not models.layers_of(model, layer)
    assert models.relative_error(run(model), reference) < error


def test_lora_training(directory):
    peft = pytest.importorskip("peft")
    model = load(directory, nf4)
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    optimizer = bnb.optim.AdamW8bit(models.trainable(model), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = run(model).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def sd3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        caption_projection_dim=64,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8).to(DEVICE, DTYPE),
        "encoder_hidden_states": torch.randn(1, 8, 32).to(DEVICE, DTYPE),
        "pooled_projections": torch.randn(1, 64).to(DEVICE, DTYPE),
        "timestep": torch.tensor([10]).to(DEVICE),
    }
    return model, inputs


def qwen_image():
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 16).to(DEVICE, DTYPE),
        "encoder_hidden_states": torch.randn(1, 7, 32).to(DEVICE, DTYPE),
        "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long).to(DEVICE),
        "timestep": torch.tensor([1.0]).to(DEVICE, DTYPE),
        "img_shapes": [(1, 4, 4)],
    }
    return model, inputs


@torch.no_grad()
@every_kind
@pytest.mark.parametrize("make", [sd3, qwen_image])
def test_other_transformers(make, config, layer, error, tmp_path):
    model, inputs = make()
    path = models.save(model, tmp_path)
    quantized = load(path, config, type(model))
    assert models.layers_of(quantized, layer)
    expected = model.to(DEVICE)(**inputs, return_dict=False)[0]
    assert models.relative_error(quantized(**inputs, return_dict=False)[0], expected) < error


# Pipelines

WITHOUT_TEXT = {
    "text_encoder": None,
    "tokenizer": None,
    "text_encoder_2": None,
    "tokenizer_2": None,
    "image_encoder": None,
    "feature_extractor": None,
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=1,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )
    path = tmp_path_factory.mktemp("pipeline")
    diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        transformer=flux(),
        **{name: None for name in WITHOUT_TEXT if "text" in name or "tokenizer" in name},
    ).save_pretrained(path)
    return path


def load_pipeline(path, quantization=None):
    options = {} if quantization is None else {"quantization_config": quantization}
    pipe = diffusers.FluxPipeline.from_pretrained(path, torch_dtype=DTYPE, **WITHOUT_TEXT, **options).to(DEVICE)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe):
    generator = torch.Generator().manual_seed(0)
    result = pipe(
        prompt_embeds=torch.randn(1, 8, 32, generator=generator).to(DEVICE, DTYPE),
        pooled_prompt_embeds=torch.randn(1, 32, generator=generator).to(DEVICE, DTYPE),
        num_inference_steps=2,
        height=8,
        width=8,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    )
    return torch.as_tensor(result.images).float()


@pytest.mark.parametrize(
    "backend, options, layer",
    [
        (
            "bitsandbytes_4bit",
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": DTYPE},
            Linear4bit,
        ),
        ("bitsandbytes_8bit", {"load_in_8bit": True}, Linear8bitLt),
    ],
    ids=["4bit", "8bit"],
)
def test_a_pipeline_quantizes_a_component_saves_and_loads(pipeline, backend, options, layer, tmp_path):
    from diffusers.quantizers import PipelineQuantizationConfig

    config = PipelineQuantizationConfig(
        quant_backend=backend, quant_kwargs=options, components_to_quantize=["transformer"]
    )
    pipe = load_pipeline(pipeline, config)
    assert models.layers_of(pipe.transformer, layer)
    picture = image(pipe)
    assert torch.isfinite(picture).all()
    pipe.save_pretrained(tmp_path)
    assert torch.allclose(image(load_pipeline(tmp_path)), picture, atol=1e-3)


def test_a_pipeline_with_a_mapping_of_components(pipeline):
    from diffusers.quantizers import PipelineQuantizationConfig

    pipe = load_pipeline(pipeline, PipelineQuantizationConfig(quant_mapping={"transformer": nf4()}))
    assert models.layers_of(pipe.transformer, Linear4bit)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs an accelerator to offload from")
@every_kind
def test_model_offload(pipeline, config, layer, error):
    """Between two pictures the quantised part is on the CPU, and nothing of it is left on the device."""
    from diffusers.quantizers import PipelineQuantizationConfig

    pipe = load_pipeline(pipeline, PipelineQuantizationConfig(quant_mapping={"transformer": config()}))
    expected = image(pipe)
    pipe.to("cpu")
    gc.collect()
    memory = getattr(torch, DEVICE.type)
    before = memory.memory_allocated()
    pipe.enable_model_cpu_offload(device=DEVICE)
    for _ in range(2):
        assert torch.equal(image(pipe), expected)
        pipe.maybe_free_model_hooks()
        gc.collect()
        assert models.layers_of(pipe.transformer, layer) and pipe.transformer.device.type == "cpu"
        assert memory.memory_allocated() <= before
