"""transformers: loading in 4 and 8 bits, saving, moving, dequantising, mixtures of experts, and old checkpoints."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
import torch
from torch import nn

import bitsandbytes as bnb
from bitsandbytes import functional as F
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from bitsandbytes.nn.parametrize import replace_parameter_4bit

from . import models
from .models import DEVICE, DTYPE, INT8, NF4

pytestmark = pytest.mark.integration
GOLDEN = Path(__file__).parents[1] / "golden" / "ckpt"
QUERY = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"


def test_transformers_accepts_the_package():
    from transformers.integrations import validate_bnb_backend_availability
    from transformers.utils import is_bitsandbytes_available

    assert is_bitsandbytes_available() and validate_bnb_backend_availability(raise_exception=True)


# Loading


def test_a_model_loads_in_4_bits(llama):
    model = models.load(llama, models.nf4())
    layers = models.layers_of(model, Linear4bit)
    assert len(layers) == models.LINEARS and not isinstance(model.lm_head, Linear4bit)
    weight = layers[QUERY].weight
    state = weight.quant_state
    assert type(weight).__name__ == "Params4bit" and weight.shape == (128 * 128 // 2, 1)
    assert weight.dtype == torch.uint8 and not weight.requires_grad
    assert (state.nested, state.quant_type, state.blocksize, state.dtype) == (True, "nf4", 64, DTYPE)
    assert tuple(state.shape) == (128, 128) and state.absmax.dtype == torch.uint8
    assert weight.device.type == state.absmax.device.type == state.state2.absmax.device.type == DEVICE.type
    assert model.is_loaded_in_4bit and model.is_quantized


def test_a_model_loads_in_8_bits(llama):
    model = models.load(llama, models.int8())
    layers = models.layers_of(model, Linear8bitLt)
    assert len(layers) == models.LINEARS
    layer = layers[QUERY]
    weight = layer.weight
    assert type(weight).__name__ == "Int8Params" and weight.dtype == torch.int8 and weight.shape == (128, 128)
    assert weight.SCB.shape == (128,) and weight.SCB.dtype == torch.float32 and weight.CB is not None
    assert layer.state.threshold == 6.0 and layer.state.has_fp16_weights is False
    models.logits(model)
    assert layer.weight.dtype == torch.int8
    assert torch.equal(layer.state.SCB, layer.weight.SCB)  # downstream reads either


def test_a_model_computes_saves_and_loads(llama, llama_logits, kind, tmp_path):
    model = models.load(llama, kind.config())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = models.logits(model)
    assert torch.isfinite(expected).all() and models.relative_error(expected, llama_logits) < kind.error
    assert torch.equal(models.logits(model), expected)
    trained = model.train()(models.token_ids()).logits
    assert models.relative_error(trained, expected) < 0.1
    assert torch.equal(models.logits(model), expected)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)

    model.save_pretrained(tmp_path)
    loaded = models.load(tmp_path)
    assert len(models.layers_of(loaded, kind.layer)) == models.LINEARS
    assert torch.equal(models.logits(loaded), expected)
    assert torch.equal(models.generate(loaded), models.generate(model))
    tensors = models.saved_tensors(tmp_path)
    found = {name.removeprefix(QUERY) for name in tensors if name.startswith(QUERY)}
    if kind is INT8:
        assert found == {".weight", ".SCB", ".weight_format"} and tensors[QUERY + ".weight_format"] == 0
        return
    state = ".weight.quant_state.bitsandbytes__nf4"
    assert found == {
        ".weight",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        state,
    }
    assert json.loads(bytes(tensors[QUERY + state].tolist())).keys() == {
        "quant_type",
        "blocksize",
        "shape",
        "dtype",
        "nested_blocksize",
        "nested_dtype",
        "nested_offset",
    }


def test_moves_do_not_change_a_model_and_casts_are_refused(llama, kind):
    model = models.load(llama, kind.config())
    expected = models.logits(model)
    for _ in range(2):
        model.to("cpu")
        model.to(DEVICE)
    assert torch.equal(models.logits(model), expected)
    with pytest.raises(ValueError):
        model.to(torch.float16)
    with pytest.raises(ValueError):
        model.half()


def test_skipped_modules_stay_ordinary_linear_layers(llama, kind):
    """As a substring, and as a whole path (bug class: a plain parameter was asked for its int8 scale)."""
    skip = ["lm_head", "down_proj", "model.layers.0.self_attn.k_proj"]
    model = models.load(llama, kind.config(llm_int8_skip_modules=skip))
    layers = models.layers_of(model, kind.layer)
    for name, module in models.layers_of(model, nn.Linear).items():
        skipped = "down_proj" in name or name in skip
        assert (name not in layers) == skipped
        if skipped:
            assert type(module) is nn.Linear and module.weight.dtype == DTYPE
    assert torch.isfinite(models.logits(model)).all()


def test_parameter_counts_and_footprint(llama, kind):
    model, full = models.load(llama, kind.config()), models.load(llama)
    assert model.num_parameters() == full.num_parameters()
    assert model.get_memory_footprint() < full.get_memory_footprint()


@pytest.mark.slow
@pytest.mark.parametrize(
    "quant_type, double, storage",
    [
        ("fp4", True, torch.uint8),
        ("fp4", False, torch.uint8),
        ("nf4", False, torch.uint8),
        ("nf4", True, torch.bfloat16),
        ("nf4", True, torch.float32),
    ],
    ids=str,
)
def test_other_4_bit_kinds(llama, llama_logits, quant_type, double, storage, tmp_path):
    config = models.nf4(
        bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=double, bnb_4bit_quant_storage=storage
    )
    model = models.load(llama, config)
    assert model.get_submodule(UP).weight.dtype == storage
    expected = models.logits(model)
    assert models.relative_error(expected, llama_logits) < 0.5
    model.save_pretrained(tmp_path)
    assert torch.equal(models.logits(models.load(tmp_path)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_other_outlier_thresholds(llama, llama_logits, threshold):
    model = models.load(llama, models.int8(llm_int8_threshold=threshold))
    assert models.relative_error(models.logits(model), llama_logits) < INT8.error


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(llama, llama_logits, kind, dtype):
    config = kind.config(bnb_4bit_compute_dtype=dtype) if kind is NF4 else kind.config()
    values = models.logits(models.load(llama, config, dtype=dtype))
    assert values.dtype == dtype and models.relative_error(values, llama_logits) < kind.error


@pytest.mark.slow
def test_int8_weights_kept_in_floating_point(llama, llama_logits):
    model = models.load(llama, models.int8(llm_int8_has_fp16_weight=True))
    assert models.relative_error(models.logits(model), llama_logits) < INT8.error


@pytest.mark.slow
@pytest.mark.parametrize("device_map", ["auto", "none"])
def test_device_maps(llama, llama_logits, kind, device_map):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        llama,
        quantization_config=kind.config(),
        dtype=DTYPE,
        device_map=None if device_map == "none" else device_map,
    )
    assert len(models.layers_of(model, kind.layer)) == models.LINEARS
    values = models.logits(model, models.token_ids().to(model.device))
    assert models.relative_error(values, llama_logits.to(values.device)) < kind.error


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs an accelerator beside the CPU")
@pytest.mark.parametrize("first", ["cpu", DEVICE], ids=str)
def test_a_model_saved_on_one_device_loads_on_the_other(llama, kind, first, tmp_path):
    """The loaded model holds what is on disk, bit for bit, and gives the results of the one that was saved."""
    second = DEVICE if first == "cpu" else "cpu"
    model = models.load(llama, kind.config(), device_map={"": first})
    model.save_pretrained(tmp_path)
    saved = models.saved_tensors(tmp_path)
    loaded = models.load(tmp_path, device_map={"": second})
    assert loaded.device == torch.device(second) and len(models.layers_of(loaded, kind.layer)) == models.LINEARS
    state = loaded.state_dict()
    assert state.keys() == saved.keys()
    for name, value in saved.items():
        assert models.same_bits(state[name].cpu(), value), name
    expected = models.logits(model, models.token_ids().to(first)).cpu()
    assert models.relative_error(models.logits(loaded, models.token_ids().to(second)).cpu(), expected) < 0.03


@pytest.mark.slow
def test_a_model_made_of_conv1d_layers(kind, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=512, n_positions=128, n_embd=128, n_layer=2, n_head=4)
    path = models.save(GPT2LMHeadModel(config), tmp_path / "float")
    model = models.load(path, kind.config())
    assert len(models.layers_of(model, kind.layer)) == 8
    values = models.logits(model)
    assert models.relative_error(values, models.logits(models.load(path))) < kind.error
    model.save_pretrained(tmp_path / "quantised")
    assert torch.equal(models.logits(models.load(tmp_path / "quantised")), values)


@pytest.mark.slow
def test_modules_that_a_model_keeps_in_float32(kind, tmp_path):
    """T5 keeps `wo` in float32; its forward casts its input to that weight's dtype."""
    from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    config = T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    config.decoder_start_token_id = 0
    path = models.save(T5ForConditionalGeneration(config), tmp_path)
    model = models.load(path, kind.config(), cls=AutoModelForSeq2SeqLM, dtype=torch.float16)
    wo = {name: module for name, module in model.named_modules() if name.endswith(".wo")}
    assert len(wo) == 4
    assert {(type(module), module.weight.dtype) for module in wo.values()} == {(nn.Linear, torch.float32)}
    assert models.layers_of(model, kind.layer)
    assert model.generate(models.token_ids(), max_new_tokens=4).shape[0] == 2


@pytest.mark.slow
def test_a_sharded_checkpoint(llama, kind, tmp_path):
    model = models.load(llama, kind.config())
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(models.logits(models.load(tmp_path)), models.logits(model))


@pytest.mark.slow
def test_sizes_that_are_no_multiple_of_a_block_and_a_resized_vocabulary(kind, tmp_path):
    path = models.save_llama(
        tmp_path,
        hidden_size=120,
        intermediate_size=200,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=40,
    )
    model = models.load(path, kind.config())
    assert models.relative_error(models.logits(model), models.logits(models.load(path))) < kind.error
    model.resize_token_embeddings(600)
    assert models.logits(model).shape[-1] == 600


@pytest.mark.slow
def test_tied_embeddings_stay_tied(kind, tmp_path):
    path = models.save_llama(tmp_path / "float", tie_word_embeddings=True)
    model = models.load(path, kind.config())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "quantised")
    loaded = models.load(tmp_path / "quantised")
    assert torch.equal(models.logits(loaded), models.logits(model))


@pytest.mark.slow
def test_copies_of_a_model_compute_the_same(llama, kind):
    import copy

    model = models.load(llama, kind.config())
    expected = models.logits(model)
    assert torch.equal(models.logits(copy.deepcopy(model)), expected)
    assert torch.equal(models.logits(model), expected)


# Dequantising


def check_dequantized(model, kind, reference, quantized):
    assert not models.layers_of(model, kind.layer)
    for module in models.layers_of(model, nn.Linear).values():
        assert type(module) is nn.Linear and type(module.weight) is nn.Parameter
    assert tuple(model.get_submodule(UP).weight.shape) == (256, 128)
    values = models.logits(model.to(DTYPE))
    assert models.relative_error(values, reference) < kind.error
    assert models.relative_error(values, quantized) < 0.1  # only the inputs of int8 layers were rounded


@pytest.mark.parametrize("after_forward", [False, True])
def test_a_dequantised_model(llama, llama_logits, kind, after_forward):
    quantized = models.logits(models.load(llama, kind.config()))
    model = models.load(llama, kind.config())
    if after_forward:
        models.logits(model)
    model.dequantize()
    check_dequantized(model, kind, llama_logits, quantized)


@pytest.mark.slow
def test_the_dtype_of_a_dequantised_model(llama):
    model = models.load(llama, models.nf4())
    model.dequantize(dtype=torch.float32)
    assert model.get_submodule(UP).weight.dtype == torch.float32


# Checkpoints that other versions wrote


def expected_logits(kind):
    tensors = load_file(GOLDEN / kind / "expected.safetensors")
    return tensors["input_ids"].to(DEVICE), tensors["logits_of_dequantized_weights_fp32"].to(DEVICE)


@pytest.mark.parametrize("name", ["nf4", "nf4_double", "nf4_bf16_storage", "fp4", "int8"])
def test_old_checkpoints_give_the_logits_they_gave(name):
    """Before a forward, after one, and after a move (bug class: int8 models saved earlier generated nonsense)."""
    ids, expected = expected_logits(name)
    model = models.load(GOLDEN / name, dtype=torch.float32)
    assert len(models.layers_of(model, Linear8bitLt if name == "int8" else Linear4bit)) == 14
    for _ in range(2):
        error = models.relative_error(models.logits(model, ids), expected)
        assert error < (3e-2 if name == "int8" else 1e-4)
        model.to("cpu").to(DEVICE)
    model.dequantize()
    values = models.logits(model.float(), ids)
    assert (values - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["nf4", "nf4_double", "nf4_bf16_storage", "fp4", "int8"])
def test_old_checkpoints_come_back_byte_for_byte(name):
    """transformers cannot save a model that it loaded quantised; the layers can."""
    saved = load_file(GOLDEN / name / "model.safetensors")
    model = models.load(GOLDEN / name, dtype=torch.float32)
    models.logits(model, expected_logits(name)[0])
    state = model.state_dict()
    assert state.keys() == saved.keys()
    for key, value in saved.items():
        if "quant_state" in key:  # JSON: equal content, whatever the order of its keys
            assert json.loads(bytes(state[key].tolist())) == json.loads(bytes(value.tolist())), key
        else:
            assert models.same_bits(state[key].cpu(), value), key


# Mixtures of experts


def mixture(name):
    from transformers import MixtralConfig, Qwen3MoeConfig

    common = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
    }
    if name == "mixtral":
        return MixtralConfig(num_local_experts=4, **common)
    return Qwen3MoeConfig(num_experts=4, moe_intermediate_size=64, head_dim=32, **common)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    paths = {}
    for name in ("mixtral", "qwen3"):
        torch.manual_seed(0)
        paths[name] = models.save(AutoModelForCausalLM.from_config(mixture(name)), tmp_path_factory.mktemp(name))
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_a_mixture_of_experts_loads_and_saves(mixtures, name, kind, tmp_path):
    model = models.load(mixtures[name], kind.config())
    assert len(models.layers_of(model, kind.layer)) == 8  # attention; transformers leaves fused experts alone
    values = models.logits(model)
    assert models.relative_error(values, models.logits(models.load(mixtures[name]))) < 0.5
    model.save_pretrained(tmp_path)
    assert models.relative_error(models.logits(models.load(tmp_path)), values) < 1e-3


def test_fused_experts_quantize_save_and_load(mixtures):
    model, other = models.load(mixtures["mixtral"]), models.load(mixtures["mixtral"])
    reference = models.logits(model)
    experts = {name: m for name, m in model.named_modules() if name.endswith(".experts")}
    assert len(experts) == 2
    before = sum(p.nbytes for m in experts.values() for p in m.parameters())
    for target in (model, other):
        for name in experts:
            module = target.get_submodule(name)
            for parameter, value in list(module.named_parameters(recurse=False)):
                assert value.dim() == 3
                replace_parameter_4bit(module, parameter, compress_statistics=True, quant_type="nf4")
    assert sum(p.nbytes for m in experts.values() for p in m.parameters()) == before / 4
    values = models.logits(model)
    assert models.relative_error(values, reference) < 0.4
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.zero_()
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(models.logits(other), values)


# Single layers as transformers makes them


def test_a_fresh_layer_on_meta_takes_a_float_weight_and_quantizes_it():
    with torch.device("meta"):
        layer = Linear4bit(64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    old = layer.weight
    value = torch.randn(32, 64, device=DEVICE)
    layer.weight = bnb.nn.Params4bit(value, requires_grad=False, **old.__dict__).to(value.device)
    assert layer.weight.bnb_quantized and layer.quant_state is layer.weight.quant_state
    weight = F.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    x = torch.randn(3, 64, device=DEVICE)
    assert torch.allclose(layer(x), x @ weight.t(), atol=1e-5)
