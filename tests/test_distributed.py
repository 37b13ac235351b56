"""Two gloo processes train as one process does: DDP, ZeRO, FSDP2, tensor parallelism."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import mulo

STEPS, BATCH = 200, 32
CASES = [(how, lo) for how in ("ddp", "zero", "fsdp2") for lo in ("mulo_m", "muvelo_m")]
CASES += [("tensor", "mulo_m")]


class Net(nn.Module):
    """A width of 17 gives uneven shards; `gate` has one row, so one process has an empty shard."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, bias=False)
        self.inner = nn.Sequential(
            nn.Linear(4 * width, width + 1), nn.Tanh(), nn.Linear(width + 1, width, bias=False)
        )
        self.readout = nn.Linear(width, 3, bias=False)
        self.gate = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        x = torch.tanh(self.conv(x.view(-1, 1, 4, 4))).flatten(1)
        y = self.readout(torch.tanh(self.inner(x)))
        return y * (1 + 0.3 * torch.tanh(self.gate(y)))


def make():
    torch.manual_seed(0)
    width = 17
    roles = mulo.infer_roles(Net, width)
    return mulo.init_(Net(width), roles), roles


def optimizer(groups, name):
    return mulo.MuLO(groups, mulo.load(name), lr=0.1, num_steps=STEPS)


def train(net, opt, rank=None, measure=lambda: 0.0):
    """Noisy batches, half of each for one of two processes; VeLO gets the loss of its own half.

    One process averages the losses of the halves: VeLO compares losses, so rounding matters.
    """
    gen, total = torch.Generator().manual_seed(1), 0.0
    teacher = torch.randn(16, 3, generator=gen)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 16, generator=gen)
        y = (x @ teacher + torch.randn(BATCH, 3, generator=gen)).argmax(1)
        halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
        halves = halves if rank is None else halves[rank : rank + 1]
        loss = sum(nn.functional.cross_entropy(net(a), b) / len(halves) for a, b in halves)
        loss.backward()
        opt.step(**({"loss": loss} if "velo" in opt_name(opt) else {}))
        opt.zero_grad()
        total += measure()
    return total


def opt_name(opt):
    inner = opt.optim if isinstance(opt, ZeroRedundancyOptimizer) else opt
    return inner.lo.config.net


def split(how, rank, name):
    """The net and its optimizer in one of two processes."""
    net, roles = make()
    mesh = init_device_mesh("cpu", (2,))
    if how == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif how == "fsdp2":
        for part in (net.inner, net):
            fully_shard(part, mesh=mesh)
    elif how == "tensor":
        parallelize_module(net.inner, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    groups = mulo.param_groups(net, roles)
    if how == "zero":
        net = nn.parallel.DistributedDataParallel(net)
        group = groups[0]
        options = {"lo": mulo.load(name), "lr": 0.1, "num_steps": STEPS}
        opt = ZeroRedundancyOptimizer(group["params"], mulo.MuLO, **options)
        for key in set(group) - {"params"}:
            opt.param_groups[0][key] = group[key]
        for group in groups[1:]:
            opt.add_param_group(group)
        return net, opt
    return net, optimizer(groups, name)


def worker(rank, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for how, name in CASES:
        net, opt = split(how, rank, name)
        if how == "fsdp2":
            refused = optimizer(opt.param_groups, name)
            refused.backend = "kernel"
            with pytest.raises(ValueError, match="kernels do not take sharded parameters"):
                train(net, refused, rank)
            opt.zero_grad()
        whole = how == "tensor"  # every process sees the whole batch
        train(net, opt, None if whole else rank)
        params = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
        torch.save([p.detach() for p in params], f"{folder}/{how}_{name}_{rank}.pt")
        if how == "fsdp2":
            saved = get_optimizer_state_dict(net, opt)["state"]["inner.2.weight"]
            assert saved["V"].placements == net.inner[2].weight.placements
    dist.barrier()
    os._exit(0)  # gloo's threads can abort the shutdown of the interpreter


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, (port, str(folder)), nprocs=2)
    return folder


@pytest.fixture(scope="module")
def alone():
    """What one process gives, and the largest update of each step, summed."""
    results = {}
    for name in ("mulo_m", "muvelo_m"):
        net, roles = make()
        opt = optimizer(mulo.param_groups(net, roles), name)
        before = [p.detach().clone() for p in net.parameters()]

        def largest_update(net=net, before=before):
            new = [p.detach().clone() for p in net.parameters()]
            size = max(float((a - b).abs().max()) for a, b in zip(new, before, strict=True))
            before[:] = new
            return size

        total = train(net, opt, measure=largest_update)
        results[name] = [p.detach() for p in net.parameters()], total
    return results


@pytest.mark.parametrize(("how", "name"), CASES)
def test_two_processes_are_one(trained, alone, how, name):
    params, total = alone[name]
    for rank in (0, 1):
        theirs = torch.load(trained / f"{how}_{name}_{rank}.pt", weights_only=True)
        error = max(float((a - b).abs().max()) for a, b in zip(theirs, params, strict=True))
        assert error <= 1e-5 * total
