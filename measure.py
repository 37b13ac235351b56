"""How speed and memory are measured, and the file they are written to.

    best = race({"a": f, "b": g}, repeats=15)       # CPU seconds of each, taking turns
    keep("step", Table(...))                        # a section of BENCHMARKS.md

Contestants take turns, so that this machine's noise falls on all alike; each one's figure is the
minimum over the repeats. Tables are kept in results/bench.json, by section, with the machine that
made them, and BENCHMARKS.md is written from that: a section can be measured again alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoints import write_atomically

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1)}
QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler's own chatter
FOLDER = Path(__file__).parent
METHOD = """\
Contestants take turns in one process; the time of each is its minimum over the rounds, of the CPU
and not of the clock on the wall; ns/param is the time of a step over the number of parameters. The
allocator keeps freed memory, and compile time is left out unless it is what is shown. Extra memory
is the peak of tensor memory during a step above what was there before it. Ratios are what counts:
times are of one core of a shared machine.
"""
GPU = """\
## On a GPU

Not measured here. The same code runs on CUDA: the compiled passes become Triton kernels on the
current stream, and nothing waits for the device (rates are tensors; the count of bad gradient
entries is looked at every 100 steps). TF32 is left as you set it: if it is on, matrix products are
rounded to 1e-3, which in a compiled step are only those of rows, columns and time. CUDA graphs are
not used: lr and t are read on the CPU at every step, and a graph would freeze them. To fill in the
table, on a machine with a GPU:

    python bench.py step --device cuda
    python bench.py many --device cuda
"""


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


def restart_with_kept_memory() -> None:
    """Start anew with an allocator that keeps what is freed (glibc reads this at the start)."""
    if any(os.environ.get(k) != v for k, v in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY | QUIET)


def race(
    contestants: dict[str, Callable[[], None]], repeats: int, device: str = "cpu"
) -> dict[str, float]:
    """The minimum seconds of each contestant, taking turns: of CPU time, or of a GPU's."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
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


def limits(repeats: int) -> dict[str, float]:
    """What one thread of this machine can do: bytes and floating-point operations a second."""
    a, b = torch.randn(2, 64, 1024, 1024)  # far beyond the cache
    x, y, z = torch.randn(3, 1024, 1024)
    took = race({"copy": lambda: b.copy_(a), "product": lambda: torch.mm(x, y, out=z)}, repeats)
    return {"bandwidth": 2 * a.nbytes / took["copy"], "gemm": 2 * 1024**3 / took["product"]}


def machine(device: str = "cpu") -> str:
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
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
    name = section if device == "cpu" else f"{section}, {device}"
    kept[name] = {"machine": machine(device), "tables": [dataclasses.asdict(t) for t in tables]}
    path.parent.mkdir(exist_ok=True)
    text = ["# Benchmarks", "", "Sections are written by the commands in their titles.", "", METHOD]
    for name, found in kept.items():
        text += [f"## python bench.py {name}", "", f"{found['machine']}.", ""]
        text += [Table(**table).text() for table in found["tables"]]
    write_atomically(path, json.dumps(kept, indent=1))
    write_atomically(folder / "BENCHMARKS.md", "\n".join([*text, GPU]))
