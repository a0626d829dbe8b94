"""The vendor's operators: results by their documented formulas, gradients by PyTorch's, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F

from tests.simulator.helpers import only_simulated, printed_by

pytestmark = only_simulated

DEVICE = "npu:0"


@pytest.fixture
def ops():
    return torch.ops.npu


def on_device(*tensors, gradients=False):
    moved = [t.to(DEVICE) for t in tensors]
    return [t.requires_grad_() for t in moved] if gradients else moved


def assert_same_gradients(actual, expected, result, wanted):
    """Both pairs of a result and its inputs agree, after a backward pass with one gradient."""
    gradient = torch.randn(wanted.shape)
    torch.testing.assert_close(result.cpu(), wanted)
    result.backward(gradient.to(DEVICE))
    wanted.backward(gradient)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.grad.cpu(), e.grad, rtol=1e-5, atol=1e-5)


def test_rms_norm(ops):
    expected = [torch.randn(4, 6, 16, requires_grad=True), torch.randn(16, requires_grad=True)]
    actual = on_device(*(t.detach() for t in expected), gradients=True)
    result, rstd = ops.npu_rms_norm(*actual, epsilon=1e-5)
    assert rstd.shape == (4, 6, 1) and rstd.dtype == torch.float32
    assert_same_gradients(actual, expected, result, F.rms_norm(expected[0], (16,), expected[1], 1e-5))


@pytest.mark.parametrize("approximate", [0, 1])
def test_geglu(approximate, ops):
    expected = [torch.randn(4, 16, requires_grad=True)]
    actual = on_device(expected[0].detach(), gradients=True)
    value, gate = expected[0].chunk(2, -1)
    wanted = value * F.gelu(gate, approximate="tanh" if approximate else "none")
    assert_same_gradients(actual, expected, ops.npu_geglu(*actual, -1, approximate)[0], wanted)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_turns_pairs(mode, ops):
    x, angle = torch.randn(2, 3, 4, 8), torch.randn(1, 1, 4, 4)
    pairs = x.unflatten(-1, (2, 4)).mT if mode == "half" else x.unflatten(-1, (4, 2))
    pairs = torch.view_as_complex(pairs.contiguous())
    turned = torch.view_as_real(pairs * torch.exp(1j * angle))
    wanted = (turned.mT if mode == "half" else turned).flatten(-2)
    angles = torch.cat((angle, angle), -1) if mode == "half" else angle.repeat_interleave(2, -1)
    (x_device,) = on_device(x, gradients=True)
    result = ops.npu_rotary_mul(x_device, *on_device(angles.cos(), angles.sin()), mode)
    torch.testing.assert_close(result.cpu(), wanted)
    result.backward(result.detach())
    torch.testing.assert_close(x_device.grad.cpu(), x)  # turning back


LAYOUTS = {
    "BNSD": lambda x: x.transpose(1, 2),
    "BSND": lambda x: x,
    "BSH": lambda x: x.flatten(2),
    "SBH": lambda x: x.flatten(2).transpose(0, 1),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fusion_attention(layout, causal, ops):
    expected = [torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    actual = on_device(*(t.detach() for t in expected), gradients=True)
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=DEVICE).triu(1) if causal else None
    outputs = ops.npu_fusion_attention(
        *map(LAYOUTS[layout], actual), 4, layout, scale=8**-0.5, atten_mask=mask, sparse_mode=3 if causal else 0
    )
    assert [tuple(t.shape) for t in outputs[1:4]] == [(2, 4, 5, 8), (2, 4, 5, 8), (0,)]
    wanted = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in expected), is_causal=causal, enable_gqa=True)
    assert_same_gradients(actual, expected, outputs[0], LAYOUTS[layout](wanted.transpose(1, 2)))


def test_fusion_attention_with_a_mask_hides_where_it_is_true(ops):
    q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
    mask = torch.tensor([[False, True, True], [False, False, True], [True, False, False]])
    result = ops.npu_fusion_attention(*on_device(q, k, v), 1, "BNSD", scale=0.5, atten_mask=mask.to(DEVICE))[0]
    torch.testing.assert_close(result.cpu(), F.scaled_dot_product_attention(q, k, v, attn_mask=~mask))


def test_fusion_attention_of_packed_sequences(ops):
    q, k, v = (torch.randn(7, 2, 4) for _ in range(3))
    result = ops.npu_fusion_attention(
        *on_device(q, k, v), 2, "TND", scale=0.5, actual_seq_qlen=[3, 7], actual_seq_kvlen=[3, 7]
    )[0]
    for part in (slice(0, 3), slice(3, 7)):
        wanted = F.scaled_dot_product_attention(*(t[part].transpose(0, 1) for t in (q, k, v))).transpose(0, 1)
        torch.testing.assert_close(result[part].cpu(), wanted)


def test_dynamic_quant(ops):
    x = torch.tensor([[127.0, -64.0, 0.4], [0.0, 0.0, 0.0], [-254.0, 3.0, 5.0]], dtype=torch.float16, device=DEVICE)
    codes, scale = ops.npu_dynamic_quant(x)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    assert codes.tolist() == [[127, -64, 0], [0, 0, 0], [-127, 2, 2]]  # 1.5 and 2.5 go to the even number
    assert scale.tolist() == [1, 0, 2]
    assert ops.npu_dynamic_quant(x, quant_mode="perchannel")[1].shape == (3,)
    assert ops.npu_dynamic_quant(x, quant_mode="pertensor")[1].tolist() == [2]


def test_quantize(ops):
    x = torch.tensor([[1.0, 2.5, -300.0], [0.5, 1.5, 300.0]], device=DEVICE)
    scales = torch.tensor([1.0, 0.5, 1.0], device=DEVICE)
    assert ops.npu_quantize(x, scales, None, torch.qint8, -1).tolist() == [[1, 5, -128], [0, 3, 127]]
    assert ops.npu_quantize(x, scales, scales, torch.quint8, -1, False).tolist() == [[2, 2, 0], [2, 1, 255]]


def test_quant_matmul(ops):
    a = torch.randint(-127, 128, (3, 40), dtype=torch.int8)
    b = torch.randint(-127, 128, (5, 40), dtype=torch.int8)
    rows, columns, bias = torch.rand(3), torch.rand(5), torch.randint(-99, 99, (5,), dtype=torch.int32)
    exact = a.int() @ b.int().t()
    x1, x2 = a.to(DEVICE), b.to(DEVICE).t()
    one = torch.ones(1, device=DEVICE)
    assert torch.equal(ops.npu_quant_matmul(x1, x2, one, output_dtype=torch.int32).cpu(), exact)
    result = ops.npu_quant_matmul(
        x1, x2, *on_device(columns), pertoken_scale=rows.to(DEVICE), bias=bias.to(DEVICE), output_dtype=torch.float16
    )
    wanted = ((exact + bias).float() * columns * rows[:, None]).half()
    torch.testing.assert_close(result.cpu(), wanted, rtol=1e-3, atol=0)


def test_apply_adam_w_equals_adamw():
    from torch_npu.optim import NpuFusedAdamW

    start, gradients = torch.randn(5), torch.randn(3, 5)
    results = []
    for device, optimizer in (("cpu", torch.optim.AdamW), (DEVICE, NpuFusedAdamW)):
        p = torch.nn.Parameter(start.to(device, copy=True))
        step = optimizer([p], lr=0.1, weight_decay=0.1)
        for gradient in gradients:
            p.grad = gradient.to(device)
            step.step()
        results.append(p.detach().cpu())
    torch.testing.assert_close(results[1], results[0])


def test_formats_are_remembered(ops):
    x = torch.arange(6, device=DEVICE).view(2, 3)
    cast = ops.npu_format_cast(x, 29)
    assert (ops.get_npu_format(x), ops.get_npu_format(cast)) == (2, 29)
    assert torch.equal(cast, x)
    assert ops.get_npu_format(ops.npu_format_cast(cast, 2)) == 2


def half():
    return torch.ones(2, 8, dtype=torch.float16, device=DEVICE)


REFUSED = {
    "dynamic_quant of float32": lambda ops: ops.npu_dynamic_quant(half().float()),
    "dynamic_quant of one row": lambda ops: ops.npu_dynamic_quant(half()[0]),
    "quant_matmul with scales in half": lambda ops: ops.npu_quant_matmul(
        half().to(torch.int8), half().to(torch.int8).t(), half()[0, :1], output_dtype=torch.float16
    ),
    "quant_matmul of unequal K": lambda ops: ops.npu_quant_matmul(
        half().to(torch.int8), half().to(torch.int8), half()[0, :1].float()
    ),
    "bfloat16 bias of a float16 result": lambda ops: ops.npu_quant_matmul(
        half().to(torch.int8),
        half().to(torch.int8).t(),
        half()[0, :1].float(),
        bias=half()[0, :2].bfloat16(),
        output_dtype=torch.float16,
    ),
    "rms_norm of integers": lambda ops: ops.npu_rms_norm(half().int(), half()[0].int()),
    "rotary_mul of rank 2": lambda ops: ops.npu_rotary_mul(half(), half(), half()),
    "attention in an unknown layout": lambda ops: ops.npu_fusion_attention(half(), half(), half(), 1, "XYZ"),
    "two devices": lambda ops: ops.npu_rms_norm(half(), half()[0].to("npu:1")),
    "the host's memory": lambda ops: ops.npu_rms_norm(half(), half()[0].cpu()),
}


@pytest.mark.parametrize("call", REFUSED)
def test_refused(call, ops):
    with pytest.raises(RuntimeError):
        REFUSED[call](ops)


def test_shapes_without_data(ops):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3, 8, dtype=torch.float16, device=DEVICE)
        codes, scale = ops.npu_dynamic_quant(x)
        assert (codes.shape, codes.dtype, codes.device.type) == ((2, 3, 8), torch.int8, "npu")
        assert (scale.shape, scale.dtype) == ((2, 3), torch.float32)


def test_other_operators_exist_until_they_are_called():
    import torch_npu

    with pytest.raises(NotImplementedError, match="npu_something is not emulated"):
        torch_npu.npu_something(1)
    assert not hasattr(torch_npu, "something")


def test_bfloat16_on_an_old_chip():
    code = (
        "import torch, torch_npu\nx = torch.ones(2, 2, device='npu').bfloat16()\n"
        "try: torch_npu.npu_rms_norm(x, x[0])\nexcept RuntimeError as error: print(error)"
    )
    assert printed_by(code, BNB_SIMULATOR_CHIP="Ascend310P3") == (
        "npu::npu_rms_norm is not implemented for DT_BFLOAT16 on Ascend310P3"
    )
