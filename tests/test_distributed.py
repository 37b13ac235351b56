"""Two gloo processes train as one process does: DDP, ZeRO, FSDP2, tensor parallelism; DCP."""

import os
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
    roles = mulo.infer_roles(Net, 17)
    return mulo.init_(Net(17), roles), roles


def optimizer(groups, name):
    return mulo.MuLO(groups, mulo.load(name), lr=0.1, num_steps=STEPS)


def train(net, opt, rank=None, measure=lambda: 0.0, steps=STEPS):
    """Noisy batches, half of each for one of two processes; VeLO gets the loss of its own half.

    One process averages the losses of the halves: VeLO compares losses, so rounding matters.
    """
    gen, total = torch.Generator().manual_seed(1), 0.0
    teacher = torch.randn(16, 3, generator=gen)
    for _ in range(steps):
        x = torch.randn(BATCH, 16, generator=gen)
        y = (x @ teacher + torch.randn(BATCH, 3, generator=gen)).argmax(1)
        halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
        halves = halves if rank is None else halves[rank : rank + 1]
        loss = sum(nn.functional.cross_entropy(net(a), b) / len(halves) for a, b in halves)
        loss.backward()
        opt.step(loss=loss)
        opt.zero_grad()
        total += measure()
    return total


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
        options = {"lo": mulo.load(name), "lr": 0.1, "num_steps": STEPS}
        net = nn.parallel.DistributedDataParallel(net)
        return net, ZeroRedundancyOptimizer(groups, mulo.MuLO, **options)
    return net, optimizer(groups, name)


def whole(net):
    """The parameters, gathered from all processes."""
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in net.parameters()]


def largest_difference(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def load(net, opt, folder):
    """Load what `dcp.save` wrote, as torch documents it."""
    model_state, opt_state = get_state_dict(net, opt)
    assert {g["step"] for g in opt.param_groups} == {0}  # torch created the state by a step
    assert not any(x.any() for state in opt.state.values() for x in (state["V"], state["r"]))
    state = {"net": model_state, "opt": opt_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])


def check_fsdp2(rank, name, net, opt, folder):
    """Save, load into new shards, and continue; refusals."""
    model_state, opt_state = get_state_dict(net, opt)
    assert opt_state["state"]["inner.2.weight"]["V"].placements == net.inner[2].weight.placements
    dcp.save({"net": model_state, "opt": opt_state}, checkpoint_id=f"{folder}/{name}")
    again, loaded = split("fsdp2", rank, name)
    load(again, loaded, f"{folder}/{name}")
    for a, b in ((net, opt), (again, loaded)):
        train(a, b, rank, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(whole(net), whole(again), strict=True))
    torch.save(whole(net), f"{folder}/continued_{name}_{rank}.pt")

    for group in opt.param_groups:
        group["freeze_zero_grad"] = True
    before = whole(net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net.inner[0].weight.grad *= 0
    opt.step(loss=1.0)
    names = [name for name, _ in net.named_parameters()]
    triples = zip(names, before, whole(net), strict=True)
    assert [name for name, a, b in triples if torch.equal(a, b)] == ["inner.0.weight"]


def check_a_process_without_tensors():
    """ZeRO gives the only tensor to one process; VeLO's reductions need both."""
    net = nn.parallel.DistributedDataParallel(nn.Linear(16, 3, bias=False))
    options = {"lo": mulo.load("velo_m"), "num_steps": STEPS}
    opt = ZeroRedundancyOptimizer(net.parameters(), mulo.MuLO, **options)
    before = whole(net)
    train(net, opt, dist.get_rank(), steps=2)
    assert not torch.equal(*before, *whole(net))


def check_padding_rows_stay_zero():
    net = fully_shard(nn.Embedding(9, 4, padding_idx=7), mesh=init_device_mesh("cpu", (2,)))
    mulo.init_(net, {"weight": "input"})
    assert whole(net)[0].eq(0).all(1).nonzero().tolist() == [[7]]


def check_fsdp1_is_refused(use_orig_params):
    net, roles = make()
    groups = mulo.param_groups(net, roles)
    opt = optimizer(groups, "mulo_m")
    wrapped = FSDP1(net, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"FSDP1 flattens parameters.*use fully_shard \(FSDP2\)"):
        mulo.param_groups(wrapped, roles)
    nn.functional.cross_entropy(wrapped(torch.ones(2, 16)), torch.zeros(2).long()).backward()
    if use_orig_params:
        for step in (opt.step, optimizer(groups, "mulo_m").step):
            with pytest.raises(ValueError, match=r"use fully_shard \(FSDP2\), not FSDP1"):
                step()
        assert not any(x.any() for state in opt.state.values() for x in state.values())
    else:  # the model has other parameters now
        with pytest.warns(UserWarning, match="found no gradient.*fully_shard"):
            opt.step()


def worker(rank, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with warnings.catch_warnings(record=True, action="default") as caught:
        for how, name in CASES:
            net, opt = split(how, rank, name)
            # tensor parallelism: every process sees the whole batch
            train(net, opt, None if how == "tensor" else rank)
            torch.save(whole(net), f"{folder}/{how}_{name}_{rank}.pt")
            if how == "fsdp2":
                check_fsdp2(rank, name, net, opt, folder)
    said = [w.filename for w in caught if "without a kernel" in str(w.message)]
    assert set(said) == {__file__}
    check_a_process_without_tensors()
    check_padding_rows_stay_zero()
    for use_orig_params in (True, False):
        check_fsdp1_is_refused(use_orig_params)
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
        history = [whole(net)]

        def largest_update(net=net, history=history):
            history.append(whole(net))
            return largest_difference(*history[-2:])

        total = train(net, opt, measure=largest_update)
        results[name] = whole(net), total
    return results


@pytest.mark.parametrize(("how", "name"), CASES)
def test_two_processes_are_one(trained, alone, how, name):
    params, total = alone[name]
    for rank in (0, 1):
        theirs = torch.load(trained / f"{how}_{name}_{rank}.pt", weights_only=True)
        assert largest_difference(theirs, params) <= 1e-5 * total


@pytest.mark.parametrize("name", ["mulo_m", "muvelo_m"])
def test_checkpoint_of_two_processes_continues_in_one(trained, alone, name):
    net, roles = make()
    opt = optimizer(mulo.param_groups(net, roles), name)
    load(net, opt, trained / name)
    train(net, opt, steps=2)
    theirs = torch.load(trained / f"continued_{name}_0.pt", weights_only=True)
    assert largest_difference(theirs, whole(net)) <= 1e-5 * alone[name][1]
