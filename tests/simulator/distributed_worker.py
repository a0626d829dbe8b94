"""One of the two processes of test_distributed.py."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def same(actual, expected):
    torch.testing.assert_close(actual.cpu(), expected)


def check_collectives(rank, device):
    mine = torch.full((3,), rank + 1.0, device=device)
    for op, expected in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2.0)):
        x = mine.clone()
        dist.all_reduce(x, op=op)
        same(x, torch.full((3,), expected))

    gathered = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(gathered, mine)
    same(torch.stack(gathered), torch.tensor([[1.0] * 3, [2.0] * 3]))

    x = mine.clone()
    dist.broadcast(x, 1)
    same(x, torch.full((3,), 2.0))

    part = torch.empty(1, device=device)
    dist.reduce_scatter(part, list((mine[:2] * torch.tensor([1.0, 10.0], device=device)).split(1)))
    same(part, torch.tensor([30.0 if rank else 3.0]))

    received = torch.empty_like(mine)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    ):
        work.wait()
    same(received, torch.full((3,), 2.0 - rank))

    x = torch.ones(2)
    dist.all_reduce(x)  # the host's tensors go over the same group
    same(x, torch.full((2,), 2.0))
    names = [None, None]
    dist.all_gather_object(names, str(device))
    assert names == ["npu:0", "npu:1"]
    dist.barrier()


def check_training(rank, device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 131), torch.nn.GELU(), torch.nn.Linear(131, 5))
    inputs = torch.randn(8, 37)
    parallel = DistributedDataParallel(copy.deepcopy(model).to(device), device_ids=[rank])
    sharded = copy.deepcopy(model).to(device)
    mesh = init_device_mesh("npu", (2,))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)

    for m, x in ((model, inputs), (parallel, inputs[rank::2].to(device)), (sharded, inputs[rank::2].to(device))):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
        for _ in range(2):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q, r in zip(model.parameters(), parallel.module.parameters(), sharded.parameters(), strict=True):
        assert q.device == r.to_local().device == device
        same(q.detach(), p.detach())
        same(r.full_tensor().detach(), p.detach())


def main(rendezvous, rank):
    device = torch.device("npu", rank)
    torch.npu.set_device(device)
    dist.init_process_group("hccl", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    check_collectives(rank, device)
    check_training(rank, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # a thread that torch leaves behind sometimes aborts an ordinary exit, after everything was checked
