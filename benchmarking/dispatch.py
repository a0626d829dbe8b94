#!/usr/bin/env python
"""Time the way from a call of an operator to its kernel, in microseconds, with a kernel that does nothing.

    python benchmarking/dispatch.py --device npu:0

"bare" is an operator with the same schema whose Python kernel is called by PyTorch's dispatcher and nothing else.
"""

import argparse
import time

import torch

import bitsandbytes  # noqa: F401  registers the operators
from bitsandbytes import _ops

_CALLS = 5000


def _median(call) -> float:
    """Median time of a call in microseconds."""
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[_CALLS // 2] * 1e6


def _arguments(op: str, device: torch.device) -> tuple:
    """Arguments of one weight of 64 x 64 and one row."""
    x = torch.zeros((1, 64), dtype=torch.float16, device=device)
    packed = torch.zeros((2048, 1), dtype=torch.uint8, device=device)
    absmax = torch.zeros(64, device=device)
    return {
        "gemm_4bit": (x, packed, [64, 64], absmax, 64, "nf4"),
        "dequantize_4bit": (packed, absmax, 64, "nf4", [64, 64], torch.float16),
        "quantize_blockwise": (x, torch.zeros(256, device=device), 256),
    }[op]


def _replace(op: str, device: torch.device, nothing) -> None:
    """Put a kernel that does nothing behind everything that the package does before a kernel."""
    if device.type == "npu":
        from bitsandbytes.backends import npu

        npu.implementations[op][:] = [npu.Implementation("default", nothing)]
    else:
        _ops.register(op, nothing, device.type.upper(), "nothing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default="cpu")
    device = parser.parse_args().device
    library = torch.library.Library("bitsandbytes_benchmark", "FRAGMENT")
    print(f"{'operator':<20} {'bare':>8} {'ours':>8} {'added':>8}   (us, {device}, PyTorch {torch.__version__})")
    for op in ("gemm_4bit", "dequantize_4bit", "quantize_blockwise"):
        args = _arguments(op, device)
        schema = _ops.schema(op)
        result = tuple(torch.empty(0, device=device) for _ in schema.returns)
        result = result if len(result) > 1 else result[0]
        library.define(str(schema).removeprefix("bitsandbytes::"))
        library.impl(op, lambda *args, result=result: result, "PrivateUse1" if device.type == "npu" else "CPU")
        _replace(op, device, lambda *args, result=result: result)
        bare, ours = getattr(torch.ops.bitsandbytes_benchmark, op), getattr(torch.ops.bitsandbytes, op)
        with torch.no_grad():
            bare, ours = _median(lambda: bare(*args)), _median(lambda: ours(*args))  # noqa: B023  called at once
        print(f"{op:<20} {bare:>8.2f} {ours:>8.2f} {ours - bare:>8.2f}")


if __name__ == "__main__":
    main()
