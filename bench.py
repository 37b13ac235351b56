"""Measure speed and memory of the step, side by side in one run, into a section of BENCHMARKS.md.

    export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967295 KINETO_LOG_LEVEL=99
    python bench.py all                 # everything below, in about twenty minutes
    python bench.py step                # the optimizer step: kernel, folded, literal, and AdamW
    python bench.py many                # models of many tensors: a ViT and a ResNet
    python bench.py metatrain           # an outer step of meta-training: kernel and folded
    python bench.py export              # the step in onnxruntime and in eager PyTorch
    python bench.py step --repeats 50   # less noise

The first two variables make glibc keep freed memory; it reads them when the process starts. Without
them temporaries of a megabyte are mapped and cleared again at every step. The third silences
torch's profiler. PyLO's optimizer takes part if it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import mulo
from mulo import kernels, metatrain, recipes, tasks
from mulo.checkpoints import write_atomically

PAGE = Path(__file__).with_name("BENCHMARKS.md")
Shapes = list[tuple[int, ...]]
Runs = dict[str, Callable[[], object]]
HEAD = """\
# Benchmarks

Each section is written by the command in its title.

Contestants take turns in one process. The time of each is its minimum over the rounds: CPU time on
one thread, wall time for threads and for the first step. Times are in ns per parameter; compilation
is excluded, except in the first step. Extra memory is the peak of tensors during a step above what
was allocated before it, in bytes per parameter; the C++ kernel's own buffers are not counted.
Compare ratios: the machine is shared.

"""


@dataclasses.dataclass
class Table:
    title: str
    head: list[str]
    rows: dict[str, list[float | str]]

    def text(self) -> str:
        def cell(x: float | str) -> str:
            if isinstance(x, str):
                return x
            return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" if x >= 0.01 else "< 0.01"

        lines = [f"**{self.title}**", "", f"| | {' | '.join(self.head)} |"]
        lines.append("|---|" + "---:|" * len(self.head))
        lines += [f"| {name} | {' | '.join(map(cell, row))} |" for name, row in self.rows.items()]
        return "\n".join([*lines, ""])


# ---------------------------------------------------------------- measuring


def race(runs: Runs, repeats: int, device: str = "cpu", wall: bool = False) -> dict[str, float]:
    """The minimum seconds of each contestant, taking turns: CPU time, or wall time on a GPU."""
    wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    clock = time.perf_counter if wall or device != "cpu" else time.process_time
    best = dict.fromkeys(runs, math.inf)
    for round_ in range(repeats + 2):  # two rounds to warm up
        for name, run in runs.items():
            wait()
            start = clock()
            run()
            wait()
            if round_ >= 2:
                best[name] = min(best[name], clock() - start)
    return best


def extra_bytes(run: Callable[[], object]) -> int:
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


def machine(device: str = "cpu") -> str:
    path = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", path.read_text() if path.exists() else "")
    parts = [] if device == "cpu" else [torch.cuda.get_device_name()]
    parts += [model[1] if model else platform.machine(), torch.backends.cpu.get_cpu_capability()]
    parts += [f"{os.cpu_count()} cores", f"torch {torch.__version__}"]
    parts += [f"{torch.get_num_threads()} thread(s)", f"load {os.getloadavg()[0]:.1f}"]
    return ", ".join(parts)


def keep(command: str, tables: list[Table], device: str = "cpu", page: Path = PAGE) -> None:
    """Write a section of the page; replaces that of the same command."""
    flag = "" if device == "cpu" else f" --device {device}"
    title = f"## python bench.py {command}{flag}\n"
    text = page.read_text() if page.exists() else ""
    sections = {x[: x.index("\n") + 1]: x for x in re.split(r"^(?=## )", text, flags=re.M)[1:]}
    body = "\n".join([title, f"{machine(device)}.\n", *map(Table.text, tables)])
    sections[title] = body.rstrip("\n") + "\n\n"
    write_atomically(page, (HEAD + "".join(sections.values())).rstrip("\n") + "\n")


# ---------------------------------------------------------------- the step


def parameters_of(shapes: Shapes, device: str = "cpu") -> list[nn.Parameter]:
    params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = 0.001 * torch.randn_like(p)
    return params


def our_step(shapes: Shapes, config: mulo.LOConfig, backend: str, device: str = "cpu") -> Callable:
    """The step of a learned optimizer with random weights, on new parameters."""
    net = mulo.VeLO if config.net == "velo" else mulo.SmallFC
    lo = net(config, torch.Generator().manual_seed(0)).to(device)
    opt = mulo.MuLO(parameters_of(shapes, device), lo, num_steps=1000, backend=backend)
    return functools.partial(opt.step, loss=torch.ones((), device=device))


def contestants_for(shapes: Shapes, config: mulo.LOConfig, device: str = "cpu") -> Runs:
    """Steps by name: ours, AdamW's, and PyLO's if it is installed."""
    small = sum(map(math.prod, shapes)) <= 2**20  # on larger models the literal step takes seconds
    backends = ("kernel", "folded", "literal") if small else ("kernel", "folded")
    steps = {backend: our_step(shapes, config, backend, device) for backend in backends}
    for kind in ("foreach", "fused"):
        options = {"lr": 1e-6, "weight_decay": 0.01, kind: True}
        steps[f"AdamW {kind}"] = torch.optim.AdamW(parameters_of(shapes, device), **options).step
    with contextlib.suppress(ImportError):
        from pylo.optim import AdafacLO_naive

        steps["PyLO naive"] = AdafacLO_naive(parameters_of(shapes, device)).step
    return steps


def compare(
    cases: dict[str, tuple[Shapes, mulo.LOConfig]], repeats: int, device: str
) -> list[Table]:
    """Races of optimizers: a table of times, and on the CPU one of extra memory."""
    times, memory = {}, {}
    for name, (shapes, config) in cases.items():
        n, runs = sum(map(math.prod, shapes)), contestants_for(shapes, config, device)
        name = f"{name}: {n:,} in {len(shapes)}"
        best = race(runs, repeats, device)
        times[name] = {k: took * 1e9 / n for k, took in best.items()}
        times[name]["kernel / AdamW foreach"] = best["kernel"] / best["AdamW foreach"]
        if device == "cpu":
            memory[name] = {k: extra_bytes(run) / n for k, run in runs.items()}
    tables = []
    for title, rows in (("ns/param", times), ("extra bytes/param", memory)):
        head = sorted({k for row in rows.values() for k in row}, key=COLUMNS.index)
        table = {name: [row.get(k, "") for k in head] for name, row in rows.items()}
        tables += [Table(f"A step, {title} (parameters in tensors)", head, table)] if rows else []
    return tables


COLUMNS = ["kernel", "folded", "literal", "AdamW foreach", "AdamW fused", "PyLO naive"]
COLUMNS += ["kernel / AdamW foreach"]


def bench_step(repeats: int, device: str) -> list[Table]:
    square, fc = [(1024, 1024)], {h: mulo.LOConfig(hidden_size=h) for h in (4, 8, 32)}
    mlp = [(1024, 3072), (1024,), (1024, 1024), (1024,), (1000, 1024), (1000,)]
    cases = {f"1024x1024, H = {h}": (square, config) for h, config in fc.items()}
    cases["a vector, H = 4"] = [(1_000_000,)], fc[4]
    cases["matrices of 16x16, H = 4"] = [(16, 16)] * 200, fc[4]
    cases["MLP 3072-1024-1024-1000, H = 32"] = mlp, fc[32]
    cases["the same MLP, VeLO, H = 4"] = mlp, mulo.LOConfig(net="velo", hidden_size=4)
    tables = compare(cases, repeats, device)
    return tables if device != "cpu" else [*tables, threads(repeats), first_step()]


def threads(repeats: int) -> Table:
    """Wall time of one and two threads."""
    step = our_step([(1024, 1024)], mulo.LOConfig(hidden_size=32), "kernel")

    def step_with(count: int) -> None:
        torch.set_num_threads(count)
        step()

    best = race({n: functools.partial(step_with, n) for n in (1, 2)}, repeats, wall=True)
    torch.set_num_threads(1)
    rows = {f"{n} thread(s)": [took * 1e9 / 2**20, best[1] / took] for n, took in best.items()}
    return Table("1024x1024, H = 32, threads", ["ns/param, wall", "x faster"], rows)


def first_step() -> Table:
    """Seconds of the first step with an empty cache, compiler and self-check included."""
    rows = {}
    for hidden in (4, 8, 32):
        step = our_step([(64, 64), (64,)], mulo.LOConfig(hidden_size=hidden), "auto")
        kernels.library.cache_clear()
        kernels.choose.cache_clear()
        with tempfile.TemporaryDirectory() as x, mock.patch.dict(os.environ, XDG_CACHE_HOME=x):
            start = time.perf_counter()
            step()
            rows[f"H = {hidden}"] = [time.perf_counter() - start]
    return Table("The first step, with nothing compiled", ["s, wall"], rows)


def bench_many(repeats: int, device: str) -> list[Table]:
    config, cases = mulo.LOConfig(hidden_size=4), {}
    for name in ("vit_w192_d14", "resnet_w512"):
        shapes = [tuple(p.shape) for p in tasks.get(name).skeleton().parameters()]
        cases[f"{name}, H = 4"] = shapes, config
    return compare(cases, repeats, device)


# ---------------------------------------------------------------- meta-training, export


def bench_metatrain(repeats: int, device: str) -> list[Table]:
    trainers = {}
    for backend in ("kernel", "folded"):
        recipe = recipes.recipe("mulo_m", backend=backend)
        trainers[backend] = metatrain.Trainer(recipe, recipes.new_lo(recipe))
    best = race({name: t.advance for name, t in trainers.items()}, max(2, repeats // 5))
    rows = {name: [1 / took, best["folded"] / took] for name, took in best.items()}
    return [Table("mulo_m at desk scale, an outer step", ["outer steps/s", "x folded"], rows)]


def bench_export(repeats: int, device: str) -> list[Table]:
    from mulo import export, serving  # here, because they need optional packages

    nets, rows = {"mulo_m": mulo.load("mulo_m")}, {}
    nets["small_fc32"] = mulo.SmallFC(mulo.LOConfig(hidden_size=32))
    for (name, net), size in itertools.product(nets.items(), (1024, 1000)):
        with tempfile.TemporaryDirectory() as folder:
            exported = export.write(net, folder, name, ["onnx"])
            group = {"params": parameters_of([(size, size)]), "scale": 1.0}
            eager = mulo.MuLO([group], net, backend="folded").step
            onnx = serving.OrtMuLO(parameters_of([(size, size)]), exported).step
            best = race({"eager": eager, "onnx": onnx}, repeats)
        ns = [took * 1e9 / size**2 for took in best.values()]
        rows[f"{name}, {size}x{size}, H = {net.config.hidden_size}"] = [*ns, ns[1] / ns[0]]
    return [Table("A step, ns/param", ["eager folded", "onnxruntime", "x eager"], rows)]


COMMANDS = dict(step=bench_step, many=bench_many, metatrain=bench_metatrain, export=bench_export)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure speed and memory, into BENCHMARKS.md.")
    parser.add_argument("command", choices=[*COMMANDS, "all"], help="what to measure")
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda for step and many")
    args = parser.parse_args()
    if args.device != "cpu" and args.command not in ("step", "many"):
        parser.error(f"{args.command} is measured on the CPU only: drop --device.")
    try:
        args.device, _ = kernels.pick_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more.")
    torch.set_num_threads(1)
    for name in COMMANDS if args.command == "all" else [args.command]:
        torch.manual_seed(0)
        tables = COMMANDS[name](args.repeats, args.device)
        print("\n".join([f"\n## {name}: {machine(args.device)}\n", *map(Table.text, tables)]))
        keep(name, tables, args.device)


if __name__ == "__main__":
    main()
