"""What training would take on a GPU that is not here: memory and time, as estimates.

    python metatrain.py mulo_m --scale paper --dry-run                  # on an A6000
    python metatrain.py mulo_m --scale paper --dry-run --card 1000,60   # GB/s, TFLOP/s
    python evaluate.py width --scale paper --dry-run                    # every job of it

One step of each task's nets runs on the meta device, where tensors have no data, under a mode that
counts the bytes that are alive, and each operation's bytes and FLOPs. An operation takes the
longest of its bytes over the card's bandwidth, its FLOPs over the card's speed, and a launch. The
kernels of the learned optimizer's step are counted by hand (`kernel_seconds`).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from mulo import NETS, LOConfig, pes, stacked, tasks, training

CONTEXT = 0.6 * 2**30  # bytes of a CUDA context and of cuBLAS workspaces, about
LAUNCH = 4e-6  # seconds between the starts of two small kernels from Python
BUSY_MEMORY, BUSY_MATMUL = 0.8, 0.75  # of its peak that a kernel reaches
HOW = (
    f"Not measured: counted bytes, FLOPs and launches, at {BUSY_MEMORY:.0%} of the card's "
    f"bandwidth and {BUSY_MATMUL:.0%} of its FLOP/s."
)
LAUNCHES = 12  # of the Triton kernels per inner step
PAPER_HOURS = {"mulo_s": 8, "lo_s": 8, "mulo_m": 103, "lo_m": 103, "muvelo_m": 250, "velo_m": 250}
DATASETS = {  # bytes of the training split, which stays on the device if it fits
    "imagenet32": 1_281_167 * 3 * 32**2,
    "imagenet64": 1_281_167 * 3 * 64**2,
    "cifar10": 50_000 * 3 * 32**2,
    "lm1b": 30_301_028 * 65 * 4,  # sentences, as rows of int32
    "fashion10k": 10_000 * 28**2,
}


def data_bytes(some: Iterable[tasks.Task]) -> int:
    """Of the data sets of some tasks."""
    return sum(DATASETS.get(name, 0) for name in {task.dataset for task in some})


class Card(NamedTuple):
    """A GPU by its data sheet."""

    name: str
    bandwidth: float  # bytes/s
    fp32: float  # FLOP/s
    tf32: float  # FLOP/s of matrix products in TF32
    memory: float = math.inf  # bytes


CARDS = {
    "a6000": Card("A6000", 768e9, 38.7e12, 77.4e12, 48 * 2**30),
    "a100": Card("A100", 1555e9, 19.5e12, 156e12, 40 * 2**30),
}


def card(text: str) -> Card:
    """A card by name, or by "GB/s,TFLOP/s"."""
    if text.lower() in CARDS:
        return CARDS[text.lower()]
    try:
        bandwidth, flops = (float(x) for x in text.split(","))
    except ValueError:
        names = ", ".join(CARDS)
        raise ValueError(f"unknown card {text!r}: use one of {names}, or GB/s,TFLOP/s.") from None
    name, flops = f"{bandwidth:g} GB/s, {flops:g} TFLOP/s", flops * 1e12
    return Card(name, bandwidth * 1e9, flops, flops)


def conv_backward_flops(grad: Tensor, x: Tensor, w: Tensor, *rest, out_val=None) -> int:
    """Each gradient takes what the forward pass does; torch counts too much if there are groups."""
    return sum(rest[-1][:2]) * conv_flop_count(x.shape, w.shape, grad.shape)


FLOPS = flop_registry | {torch.ops.aten.convolution_backward: conv_backward_flops}


class Count(TorchDispatchMode):
    """Counts the bytes that are alive, and the bytes and FLOPs of every operation."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.peak = set(), 0, 0
        self.operations: list[tuple[int, int]] = []  # bytes, FLOPs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in given}
        for storage in (x.untyped_storage() for x in made):
            key, size = storage._cdata, storage.nbytes()
            if key not in known and key not in self.alive:  # not a view
                self.alive.add(key)
                self.now += size
                weakref.finalize(storage, self._free, key, size)
        self.peak = max(self.peak, self.now)
        if not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            count = FLOPS.get(func.overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            self.operations.append((sum(x.nbytes for x in (*given, *made)), flops))
        return out

    def _free(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size

    def seconds(self, on: Card, tf32: bool) -> float:
        speed = BUSY_MATMUL * (on.tf32 if tf32 else on.fp32)
        memory = BUSY_MEMORY * on.bandwidth
        return sum(max(LAUNCH, size / memory, flops / speed) for size, flops in self.operations)


class Step(NamedTuple):
    """One step of some nets side by side, counted."""

    entries: int  # parameters of all nets
    held: int  # bytes of the nets and the optimizer's state
    count: Count
    kernel: LOConfig | None  # of a learned optimizer, if its step is a kernel

    def seconds(self, on: Card, tf32: bool = False) -> float:
        by_kernel = kernel_seconds(self.kernel, self.entries, on) if self.kernel else 0.0
        return self.count.seconds(on, tf32) + by_kernel


def meta_batch(task: tasks.Task, n: int) -> tuple[Tensor, ...]:
    """A batch for each of n nets on the meta device."""
    if task.own:
        drawn = training.batches(task.data(), [torch.Generator()] * n, task.batch_size)
        return tuple(b.to("meta") for b in drawn)
    x = torch.zeros(n, task.batch_size, *task.shape, device="meta")
    if task.family == "lm":
        return x.long(), x.long(), x.bool()
    return x, torch.zeros(n, task.batch_size, device="meta", dtype=torch.long)


@functools.cache
@torch.no_grad()
def nets_step(
    task: tasks.Task,
    optimizer: LOConfig | str,  # a baseline is given by name
    n: int,
    backend: str = "auto",
    perturbed: bool = False,  # as in meta-training: every net has weights phi of its own
) -> Step:
    """A step of n nets as in `training.train`, on the meta device."""
    shapes = {k: p.shape for k, p in task.skeleton().named_parameters()}
    theta = {k: torch.zeros(n, *shape, device="meta") for k, shape in shapes.items()}
    learned = isinstance(optimizer, LOConfig)
    if learned:
        with torch.device("meta"):
            phi = stacked(NETS[optimizer.net](optimizer))
        if perturbed:
            phi = {k: torch.cat([w] * n) for k, w in phi.items()}
        opt = training.Learned(optimizer, task, "meta", backend)
        state = opt.init(theta, phi, torch.full((n,), 1000.0))
        weights, t = opt.prepare(phi), torch.zeros(n, device="meta")
    else:
        make = training.Muon if optimizer == "muon" else training.Adam
        opt = make(task, torch.full((n,), 1e-3), weight_decay=0.01)
        state = opt.init(theta)
    with Count() as count:
        batch = meta_batch(task, n)  # alive during the step too
        losses, grads = training.gradients(task, theta, batch)
        if learned:
            opt.step(weights, state, theta, grads, losses, t)
        else:
            opt.step(state, theta, grads, 0)
    held = sum(x.nbytes for x in (*theta.values(), *state.values()))
    kernel = optimizer if learned and opt.backend == "kernel" else None
    return Step(sum(p.numel() for p in theta.values()), held, count, kernel)


def kernel_seconds(config: LOConfig, entries: int, on: Card) -> float:
    """Of a learned optimizer's step by the kernel: three passes over p, g, M, V, which are 4, 40
    and 28 bytes per entry; the network; 150 FLOPs for features, exp and sums."""
    h, dense = config.hidden_size, 16 if config.net == "small_fc" else 18
    network = 2 * (dense * h + (config.hidden_layers - 1) * h * h + 2 * h)
    compute = entries * (network + 150) / (BUSY_MATMUL * on.fp32)
    return entries * 72 / (BUSY_MEMORY * on.bandwidth) + compute + LAUNCHES * LAUNCH


def meta_training(trainer: pes.Trainer, on: Card) -> tuple[list[tuple], float, float]:
    """Of each task: bytes held, bytes more while nets train, seconds of a truncation. Of the run:
    bytes, seconds of an outer step. The Trainer is on the meta device."""
    r, parts = trainer.recipe, []
    n, groups = 2 * min(r.micro_batch, r.pairs), math.ceil(r.pairs / r.micro_batch)
    for task in trainer.tasks:
        step = nets_step(task, trainer.lo.config, n, r.backend, perturbed=True)
        held = step.held * 2 * r.pairs // n + r.pairs * trainer.phi.nbytes  # nets, state, xi
        parts.append((held, step.count.peak, step.seconds(on, r.tf32) * r.truncation * groups))
    held, more, seconds = zip(*parts, strict=True)
    outer = sum(seconds) * (r.per_step or len(seconds)) / len(seconds)
    return parts, sum(held) + max(more) + data_bytes(trainer.tasks) + CONTEXT, outer


def report(trainer: pes.Trainer, on: Card) -> str:
    """Memory and time of a run, from a Trainer on the meta device, in sentences."""
    r, lines = trainer.recipe, []
    parts, total, outer = meta_training(trainer, on)
    for task, (held, more, seconds) in zip(trainer.tasks, parts, strict=True):
        lines.append(
            f"{task.name}: nets and their state {held / 2**30:.2f} GiB, while "
            f"{2 * min(r.micro_batch, r.pairs)} of {2 * r.pairs} nets train {more / 2**30:.2f} GiB "
            f"more; {seconds:.2f} s per truncation of {r.truncation} steps"
        )
    data, hours = data_bytes(trainer.tasks), outer * r.steps / 3600
    paper = f" (the paper: {PAPER_HOURS[r.name]} h)" if r.scale == "paper" else ""
    return "\n".join([
        *lines,
        f"{r.name}, {len(trainer.phi):,} weights: about {total / 2**30:.2f} GiB, of which the data "
        f"set {data / 2**30:.2f} and the CUDA context {CONTEXT / 2**30:.1f}; a smaller "
        "--micro-batch takes less",
        f"Estimated on an {on.name}: {outer:.1f} s per outer step, {hours:.1f} h for {r.steps:,} "
        f"steps{paper}. {HOW}",
    ])  # fmt: skip


if __name__ == "__main__":
    raise SystemExit("estimate.py is a module, not a command: use `from mulo import estimate`.")
