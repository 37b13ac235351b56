"""Measure the speed of the step. Prints a section of BENCHMARKS.md for each command.

    python bench.py all                 # everything below, in about twenty minutes
    python bench.py step                # the optimizer step: kernel, folded, literal, and AdamW
    python bench.py many                # models of many tensors: a ViT and a ResNet
    python bench.py train               # a training step: gradients, and AdamW, Muon or mulo_m
    python bench.py metatrain           # an outer step of meta-training: kernel and folded
    python bench.py export              # the step in onnxruntime and in eager PyTorch

Contestants take turns in one process.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import mulo
from mulo import evaluate, kernels, metatrain, recipes, roles, tasks, training
from mulo.evaluate import exit_with_message, positive

Shapes = list[tuple[int, ...]]
Runs = dict[str, Callable[[], object]]
Cases = dict[str, tuple[Shapes, mulo.LOConfig]]
Rows = dict[str, dict[str, float]]  # of a table: {name: {column: value}}


def race(runs: Runs, repeats: int, device: str = "cpu") -> dict[str, float]:
    """The minimum seconds of each contestant: CPU time, or wall time on a GPU."""
    wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = {name: [] for name in runs}
    for _ in range(repeats + 2):
        for name, run in runs.items():
            wait()
            start = clock()
            run()
            wait()
            times[name].append(clock() - start)
    return {name: min(seconds[2:]) for name, seconds in times.items()}  # two rounds to warm up


def machine(device: str) -> str:
    path = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", path.read_text() if path.exists() else "")
    parts = [] if device == "cpu" else [torch.cuda.get_device_name()]
    parts += [model[1] if model else platform.machine(), torch.backends.cpu.get_cpu_capability()]
    parts += [f"{os.cpu_count()} cores", f"torch {torch.__version__}"]
    parts += [f"{torch.get_num_threads()} thread(s)", f"load {os.getloadavg()[0]:.1f}"]
    return ", ".join(parts)


def print_table(title: str, rows: Rows) -> None:
    """Print a Markdown table. The first row has all columns; the others may lack some."""
    columns = list(next(iter(rows.values())))
    lines = [f"**{title}**", "", f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        numbers = [row.get(column) for column in columns]
        cells = ["" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in numbers]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    print("\n".join([*lines, ""]), flush=True)


def parameters_of(shapes: Shapes, device: str = "cpu") -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = 0.001 * torch.randn_like(p)
    return params


def contestants(shapes: Shapes, config: mulo.LOConfig, device: str) -> Runs:
    """Steps of a learned optimizer with random weights, and of AdamW, each with its parameters."""
    lo = mulo.NETS[config.net](config, torch.Generator().manual_seed(0)).to(device)
    loss, steps = torch.ones((), device=device), {}
    small = sum(map(math.prod, shapes)) <= 2**20  # on larger models the literal step takes seconds
    for backend in ("kernel", "folded", "literal") if small else ("kernel", "folded"):
        opt = mulo.MuLO(parameters_of(shapes, device), lo, num_steps=1000, backend=backend)
        steps[backend] = functools.partial(opt.step, loss=loss)
    for kind in ("foreach", "fused"):
        options = {"lr": 1e-6, "weight_decay": 0.01, kind: True}
        steps[f"AdamW {kind}"] = torch.optim.AdamW(parameters_of(shapes, device), **options).step
    return steps


def compare(cases: Cases, repeats: int, device: str, per_param: bool = True) -> Rows:
    """Race optimizers: ns per parameter, or µs per step."""
    rows = {}
    for name, (shapes, config) in cases.items():
        n = sum(map(math.prod, shapes))
        best = race(contestants(shapes, config, device), repeats, device)
        row = {k: seconds * 1e9 / (n if per_param else 1000) for k, seconds in best.items()}
        row["kernel / AdamW foreach"] = best["kernel"] / best["AdamW foreach"]
        rows[f"{name}: {n:,} in {len(shapes)}"] = row
    return rows


def bench_step(repeats: int, device: str) -> None:
    mlp = [(1024, 3072), (1024,), (1024, 1024), (1024,), (1000, 1024), (1000,)]
    fc = {h: mulo.LOConfig(hidden_size=h) for h in (4, 8, 32)}
    cases = {f"1024x1024, H = {h}": ([(1024, 1024)], config) for h, config in fc.items()} | {
        "a vector, H = 4": ([(1_000_000,)], fc[4]),
        "matrices of 16x16, H = 4": ([(16, 16)] * 200, fc[4]),
        "MLP 3072-1024-1024-1000, H = 32": (mlp, fc[32]),
        "the same MLP, VeLO, H = 4": (mlp, mulo.LOConfig(net="velo", hidden_size=4)),
    }
    print_table("A step, ns/param (parameters in tensors)", compare(cases, repeats, device))
    tiny = {"8x8 and 8, H = 8": ([(8, 8), (8,)] * 3, fc[8])}
    rows = compare(tiny, 20 * repeats, device, per_param=False)
    print_table("The fixed cost of a step, µs (parameters in tensors)", rows)


def bench_many(repeats: int, device: str) -> None:
    cases = {}
    for name in ("vit_w192_d14", "resnet_w512"):
        shapes = [tuple(p.shape) for p in tasks.get(name).skeleton().parameters()]
        cases[f"{name}, H = 4"] = shapes, mulo.LOConfig(hidden_size=4)
    print_table("A step, ns/param (parameters in tensors)", compare(cases, repeats, device))


def bench_train(repeats: int, device: str) -> None:
    rows = {}
    optimizers = {
        "AdamW": evaluate.adam([evaluate.ADAMW_DEFAULTS]),
        "Muon": evaluate.adam([evaluate.MUON], "muon"),
        "mulo_m": mulo.load("mulo_m"),
    }
    for width in (64, 256, 1024):
        task, runs = f"fashion_mlp_w{width}_d3", {}
        steps = 25_600 // width  # enough that loading the data counts little
        for name, optimizer in optimizers.items():
            ruled = tasks.get(task, rules=roles.ALL if name == "mulo_m" else ())
            runs[name] = functools.partial(training.train, ruled, optimizer, steps, [0])
        best = race(runs, max(1, repeats // 5))
        rows[task] = {k: 1e3 * seconds / steps for k, seconds in best.items()}
    print_table("A training step of one net, ms", rows)


def bench_metatrain(repeats: int, device: str) -> None:
    runs = {}
    for backend in ("kernel", "folded"):
        recipe = recipes.recipe("mulo_m", backend=backend)
        runs[backend] = metatrain.Trainer(recipe, recipes.new_lo(recipe)).advance
    best = race(runs, max(2, repeats // 5))
    rows = {k: {"outer steps/s": 1 / s, "x folded": best["folded"] / s} for k, s in best.items()}
    print_table("mulo_m at desk scale, an outer step", rows)


def bench_export(repeats: int, device: str) -> None:
    from mulo import export, serving  # here, because they need optional packages

    rows, fc32 = {}, mulo.SmallFC(mulo.LOConfig(hidden_size=32))
    for name, net in (("mulo_m", mulo.load("mulo_m")), ("small_fc32", fc32)):
        a, b = ([{"params": parameters_of([(1024, 1024)]), "scale": 1.0}] for _ in range(2))
        runs = {"eager folded": mulo.MuLO(a, net, backend="folded").step}
        with tempfile.TemporaryDirectory() as folder:
            runs["onnxruntime"] = serving.OrtMuLO(b, export.write(net, folder, name, ["onnx"])).step
        row = {k: seconds * 1e9 / 2**20 for k, seconds in race(runs, repeats).items()}
        row["x eager"] = row["onnxruntime"] / row["eager folded"]
        rows[f"{name}, 1024x1024, H = {net.config.hidden_size}"] = row
    print_table("A step, ns/param", rows)


BENCHES = (bench_step, bench_many, bench_train, bench_metatrain, bench_export)
COMMANDS = {bench.__name__.removeprefix("bench_"): bench for bench in BENCHES}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the speed of the step.")
    parser.add_argument("command", choices=[*COMMANDS, "all"], help="what to measure")
    parser.add_argument("--repeats", type=positive, default=15, help="rounds (default: 15)")
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda for step and many")
    args = parser.parse_args()
    if args.device != "cpu" and args.command not in ("step", "many"):
        parser.error(f"{args.command} is measured on the CPU only: drop --device.")
    with exit_with_message("bench.py"):
        device, _ = kernels.pick_device(args.device)
    torch.set_num_threads(1)
    training.keep_freed_memory()
    for name in COMMANDS if args.command == "all" else [args.command]:
        torch.manual_seed(0)
        flag = "" if device == "cpu" else f" --device {device}"
        print(f"## python bench.py {name}{flag}\n\n{machine(device)}.\n")
        COMMANDS[name](args.repeats, device)


if __name__ == "__main__":
    main()
