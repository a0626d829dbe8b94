"""The vendor's operators: schemas, and shapes and dtypes as the real torch_npu computes them without running anything.

It checks less here than on a device, and CANN checks more than both: what is refused here is refused everywhere, but a
call that passes may still be refused by a card.
"""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.simulator.cann import wheel  # noqa: F401  skips where there is no torch_npu

SCHEMAS = [
    line
    for line in (Path(__file__).parents[1] / "vendor_schemas.txt").read_text().splitlines()
    if not line.startswith("#")
]
M, K, N = 6, 64, 32
ops = torch.ops.npu


@pytest.fixture(autouse=True)
def fake():
    """Tensors without memory on the device `npu`."""
    with FakeTensorMode():
        yield


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="npu")


def describe(*tensors):
    return [(tuple(t.shape), t.dtype) for t in tensors]


@pytest.mark.parametrize("line", SCHEMAS, ids=lambda line: line.split("(")[0])
def test_schemas_are_those_of_the_wheel(line):
    name, _, overload = line.split("(")[0].removeprefix("npu::").partition(".")
    assert str(getattr(getattr(ops, name), overload or "default")._schema) == line
    assert torch._C._dispatch_has_kernel_for_dispatch_key(line.split("(")[0], "PrivateUse1")


# --- npu_dynamic_quant ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "mode, scale", [("pertoken", (2, M)), ("perchannel", (2, K)), ("pertensor", (1,))], ids=lambda v: str(v)
)
def test_dynamic_quant(mode, scale, dtype):
    """fp32 passes here; whether the kernel takes it, only CANN knows. Its documentation names fp16 and bf16."""
    x = empty(2, M, K, dtype=dtype)
    coded = [((2, M, K), torch.int8), (scale, torch.float32)]
    assert describe(*ops.npu_dynamic_quant(x, quant_mode=mode)) == coded
    assert describe(*ops.npu_dynamic_quant_asymmetric(x, quant_mode=mode)) == [*coded, (scale, torch.float32)]


def test_dynamic_quant_to_4_bits_packs_eight_in_an_int32():
    four = torch.quint4x2
    assert describe(*ops.npu_dynamic_quant(empty(M, K, dtype=torch.float16), dst_type=four)) == [
        ((M, K // 8), torch.int32),
        ((M,), torch.float32),
    ]
    with pytest.raises(RuntimeError, match="divisible by 8"):
        ops.npu_dynamic_quant(empty(M, K + 1, dtype=torch.float16), dst_type=four)


# --- npu_quantize ---


@pytest.mark.parametrize("div_mode", [True, False])
@pytest.mark.parametrize(
    "asked, given",
    [(torch.qint8, torch.int8), (torch.quint8, torch.uint8), (torch.qint32, torch.int32), (torch.int8, torch.int8)],
    ids=str,
)
def test_quantize_gives_plain_integers(asked, given, div_mode):
    result = ops.npu_quantize(empty(M, K), empty(K), None, asked, -1, div_mode)
    assert describe(result) == [((M, K), given)]


def test_quantize_to_4_bits():
    result = ops.npu_quantize(empty(M, K), empty(K), None, torch.quint4x2, -1, False)
    assert describe(result) == [((M, K // 8), torch.int32)]


# --- npu_quant_matmul ---


def quant_matmul(*, x=(M, K), scale=torch.float32, scales=(N,), weight=None, **options):
    weight = empty(N, K, dtype=torch.int8).t() if weight is None else weight
    return ops.npu_quant_matmul(empty(*x, dtype=torch.int8), weight, empty(*scales, dtype=scale), **options)


@pytest.mark.parametrize("transposed", [True, False])
def test_quant_matmul_takes_a_weight_of_k_by_n_or_the_transposed_view_of_n_by_k(transposed):
    weight = empty(N, K, dtype=torch.int8).t() if transposed else empty(K, N, dtype=torch.int8)
    assert describe(quant_matmul(weight=weight, output_dtype=torch.float16)) == [((M, N), torch.float16)]


def test_quant_matmul_takes_rows_in_more_dimensions():
    assert describe(quant_matmul(x=(2, M, K), output_dtype=torch.float16)) == [((2, M, N), torch.float16)]


def test_quant_matmul_gives_the_accumulator_for_a_scale_of_one_value():
    assert describe(quant_matmul(scales=(1,), output_dtype=torch.int32)) == [((M, N), torch.int32)]


def test_quant_matmul_gives_int8_unless_told():
    assert describe(quant_matmul(scale=torch.int64)) == [((M, N), torch.int8)]


F32, F16, BF16, I32, I64 = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64


@pytest.mark.parametrize(
    "scale, output, bias, pertoken, accepted",
    [
        (F32, F16, None, False, True),
        (F32, F16, None, True, True),
        (F32, BF16, None, True, True),
        (F32, I32, None, False, True),
        (BF16, BF16, None, True, True),
        (BF16, I32, None, False, True),
        (BF16, F16, None, False, False),
        (I64, F16, None, False, True),
        (I64, I32, None, False, False),
        (F32, F16, I32, False, True),
        (F32, F16, F16, True, True),
        (F32, F16, F16, False, False),
        (F32, F16, F32, True, True),
        (F32, BF16, BF16, True, True),
        (F32, F16, BF16, True, False),
        (F32, I32, I32, False, True),
        (F32, I32, F32, False, False),
    ],
)
def test_dtypes_of_quant_matmul(scale, output, bias, pertoken, accepted):
    options = {
        "output_dtype": output,
        "bias": None if bias is None else empty(N, dtype=bias),
        "pertoken_scale": empty(M) if pertoken else None,
    }
    if accepted:
        assert describe(quant_matmul(scale=scale, **options)) == [((M, N), output)]
    else:
        with pytest.raises(RuntimeError):
            quant_matmul(scale=scale, **options)


@pytest.mark.parametrize(
    "wrong",
    [{"scales": (N + 1,)}, {"bias": (N + 1,)}, {"weight": (K + 1, N)}],
    ids=str,
)
def test_shapes_that_quant_matmul_refuses(wrong):
    options = {"scales": (N,), "bias": (N,), "weight": (K, N)} | wrong
    weight, bias = empty(*options["weight"], dtype=torch.int8), empty(*options["bias"])
    arguments = {"scales": options["scales"], "weight": weight, "bias": bias, "pertoken_scale": empty(M)}
    with pytest.raises(RuntimeError):
        quant_matmul(output_dtype=torch.bfloat16, **arguments)


# --- The others ---


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_weight_quant_batchmatmul(dtype):
    x, scale = empty(M, K, dtype=dtype), empty(K // 32, N, dtype=dtype)
    whole = ops.npu_weight_quant_batchmatmul(x, empty(K, N, dtype=torch.int8), empty(N, dtype=dtype))
    packed = ops.npu_weight_quant_batchmatmul(x, empty(K, N // 8, dtype=I32), scale, antiquant_group_size=32)
    assert describe(whole, packed) == [((M, N), dtype)] * 2


def test_apply_adam_w_works_on_the_tensors_that_it_is_given():
    p, m, v, g = (empty(N) for _ in range(4))
    results = ops.npu_apply_adam_w.out(0.9, 0.99, 1e-3, 0.1, 0.9, 0.99, 1e-8, g, None, False, False, out=(p, m, v))
    assert describe(*results) == [((N,), F32)] * 3


def test_operators_that_models_use():
    x, weight = empty(2, M, K, dtype=F16), empty(K, dtype=F16)
    assert describe(*ops.npu_rms_norm(x, weight)) == [((2, M, K), F16), ((2, M, 1), F32)]
    heads, rotation = empty(2, 4, M, 16, dtype=F16), empty(1, 1, M, 16, dtype=F16)
    assert describe(ops.npu_rotary_mul(heads, rotation, rotation)) == [((2, 4, M, 16), F16)]
    assert describe(ops.npu_fusion_attention(heads, heads, heads, 4, "BNSD")[0]) == [((2, 4, M, 16), F16)]
