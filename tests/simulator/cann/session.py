"""Every module, every optimizer and the functions around the operators once on the device; prints what CANN was asked.

python -m tests.simulator.cann.session
"""

import torch

import bitsandbytes as bnb
import bitsandbytes.functional as F
from tests.simulator.cann.wheel import log

DEVICE = "npu:0"
OPTIMIZERS = [
    value
    for value in vars(bnb.optim).values()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and value.__module__ != "bitsandbytes.optim.optimizer"
]


def layer(module: torch.nn.Module, dtype: torch.dtype) -> None:
    module = module.to(DEVICE)
    x = torch.zeros(3, 64, dtype=dtype).to(DEVICE).requires_grad_()
    module(x).sum().backward()
    with torch.no_grad():
        module(x[:1])
    module.state_dict()


def layers() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for quant_type in ("nf4", "fp4"):
            for nested in (False, True):
                layer(bnb.nn.Linear4bit(64, 32, True, dtype, nested, quant_type), dtype)
        for threshold in (0.0, 6.0):
            layer(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False, threshold=threshold), dtype)
    for threshold in (0.0, 6.0):
        layer(bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=True, threshold=threshold), torch.float32)


def embeddings() -> None:
    indices = torch.zeros(3, dtype=torch.int64).to(DEVICE)
    for kind in (bnb.nn.EmbeddingNF4, bnb.nn.EmbeddingFP4, bnb.nn.Embedding8bit, bnb.nn.StableEmbedding):
        kind(64, 64).to(DEVICE)(indices)


def optimizers() -> None:
    for kind in OPTIMIZERS:
        parameter = torch.nn.Parameter(torch.zeros(64, 80, device=DEVICE))  # large enough for 8-bit states
        needed = {"momentum": 0.9} if kind.__name__.startswith(("SGD", "LARS")) else {}
        optimizer = kind([parameter], lr=1e-3, **needed)
        for _ in range(2):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


def functions() -> None:
    x = torch.zeros(64, 64).to(DEVICE)
    for nested in (False, True):
        codes, state = F.quantize_4bit(x, compress_statistics=nested)
        F.dequantize_4bit(codes, state)
        state.as_dict(packed=True)
        F.dequantize_blockwise(*F.quantize_blockwise(x, nested=nested))


if __name__ == "__main__":
    for part in (layers, embeddings, optimizers, functions):
        part()
        torch.npu.synchronize()
    print(*log(), sep="\n")
