"""Speed and memory, side by side in one run. Writes its section of BENCHMARKS.md.

    python bench.py all                 # everything below: half an hour
    python bench.py step                # the optimizer step: compiled, folded, literal, and AdamW
    python bench.py memory              # extra memory of a step, and that of the state
    python bench.py many                # models of many tensors: a ViT and a ResNet
    python bench.py roofline            # what this machine could do at best
    python bench.py tasks               # stacked nets against a loop, batches against a DataLoader
    python bench.py metatrain           # an outer step: compiled, folded, vmap and literal features
    python bench.py export              # the step in onnxruntime against the eager one, file sizes
    python bench.py step --repeats 50   # steadier figures

One thread. `measure.py` tells how it is measured. PyLO's optimizer and mup's AdamW take part where
they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

import export
import features
import lo
import measure
import metatrain
import mulo
import pes
import rule
import tasks
from measure import Table, extra_bytes, race
from optimizees import datasets


def parameters_of(shapes: list[tuple[int, ...]], device: str = "cpu") -> list[nn.Parameter]:
    params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
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


@contextlib.contextmanager
def package_mup() -> Iterator[ModuleType]:
    """The package mup, if it is installed: our module of that name steps aside for its import."""
    ours, path = sys.modules.pop("mup"), sys.path[:]
    here = Path(__file__).parent
    sys.path[:] = [folder for folder in path if Path(folder).resolve() != here]
    try:
        yield importlib.import_module("mup")
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.split(".")[0] == "mup"]:
            del sys.modules[name]
        sys.modules["mup"] = ours


def others(shapes: list[tuple[int, ...]], device: str) -> dict[str, Callable[[], None]]:
    """AdamW, and what is installed of other people's."""
    adamw = {"lr": 1e-6, "weight_decay": 0.01}
    found = {
        f"AdamW {kind}": torch.optim.AdamW(
            parameters_of(shapes, device), **adamw, **{kind: True}
        ).step
        for kind in ("foreach", "fused")
    }
    with contextlib.suppress(ImportError), package_mup() as theirs:
        params = nn.ParameterList(parameters_of(shapes, device))
        theirs.set_base_shapes(params, None)
        found["mup's AdamW"] = theirs.MuAdamW(params, **adamw).step
    with contextlib.suppress(ImportError):
        from pylo.optim import AdafacLO_naive

        found["PyLO, naive"] = AdafacLO_naive(parameters_of(shapes, device)).step
    return found


def contestants_for(
    shapes: list[tuple[int, ...]],
    hidden: int,
    with_literal: bool,
    device: str = "cpu",
    compiled: bool = True,
) -> dict[str, Callable[[], None]]:
    """Names and steps: ours first, then AdamW's."""
    net = mulo.SmallFC(mulo.LOConfig(hidden_size=hidden), torch.Generator().manual_seed(0))
    net = net.to(device)
    forms = {"compiled": True} if compiled else {}
    found = {
        f"μLO {form}, H={hidden}": mulo.MuLO(parameters_of(shapes, device), net, compile=how).step
        for form, how in (forms | {"folded": False}).items()
    }
    if with_literal and device == "cpu":
        found[f"μLO literal, H={hidden}"] = literal(parameters_of(shapes), net)
    return found | others(shapes, device)


def compare(
    title: str, shapes: list, hidden: int, with_literal: bool, repeats: int, device: str
) -> Table:
    """A race as a table; the first step, compilers included, is timed apart."""
    n = sum(math.prod(shape) for shape in shapes)
    runs = contestants_for(shapes, hidden, with_literal, device)
    start = time.perf_counter()
    next(iter(runs.values()))()
    first = time.perf_counter() - start
    best = race(runs, repeats, device)
    adamw = best["AdamW foreach"]
    slowest = best.get(f"μLO literal, H={hidden}", math.nan)
    rows = {
        name: [
            took * 1e9 / n,
            took / adamw,
            slowest / took if slowest == slowest else "",
            extra_bytes(runs[name]) / n if device == "cpu" else "",
        ]
        for name, took in best.items()
    }
    head = ["ns/param", "x AdamW foreach", "x faster than literal", "extra bytes/param"]
    note = f"First compiled step, with the compiler if its cache is empty: {first:.0f} s."
    title = f"{title}: {n:,} parameters in {len(shapes)} tensor(s), H = {hidden}"
    return Table(title, head, rows, [note])


def bar(text: str, got: float | str, most: float = math.inf, least: float = 0.0) -> str:
    if isinstance(got, str):  # as extra memory on a GPU
        return f"Bar: {text}: not measured."
    return f"Bar: {text}: {got:.2f}, {'met' if least <= got <= most else 'MISSED'}."


def bench_step(repeats: int, device: str) -> list[Table]:
    mlp = [(1024, 3072), (1024,), (1024, 1024), (1024,), (1000, 1024), (1000,)]
    bars = {4: ((2.3, 1.8), 25, 4.1), 32: ((12, 8), 6.5, 4.0)}
    tables = []
    for hidden, ((slower, stretch), faster, most) in bars.items():
        table = compare("1024x1024", [(1024, 1024)], hidden, True, repeats, device)
        got = table.rows[f"μLO compiled, H={hidden}"]
        table.notes += [
            bar(f"at most {slower}x AdamW foreach (stretch {stretch}x)", got[1], slower),
            bar(f"at least {faster}x faster than literal", got[2], least=faster),
            bar(f"at most {most} extra bytes per parameter", got[3], most),
        ]
        tables.append(table)
    small = [(16, 16)] * 200
    tables.append(compare("200 tensors of 16x16", small, 4, False, repeats, device))
    return [*tables, compare("MLP 3072-1024-1024-1000", mlp, 32, False, repeats, device)]


def bench_memory(repeats: int, device: str) -> list[Table]:
    """Extra memory by the profiler, and the state that stays."""
    tables = []
    for shape in ((1024, 1024), (4096, 1024), (1_000_000,)):
        n, rows = math.prod(shape), {}
        for hidden in (4, 32):
            for name, run in contestants_for([shape], hidden, True).items():
                extra = extra_bytes(run) / n
                owner = getattr(run, "__self__", None)
                held = [x for s in owner.state.values() for x in s.values()] if owner else []
                state = sum(x.nbytes for x in held if isinstance(x, torch.Tensor)) / n
                rows[name] = [extra, state if owner else ""]
        tables.append(Table(f"{shape}", ["extra bytes/param", "state, bytes/param"], rows))
    return tables


def bench_many(repeats: int, device: str) -> list[Table]:
    tables = []
    for name in ("vit_w192_d14", "resnet_w512"):
        model = tasks.get(name).skeleton()
        shapes = [tuple(p.shape) for p in model.parameters()]
        table = compare(name, shapes, 4, False, repeats, device)
        if name.startswith("vit"):
            got = table.rows["μLO compiled, H=4"][1]
            table.notes.append(bar("at most 4x AdamW foreach", got, 4))
        tables.append(table)
    return tables


def bench_roofline(repeats: int, device: str) -> list[Table]:
    """The least time of a step, from bytes moved and operations done, and how far we are."""
    can = measure.limits(repeats)
    passes = {"g": 4, "p, g, M, V read": 24, "p, g, M, V read, p, M, V written": 44}
    size, rows = 1024 * 1024, {}
    for hidden in (4, 32):
        flops = 2 * (16 * hidden + hidden * hidden + 2 * hidden) + 60  # the net; features twice
        limit = max(sum(passes.values()) / can["bandwidth"], flops / can["gemm"]) * 1e9
        step = contestants_for([(1024, 1024)], hidden, False)[f"μLO compiled, H={hidden}"]
        took = race({"": step}, repeats)[""] / size * 1e9
        rows[f"H={hidden}"] = [sum(passes.values()), flops, limit, took, took / limit]
    rates = f"{can['bandwidth'] / 1e9:.1f} GB/s copied, {can['gemm'] / 1e9:.0f} GFLOP/s multiplied"
    head = ["bytes/param", "FLOP/param", "limit, ns/param", "compiled, ns/param", "x limit"]
    parts = "; ".join(f"{n} B ({what})" for what, n in passes.items())
    return [Table(f"1024x1024: {rates}", head, rows, [f"Three passes: {parts}."])]


def bench_tasks(repeats: int, device: str) -> list[Table]:
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
    rows = {name: [took * 1e3, best["loop"] / took] for name, took in best.items()}
    title = f"losses and gradients of {P} nets, {task.name}, batch {task.batch_size}"
    tables = [Table(title, ["ms", "x faster than a loop"], rows)]

    torch.set_num_threads(2)  # as many as the loader has workers
    x = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8)
    images = datasets.Images(x, torch.randint(10, (50_000,)), 10, *datasets.CIFAR10)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in datasets.CIFAR10)

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
    torch.set_num_threads(1)
    rows = {k: [took * 1e3, seconds["DataLoader"] / took] for k, took in seconds.items()}
    title = f"a batch of {size} images of 3x32x32, drawn and normalised, from 50,000 in memory"
    note = "Wall time, 2 threads and 2 workers."
    return [*tables, Table(title, ["ms", "x faster than a DataLoader"], rows, [note])]


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


def bench_metatrain(repeats: int, device: str) -> list[Table]:
    r = metatrain.recipe("mulo_m")
    names = ("stacked, compiled", "stacked, folded", "vmap, literal")
    *_, plain = trainers = [
        pes.Trainer(dataclasses.replace(r, compile=name == names[0]), metatrain.new_lo(r))
        for name in names
    ]
    for [particles] in plain.particles:
        particles.inner_step = straightforward(particles)
        particles.opt.prepare = lambda phi: phi
    start = time.perf_counter()
    losses = [trainers[0].advance()["meta_loss"]]
    first = time.perf_counter() - start
    losses += [trainer.advance()["meta_loss"] for trainer in trainers[1:]]
    runs = dict(zip(names, [t.advance for t in trainers], strict=True))
    best = race(runs, max(2, repeats // 5))
    slow = best["vmap, literal"]
    rows = {
        name: [1 / took, best["stacked, folded"] / took, slow / took] for name, took in best.items()
    }
    head = ["outer steps/s", "x folded", "x vmap"]
    notes = [
        f"They start with meta-losses {', '.join(f'{x:.6f}' for x in losses)}.",
        f"First compiled outer step, with the compiler if its cache is empty: {first:.0f} s.",
    ]
    _, folded, vmap = rows[names[0]]
    bars = [
        bar("compiled, at least 2.5x folded", folded, least=2.5),
        bar("compiled, at least 15x vmap", vmap, least=15),
    ]
    return [Table("mulo_m at desk scale, an outer step", head, rows, [*notes, *bars])]


def bench_export(repeats: int, device: str) -> list[Table]:
    shipped = mulo.load("mulo_m")
    wide = mulo.SmallFC(mulo.LOConfig(hidden_size=32), torch.Generator().manual_seed(0))
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for name, net in (("mulo_m", shipped), ("small_fc32", wide)):
            exported = export.write(net, Path(folder, name), name, ("onnx", "ts"))
            sizes = [
                f.stat().st_size for s in ("onnx", "ts") for f in exported.parent.glob(f"*.{s}")
            ]
            rows = {}
            for shape in ((1024, 1024), (1000, 1000)):
                group = {"params": parameters_of([shape]), "scale": 1.0}
                runs = {
                    "eager folded": mulo.MuLO([group], net).step,
                    "onnxruntime": export.OrtMuLO(parameters_of([shape]), exported).step,
                }
                best = race(runs, repeats)
                eager = best["eager folded"]
                for run, took in best.items():
                    rows[f"{run}, {shape}"] = [took * 1e9 / math.prod(shape), took / eager]
            title = f"{name}, H = {net.config.hidden_size}: largest file {max(sizes):,} bytes"
            tables.append(Table(title, ["ns/param", "x eager"], rows))
            batched, single = (parameters_of([(16, 16)] * 100) for _ in range(2))
            single = [export.OrtMuLO([p], exported) for p in single]
            runs = {
                "in one call": export.OrtMuLO(batched, exported).step,
                "one call each": lambda single=single: [opt.step() for opt in single],
            }
            best = race(runs, repeats)
            rows = {run: [took * 1e3, best["one call each"] / took] for run, took in best.items()}
            title = f"{name}: 100 tensors of 16x16 in onnxruntime"
            tables.append(Table(title, ["ms", "x faster than one call each"], rows))
    return tables


COMMANDS = {
    "step": bench_step,
    "memory": bench_memory,
    "many": bench_many,
    "roofline": bench_roofline,
    "tasks": bench_tasks,
    "metatrain": bench_metatrain,
    "export": bench_export,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Speed and memory, side by side in one run, into BENCHMARKS.md.",
        epilog="example: python bench.py step --repeats 5",
    )
    parser.add_argument("what", choices=[*COMMANDS, "all"], help="what to measure")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of which the best counts")
    parser.add_argument("--device", default="cpu", help="cuda is for step and many")
    args = parser.parse_args()
    if args.device != "cpu" and args.what not in ("step", "many"):
        parser.error(f"{args.what} is measured on the CPU only: use step or many, or leave it out.")
    try:
        metatrain.check_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more.")
    measure.restart_with_kept_memory()
    torch.set_num_threads(1)
    for name in COMMANDS if args.what == "all" else [args.what]:
        torch.manual_seed(0)
        tables = COMMANDS[name](args.repeats, args.device)
        print(
            "\n".join([f"\n## {name}: {measure.machine(args.device)}\n", *map(Table.text, tables)])
        )
        measure.keep(name, tables, args.device)


if __name__ == "__main__":
    main()
