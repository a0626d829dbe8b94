"""The self-test of `python -m bitsandbytes info`: each check has one known answer on every device.

Inputs are chosen so that the arithmetic is exact (statistics that are powers of two, values that are levels), so the
expected codes and values follow from the format alone and not from the code under test.
"""

from collections.abc import Callable, Sequence

import torch

from bitsandbytes import formats, functional, optim
from bitsandbytes.autograd._functions import matmul_4bit


class CheckError(Exception):
    """A result that differs from the expected one, in words."""


def _expect(what: str, got: torch.Tensor | None, want: Sequence[float] | torch.Tensor, tolerance: float = 0.0) -> None:
    if got is None:
        raise CheckError(f"{what}: got None")
    have = got.detach().cpu().flatten().to(torch.float64)
    wanted = torch.as_tensor(want).cpu().flatten().to(torch.float64)
    if have.shape != wanted.shape:
        raise CheckError(f"{what}: got {have.numel()} values, expected {wanted.numel()}")
    # Written so that a NaN counts as wrong.
    wrong = (~((have - wanted).abs() <= tolerance)).nonzero().flatten().tolist()
    if wrong:
        first = wrong[0]
        raise CheckError(
            f"{what}: {len(wrong)} of {have.numel()} values are wrong, "
            f"the first at {first}: got {have[first]:g}, expected {wanted[first]:g}"
        )


# Codes 0 to 15, four times, and a short last block of one value; two codes a byte, the first in the high nibble.
_ALL_CODES = [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def _fourbit(device: torch.device, quant_type: str, packed: list[int], tail_level: float) -> None:
    levels = formats.codebook(quant_type, device)
    x = torch.cat([2.0 * levels.repeat(4), torch.tensor([-3.0], device=device)])
    got, state = functional.quantize_4bit(x, blocksize=64, quant_type=quant_type)
    _expect("packed codes", got, packed)
    _expect("absmax", state.absmax, [2.0, 3.0])
    _expect("decoded values", functional.dequantize_4bit(got, state), [*x[:64].tolist(), 3.0 * tail_level])


def nf4(device: torch.device) -> None:
    # -3 is its block's absmax: code 0 (-1.0), beside the code of 0, which is 7.
    _fourbit(device, "nf4", _ALL_CODES * 4 + [0x07], -1.0)


def fp4(device: torch.device) -> None:
    # Zero has one code, so the value of code 8 comes back as code 0; -3 has the sign bit and the largest magnitude.
    signed_zero_is_zero = [0x09 if byte == 0x89 else byte for byte in _ALL_CODES]
    _fourbit(device, "fp4", signed_zero_is_zero * 4 + [0xB0], -1.0)


def nested(device: torch.device) -> None:
    # Blocks of ones and of threes: the offset is 2 and the centred statistics are -1 and 1, a block of 256 of them.
    x = torch.tensor([1.0, 3.0], device=device).repeat_interleave(64).repeat(128)
    packed, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    code = functional.create_dynamic_map()
    _expect("offset", state.offset, [2.0])
    _expect("codes of absmax", state.absmax, [0, 255] * 128)
    _expect("absmax of absmax", state.state2.absmax, [1.0])
    decoded = (2.0 + code[[0, 255]]).repeat_interleave(64).repeat(128)
    _expect("decoded values", functional.dequantize_4bit(packed, state), decoded)


def blockwise(device: torch.device) -> None:
    x = torch.cat([4.0 * functional.create_dynamic_map().to(device), torch.zeros(3, device=device)])
    codes, state = functional.quantize_blockwise(x, blocksize=256)
    _expect("codes", codes, [*range(256), 127, 127, 127])
    _expect("absmax", state.absmax, [4.0, 0.0])
    _expect("decoded values", functional.dequantize_blockwise(codes, state), x)


def int8_rows(device: torch.device) -> None:
    # Row statistics 127, 0 and 254: the codes are x, 0 and x / 2, and halves go to the even neighbour.
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-254.0, 3.0, 1.0, 100.0]], device=device)
    codes, stats, _ = functional.int8_vectorwise_quant(x.to(torch.float16))
    _expect("codes", codes, [127, 0, 2, -2, 0, 0, 0, 0, -127, 2, 0, 50])
    _expect("row statistics", stats, [127.0, 0.0, 254.0])


def int8_matmul(device: torch.device) -> None:
    # 127 * 127 * 2047 needs 25 bits: a product that is summed in fp32 is off by one.
    a = torch.full((2, 2048), 127, dtype=torch.int8)
    b = torch.full((3, 2048), 127, dtype=torch.int8)
    b[:, 0] = torch.tensor([127, -127, 1], dtype=torch.int8)
    product = functional.int8_linear_matmul(a.to(device), b.to(device))
    rest = 127 * 127 * 2047
    _expect("int32 product", product, [rest + 127 * 127, rest - 127 * 127, rest + 127] * 2)

    small = torch.tensor([[16129, -32258]], dtype=torch.int32, device=device)
    row, column = torch.tensor([2.0], device=device), torch.tensor([1.0, 4.0], device=device)
    bias = torch.tensor([0.5, 0.0], dtype=torch.float16, device=device)
    _expect("dequantised product", functional.int8_mm_dequant(small, row, column, bias=bias), [2.5, -16.0])


def gemm_4bit(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 128, generator=generator).to(device)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    decoded = functional.dequantize_4bit(packed, state).cpu().double()
    for rows in (1, 5):
        x = torch.randn(rows, 128, generator=generator)
        want = x.double() @ decoded.t()
        bound = 2 * 128 * torch.finfo(torch.float32).eps * (x.double().abs() @ decoded.abs().t()).max().item()
        _expect(f"product of {rows} rows", matmul_4bit(x.to(device), packed.t(), quant_state=state), want, bound)


def optimizer_step(device: torch.device) -> None:
    # Adam's first step moves each value by the learning rate against the gradient's sign.
    for optimizer_class, state_dtype in ((optim.Adam, torch.float32), (optim.Adam8bit, torch.uint8)):
        parameter = torch.nn.Parameter(torch.ones(4096, device=device))
        parameter.grad = torch.tensor([0.5, -0.25], device=device).repeat(2048)
        optimizer = optimizer_class([parameter], lr=0.125)
        optimizer.step()
        name = optimizer_class.__name__
        _expect(f"{name}: parameter", parameter, [0.875, 1.125] * 2048, 1e-5)
        if (dtype := optimizer.state[parameter]["state1"].dtype) != state_dtype:
            raise CheckError(f"{name}: state has dtype {dtype}, expected {state_dtype}")


CHECKS: dict[str, Callable[[torch.device], None]] = {
    "NF4": nf4,
    "FP4": fp4,
    "nested statistics": nested,
    "8-bit blockwise": blockwise,
    "int8 rows": int8_rows,
    "int8 matmul": int8_matmul,
    "4-bit matmul": gemm_4bit,
    "optimizer step": optimizer_step,
}


def run(device: torch.device) -> dict[str, str]:
    """Run every check on `device`; check name -> what is wrong, empty if nothing."""
    results = {}
    for name, check in CHECKS.items():
        try:
            check(device)
            results[name] = ""
        except CheckError as error:
            results[name] = str(error)
        except Exception as error:  # whatever breaks is a finding, not the end of the report
            results[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return results
