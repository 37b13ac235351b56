"""Measure speed and memory, side by side in one run, into a section of BENCHMARKS.md.

    python bench.py all                 # everything below, in about twenty minutes
    python bench.py step                # the optimizer step: kernel, folded, literal, and AdamW
    python bench.py many                # models of many tensors: a ViT and a ResNet
    python bench.py roofline            # what this machine could do at best
    python bench.py metatrain           # an outer step of meta-training: kernel and folded
    python bench.py export              # the step in onnxruntime against the eager one, file sizes
    python bench.py gpu                 # the Triton kernels, compiled for GPUs that are not here
    python bench.py step --repeats 50   # steadier figures

results/bench.json keeps the tables by section, with the machine that made them; BENCHMARKS.md is
written from it. PyLO's optimizer takes part where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import platform
import re
import sys
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

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1)}
QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler's messages
BACKENDS = ("kernel", "folded", "literal")
FOLDER = Path(__file__).parent
Shapes = list[tuple[int, ...]]
Runs = dict[str, Callable[[], object]]
METHOD = """\
Contestants take turns in one process. The time of each is its minimum over the rounds: CPU time on
one thread, wall time where threads are compared. ns/param is the time of a step over the number of
parameters. The allocator keeps freed memory; compile time is left out unless it is what is shown.
Extra memory is the peak during a step above what was there before it: of tensors, and for kernels
of the process (resident memory). Compare ratios: times are of one core of a shared machine.
"""


# ---------------------------------------------------------------- measuring


@dataclasses.dataclass
class Table:
    """Named rows of numbers, and sentences about them."""

    title: str
    head: list[str]
    rows: dict[str, list[float | str]]
    notes: list[str] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        def show(x: float | str) -> str:
            return x if isinstance(x, str) else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"

        lines = [f"**{self.title}**", "", f"| | {' | '.join(self.head)} |"]
        lines.append("|---|" + "---:|" * len(self.head))
        lines += [f"| {name} | {' | '.join(map(show, row))} |" for name, row in self.rows.items()]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).rstrip() + "\n"


def bar(text: str, got: float, most: float = math.inf, least: float = 0.0) -> str:
    return f"Bar: {text}: {got:.2f}, {'met' if least <= got <= most else 'MISSED'}."


def restart_with_kept_memory() -> None:
    """Restart with an allocator that keeps freed memory: glibc reads its settings at the start."""
    if any(os.environ.get(k) != v for k, v in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY | QUIET)


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


def extra_resident(run: Callable[[], None]) -> int:
    """Peak of resident memory during run(), in bytes, as the kernel sees it; 0 where it cannot."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(name))

    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status("VmRSS")
        run()
        return max(0, status("VmHWM") - before)
    except (OSError, AttributeError, StopIteration):
        return 0


def machine(device: str = "cpu") -> str:
    path = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", path.read_text() if path.exists() else "")
    parts = [] if device == "cpu" else [torch.cuda.get_device_name()]
    parts += [model[1] if model else platform.machine(), torch.backends.cpu.get_cpu_capability()]
    parts += [f"{os.cpu_count()} cores", f"torch {torch.__version__}"]
    parts += [f"{torch.get_num_threads()} thread(s)", f"load {os.getloadavg()[0]:.1f}"]
    return ", ".join(parts)


def keep(section: str, tables: list[Table], device: str = "cpu", folder: Path = FOLDER) -> None:
    """Replace a section of results/bench.json, and write BENCHMARKS.md anew."""
    path = folder / "results" / "bench.json"
    sections = json.loads(path.read_text()) if path.exists() else {}
    name = section if device == "cpu" else f"{section}, {device}"
    sections[name] = {"machine": machine(device), "tables": [dataclasses.asdict(t) for t in tables]}
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps(sections, indent=1))
    write_atomically(folder / "BENCHMARKS.md", written(sections))


def written(sections: dict[str, dict]) -> str:
    """BENCHMARKS.md, from what results/bench.json holds."""
    text = ["# Benchmarks", "", "Sections are written by the commands in their titles.", "", METHOD]
    for name in sorted(sections, key=[*COMMANDS, *sections].index):
        text += [f"## python bench.py {name}", "", f"{sections[name]['machine']}.", ""]
        text += [Table(**table).text() for table in sections[name]["tables"]]
    return "\n".join(text)


# ---------------------------------------------------------------- the step


def parameters_of(shapes: Shapes, device: str = "cpu") -> list[nn.Parameter]:
    params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = 0.001 * torch.randn_like(p)
    return params


def our_step(shapes: Shapes, hidden: int, backend: str, device: str = "cpu") -> Callable:
    """The step of μLO with random weights, of new parameters."""
    config, generator = mulo.LOConfig(hidden_size=hidden), torch.Generator().manual_seed(0)
    lo = mulo.SmallFC(config, generator).to(device)
    return mulo.MuLO(parameters_of(shapes, device), lo, backend=backend).step


def contestants_for(
    shapes: Shapes, hidden: int, device: str = "cpu", backends: tuple[str, ...] = BACKENDS[:2]
) -> Runs:
    """Names and steps: ours, AdamW's, and PyLO's if it is installed."""
    steps = {f"μLO {b}, H={hidden}": our_step(shapes, hidden, b, device) for b in backends}
    for kind in ("foreach", "fused"):
        options = {"lr": 1e-6, "weight_decay": 0.01, kind: True}
        steps[f"AdamW {kind}"] = torch.optim.AdamW(parameters_of(shapes, device), **options).step
    with contextlib.suppress(ImportError):
        from pylo.optim import AdafacLO_naive

        steps["PyLO, naive"] = AdafacLO_naive(parameters_of(shapes, device)).step
    return steps


def compare(
    title: str,
    shapes: Shapes,
    hidden: int,
    repeats: int,
    device: str,
    most: float | None = None,  # bar of the kernel's time, over that of AdamW foreach
    most_bytes: float | None = None,  # bar of its extra memory, in bytes per parameter
    backends: tuple[str, ...] = BACKENDS[:2],
) -> Table:
    """A race of optimizers as a table."""
    n, rows = sum(map(math.prod, shapes)), {}
    runs = contestants_for(shapes, hidden, device, backends)
    best = race(runs, repeats, device)
    literal = best.get(f"μLO literal, H={hidden}")
    for name, took in best.items():
        extra = ""
        if device == "cpu":  # the profiler sees tensors only: C++ has memory of its own
            resident = extra_resident(runs[name]) if "kernel" in name else 0
            extra = max(extra_bytes(runs[name]), resident) / n
        faster = literal / took if literal else ""
        rows[name] = [took * 1e9 / n, took / best["AdamW foreach"], faster, extra]
    _, slower, _, extra = rows[f"μLO kernel, H={hidden}"]
    notes = [bar(f"at most {most}x AdamW foreach", slower, most)] if most else []
    if most_bytes and device == "cpu":
        notes.append(bar(f"at most {most_bytes} extra bytes per parameter", extra, most_bytes))
    head = ["ns/param", "x AdamW foreach", "x faster than literal", "extra bytes/param"]
    title = f"{title}: {n:,} parameters in {len(shapes)} tensor(s), H = {hidden}"
    return Table(title, head, rows, notes)


def bench_step(repeats: int, device: str) -> list[Table]:
    square, rest = [(1024, 1024)], (repeats, device)
    mlp = [(1024, 3072), (1024,), (1024, 1024), (1024,), (1000, 1024), (1000,)]
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    most = {4: 1.5, 8: 1.8, 32: 6.5} if wide else {4: 2.2, 8: 3.0, 32: 15.0}
    tables = [
        *(compare("1024x1024", square, h, *rest, x, 0.5, BACKENDS) for h, x in most.items()),
        compare("a vector", [(1_000_000,)], 4, *rest, 3.5, 8),
        compare("200 tensors of 16x16", [(16, 16)] * 200, 4, *rest),
        compare("MLP 3072-1024-1024-1000", mlp, 32, *rest),
    ]
    return tables if device != "cpu" else [*tables, threads(repeats), first_step()]


def threads(repeats: int) -> Table:
    """Wall time of one and two threads."""
    step = our_step([(1024, 1024)], 32, "kernel")

    def step_with(count: int) -> None:
        torch.set_num_threads(count)
        step()

    runs = {n: functools.partial(step_with, n) for n in (1, 2)}
    best = race(runs, repeats, wall=True)
    torch.set_num_threads(1)
    rows = {f"{n} thread(s)": [took * 1e9 / 2**20, best[1] / took] for n, took in best.items()}
    note = bar("two threads at least 1.6x as fast as one", best[1] / best[2], least=1.6)
    return Table("1024x1024, H = 32, threads", ["ns/param, wall", "x faster"], rows, [note])


def first_step() -> Table:
    """Seconds of the first step with an empty cache, compiler and self-check included."""
    rows = {}
    for hidden in (4, 8, 32):
        step = our_step([(64, 64), (64,)], hidden, "auto")
        kernels.library.cache_clear()
        kernels.choose.cache_clear()
        with tempfile.TemporaryDirectory() as x, mock.patch.dict(os.environ, XDG_CACHE_HOME=x):
            start = time.perf_counter()
            step()
            rows[f"H={hidden}"] = [time.perf_counter() - start]
    note = bar("at most 5 s", max(x for [x] in rows.values()), 5)
    return Table("The first step, with nothing compiled", ["s, wall"], rows, [note])


def bench_many(repeats: int, device: str) -> list[Table]:
    nets = {"vit_w192_d14": 2, "resnet_w512": 4}
    shapes = {k: [tuple(p.shape) for p in tasks.get(k).skeleton().parameters()] for k in nets}
    return [compare(k, shapes[k], 4, repeats, device, most) for k, most in nets.items()]


def bench_roofline(repeats: int, device: str) -> list[Table]:
    """The least time of a step, from bytes moved and operations done, and how far we are."""
    a, b = torch.ones(2, 64, 1024, 1024)  # far beyond the cache
    x, y, z = torch.randn(3, 1024, 1024)
    took = race({"copy": lambda: b.copy_(a), "product": lambda: torch.mm(x, y, out=z)}, repeats)
    bandwidth, gemm = 2 * a.nbytes / took["copy"], 2 * 1024**3 / took["product"]
    passes = {"g": 4, "p, g, M, V read, M, V written": 40, "p, g, M, V read, p written": 28}
    size, rows = sum(passes.values()), {}
    for hidden in (4, 8, 32):
        flops = 2 * (16 * hidden + hidden * hidden + 2 * hidden) + 60  # the net; features twice
        limit = max(size / bandwidth, flops / gemm) * 1e9
        took = race({"": our_step([(1024, 1024)], hidden, "kernel")}, repeats)[""] / 2**20 * 1e9
        rows[f"H={hidden}"] = [size, flops, limit, took, took / limit]
    rates = f"{bandwidth / 1e9:.1f} GB/s copied, {gemm / 1e9:.0f} GFLOP/s multiplied"
    head = ["bytes/param", "FLOP/param", "limit, ns/param", "kernel, ns/param", "x limit"]
    parts = "; ".join(f"{n} B ({what})" for what, n in passes.items())
    return [Table(f"1024x1024: {rates}", head, rows, [f"Three passes: {parts}."])]


# ---------------------------------------------------------------- meta-training


def bench_metatrain(repeats: int, device: str) -> list[Table]:
    trainers = {}
    for backend in BACKENDS[:2]:
        recipe = recipes.recipe("mulo_m", backend=backend)
        trainers[backend] = metatrain.Trainer(recipe, recipes.new_lo(recipe))
    best = race({name: t.advance for name, t in trainers.items()}, max(2, repeats // 5))
    rows = {name: [1 / took, best["folded"] / took] for name, took in best.items()}
    note = bar("kernel, at least 3.2x folded", rows["kernel"][1], least=3.2)
    title = "mulo_m at desk scale, an outer step"
    return [Table(title, ["outer steps/s", "x folded"], rows, [note])]


# ---------------------------------------------------------------- export and GPUs


def bench_export(repeats: int, device: str) -> list[Table]:
    from mulo import (
        export,  # here, as onnxruntime takes seconds to import
        serving,
    )

    nets, tables = {"mulo_m": mulo.load("mulo_m")}, []
    nets["small_fc32"] = mulo.SmallFC(mulo.LOConfig(hidden_size=32))
    for name, net in nets.items():
        with tempfile.TemporaryDirectory() as folder:
            exported = export.write(net, Path(folder, name), name, ("onnx", "ts"))
            files = [f for f in exported.parent.iterdir() if f.suffix in (".onnx", ".ts")]
            largest, rows = max(f.stat().st_size for f in files), {}
            for shape in ((1024, 1024), (1000, 1000)):
                group = {"params": parameters_of([shape]), "scale": 1.0}
                eager = mulo.MuLO([group], net, backend="folded").step
                onnx = serving.OrtMuLO(parameters_of([shape]), exported).step
                best = race({"eager folded": eager, "onnxruntime": onnx}, repeats)
                for run, took in best.items():
                    ns = took * 1e9 / math.prod(shape)
                    rows[f"{run}, {shape}"] = [ns, took / best["eager folded"]]
            title = f"{name}, H = {net.config.hidden_size}: largest file {largest:,} bytes"
            tables.append(Table(title, ["ns/param", "x eager"], rows))
    return tables


def bench_gpu(repeats: int, device: str) -> list[Table]:
    """The Triton kernels, compiled ahead of time: nothing is run."""
    from mulo.kernels import ahead  # here, as it imports triton

    configs = {f"H={h}": mulo.LOConfig(hidden_size=h) for h in (4, 8, 32)}
    configs["VeLO, H=4"] = mulo.LOConfig(net="velo", hidden_size=4)
    tables = []
    for name, config in configs.items():
        measured = {a: ahead.compiled(config, a) for a in ahead.ARCHITECTURES}
        rows = {f"{a}: {k}": row for a, each in measured.items() for k, row in each.items()}
        took = ahead.estimate(measured["sm_86"]) * 1e9
        notes = [
            f"Estimated on an A6000 (768 GB/s, 38.7 TFLOP/s), not measured: {took:.3f} ns/param of "
            "a large matrix, each pass at the longer of its bytes and its instructions.",
            bar("no spills", sum(spills for _, spills, *_ in rows.values()), 0),
        ]
        tables.append(Table(f"{name}: the kernels as compiled", ahead.COLUMNS, rows, notes))
    return tables


COMMANDS = dict(step=bench_step, many=bench_many, roofline=bench_roofline)
COMMANDS |= dict(metatrain=bench_metatrain, export=bench_export, gpu=bench_gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure speed and memory, into BENCHMARKS.md.")
    parser.add_argument("what", choices=[*COMMANDS, "all"], help="what to measure")
    parser.add_argument("--repeats", type=int, default=15, help="rounds of which the best counts")
    parser.add_argument("--device", default="cpu", help="cuda is for step and many")
    args = parser.parse_args()
    if args.device != "cpu" and args.what not in ("step", "many"):
        parser.error(f"{args.what} is measured on the CPU only: use step or many, or leave it out.")
    try:
        args.device, _ = kernels.pick_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    if args.repeats < 1:
        parser.error("--repeats must be 1 or more.")
    restart_with_kept_memory()
    torch.set_num_threads(1)
    for name in COMMANDS if args.what == "all" else [args.what]:
        torch.manual_seed(0)
        tables = COMMANDS[name](args.repeats, args.device)
        print("\n".join([f"\n## {name}: {machine(args.device)}\n", *map(Table.text, tables)]))
        keep(name, tables, args.device)


if __name__ == "__main__":
    main()
