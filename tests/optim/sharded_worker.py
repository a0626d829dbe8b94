"""One of two processes of test_sharded.py: trains a model under FSDP2, saves the optimizer, loads it, trains on."""

import os
from pathlib import Path
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bitsandbytes import optim
from bitsandbytes.errors import UnsupportedError

OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdEMAMix8bit": lambda p: optim.AdEMAMix8bit(p, lr=0.01, min_8bit_size=0),
    "Lion8bit": lambda p: optim.Lion8bit(p, lr=0.01, min_8bit_size=0),
}


def new_model():
    torch.manual_seed(0)
    # Shards of unequal size, blocks that are not full, and a bias with one element fewer than there are ranks.
    return torch.nn.Sequential(torch.nn.Linear(37, 131), torch.nn.Linear(131, 5), torch.nn.Linear(5, 1))


def sharded(mesh):
    model = new_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        model(torch.randn(8, 37)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def check(name, full, mesh, folder):
    model = sharded(mesh)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    if name == "AdamW":  # in 32 bits, sharding changes nothing
        whole = new_model()
        train(whole, OPTIMIZERS[name](whole.parameters()), 3)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q)

    options = StateDictOptions(full_state_dict=full)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    resumed = sharded(mesh)
    resumed.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    if not full:
        dcp.save({"optimizer": saved}, checkpoint_id=folder / name)
        saved = get_optimizer_state_dict(resumed, resumed_optimizer)
        dcp.load({"optimizer": saved}, checkpoint_id=folder / name)
    set_optimizer_state_dict(resumed, resumed_optimizer, saved, options=options)

    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        state, other = optimizer.state[p], resumed_optimizer.state[q]
        assert state.keys() == other.keys()
        for key, value in state.items():
            assert type(value) is type(other[key]), key
            assert torch.equal(local(value), local(other[key])) if torch.is_tensor(value) else value == other[key], key
        if "8bit" in name:
            assert local(state["state1"]).dtype == torch.uint8
    train(model, optimizer, 1, first=3)
    train(resumed, resumed_optimizer, 1, first=3)
    for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, full in (("AdamW", True), ("Lion8bit", False), ("AdEMAMix8bit", True), ("AdEMAMix8bit", False)):
        check(name, full, mesh, folder)

    model = sharded(mesh)
    try:  # the norm of a shard is not that of the parameter
        train(model, optim.LAMB(model.parameters()), 1)
        raise AssertionError("a bound on the norm must be refused for shards")
    except UnsupportedError as error:
        assert "max_unorm" in str(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # a thread that torch leaves behind sometimes aborts an ordinary exit, after everything was checked
