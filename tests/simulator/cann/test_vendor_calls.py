"""What the vendor's operators check on a device, and which operators of CANN they lead to, whose rules count there."""

import pytest
import torch

from tests.simulator.cann.wheel import operators_of

M, K, N = 6, 64, 32
F32, F16, BF16, I32, I64 = torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64
ops = torch.ops.npu


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype).to("npu")


def called(function) -> set[str]:
    return {line.split()[0] for line in operators_of(function)}


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_dynamic_quant_passes_every_dtype_on(dtype):
    x = zeros(M, K, dtype=dtype)
    assert called(lambda: ops.npu_dynamic_quant(x)) == {"aclnnDynamicQuantV2"}


def test_dynamic_quant_needs_two_dimensions():
    with pytest.raises(RuntimeError, match="dim should be greater than 1"):
        ops.npu_dynamic_quant(zeros(K, dtype=F16))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantize_by_division(dtype):
    x, scales = zeros(M, K), zeros(K)
    assert called(lambda: ops.npu_quantize(x, scales, None, dtype, -1, True)) == {"aclnnQuantize"}


def test_quantize_by_multiplication_is_another_operator_with_fewer_dtypes():
    x, scales = zeros(M, K), zeros(K)
    assert called(lambda: ops.npu_quantize(x, scales, None, torch.qint8, -1, False)) == {"aclnnAscendQuantV3"}
    assert called(lambda: ops.npu_quantize(x, scales, None, torch.quint4x2, -1, False)) == {"aclnnAscendQuantV3"}
    for dtype in (torch.quint8, torch.qint32):
        with pytest.raises(RuntimeError, match="not been supported"):
            ops.npu_quantize(x, scales, None, dtype, -1, False)


@pytest.mark.parametrize(
    "scale, output, pertoken, converts",
    [
        (F32, F16, False, True),
        (F32, F16, True, False),
        (F32, BF16, False, False),
        (F32, I32, False, False),
        (BF16, BF16, False, False),
        (I64, F16, False, False),
    ],
)
def test_quant_matmul_converts_an_fp32_scale_on_every_call_unless_it_has_row_scales(scale, output, pertoken, converts):
    x, weight, scales = zeros(M, K, dtype=torch.int8), zeros(N, K, dtype=torch.int8), zeros(N, dtype=scale)
    rows = zeros(M) if pertoken else None
    conversion = {"aclnnTransQuantParamV3"} if converts else set()
    assert (
        called(lambda: ops.npu_quant_matmul(x, weight.t(), scales, output_dtype=output, pertoken_scale=rows))
        == {"aclnnQuantMatmulV5"} | conversion
    )


def test_a_weight_keeps_its_format_unless_internal_formats_are_allowed():
    weight = zeros(K, N, dtype=torch.int8)
    assert ops.get_npu_format(weight) == ops.get_npu_format(ops.npu_format_cast(weight, 29)) == 2
