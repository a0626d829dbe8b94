"""One of two processes that train a 4-bit model with LoRA under FSDP2; run by test_fsdp.py."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bitsandbytes as bnb

if os.environ["BNB_TEST_DEVICE"] == "npu":
    import torch_npu  # noqa: F401  # names the device

RANK = int(os.environ["RANK"])
DEVICE = torch.device("cpu") if os.environ["BNB_TEST_DEVICE"] == "cpu" else torch.device("npu", RANK)
DTYPE = torch.bfloat16 if DEVICE.type == "cpu" or torch.npu.is_bf16_supported() else torch.float16


class Block(torch.nn.Module):
    def __init__(self, storage):
        super().__init__()
        self.base = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=DTYPE, quant_type="nf4", quant_storage=storage)
        self.base.weight = bnb.nn.Params4bit(
            (torch.randn(64, 64) / 8).to(DTYPE),
            requires_grad=False,
            quant_type="nf4",
            quant_storage=storage,
            module=self.base,
        )
        self.down = torch.nn.Linear(64, 8, bias=False, dtype=DTYPE)
        self.up = torch.nn.Linear(8, 64, bias=False, dtype=DTYPE)

    def forward(self, x):
        return x + self.base(x) + self.up(self.down(x))


def build(storage):
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(storage), Block(storage)).to(DEVICE).train()


def train(model, x):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def packed(model):
    return {name: value for name, value in model.items() if name.endswith("base.weight")}


def as_bytes(value):
    return value.cpu().view(torch.uint8).view(-1)


def main(storage_name):
    storage = getattr(torch, storage_name)
    if DEVICE.type == "cpu":
        dist.init_process_group("gloo")
    else:
        torch.accelerator.set_device_index(RANK)
        dist.init_process_group("hccl", device_id=DEVICE)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    single = build(storage)
    before = {name: value.clone() for name, value in packed(single.state_dict()).items()}
    expected = train(single, x)

    model = build(storage)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model[0].base.weight, DTensor)
    losses = train(model, x)
    assert all(abs(a - b) <= 0.02 * b for a, b in zip(losses, expected, strict=True)), (losses, expected)
    assert losses[-1] < losses[0], losses

    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if RANK == 0:
        assert packed(gathered).keys() == before.keys()
        for name, value in packed(gathered).items():
            assert value.dtype == storage
            assert torch.equal(as_bytes(value), as_bytes(before[name])), name
        trained = single.state_dict()
        for name, value in gathered.items():
            if ".down." in name or ".up." in name:
                error = (value.cpu().float() - trained[name].cpu().float()).norm() / trained[name].cpu().float().norm()
                assert error < 0.02, (name, error)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    print(f"rank {RANK} finished", flush=True)
    os._exit(0)  # a thread that torch leaves behind sometimes aborts an ordinary exit, after everything was checked
