"""Integer quantisation and the matrix product of quantised tensors."""

import torch

from ._registry import DTYPES, FLOATS, require, require_emulated, vendor_op

_LONGEST = 65535  # of the last two dimensions of a matrix


@vendor_op("npu_dynamic_quant")
def npu_dynamic_quant(
    input, *, smooth_scales=None, group_index=None, dst_type=None, quant_mode="pertoken", dst_type_max=0.0
):
    require_emulated(group_index is None and dst_type in (None, 1), "npu_dynamic_quant to another dtype or in groups")
    require(
        input.dtype in (torch.float16, torch.bfloat16) and input.dim() >= 2,
        f"npu_dynamic_quant takes float16 or bfloat16 of at least 2 dimensions, not {input.dtype} of {input.dim()}",
    )
    axes = {"pertoken": -1, "perchannel": -2, "pertensor": tuple(range(input.dim()))}
    require(quant_mode in axes, f"npu_dynamic_quant: no quant_mode '{quant_mode}'")
    values = input.float()
    if smooth_scales is not None:
        require(
            smooth_scales.dtype == input.dtype and smooth_scales.shape == input.shape[-1:],
            "npu_dynamic_quant: smooth_scales has the input's dtype and one value a column",
        )
        values = values * smooth_scales.float()
    scale = values.abs().amax(axes[quant_mode], keepdim=True) / 127
    codes = torch.where(scale > 0, values / scale, 0).round().clamp(-128, 127).to(torch.int8)
    return codes, scale.reshape(1) if quant_mode == "pertensor" else scale.squeeze(axes[quant_mode])


_QUANTISED = {0: torch.uint8, 13: torch.uint8, 1: torch.int8, 12: torch.int8, 3: torch.int32, 14: torch.int32}


@vendor_op("npu_quantize")
def npu_quantize(input, scales, zero_points, dtype, axis=1, div_mode=True):
    require_emulated(dtype in _QUANTISED, f"npu_quantize to dtype {dtype}")
    require(input.dtype in FLOATS, f"npu_quantize: unsupported dtype {input.dtype}")
    require(
        scales.dtype in ((torch.float32, torch.bfloat16) if div_mode else FLOATS),
        f"npu_quantize: unsupported scales of {scales.dtype}",
    )

    def along_axis(factors: torch.Tensor) -> torch.Tensor:
        if factors.dim() == input.dim():
            return factors.float()
        require(
            factors.dim() == 1 and factors.numel() in (1, input.shape[axis]),
            f"npu_quantize: {tuple(factors.shape)} does not lie along axis {axis} of {tuple(input.shape)}",
        )
        shape = [1] * input.dim()
        shape[axis] = factors.numel()
        return factors.float().view(shape)

    factor = along_axis(scales)
    values = input.float() / factor if div_mode else input.float() * factor
    if zero_points is not None:
        values = values + along_axis(zero_points)
    target = _QUANTISED[dtype]
    limits = torch.iinfo(target)
    return values.double().round().clamp(limits.min, limits.max).to(target)


@vendor_op("npu_quant_matmul")
def npu_quant_matmul(
    x1, x2, scale, *, offset=None, pertoken_scale=None, bias=None, output_dtype=None, group_sizes=None, **other
):
    require_emulated(
        x1.dtype == x2.dtype == torch.int8 and scale.dtype != torch.int64 and group_sizes is None,
        "npu_quant_matmul but with int8 matrices and scales in floating point",
    )
    output = torch.int8 if output_dtype is None else DTYPES.get(output_dtype)
    _check_product(x1, x2, scale, offset, pertoken_scale)
    _check_output(output, scale, pertoken_scale)
    if bias is not None:
        _check_bias(bias, x2.shape[-1], output, pertoken_scale)

    exact = x1.double() @ x2.double()
    if bias is not None and bias.dtype == torch.int32:
        exact = exact + bias
    result = exact.float() * scale.float()  # rounds sums beyond 2^24, as an epilogue in float32 may
    if pertoken_scale is not None:
        result = result * pertoken_scale[:, None]
    if bias is not None and bias.dtype != torch.int32:
        result = result + bias.float()
    if output == torch.int8:
        return (result if offset is None else result + offset).round().clamp(-128, 127).to(torch.int8)
    return result.to(output)


def _check_product(x1, x2, scale, offset, pertoken_scale) -> None:
    k, n = x2.shape[-2:]
    require(
        2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6 and x1.shape[-1] == k,
        f"npu_quant_matmul: {tuple(x1.shape)} and {tuple(x2.shape)} cannot be multiplied",
    )
    require(max(k, n) <= _LONGEST, f"npu_quant_matmul: K={k} and N={n} go up to {_LONGEST}")
    require(
        scale.dtype in (torch.float32, torch.bfloat16) and scale.dim() == 1 and scale.numel() in (1, n),
        f"npu_quant_matmul: scale is {scale.dtype} {tuple(scale.shape)}, not float32 or bfloat16 (1,) or ({n},)",
    )
    if pertoken_scale is not None:
        require(
            pertoken_scale.dtype == torch.float32 and pertoken_scale.shape == x1.shape[-2:-1],
            "npu_quant_matmul: pertoken_scale is float32, one value a row",
        )
    if offset is not None:
        require(
            offset.dtype == torch.float32 and offset.dim() == 1 and offset.numel() in (1, n),
            "npu_quant_matmul: offset is float32 with one value, or one a column",
        )


def _check_output(output, scale, pertoken_scale) -> None:
    require(
        output in (torch.int8, torch.int32, torch.float16, torch.bfloat16), f"npu_quant_matmul: no output of {output}"
    )
    if scale.dtype == torch.bfloat16:
        require(
            output in (torch.bfloat16, torch.int32),
            "npu_quant_matmul: a scale of bfloat16 needs output_dtype bfloat16 or int32",
        )


def _check_bias(bias, columns, output, pertoken_scale) -> None:
    require(bias.shape in ((columns,), (*bias.shape[:1], 1, columns)), "npu_quant_matmul: bias is (N,) or (B, 1, N)")
    require(
        bias.dtype in (torch.int32, *FLOATS) and (output != torch.int32 or bias.dtype == torch.int32),
        f"npu_quant_matmul: no bias of {bias.dtype} for an output of {output}",
    )
    if bias.dtype == torch.bfloat16:
        require(output == torch.bfloat16, "npu_quant_matmul: a bias of bfloat16 needs output_dtype bfloat16")
    if bias.dtype == torch.float16:
        require(
            output == torch.float16 and pertoken_scale is not None,
            "npu_quant_matmul: a bias of float16 needs output_dtype float16 and pertoken_scale",
        )
