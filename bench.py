"""Speed and memory, side by side in one run: this machine's noise falls on all alike.

    python bench.py step                # the optimizer step: literal and folded form, and AdamW
    python bench.py tasks               # stacked nets against a loop, batches against a DataLoader
    python bench.py metatrain           # an outer step against vmap and literal features
    python bench.py export              # the step in onnxruntime against the eager one, file sizes
    python bench.py step --repeats 50   # steadier figures

Contestants take turns; each one's figure is the minimum over the repeats of the CPU time of a step,
divided by the number of parameters. One thread. Freed memory is kept by the allocator (this program
starts itself anew with glibc's MALLOC_ variables set), because page faults would otherwise count
against whatever allocates most. Extra memory is the peak of tensor memory during a step above what
was there before, as torch's profiler reports every allocation.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import data
import export
import features
import lo
import metatrain
import mulo
import pes
import rule
import tasks

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1)}
QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler's own chatter


def keep_freed_memory() -> None:
    """Start anew with an allocator that keeps what is freed (glibc reads this at the start)."""
    if any(os.environ.get(k) != v for k, v in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY | QUIET)


def race(contestants: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The minimum CPU seconds of each contestant, taking turns."""
    best = dict.fromkeys(contestants, math.inf)
    for round_ in range(repeats + 2):  # two rounds to warm up
        for name, run in contestants.items():
            start = time.process_time()
            run()
            took = time.process_time() - start
            if round_ >= 2:
                best[name] = min(best[name], took)
    return best


def extra_bytes(run: Callable[[], None]) -> int:
    """Peak of tensor memory during run() above what was allocated before it."""
    run()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    memory = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(memory, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def parameters_of(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    params = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = 0.001 * torch.randn_like(p)
    return params


def literal(params: list[nn.Parameter], net: mulo.LO) -> Callable[[], None]:
    """A step of every parameter in the literal form, one at a time."""
    phi, t = lo.stacked(net), torch.zeros(1)
    state: dict[nn.Parameter, features.Accumulators] = {}

    @torch.no_grad()
    def run() -> None:
        for p in params:
            dims = features.factored_dims(p.shape)
            acc = state.get(p) or features.init_accumulators(p[None], dims)
            one = torch.ones(1)
            state[p], new = rule.literal_step(
                net.config, phi, acc, p[None], p.grad[None], t, one, dims
            )
            p.copy_(new[0])

    return run


def contestants_for(shapes: list[tuple[int, ...]], hidden: int, with_literal: bool) -> dict:
    net = mulo.SmallFC(mulo.LOConfig(hidden_size=hidden), torch.Generator().manual_seed(0))
    adamw = {"lr": 1e-6, "weight_decay": 0.01}
    found = {f"μLO folded, H={hidden}": mulo.MuLO(parameters_of(shapes), net).step}
    if with_literal:
        found[f"μLO literal, H={hidden}"] = literal(parameters_of(shapes), net)
    for kind in ("foreach", "fused"):
        found[f"AdamW {kind}"] = torch.optim.AdamW(
            parameters_of(shapes), **adamw, **{kind: True}
        ).step
    return found


def bench_step(repeats: int) -> None:
    mlp = [(1024, 3072), (1024,), (1024, 1024), (1024,), (1000, 1024), (1000,)]
    cases = {
        "one tensor of 1024x1024": ([(1024, 1024)], (4, 32), True),
        "200 tensors of 16x16": ([(16, 16)] * 200, (4,), False),
        "an MLP of 3072-1024-1024-1000": (mlp, (32,), False),
    }
    for title, (shapes, hidden_sizes, with_literal) in cases.items():
        n = sum(math.prod(shape) for shape in shapes)
        for hidden in hidden_sizes:
            print(f"\n{title}: {n:,} parameters, {len(shapes)} tensor(s)")
            runs = contestants_for(shapes, hidden, with_literal)
            best = race(runs, repeats)
            adamw, folded = best["AdamW foreach"], best[f"μLO folded, H={hidden}"]
            heads = ("ns/param", "µs/tensor", "x AdamW", "x folded", "bytes/param")
            print(f"{'':20}" + "".join(f"{head:>13}" for head in heads))
            for name, took in best.items():
                row = (took / n * 1e9, took / len(shapes) * 1e6, took / adamw, took / folded)
                row += (extra_bytes(runs[name]) / n,)
                print(f"{name:20}" + "".join(f"{x:13.2f}" for x in row))


def bench_tasks(repeats: int) -> None:
    task, P = tasks.get("fashion8_mlp_w64_d3"), 16
    generator = torch.Generator().manual_seed(0)
    params = {k: p.requires_grad_() for k, p in task.init(P, generator).items()}
    batch = task.data().batch(generator, task.batch_size, P)
    models = [task.model(generator) for _ in range(P)]

    def stacked() -> None:
        torch.autograd.grad(task.losses(params, batch).sum(), list(params.values()))

    def loop() -> None:
        for k, model in enumerate(models):
            loss = task.loss(model, tuple(b[k] for b in batch))
            torch.autograd.grad(loss, list(model.parameters()))

    best = race({"stacked": stacked, "loop": loop}, repeats)
    ratio = best["loop"] / best["stacked"]
    print(f"\nlosses and gradients of {P} nets, {task.name}, batch {task.batch_size}")
    print(
        f"stacked {best['stacked'] * 1e3:.2f} ms, a loop {best['loop'] * 1e3:.2f} ms: {ratio:.1f}x"
    )

    torch.set_num_threads(2)  # as many as the loader has workers
    x = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8)
    images = data.Images(x, torch.randint(10, (50_000,)), 10, *data.CIFAR10)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in data.CIFAR10)

    class Items(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, k: int) -> tuple:
            return (x[k] - mean) / std, images.y[k]

    size, seconds = 4096, {"Images.batch": [], "DataLoader": []}
    for _ in range(max(3, repeats // 5)):  # in turns; wall time, as the workers are processes
        start = time.perf_counter()
        for _ in range(11):
            batch = images.batch(generator, size)  # held until the next one, as training does
        seconds["Images.batch"].append((time.perf_counter() - start) / 11)
        loader = iter(torch.utils.data.DataLoader(Items(), size, shuffle=True, num_workers=2))
        next(loader)  # the workers have started; 11 full batches remain of the epoch
        start = time.perf_counter()
        for _ in range(11):
            next(loader)
        seconds["DataLoader"].append((time.perf_counter() - start) / 11)
        del loader
    seconds = {name: statistics.median(took) for name, took in seconds.items()}
    ratio = seconds["DataLoader"] / seconds["Images.batch"]
    print(f"\na batch of {size} images of 3x32x32, drawn and normalised, from 50,000 in memory")
    for name, took in seconds.items():
        print(f"{name:14}{took * 1e3:8.1f} ms")
    print(f"{ratio:.1f}x faster (2 threads) than a DataLoader with 2 workers")


def straightforward(particles: pes.Particles) -> Callable:
    """An inner step as one would first write it: vmap over nets, literal features."""
    task, opt = particles.task, particles.opt
    model = task.skeleton()

    def loss(theta: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, theta, (x,))
        return torch.nn.functional.cross_entropy(logits, y)

    def update(phi: dict, acc: dict, p: torch.Tensor, g: torch.Tensor, t: torch.Tensor, name: str):
        phi = {k: w[None] for k, w in phi.items()}
        acc = features.Accumulators(*(x[None] for x in acc))
        scale = torch.full((1,), opt.scale[name])
        rest = (p[None], g[None], t[None], scale, opt.dims[name])
        acc, p = rule.literal_step(opt.config, phi, acc, *rest)
        return tuple(x[0] for x in acc), p[0]

    def inner_step(phi: dict, batch: tuple) -> torch.Tensor:
        per_net = torch.vmap(torch.func.grad_and_value(loss))
        grads, losses = per_net(particles.theta, *batch)
        t = torch.cat([particles.t, particles.t])
        for name, p in particles.theta.items():
            keys = [f"{k}/{name}" for k in features.Accumulators._fields]
            acc = tuple(particles.state[k] for k in keys)
            one = functools.partial(update, name=name)
            acc, particles.theta[name] = torch.vmap(one)(phi, acc, p, grads[name], t)
            particles.state |= dict(zip(keys, acc, strict=True))
        return losses

    return inner_step


def bench_metatrain(repeats: int) -> None:
    r = metatrain.recipe("mulo_m")
    ours, plain = (pes.Trainer(r, metatrain.new_lo(r)) for _ in range(2))
    for [particles] in plain.particles:
        particles.inner_step = straightforward(particles)
        particles.opt.prepare = lambda phi: phi
    rows = [trainer.advance() for trainer in (ours, plain)]
    losses = [row["meta_loss"] for row in rows]
    print(f"\nmulo_m at desk scale; both start with meta-loss {losses[0]:.6f}, {losses[1]:.6f}")
    runs = {"stacked, folded": ours.advance, "vmap, literal": plain.advance}
    best = race(runs, max(2, repeats // 5))
    for name, took in best.items():
        print(f"{name:18}{1 / took:8.3f} outer steps/s")
    print(f"{best['vmap, literal'] / best['stacked, folded']:.1f}x")


def bench_export(repeats: int) -> None:
    shipped = mulo.load("mulo_m")
    wide = mulo.SmallFC(mulo.LOConfig(hidden_size=32), torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        for name, net in (("mulo_m", shipped), ("small_fc32", wide)):
            exported = export.write(net, Path(folder, name), name, ("onnx", "ts"))
            sizes = [
                f.stat().st_size for s in ("onnx", "ts") for f in exported.parent.glob(f"*.{s}")
            ]
            print(
                f"\n{name}, hidden size {net.config.hidden_size}: largest file {max(sizes):,} bytes"
            )
            for shape in ((1024, 1024), (1000, 1000)):
                runs = {
                    "eager folded": mulo.MuLO(parameters_of([shape]), net).step,
                    "onnxruntime": export.OrtMuLO(parameters_of([shape]), exported).step,
                }
                best = race(runs, repeats)
                for run, took in best.items():
                    print(f"{run:14}{shape!s:>14}{took * 1e9 / math.prod(shape):8.1f} ns/param")
                print(f"{best['onnxruntime'] / best['eager folded']:.2f}x")
            batched, single = (parameters_of([(16, 16)] * 100) for _ in range(2))
            single = [export.OrtMuLO([p], exported) for p in single]
            runs = {
                "in one call": export.OrtMuLO(batched, exported).step,
                "one call each": lambda single=single: [opt.step() for opt in single],
            }
            best = race(runs, repeats)
            print("100 tensors of 16x16 in onnxruntime")
            for run, took in best.items():
                print(f"{run:14}{took * 1e3:8.2f} ms")
            print(f"{best['one call each'] / best['in one call']:.1f}x")


def main() -> None:
    commands = {"step": bench_step, "tasks": bench_tasks, "metatrain": bench_metatrain}
    commands["export"] = bench_export
    parser = argparse.ArgumentParser(description="Speed and memory, side by side in one run.")
    parser.add_argument("what", choices=commands, help="what to measure")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of which the best counts")
    args = parser.parse_args()
    if args.what != "tasks":
        keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, one thread, minimum of {args.repeats} rounds of CPU time")
    commands[args.what](args.repeats)


if __name__ == "__main__":
    main()
