"""Public names and signatures outside `functional` and `optim`, as upstream 0.50.2 has them."""

from importlib import import_module
from importlib.metadata import version
import inspect
import re

import pytest
import torch

import bitsandbytes as bnb

# Parameters and defaults of the classes of `nn`.
LAYERS = {
    "Embedding": (
        "num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, "
        "scale_grad_by_freq=False, sparse=False, _weight=None, device=None"
    ),
    "Embedding4bit": (
        "num_embeddings, embedding_dim, dtype=None, quant_type='fp4', quant_storage=torch.uint8, device=None"
    ),
    "Embedding8bit": "num_embeddings, embedding_dim, device=None, dtype=None",
    "EmbeddingFP4": "num_embeddings, embedding_dim, dtype=None, quant_storage=torch.uint8, device=None",
    "EmbeddingNF4": "num_embeddings, embedding_dim, dtype=None, quant_storage=torch.uint8, device=None",
    "Int8Params": "data=None, requires_grad=True, has_fp16_weights=False, CB=None, SCB=None, **kwargs",
    "Linear4bit": (
        "input_features, output_features, bias=True, compute_dtype=None, compress_statistics=True, "
        "quant_type='fp4', quant_storage=torch.uint8, device=None"
    ),
    "Linear8bitLt": (
        "input_features, output_features, bias=True, has_fp16_weights=True, threshold=0.0, index=None, device=None"
    ),
    "LinearFP4": (
        "input_features, output_features, bias=True, compute_dtype=None, compress_statistics=True, "
        "quant_storage=torch.uint8, device=None"
    ),
    "LinearNF4": (
        "input_features, output_features, bias=True, compute_dtype=None, compress_statistics=True, "
        "quant_storage=torch.uint8, device=None"
    ),
    "OutlierAwareLinear": "input_features, output_features, bias=True, device=None",
    "Params4bit": (
        "data=None, requires_grad=False, quant_state=None, blocksize=None, compress_statistics=True, "
        "quant_type='fp4', quant_storage=torch.uint8, module=None, bnb_quantized=False, **kwargs"
    ),
    "StableEmbedding": (
        "num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, "
        "scale_grad_by_freq=False, sparse=False, _weight=None, device=None, dtype=None"
    ),
}

# Parameters and defaults of functions, classes and methods, by module below `bitsandbytes`.
SIGNATURES = {
    "": {
        "MatmulLtState": (
            "force_no_igemmlt=False, CB=None, SB=None, SCB=None, SBt=None, CBt=None, subB=None, "
            "outlier_pool=None, idx=None"
        ),
        "matmul": "A, B, out=None, state=None, threshold=0.0, bias=None",
        "matmul_4bit": "A, B, quant_state, out=None, bias=None",
    },
    "nn": LAYERS,
    "nn.modules": {
        **LAYERS,
        "Embedding.forward": "self, input",
        "Embedding.reset_parameters": "self",
        "Embedding4bit.forward": "self, input",
        "Embedding8bit.forward": "self, input",
        "GlobalOptimManager": "",
        "Int8Params.cpu": "self",
        "Int8Params.cuda": "self, device=None, non_blocking=False",
        "Int8Params.to": "self, *args, **kwargs",
        "Int8Params.xpu": "self, device=None, non_blocking=False",
        "Linear4bit.forward": "self, x",
        "Linear4bit.set_compute_type": "self, x",
        "Linear8bitLt.forward": "self, x",
        "Linear8bitLt.init_8bit_state": "self",
        "Linear8bitLt.to": "self, *args, **kwargs",
        "OutlierAwareLinear.forward": "self, x",
        "OutlierAwareLinear.forward_with_outliers": "self, x, outlier_idx",
        "OutlierAwareLinear.quantize_weight": "self, w, outlier_idx",
        "OutlierTracer": "",
        "Params4bit.cpu": "self",
        "Params4bit.cuda": "self, device=None, non_blocking=False",
        "Params4bit.from_prequantized": (
            "data, quantized_stats, requires_grad=False, device='cuda', module=None, **kwargs"
        ),
        "Params4bit.to": "self, *args, **kwargs",
        "Params4bit.xpu": "self, device=None, non_blocking=False",
        "QuantState": (
            "absmax, shape=None, code=None, blocksize=None, quant_type=None, dtype=None, offset=None, state2=None"
        ),
        "StableEmbedding.forward": "self, input",
        "StableEmbedding.reset_parameters": "self",
        "fix_4bit_weight_quant_state_from_module": "module",
        "has_avx512bf16": "",
        "maybe_rearrange_weight": (
            "state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs"
        ),
    },
    "nn.parametrize": {
        "Bnb4bitParametrization": "quant_state",
        "Bnb4bitParametrization.forward": "self, quantized_param",
        "replace_parameter_4bit": "module, param_name, compress_statistics=False, quant_type='nf4', blocksize=None",
        "replace_parameter_4bit_prequantized": "module, param_name, qs_dict, device",
    },
    "autograd._functions": {
        "GlobalOutlierPooler": "",
        "GlobalOutlierPooler.add_outliers": "self, outlier_idx, feature_dim",
        "GlobalOutlierPooler.get_current_outlier_idx": "self",
        "GlobalOutlierPooler.get_instance": "",
        "GlobalOutlierPooler.initialize": "self",
        "MatMul4Bit": "*args, **kwargs",
        "MatMul4Bit.backward": "ctx, grad_output",
        "MatMul4Bit.forward": "ctx, A, B, out=None, bias=None, quant_state=None",
        "MatMul8bitFp": "*args, **kwargs",
        "MatMul8bitFp.backward": "ctx, grad_output",
        "MatMul8bitFp.forward": "ctx, A, B, out=None, bias=None, state=None",
        "MatMul8bitLt": "*args, **kwargs",
        "MatMul8bitLt.backward": "ctx, grad_output",
        "MatMul8bitLt.forward": "ctx, A, B, out=None, bias=None, state=None",
        "MatmulLtState": (
            "force_no_igemmlt=False, CB=None, SB=None, SCB=None, SBt=None, CBt=None, subB=None, "
            "outlier_pool=None, idx=None"
        ),
        "MatmulLtState.reset_grads": "self",
        "matmul": "A, B, out=None, state=None, threshold=0.0, bias=None",
        "matmul_4bit": "A, B, quant_state, out=None, bias=None",
    },
    "utils": {
        "OutlierTracer": "",
        "OutlierTracer.get_hvalue": "self, weight",
        "OutlierTracer.get_instance": "",
        "OutlierTracer.get_outliers": "self, weight",
        "OutlierTracer.initialize": "self, model",
        "OutlierTracer.is_initialized": "self",
        "execute_and_return": "command_string",
        "find_outlier_dims": "weight, reduction_dim=0, zscore=4.0, topk=None, rdm=False",
        "outlier_hook": "module, input",
        "pack_dict_to_tensor": "source_dict",
        "replace_linear": (
            "model, linear_replacement, skip_modules=('lm_head',), copy_weights=False, post_processing_function=None"
        ),
        "sync_gpu": "t",
        "unpack_tensor_to_dict": "tensor_data",
    },
    "cextension": {
        "BNBNativeLibrary": "lib",
    },
}

# Other public names: values, submodules, properties and class attributes.
NAMES = {
    "": "adam autograd backends cextension features functional modules nn optim supported_torch_devices utils",
    "nn": "modules",
    "nn.modules": (
        "INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING Params4bit.absmax Params4bit.code "
        "Params4bit.nested_absmax Params4bit.nested_blocksize Params4bit.nested_dtype "
        "Params4bit.nested_offset Params4bit.nested_quant_map Params4bit.offset Params4bit.quant_map "
        "Params4bit.state2 bnb logger"
    ),
    "nn.parametrize": "F",
    "autograd._functions": (
        "F MatmulLtState.CB MatmulLtState.CBt MatmulLtState.SB MatmulLtState.SBt MatmulLtState.SCB "
        "MatmulLtState.force_no_igemmlt MatmulLtState.has_accumulated_gradients "
        "MatmulLtState.has_fp16_weights MatmulLtState.idx MatmulLtState.is_training "
        "MatmulLtState.outlier_pool MatmulLtState.subB MatmulLtState.threshold MatmulLtState.use_pool"
    ),
    "utils": "INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING",
    "cextension": (
        "BNBNativeLibrary.compiled_with_cuda BNB_BACKEND DYNAMIC_LIBRARY_SUFFIX HIP_ENVIRONMENT PACKAGE_DIR "
        "ROCM_GPU_ARCH lib"
    ),
}

# Upstream's public names that are left out on purpose, each with the reason.
LEFT_OUT = {
    "consts": "CUDA",
    "cuda_specs": "CUDA",
    "cpu_ops": "internal",
    "default_ops": "internal",
    "autograd._functions.logger": "unused",
    "utils.logger": "unused",
    "cextension.CUDASpecs": "CUDA",
    "cextension.CudaBNBNativeLibrary": "CUDA",
    "cextension.ErrorHandlerMockBNBNativeLibrary": "CUDA",
    "cextension.XpuBNBNativeLibrary": "XPU",
    "cextension.get_available_cuda_binary_versions": "CUDA",
    "cextension.get_cuda_bnb_library_path": "CUDA",
    "cextension.get_cuda_specs": "CUDA",
    "cextension.get_cuda_version_tuple": "CUDA",
    "cextension.get_native_library": "CUDA",
    "cextension.get_rocm_gpu_arch": "ROCm",
    "cextension.get_xpu_bnb_library_path": "XPU",
    "cextension.logger": "unused",
    "cextension.parse_cuda_version": "CUDA",
}

# Parameters of ours that upstream lacks: always at the end, with a default.
OWN = {name: ", padding_idx=None" for name in ("Embedding4bit", "EmbeddingNF4", "EmbeddingFP4", "Embedding8bit")}

REQUIRED_MODULES = ("optim.adam", "optim.adamw", "nn.modules", "nn.parametrize", "autograd._functions", "functional")


def module(name):
    return import_module(f"bitsandbytes.{name}".rstrip("."))


def look_up(path):
    """Whether `path` below the package is an attribute or a module."""
    found = bnb
    for part in path.split("."):
        if not hasattr(found, part):
            try:
                import_module(f"{found.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        found = getattr(found, part)
    return True


def written(function):
    """Parameters with their defaults, without annotations."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(star + parameter.name + default)
    return ", ".join(parts)


@pytest.mark.parametrize(
    "path, name, expected",
    [(path, name, expected) for path, names in SIGNATURES.items() for name, expected in names.items()],
)
def test_signature_is_upstreams(path, name, expected):
    found = module(path)
    for part in name.split("."):
        found = getattr(found, part)
    assert written(found) == expected + OWN.get(name, "")


@pytest.mark.parametrize("path, name", [(path, name) for path, names in NAMES.items() for name in names.split()])
def test_name_exists(path, name):
    owner = module(path)
    *parents, last = name.split(".")
    for part in parents:
        owner = getattr(owner, part)
    # A property of a class reads through an instance: ask the class for it.
    assert hasattr(owner, last)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_left_out(name):
    """A name that appears after all belongs in the tables above."""
    assert not look_up(name)


@pytest.mark.parametrize("name", REQUIRED_MODULES)
def test_modules_that_others_import(name):
    assert look_up(name)


def test_everything_exported_exists_and_everything_of_upstreams_is_exported():
    for path in ("", "nn", "nn.modules"):
        exported = set(module(path).__all__)
        assert all(hasattr(module(path), name) for name in exported)
        own = set(SIGNATURES[path]) | set(NAMES[path].split())
        assert {name for name in own if "." not in name} <= exported


# Identity


def test_version():
    """Readers compare it as a string and by its numbers, so it has no local part."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", bnb.__version__)
    assert "0.50.0" <= bnb.__version__ < "1"  # some compare it so
    assert version("bitsandbytes") == bnb.__version__


def test_signals_that_others_read():
    assert bnb.features >= {"multi_backend"} and isinstance(bnb.features, set)
    assert bnb.supported_torch_devices >= {"cpu", "npu"} and isinstance(bnb.supported_torch_devices, set)


@pytest.mark.parametrize("name", ["Params4bit", "Int8Params", "Linear4bit", "Linear8bitLt"])
def test_class_names_that_others_compare_as_strings(name):
    assert getattr(bnb.nn, name).__name__ == name


@pytest.mark.parametrize(
    "name", ["Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit", "AdamW", "Lion", "RMSprop"]
)
def test_optimizer_classes_live_in_the_package(name):
    cls = getattr(bnb.optim, name)
    assert cls.__name__ == name and "bitsandbytes" in str(cls)
    own = cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]
    assert all(base.__module__.startswith("bitsandbytes.") for base in own)


def test_one_object_under_every_path():
    assert bnb.modules is bnb.nn.modules and bnb.adam is bnb.optim.adam
    assert bnb.matmul_4bit is bnb.autograd._functions.matmul_4bit
    assert bnb.MatmulLtState is bnb.autograd._functions.MatmulLtState
    assert bnb.nn.Params4bit is bnb.nn.modules.Params4bit
    assert bnb.nn.modules.QuantState is bnb.functional.QuantState
    assert bnb.functional.lib is bnb.cextension.lib
