"""What PyTorch sees of each operator: schema, fake, tags, kernels. As upstream has it, save the embeddings: ours."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import bitsandbytes  # noqa: F401  registers the operators
from bitsandbytes._ops import implementations
from bitsandbytes.errors import ArgumentError
from tests.cases.samples import FIRST, SAMPLES
from tests.helpers import LAYOUTS, QUANT_OPS, as_tuple, dispatch_key, overload, relaid

# Upstream writes the alias of `out` without a name (`Tensor!`); with one, `(a!)`, it means the same.
SCHEMAS = {
    "dequantize_4bit": (
        "(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor"
    ),
    "dequantize_4bit.out": (
        "(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype, Tensor(a!) out) -> ()"
    ),
    "dequantize_blockwise": "(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor",
    "dequantize_blockwise.out": (
        "(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype, Tensor(a!) out) -> ()"
    ),
    "embedding_4bit": (
        "(Tensor indices, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, ScalarType dtype, "
        "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor"
    ),
    "gemm_4bit": (
        "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, "
        "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor"
    ),
    "gemv_4bit": "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor",
    "gemv_4bit.out": (
        "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize, Tensor(a!) out) -> ()"
    ),
    "int8_double_quant": "(Tensor A, float threshold=0.) -> (Tensor, Tensor, Tensor, Tensor, Tensor?)",
    "int8_embedding": "(Tensor indices, Tensor A, Tensor stats, ScalarType dtype) -> Tensor",
    "int8_linear_matmul": "(Tensor A, Tensor B) -> Tensor",
    "int8_linear_matmul.out": "(Tensor A, Tensor B, Tensor(a!) out) -> ()",
    "int8_mixed_scaled_mm": (
        "(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None, Tensor? bias=None) "
        "-> (Tensor, Tensor?)"
    ),
    "int8_mm_dequant": (
        "(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, Tensor? bias=None) -> Tensor"
    ),
    "int8_scaled_mm": (
        "(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None, ScalarType? dtype=None) -> Tensor"
    ),
    "int8_vectorwise_dequant": "(Tensor A, Tensor stats) -> Tensor",
    "int8_vectorwise_quant": "(Tensor A, float threshold=0.) -> (Tensor, Tensor, Tensor?)",
    "quantize_4bit": "(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)",
    "quantize_blockwise": "(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
}


def test_the_tables_of_these_tests_name_every_quantisation_operator():
    registered = {op for op in implementations if not op.startswith("optimizer")}
    assert set(SCHEMAS) == set(QUANT_OPS) == set(FIRST) == registered


@pytest.mark.parametrize("op", QUANT_OPS)
def test_schema_is_upstreams_or_ours(op):
    assert str(overload(op)._schema) == f"bitsandbytes::{op}{SCHEMAS[op]}"


@pytest.mark.parametrize("op", QUANT_OPS)
def test_operator_is_tagged_for_compilation(op):
    assert torch.Tag.pt2_compliant_tag in overload(op).tags


@pytest.mark.parametrize("op", QUANT_OPS)
@pytest.mark.parametrize("key", ["CPU", "PrivateUse1", "CompositeExplicitAutograd", "Meta"])
def test_operator_has_a_kernel_for_every_device(op, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"bitsandbytes::{op}", key)


@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_fake_has_the_shapes_dtypes_and_strides_of_the_real_result(sample, layout, device):
    args = sample.args(device)
    if layout != "contiguous":
        args = {name: value if name == "out" else relaid(value, layout) for name, value in args.items()}
    real = overload(sample.op)(**args)
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    with fake_mode:
        fake_args = {
            name: fake_mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in args.items()
        }
        fake = overload(sample.op)(**fake_args)
    if real is None:
        assert fake is None
        return
    real, fake = as_tuple(real), as_tuple(fake)
    assert len(real) == len(fake)
    for r, f in zip(real, fake, strict=True):
        assert (r is None) == (f is None)
        if r is not None:
            assert f.dtype == r.dtype
            assert f.device.type == r.device.type
            assert f.dim() == r.dim()
            # The number of outlier columns is known only at run time.
            known = [i for i, size in enumerate(f.shape) if isinstance(size, int)]
            assert [f.shape[i] for i in known] == [r.shape[i] for i in known]
            assert f.stride() == r.stride()


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_meta_tensors_give_shapes_without_data(sample):
    args = sample.args("meta")
    if sample.op in ("int8_vectorwise_quant", "int8_double_quant") and args["threshold"]:
        pytest.skip("the number of outliers depends on the data")
    results = overload(sample.op)(**args)
    for result in as_tuple(results):
        assert result is None or result.is_meta


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("op", QUANT_OPS)
def test_opcheck(op, layout, device):
    args = FIRST[op].args(device)
    if layout != "contiguous":
        args = {name: relaid(value, layout) for name, value in args.items()}
    torch.library.opcheck(overload(op), (), args)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s is not FIRST[s.op] and not s.op.endswith(".out")], ids=str)
def test_opcheck_of_schema_and_fake(sample, device):
    torch.library.opcheck(overload(sample.op), (), sample.args(device), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", QUANT_OPS)
def test_real_calls_go_through_the_argument_check(op, target):
    """PyTorch itself runs neither schema checks nor fakes on real calls."""
    wrong = {"blocksize": 3} if op.endswith("_4bit") or op.endswith("_4bit.out") else {"blocksize": 0}
    if op.startswith("int8"):
        name = next(iter(FIRST[op].args()))
        wrong = {name: torch.ones(2, 2, dtype=torch.float64, device=target.device)}
    args = FIRST[op].args(target.device) | wrong
    assert implementations[op][dispatch_key(target.device)]
    with pytest.raises(ArgumentError):
        overload(op)(**args)
