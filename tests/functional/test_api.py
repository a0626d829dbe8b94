"""Public names and signatures of `bitsandbytes.functional`, as upstream 0.50.2 has them."""

import inspect
import warnings

import pytest
import torch

import bitsandbytes as bnb
from bitsandbytes import _ops
import bitsandbytes.functional as F
from tests.cases.samples import FIRST
from tests.helpers import as_tuple, assert_all_same, overload, reference_on_the_cpu

# Parameters and defaults. `igemm`, `batched_igemm`, `check_matmul` and `CUBLAS_Context` are left out on purpose.
SIGNATURES = {
    "create_dynamic_map": "signed=True, max_exponent_bits=7, total_bits=8",
    "create_fp8_map": "signed=True, exponent_bits=5, precision_bits=2, total_bits=8",
    "create_linear_map": "signed=True, total_bits=8, add_zero=True",
    "create_normal_map": "offset=0.9677083, use_extra_value=True",
    "dequantize_4bit": "A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type='fp4'",
    "dequantize_blockwise": "A, quant_state=None, absmax=None, code=None, out=None, blocksize=4096, nested=False",
    "dequantize_fp4": "A, quant_state=None, absmax=None, out=None, blocksize=None",
    "dequantize_nf4": "A, quant_state=None, absmax=None, out=None, blocksize=None",
    "elementwise_func": "func_name, A, B, value, prefetch=True",
    "fill": "A, value, device=None, prefetch=True",
    "gemv_4bit": "A, B, out=None, transposed_A=False, transposed_B=False, state=None",
    "get_4bit_type": "typename, device=None, blocksize=64",
    "get_paged": "*shape, dtype=torch.float32, device=device(type='cuda', index=0)",
    "get_ptr": "A",
    "has_avx512bf16": "",
    "int8_double_quant": "A, col_stats=None, row_stats=None, out_col=None, out_row=None, threshold=0.0",
    "int8_linear_matmul": "A, B, out=None, dtype=torch.int32",
    "int8_mm_dequant": "A, row_stats, col_stats, out=None, bias=None",
    "int8_vectorwise_dequant": "A, stats",
    "int8_vectorwise_quant": "A, threshold=0.0",
    "is_on_gpu": "tensors",
    "optimizer_update_32bit": (
        "optimizer_name, g, p, state1, beta1, eps, step, lr, state2=None, beta2=0.0, beta3=0.0, alpha=0.0, "
        "weight_decay=0.0, gnorm_scale=1.0, unorm_vec=None, max_unorm=0.0, skip_zeros=False"
    ),
    "optimizer_update_8bit_blockwise": (
        "optimizer_name, g, p, state1, state2, beta1, beta2, beta3, alpha, eps, step, lr, qmap1, qmap2, absmax1, "
        "absmax2, weight_decay=0.0, gnorm_scale=1.0, skip_zeros=False"
    ),
    "pack_dict_to_tensor": "source_dict",
    "prefetch_tensor": "A, to_cpu=False",
    "quantize_4bit": (
        "A, absmax=None, out=None, blocksize=None, compress_statistics=False, quant_type='fp4', "
        "quant_storage=torch.uint8"
    ),
    "quantize_blockwise": "A, code=None, absmax=None, out=None, blocksize=4096, nested=False",
    "quantize_fp4": "A, absmax=None, out=None, blocksize=None, compress_statistics=False, quant_storage=torch.uint8",
    "quantize_nf4": "A, absmax=None, out=None, blocksize=None, compress_statistics=False, quant_storage=torch.uint8",
    "unpack_tensor_to_dict": "tensor_data",
    "QuantState": (
        "absmax, shape=None, code=None, blocksize=None, quant_type=None, dtype=None, offset=None, state2=None"
    ),
    "QuantState.as_dict": "self, packed=False",
    "QuantState.from_dict": "qs_dict, device",
    "QuantState.to": "self, device",
    "GlobalPageManager.get_instance": "",
    "GlobalPageManager.initialize": "self",
    "GlobalPageManager.prefetch_all": "self, to_cpu=False",
}


def written(parameter: inspect.Parameter) -> str:
    star = "*" if parameter.kind == parameter.VAR_POSITIONAL else ""
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return star + parameter.name + default


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_upstreams(name):
    found = F
    for part in name.split("."):
        found = getattr(found, part)
    assert ", ".join(map(written, inspect.signature(found).parameters.values())) == SIGNATURES[name]


def test_every_public_name_is_listed():
    functions = {name for name in SIGNATURES if "." not in name}
    assert set(F.__all__) == functions | {"C", "FIRST_CUDA_DEVICE", "GlobalPageManager", "lib", "name2qmap"}
    assert all(hasattr(F, name) for name in F.__all__)


@pytest.mark.parametrize("name", ["igemm", "batched_igemm", "check_matmul", "CUBLAS_Context"])
def test_deprecated_gemms_are_left_out(name):
    assert not hasattr(F, name)


def test_values():
    assert F.C == 127.0
    assert F.FIRST_CUDA_DEVICE == torch.device("cuda", 0)
    assert F.has_avx512bf16() is False


def test_names_at_the_top():
    assert bnb.features == {"multi_backend"}
    assert {"cpu", "npu"} <= bnb.supported_torch_devices <= {"cpu", "npu", "cuda", "xpu", "mps", "hpu"}
    assert bnb.functional is F
    assert bnb.matmul_4bit and bnb.matmul and bnb.MatmulLtState


# bitsandbytes#1615: missing native functions showed up as attributes of None, far from the cause.
class TestNativeLibrary:
    def test_a_native_function_that_does_not_exist_is_an_attribute_error(self):
        assert not hasattr(F.lib, "cdequantize_blockwise_fp32")
        assert not F.lib.compiled_with_cuda

    @pytest.mark.parametrize("look_up", [lambda name: getattr(F.lib, name), lambda name: F.lib[name]])
    def test_the_message_names_the_function_and_the_backend_and_never_cuda(self, look_up):
        with pytest.raises(AttributeError) as caught:
            look_up("cgemm_4bit_inference")
        text = str(caught.value)
        assert "cgemm_4bit_inference" in text
        assert bnb.cextension.BNB_BACKEND in text
        assert str(bnb.cextension.PACKAGE_DIR) in text
        assert "cuda" not in text.lower()


class TestMessagesAboutDevices:
    def test_a_device_without_kernels_is_announced_once(self, monkeypatch):
        monkeypatch.setattr(_ops, "_announced", set())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for kind in ("xpu", "xpu", "mps", "xpu"):
                _ops.warn_reference_only(kind)
        texts = [str(w.message) for w in caught]
        assert len(texts) == 2
        assert "'xpu'" in texts[0]
        assert "'mps'" in texts[1]

    def test_operators_announce_it_themselves_and_compute_the_same(self, monkeypatch):
        """The kernel for devices without their own, called on the CPU."""
        monkeypatch.setattr(_ops, "_announced", set())
        key = torch._C.DispatchKey.CompositeExplicitAutograd
        with warnings.catch_warnings(record=True) as caught, reference_on_the_cpu():
            warnings.simplefilter("always")
            for op, sample in FIRST.items():
                args = sample.args()
                composite = overload(op)._op_dk(key, *args.values())
                if "out" not in args:
                    assert_all_same(as_tuple(composite), as_tuple(overload(op)(**args)))
        assert [str(w.message) for w in caught if "no kernels" not in str(w.message)] == []
        assert len(caught) == 1

    def test_a_supported_device_is_not_announced(self, recwarn):
        F.quantize_4bit(torch.ones(64))
        assert not recwarn.list
