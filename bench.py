"""Speed and memory, side by side in one run. Writes its section of BENCHMARKS.md.

    python bench.py all                 # everything below, in about twenty minutes
    python bench.py step                # the optimizer step: kernel, folded, literal, and AdamW
    python bench.py many                # models of many tensors: a ViT and a ResNet
    python bench.py roofline            # what this machine could do at best
    python bench.py tasks               # stacked nets against a loop, batches against a DataLoader
    python bench.py metatrain           # an outer step: kernel, folded, and vmap with literal steps
    python bench.py export              # the step in onnxruntime against the eager one, file sizes
    python bench.py gpu                 # the Triton kernels, compiled for GPUs that are not here
    python bench.py step --repeats 50   # steadier figures

Contestants take turns, so that the machine's noise falls on all alike; each one's figure is its
minimum over the rounds. Tables are kept in results/bench.json by section, with the machine that
made them, and BENCHMARKS.md is written from that: a section can be measured again alone. PyLO's
optimizer and mup's AdamW take part where they are installed.
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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import features
import kernels
import metatrain
import mulo
import pes
import tasks
from checkpoints import write_atomically
from optimizees import datasets

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1)}
QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler's messages
FOLDER = Path(__file__).parent
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
    """A table of a section: named rows of numbers, and sentences about them."""

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


def bar(text: str, got: float | str, most: float = math.inf, least: float = 0.0) -> str:
    if isinstance(got, str):
        return f"Bar: {text}: not measured."
    return f"Bar: {text}: {got:.2f}, {'met' if least <= got <= most else 'MISSED'}."


def restart_with_kept_memory() -> None:
    """Start anew with an allocator that keeps what is freed (glibc reads this at the start)."""
    if any(os.environ.get(k) != v for k, v in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY | QUIET)


def race(
    contestants: dict[str, Callable[[], None]],
    repeats: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """The minimum seconds of each contestant, taking turns: CPU time, or wall time on a GPU."""
    wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    clock = clock if device == "cpu" else time.perf_counter
    best = dict.fromkeys(contestants, math.inf)
    for round_ in range(repeats + 2):  # two rounds to warm up
        for name, run in contestants.items():
            wait()
            start = clock()
            run()
            wait()
            took = clock() - start
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
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
        name += ", AVX-512" if any("avx512f" in x for x in lines) else ""
    if device != "cpu":
        name = f"{torch.cuda.get_device_name()}, {name}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    return (
        f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s), load {load:.1f}"
    )


def keep(section: str, tables: list[Table], device: str = "cpu", folder: Path = FOLDER) -> None:
    """Replace a section of results/bench.json, and write BENCHMARKS.md anew."""
    path = folder / "results" / "bench.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept = {k: x for k, x in kept.items() if k.split(",")[0] in COMMANDS}
    name = section if device == "cpu" else f"{section}, {device}"
    kept[name] = {"machine": machine(device), "tables": [dataclasses.asdict(t) for t in tables]}
    path.parent.mkdir(exist_ok=True)
    text = ["# Benchmarks", "", "Sections are written by the commands in their titles.", "", METHOD]
    for name in sorted(kept, key=[*COMMANDS, *kept].index):
        text += [f"## python bench.py {name}", "", f"{kept[name]['machine']}.", ""]
        text += [Table(**table).text() for table in kept[name]["tables"]]
    write_atomically(path, json.dumps(kept, indent=1))
    write_atomically(folder / "BENCHMARKS.md", "\n".join(text))


# ---------------------------------------------------------------- the step


def parameters_of(shapes: list[tuple[int, ...]], device: str = "cpu") -> list[nn.Parameter]:
    params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = 0.001 * torch.randn_like(p)
    return params


def random_lo(hidden: int, device: str = "cpu") -> mulo.LO:
    config = mulo.LOConfig(hidden_size=hidden)
    return mulo.SmallFC(config, torch.Generator().manual_seed(0)).to(device)


def others(shapes: list[tuple[int, ...]], device: str) -> dict[str, Callable[[], None]]:
    """AdamW, and what is installed of other people's."""
    adamw = {"lr": 1e-6, "weight_decay": 0.01}
    found = {}
    for kind in ("foreach", "fused"):
        opt = torch.optim.AdamW(parameters_of(shapes, device), **adamw, **{kind: True})
        found[f"AdamW {kind}"] = opt.step
    with contextlib.suppress(ImportError):
        import mup

        params = nn.ParameterList(parameters_of(shapes, device))
        mup.set_base_shapes(params, None)
        found["mup's AdamW"] = mup.MuAdamW(params, **adamw).step
    with contextlib.suppress(ImportError):
        from pylo.optim import AdafacLO_naive

        found["PyLO, naive"] = AdafacLO_naive(parameters_of(shapes, device)).step
    return found


def contestants_for(
    shapes: list[tuple[int, ...]],
    hidden: int,
    device: str = "cpu",
    backends: tuple[str, ...] = ("kernel", "folded"),
) -> dict[str, Callable[[], None]]:
    """Names and steps: ours first, then AdamW's."""
    lo = random_lo(hidden, device)
    found = {
        f"μLO {backend}, H={hidden}": mulo.MuLO(
            parameters_of(shapes, device), lo, backend=backend
        ).step
        for backend in backends
    }
    return found | others(shapes, device)


def compare(
    title: str,
    shapes: list,
    hidden: int,
    repeats: int,
    device: str,
    backends: tuple[str, ...] = ("kernel", "folded"),
) -> Table:
    """A race as a table."""
    n = sum(math.prod(shape) for shape in shapes)

    def extra(name: str) -> float | str:
        if device != "cpu":
            return ""
        seen = extra_resident(runs[name]) if "kernel" in name else 0  # C++ has memory of its own
        return max(extra_bytes(runs[name]), seen) / n

    runs = contestants_for(shapes, hidden, device, backends)
    best = race(runs, repeats, device)
    slowest = best.get(f"μLO literal, H={hidden}")
    rows = {
        name: [
            took * 1e9 / n,
            took / best["AdamW foreach"],
            slowest / took if slowest else "",
            extra(name),
        ]
        for name, took in best.items()
    }
    head = ["ns/param", "x AdamW foreach", "x faster than literal", "extra bytes/param"]
    title = f"{title}: {n:,} parameters in {len(shapes)} tensor(s), H = {hidden}"
    return Table(title, head, rows)


def bench_step(repeats: int, device: str) -> list[Table]:
    all_three, wide = ("kernel", "folded", "literal"), torch.backends.cpu.get_cpu_capability()
    bars = {4: 1.5, 8: 1.8, 32: 6.5} if wide == "AVX512" else {4: 2.2, 8: 3.0, 32: 15.0}
    tables = []
    for hidden, most in bars.items():
        table = compare("1024x1024", [(1024, 1024)], hidden, repeats, device, all_three)
        _, slower, _, extra = table.rows[f"μLO kernel, H={hidden}"]
        table.notes += [
            bar(f"at most {most}x AdamW foreach ({wide})", slower, most),
            bar("at most 0.5 extra bytes per parameter", extra, 0.5),
        ]
        tables.append(table)
    table = compare("a vector", [(1_000_000,)], 4, repeats, device)
    _, slower, _, extra = table.rows["μLO kernel, H=4"]
    table.notes += [bar("at most 3.5x AdamW foreach", slower, 3.5)]
    table.notes += [bar("at most 8 extra bytes per parameter", extra, 8)]
    tables.append(table)
    tables.append(compare("200 tensors of 16x16", [(16, 16)] * 200, 4, repeats, device))
    mlp = [(1024, 3072), (1024,), (1024, 1024), (1024,), (1000, 1024), (1000,)]
    tables.append(compare("MLP 3072-1024-1024-1000", mlp, 32, repeats, device))
    return tables if device != "cpu" else [*tables, threads(repeats), first_step()]


def threads(repeats: int) -> Table:
    """Wall time of one and two threads."""
    took = {}
    for count in (1, 2):
        torch.set_num_threads(count)
        opt = mulo.MuLO(parameters_of([(1024, 1024)]), random_lo(32), backend="kernel")
        took[f"{count} thread(s)"] = race({"": opt.step}, repeats, clock=time.perf_counter)[""]
    torch.set_num_threads(1)
    one, two = took.values()
    rows = {name: [x * 1e9 / 2**20, one / x] for name, x in took.items()}
    note = bar("two threads at least 1.6x as fast as one", one / two, least=1.6)
    return Table("1024x1024, H = 32, threads", ["ns/param, wall", "x faster"], rows, [note])


def first_step() -> Table:
    """Seconds of the first step with an empty cache, compiler and self-check included."""
    rows = {}
    for hidden in (4, 8, 32):
        with tempfile.TemporaryDirectory() as folder:
            before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), folder
            kernels.library.cache_clear()
            kernels.choose.cache_clear()
            opt = mulo.MuLO(parameters_of([(64, 64), (64,)]), random_lo(hidden))
            start = time.perf_counter()
            opt.step()
            rows[f"H={hidden}"] = [time.perf_counter() - start]
            kernels.library.cache_clear()
            kernels.choose.cache_clear()
            os.environ.pop("XDG_CACHE_HOME")
            if before:
                os.environ["XDG_CACHE_HOME"] = before
    note = bar("at most 5 s", max(x for [x] in rows.values()), 5)
    return Table("The first step, with nothing compiled", ["s, wall"], rows, [note])


def bench_many(repeats: int, device: str) -> list[Table]:
    tables = []
    for name, most in (("vit_w192_d14", 2), ("resnet_w512", 4)):
        shapes = [tuple(p.shape) for p in tasks.get(name).skeleton().parameters()]
        table = compare(name, shapes, 4, repeats, device)
        slower = table.rows["μLO kernel, H=4"][1]
        table.notes.append(bar(f"at most {most}x AdamW foreach", slower, most))
        tables.append(table)
    return tables


def bench_roofline(repeats: int, device: str) -> list[Table]:
    """The least time of a step, from bytes moved and operations done, and how far we are."""
    a, b = torch.randn(2, 64, 1024, 1024)  # far beyond the cache
    x, y, z = torch.randn(3, 1024, 1024)
    took = race({"copy": lambda: b.copy_(a), "product": lambda: torch.mm(x, y, out=z)}, repeats)
    bandwidth, gemm = 2 * a.nbytes / took["copy"], 2 * 1024**3 / took["product"]
    passes = {"g": 4, "p, g, M, V read, M, V written": 40, "p, g, M, V read, p written": 28}
    rows = {}
    for hidden in (4, 8, 32):
        flops = 2 * (16 * hidden + hidden * hidden + 2 * hidden) + 60  # the net; features twice
        limit = max(sum(passes.values()) / bandwidth, flops / gemm) * 1e9
        step = contestants_for([(1024, 1024)], hidden, backends=("kernel",))
        took = race({"": step[f"μLO kernel, H={hidden}"]}, repeats)[""] / 2**20 * 1e9
        rows[f"H={hidden}"] = [sum(passes.values()), flops, limit, took, took / limit]
    rates = f"{bandwidth / 1e9:.1f} GB/s copied, {gemm / 1e9:.0f} GFLOP/s multiplied"
    head = ["bytes/param", "FLOP/param", "limit, ns/param", "kernel, ns/param", "x limit"]
    parts = "; ".join(f"{n} B ({what})" for what, n in passes.items())
    return [Table(f"1024x1024: {rates}", head, rows, [f"Three passes: {parts}."])]


# ---------------------------------------------------------------- tasks and meta-training


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
    scales = dict(zip(particles.theta, opt.fixed[0, 0], strict=True))

    def loss(theta: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, theta, (x,))
        return torch.nn.functional.cross_entropy(logits, y)

    def update(phi: dict, acc: dict, p: torch.Tensor, g: torch.Tensor, t: torch.Tensor, name: str):
        phi = {k: w[None] for k, w in phi.items()}
        acc = features.Accumulators(*(x[None] for x in acc))
        rest = (p[None], g[None], t[None], scales[name][None], opt.dims[name])
        acc, p = mulo.step(opt.config, phi, acc, *rest)
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
    names = {"stacked, kernel": "auto", "stacked, folded": "folded", "vmap, literal": "literal"}
    trainers = {}
    for name, backend in names.items():
        r = metatrain.recipe("mulo_m", backend=backend)
        trainers[name] = pes.Trainer(r, metatrain.new_lo(r))
    for [particles] in trainers["vmap, literal"].particles:
        particles.inner_step = straightforward(particles)
        particles.opt.prepare = lambda phi: phi
    losses = [trainer.advance()["meta_loss"] for trainer in trainers.values()]
    best = race({name: t.advance for name, t in trainers.items()}, max(2, repeats // 5))
    slow = best["vmap, literal"]
    rows = {
        name: [1 / took, best["stacked, folded"] / took, slow / took] for name, took in best.items()
    }
    _, folded, vmap = rows["stacked, kernel"]
    notes = [
        f"They start with meta-losses {', '.join(f'{x:.6f}' for x in losses)}.",
        bar("kernel, at least 3.2x folded", folded, least=3.2),
        bar("kernel, at least 14x vmap", vmap, least=14),
    ]
    head = ["outer steps/s", "x folded", "x vmap"]
    return [Table("mulo_m at desk scale, an outer step", head, rows, notes)]


def bench_export(repeats: int, device: str) -> list[Table]:
    import export  # here, as onnxruntime takes seconds to import
    import serving

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
                    "eager folded": mulo.MuLO([group], net, backend="folded").step,
                    "onnxruntime": serving.OrtMuLO(parameters_of([shape]), exported).step,
                }
                best = race(runs, repeats)
                eager = best["eager folded"]
                for run, took in best.items():
                    rows[f"{run}, {shape}"] = [took * 1e9 / math.prod(shape), took / eager]
            title = f"{name}, H = {net.config.hidden_size}: largest file {max(sizes):,} bytes"
            tables.append(Table(title, ["ns/param", "x eager"], rows))
            batched, single = (parameters_of([(16, 16)] * 100) for _ in range(2))
            single = [serving.OrtMuLO([p], exported) for p in single]
            runs = {
                "in one call": serving.OrtMuLO(batched, exported).step,
                "one call each": lambda single=single: [opt.step() for opt in single],
            }
            best = race(runs, repeats)
            rows = {run: [took * 1e3, best["one call each"] / took] for run, took in best.items()}
            title = f"{name}: 100 tensors of 16x16 in onnxruntime"
            tables.append(Table(title, ["ms", "x faster than one call each"], rows))
    return tables


def bench_gpu(repeats: int, device: str) -> list[Table]:
    """The Triton kernels, compiled ahead of time: nothing is run."""
    from kernels import ahead  # here, as it imports triton

    configs = {f"H={h}": mulo.LOConfig(hidden_size=h) for h in (4, 8, 32)}
    configs["VeLO, H=4"] = mulo.LOConfig(net="velo", hidden_size=4)
    tables = []
    for name, config in configs.items():
        rows, spills = {}, 0
        for architecture in ahead.ARCHITECTURES:
            lines = ahead.compiled(config, architecture)
            spills += sum(x.spills + x.stack for x in lines)
            for x in lines:
                row = [x.registers, x.spills, x.shared, x.instructions]
                rows[f"{architecture}: {x.kernel}"] = row
            if architecture == "sm_86":
                took = ahead.estimate(lines) * 1e9
        head = ["registers", "spills", "shared bytes", "instructions/entry"]
        notes = [
            f"Estimated on an A6000 (768 GB/s, 38.7 TFLOP/s), not measured: {took:.3f} ns/param of "
            "a large matrix, each pass at the longer of its bytes and its instructions.",
            bar("no spills", spills, 0),
        ]
        tables.append(Table(f"{name}: the kernels as compiled", head, rows, notes))
    return tables


COMMANDS = {
    "step": bench_step,
    "many": bench_many,
    "roofline": bench_roofline,
    "tasks": bench_tasks,
    "metatrain": bench_metatrain,
    "export": bench_export,
    "gpu": bench_gpu,
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
    restart_with_kept_memory()
    torch.set_num_threads(1)
    for name in COMMANDS if args.what == "all" else [args.what]:
        torch.manual_seed(0)
        tables = COMMANDS[name](args.repeats, args.device)
        print("\n".join([f"\n## {name}: {machine(args.device)}\n", *map(Table.text, tables)]))
        keep(name, tables, args.device)


if __name__ == "__main__":
    main()
