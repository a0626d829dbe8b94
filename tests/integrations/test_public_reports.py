"""What users of Ascend cards and of other accelerators have reported in public, each as a test.

Reports about training (hiyouga/LlamaFactory#6452 and #9465) are also what test_peft.py and test_trainer.py do, those
about pipelines (huggingface/diffusers#9953 and #10653) what test_diffusers.py does.
"""

from collections.abc import Iterator
import gc
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bitsandbytes as bnb
from bitsandbytes import _ops
from bitsandbytes import functional as F
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from tests.helpers import LEVELS, dispatch_key, oracle_dequantize_4bit, oracle_quantize_4bit, randn

from . import models
from .models import DEVICE, DTYPE

pytestmark = pytest.mark.integration
on_an_accelerator = pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a device with memory of its own")
KINDS = pytest.mark.parametrize("make", ["nf4", "nf4 nested", "int8"])


def layer(make: str, in_features=128, out_features=96) -> torch.nn.Module:
    if make == "int8":
        return Linear8bitLt(in_features, out_features, has_fp16_weights=False, threshold=6.0)
    return Linear4bit(
        in_features, out_features, quant_type="nf4", compress_statistics="nested" in make, compute_dtype=torch.float32
    )


def tensors(owner: object, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor that an object holds, through modules, parameters and states."""
    seen = set() if seen is None else seen
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, torch.Tensor):
        yield owner
    parts = owner.values() if isinstance(owner, dict) else [getattr(owner, "__dict__", {})]
    for part in parts:
        if isinstance(part, (dict, torch.Tensor, torch.nn.Module, QuantState, bnb.MatmulLtState)):
            yield from tensors(part, seen)


def devices(owner: object) -> set[str]:
    return {tensor.device.type for tensor in tensors(owner)}


# bitsandbytes-foundation/bitsandbytes#1465: one transpose too many on NPUs


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_4_bit_matmul_takes_the_weight_either_way_round(rank, transposed):
    weight, bias = randn(256, 512, device=DEVICE), randn(256, device=DEVICE, seed=1)
    x = randn(*[2] * (rank - 1), 512, device=DEVICE, seed=2)
    packed, state = F.quantize_4bit(weight, quant_type="nf4")
    expected = torch.nn.functional.linear(x.cpu(), F.dequantize_4bit(packed, state).cpu(), bias.cpu())
    result = bnb.matmul_4bit(x, packed.t() if transposed else packed, quant_state=state, bias=bias)
    assert result.shape == expected.shape
    assert models.relative_error(result.cpu(), expected) < 1e-5


# bitsandbytes-foundation/bitsandbytes#1695: a device fault while an image model was decoded


def qwen_image_shapes() -> list[tuple[int, int]]:
    """(out_features, in_features) of every Linear layer of the published model."""
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = diffusers.QwenImageTransformer2DModel(num_layers=1)  # its defaults are that model's, with 60 layers
    return sorted({(m.out_features, m.in_features) for m in model.modules() if isinstance(m, torch.nn.Linear)})


def check_shape(rows: int, columns: int, nested: bool) -> None:
    """Codes and values are those of an independent implementation; the matmul is that of the decoded weight."""
    weight = randn(rows, columns, dtype=DTYPE, seed=rows)
    packed, state = F.quantize_4bit(weight.to(DEVICE), quant_type="nf4", compress_statistics=nested)
    codes, absmax = oracle_quantize_4bit(weight, 64, "nf4")
    assert torch.equal(packed.cpu(), codes)
    decoded = F.dequantize_4bit(packed, state).cpu()
    if nested:
        assert models.relative_error(decoded, weight) < 0.15
    else:
        assert torch.equal(decoded, oracle_dequantize_4bit(codes, absmax, 64, "nf4", (rows, columns), DTYPE))
    x = randn(3, columns, dtype=DTYPE, seed=1)
    result = bnb.matmul_4bit(x.to(DEVICE), packed, quant_state=state)
    assert models.relative_error(result.cpu(), x.float() @ decoded.float().t()) < 0.01


def test_the_layers_of_an_image_model():
    """Every layer's width, with fewer rows; and with rows that leave the last block and the last tile partial."""
    shapes = qwen_image_shapes()
    assert (18432, 3072) in shapes and (3072, 12288) in shapes and (64, 3072) in shapes
    for i, (rows, columns) in enumerate(shapes):
        check_shape(min(rows, 96), columns, nested=i % 2 == 0)
        check_shape(min(rows, 33), columns - 1, nested=i % 2 == 1)


@pytest.mark.slow
def test_the_largest_layer_of_an_image_model():
    check_shape(*max(qwen_image_shapes(), key=lambda shape: shape[0] * shape[1]), nested=False)


# bitsandbytes-foundation/bitsandbytes#1534: out of memory on large weights; int8 without a backward


@on_an_accelerator
@pytest.mark.slow
def test_temporaries_do_not_grow_with_the_weight():
    memory = getattr(torch, DEVICE.type)
    limit, size = 256 << 20, 512 << 20

    def temporaries(call) -> int:
        gc.collect()
        memory.reset_peak_memory_stats()
        before = memory.memory_allocated()
        result = call()
        kept = memory.memory_allocated() - before
        assert kept > 0
        del result
        return memory.max_memory_allocated() - before - kept

    weight = torch.ones(1024, size // 4 // 1024, device=DEVICE)
    packed, state = F.quantize_4bit(weight, quant_type="nf4")
    assert temporaries(lambda: F.quantize_4bit(weight, quant_type="nf4")) < limit
    assert temporaries(lambda: F.dequantize_4bit(packed, state)) < limit


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32], ids=str)
def test_an_int8_layer_gives_input_gradients(training, dtype):
    module = layer("int8").to(DEVICE).train(training)
    weight = F.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    x = randn(4, 128, dtype=dtype, device=DEVICE).requires_grad_()
    gradient = randn(4, 96, dtype=dtype, device=DEVICE, seed=1)
    module(x).backward(gradient)
    assert x.grad.dtype == dtype
    assert models.relative_error(x.grad.cpu(), gradient.cpu().float() @ weight.cpu()) < 0.02


# hiyouga/LlamaFactory#6452: inputs cast to fp16 on their way into int8


@pytest.mark.skipif(DTYPE is not torch.bfloat16, reason="about bfloat16, which this chip does not have")
@pytest.mark.parametrize("training", [False, True])
def test_int8_keeps_the_range_of_bf16(training):
    module = Linear8bitLt(64, 64, has_fp16_weights=False).to(DEVICE).train(training)
    x = randn(4, 64, dtype=torch.bfloat16, device=DEVICE, scale=1e6)  # far beyond fp16's 65504
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = module(x)
    assert result.dtype == torch.bfloat16
    weight = F.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).cpu()
    expected = torch.nn.functional.linear(x.cpu().float(), weight, module.bias.cpu().float())
    assert models.relative_error(result.cpu(), expected) < 0.02


# huggingface/transformers#38468: an integer meant CUDA


@on_an_accelerator
@KINDS
def test_an_integer_is_an_index_of_this_accelerator(make):
    module = layer(make).to(0)
    assert devices(module) == {DEVICE.type}
    assert module.weight.to(0).device == torch.device(DEVICE.type, 0)
    assert torch.isfinite(module(randn(2, 128, device=DEVICE))).all()


@on_an_accelerator
def test_a_state_from_a_file_takes_every_spelling_of_a_device():
    packed, state = F.quantize_4bit(randn(64, 64), quant_type="nf4", compress_statistics=True)
    saved = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    for spelling in (0, DEVICE.type, str(torch.device(DEVICE.type, 0)), torch.device(DEVICE.type, 0)):
        restored = QuantState.from_dict(dict(saved), device=spelling)
        assert devices(restored) == {DEVICE.type}
        parameter = bnb.nn.Params4bit.from_prequantized(packed, dict(saved), device=spelling)
        assert devices(parameter) == {DEVICE.type}


@on_an_accelerator
def test_a_model_loads_with_an_integer_device_map(llama, kind):
    model = models.load(llama, kind.config(), device_map={"": 0})
    assert model.device == torch.device(DEVICE.type, 0)
    assert torch.equal(models.logits(model), models.logits(models.load(llama, kind.config())))


# Comfy-Org/ComfyUI#11909: an int8 matmul ran on the host


class NoHostCopies(TorchDispatchMode):
    """An error where an operator, or a kernel of this package within it, copies a device tensor to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "bitsandbytes":
            name = func._schema.name.partition("::")[2]
            overload = f".{func._overloadname}" if func._overloadname != "default" else ""
            with self:  # PyTorch runs an operator without the mode; its kernel shall be watched too
                return _ops._kernels[name + overload, dispatch_key(DEVICE)](*args, **kwargs)
        result = func(*args, **kwargs)
        sources = {a.device.type for a in args if isinstance(a, torch.Tensor) and a.dim()}
        if isinstance(result, torch.Tensor) and result.dim() and result.device.type == "cpu":
            assert DEVICE.type not in sources, f"{func} copies to the host"
        return result


@on_an_accelerator
def test_the_watch_for_host_copies_sees_one():
    with pytest.raises(AssertionError, match="copies to the host"), NoHostCopies():
        torch.ones(4, device=DEVICE).cpu()


@on_an_accelerator
@pytest.mark.parametrize("training", [False, True])
@KINDS
@torch.no_grad()
def test_a_layer_stays_on_its_device(make, training):
    module = layer(make).to(DEVICE).train(training)
    x = randn(5, 128, device=DEVICE)
    x[0, 3] = 40.0  # an outlier for int8
    expected = module(x)
    with NoHostCopies():
        result = module(x)
        again = module.weight.to(DEVICE)
    assert torch.equal(result, expected) and again.device == module.weight.device


@on_an_accelerator
@torch.no_grad()
def test_quantisation_and_an_int8_matmul_stay_on_the_device():
    x, weight = randn(4, 64, dtype=torch.float16, device=DEVICE), randn(32, 64, device=DEVICE)
    with NoHostCopies():
        CA, SCA, _ = F.int8_vectorwise_quant(x)
        CB, SCB, _ = F.int8_vectorwise_quant(weight)
        result = F.int8_mm_dequant(F.int8_linear_matmul(CA, CB), SCA, SCB)
        packed, state = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        decoded = F.dequantize_4bit(packed, state)
        codes, block_state = F.quantize_blockwise(weight)
        F.dequantize_blockwise(codes, block_state)
    assert models.relative_error(result.cpu(), x.cpu().float() @ weight.cpu().t()) < 0.02
    assert models.relative_error(decoded.cpu(), weight.cpu()) < 0.15


# bitsandbytes-foundation/bitsandbytes#937, #953, #1527, #1332, #1769, #1815 and huggingface/diffusers#10798: moves


@on_an_accelerator
@KINDS
@pytest.mark.parametrize("after_forward", [False, True])
@torch.no_grad()
def test_moves_change_nothing_and_leave_nothing_behind(make, after_forward):
    memory = getattr(torch, DEVICE.type)
    x = randn(3, 1024)
    layer(make, 1024, 1024).to(DEVICE).eval()(x.to(DEVICE))  # tables are made once for each device, and stay
    gc.collect()
    empty = memory.memory_allocated()
    module = layer(make, 1024, 1024).to(DEVICE).eval()
    if after_forward:
        module(x.to(DEVICE))
    saved = {name: value.cpu() for name, value in module.state_dict().items()}
    expected = module(x.to(DEVICE)).cpu()
    for _ in range(2):
        module.to("cpu")
        gc.collect()
        assert devices(module) == {"cpu"}
        assert memory.memory_allocated() == empty
        module.to(DEVICE)
        assert devices(module) == {DEVICE.type}
        assert torch.equal(module(x.to(DEVICE)).cpu(), expected)
        for name, value in module.state_dict().items():
            assert models.same_bits(value.cpu(), saved[name]), name


# bitsandbytes-foundation/bitsandbytes#1567 and #2025: the tables of a device


@pytest.mark.parametrize("quant_type", LEVELS)
def test_the_levels_of_a_device_are_those_of_the_format(quant_type):
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] << 4 | codes[1::2]).view(-1, 1).to(DEVICE)
    state = QuantState(
        absmax=torch.ones(1, device=DEVICE),
        shape=torch.Size([16]),
        code=F.get_4bit_type(quant_type, device=DEVICE),
        blocksize=64,
        quant_type=quant_type,
        dtype=torch.float32,
    )
    assert torch.equal(F.dequantize_4bit(packed, state).cpu(), torch.from_numpy(LEVELS[quant_type]))
