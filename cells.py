"""The nets trained in evaluation, kept: what is finished is not run again.

    job = Job(contender("mulo_m"), "fashion8_mlp_w256_d3", steps=500, seeds=(0, 1, 2))
    cells = Cells(Path("results"), processes=2)
    cells.fill([job, ...])                              # trains what is missing, in parallel
    losses = cells.losses(job)                          # (50, seeds)

One row of results/losses.csv is one net: which optimizer trained it, on which task, for how long,
under which schedule of the rate, from which seed, and its training loss, averaged over 50 equal
windows. A job with times to look at, `at`, is about activations instead, kept in watch.json. All
seeds of a job are trained side by side. A net that diverges is a result like any other: its loss is
nan from there on.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from tqdm import tqdm

import baselines
import checkpoints
import metatrain
import mulo
import roles
import tasks
import training
from report import write_table

fcntl = None
with contextlib.suppress(ImportError):  # not on Windows: one evaluation at a time there
    import fcntl

POINTS = 50
BATCHES = 10_000  # seeds of batches begin here: nets of all widths see the same, and differ by that
Seen = dict[str, list[tuple[float, float]]]  # per layer: (change, size) at each time


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer under test, with its parametrization."""

    name: str
    rules: tuple[str, ...]  # of μP; () is SP
    lo: mulo.LO | None = None  # None: the baseline of that name
    recipe: str | None = None  # that meta-trained it


def tuned(which: str, kind: str, steps: int, schedule: str) -> dict:
    """A baseline's hyperparameters: tuned at the meta-trained horizon, or for a schedule."""
    horizons = [metatrain.recipe("mulo_m", scale).unroll for scale in metatrain.SCALES]
    for length in horizons if schedule == "constant" else [steps]:
        values = baselines.best(which, kind, length, schedule)
        if values is not None:
            return {k: values[k] for k in baselines.FIELDS}
    flags = " --scale paper" if kind in baselines.PAPER[which] else ""
    if schedule != "constant":
        flags += f" --steps {steps} --schedule {schedule} --rates-only"
    raise ValueError(f"{which} is not tuned for {kind}: run python evaluate.py tune {kind}{flags}.")


def contender(name: str) -> Contender:
    """By name: adamw, muadam, a shipped optimizer, or the folder of a meta-training run."""
    if name in baselines.NAMES:
        return Contender(name, roles.ALL if name == "muadam" else ())
    folder = Path(name)
    path = checkpoints.find(folder / "lo.pt" if (folder / "lo.pt").is_file() else name)
    recipe = checkpoints.about(path).get("recipe")
    recipe = recipe or {"mup": False, "name": None}  # others' weights, such as VeLO-4000: in SP
    label = folder.parent.name if folder.name == "lo.pt" else folder.name
    return Contender(label, roles.ALL if recipe["mup"] else (), mulo.load(path), recipe["name"])


@dataclasses.dataclass(frozen=True)
class Job:
    """Nets to be trained: one optimizer, one task, some seeds."""

    who: Contender
    task: str
    steps: int
    schedule: str = "constant"
    seeds: tuple[int, ...] = (0,)
    at: tuple[int, ...] = ()  # times to look at activations
    values: dict | None = dataclasses.field(default=None, compare=False)  # a baseline's

    def __post_init__(self):
        if self.steps < 1 or not self.seeds:
            raise ValueError("steps and seeds must be 1 or more.")
        self.get_task()  # which says so if there is none of that name
        if self.who.lo is None and self.values is None:  # once: a tuning may end meanwhile
            kind = self.task[: self.task.rindex("_w")]
            values = tuned(self.who.name, kind, self.steps, self.schedule)
            object.__setattr__(self, "values", values)

    def get_task(self) -> tasks.Task:
        return tasks.get(self.task, rules=self.who.rules)

    def digest(self) -> str:
        """What distinguishes optimizers of one name: weights or tuned values, rules, the batch."""
        what = list(self.values.values()) if self.values else checkpoints.digest(self.who.lo)
        what = f"{what} {self.who.rules} {self.get_task().batch_size}"
        return hashlib.sha256(what.encode()).hexdigest()[:8]

    def keys(self) -> list[tuple[str, ...]]:
        """One for each seed, or one for a look at all of them."""
        head = (self.who.name, self.digest(), self.task, str(self.steps), self.schedule)
        if self.at:
            return [(*head, " ".join(map(str, self.seeds)), " ".join(map(str, self.at)))]
        return [(*head, str(seed)) for seed in self.seeds]

    def title(self) -> str:
        return f"{self.who.name} on {self.task}"

    def cost(self) -> int:
        """In arbitrary units, to begin with the longest."""
        size = sum(p.numel() for p in self.get_task().skeleton().parameters())
        return self.steps * len(self.seeds) * (size + 20_000)

    def run(self, device: str = "cpu") -> list:
        """Train; what goes with each of `keys`."""
        task = self.get_task()
        seen = Watch(task, self.at, device) if self.at else None
        losses = training.train(
            task,
            self.who.lo or baselines.adam(self.values, len(self.seeds)),
            max(self.at) + 1 if self.at else self.steps,
            list(self.seeds),
            schedule=baselines.schedule_of(self.schedule, self.steps),
            device=device,
            look=seen,
            num_steps=self.steps,
            data_seeds=[BATCHES + seed for seed in self.seeds],
        )
        if seen:
            return [seen.found]
        return [" ".join(f"{x:.4f}" for x in curve) for curve in windows(losses).T.tolist()]


class Watch:
    """Looks, at some times, at pre-activations y: std of their change so far, and mean |y|."""

    def __init__(self, task: tasks.Task, at: tuple[int, ...], device: str):
        self.task, self.at = task, at
        self.probe = task.data(device=device).batch(torch.Generator().manual_seed(123), 64)[0]
        self.first: dict[str, Tensor] = {}
        self.found: Seen = {}

    def __call__(self, t: int, theta: training.Theta) -> None:
        if t and t not in self.at:
            return
        for name, y in pre_activations(self.task, theta, self.probe).items():
            self.first.setdefault(name, y)
            change = (y - self.first[name]).flatten(1).std(1).mean()
            if t:
                pair = tuple(float(f"{x:.5g}") for x in (change, y.abs().mean()))
                self.found.setdefault(name, []).append(pair)


def pre_activations(task: tasks.Task, theta: training.Theta, probe: Tensor) -> dict[str, Tensor]:
    """The output of every layer for a probe, (P, b, ...) each; the last are the logits."""
    model, found = task.skeleton(), {}
    for name, module in model.named_modules():
        if isinstance(module, roles.LAYERS):
            module.register_forward_hook(lambda m, args, y, name=name: found.__setitem__(name, y))
    P = len(next(iter(theta.values())))
    functional_call(model, theta, (probe.expand(P, *probe.shape),))
    return found


def _prepare_process() -> None:
    torch.set_num_threads(1)
    training.keep_freed_memory()


class Cells:
    """A folder of finished jobs; rows are added as these end, by rename."""

    KEY = ("optimizer", "digest", "task", "steps", "schedule", "seed")

    def __init__(self, folder: Path, device: str = "cpu", processes: int = 1):
        self.folder, self.device, self.processes = folder, device, processes
        self.rows: dict[tuple[str, ...], str] = {}
        self.seen: dict[tuple[str, ...], Seen] = {}
        self.read()

    def read(self) -> None:
        """Add what the files have."""
        if (self.folder / "losses.csv").exists():
            with open(self.folder / "losses.csv", newline="") as file:
                for row in csv.DictReader(file):
                    self.rows[tuple(row[k] for k in self.KEY)] = row["losses"]
        if (self.folder / "watch.json").exists():
            known = json.loads((self.folder / "watch.json").read_text())
            self.seen |= {tuple(k.split(", ")): v for k, v in known.items()}

    def fill(self, jobs: Iterable[Job], desc: str = "training") -> None:
        """Train what is missing."""
        missing = {tuple(m.keys()): m for job in jobs if (m := self._missing(job))}  # each once
        for job, results in self.train(list(missing.values()), desc):
            kept = self.seen if job.at else self.rows
            kept |= dict(zip(job.keys(), results, strict=True))
            self.save()

    def losses(self, job: Job) -> Tensor:
        """Mean losses in POINTS windows, (POINTS, seeds)."""
        self.fill([job])
        found = [[float(x) for x in self.rows[key].split()] for key in job.keys()]
        return torch.tensor(found).T

    def watched(self, job: Job) -> Seen:
        """Change and size of each layer's pre-activations at each of the job's times."""
        self.fill([job])
        return self.seen[job.keys()[0]]

    def _missing(self, job: Job) -> Job | None:
        """The job without the seeds that are there."""
        if job.at:
            return None if job.keys()[0] in self.seen else job
        pairs = zip(job.seeds, job.keys(), strict=True)
        seeds = tuple(seed for seed, key in pairs if key not in self.rows)
        return dataclasses.replace(job, seeds=seeds) if seeds else None

    def train(self, jobs: list, desc: str) -> Iterator[tuple]:
        """Jobs, which have `title`, `cost` and `run`, with their results; the longest begin."""
        jobs = sorted(jobs, key=lambda job: job.cost(), reverse=True)
        return tqdm(self._run(jobs), total=len(jobs), desc=desc, disable=not jobs)

    def _run(self, jobs: list) -> Iterator[tuple]:
        if min(self.processes, len(jobs)) <= 1:
            yield from ((job, job.run(self.device)) for job in jobs)
            return
        with ProcessPoolExecutor(
            self.processes, mp_context=get_context("spawn"), initializer=_prepare_process
        ) as pool:
            started = {pool.submit(job.run, self.device): job for job in jobs}
            failed = []
            try:
                for future in as_completed(started):
                    if future.exception():  # the others go on
                        failed.append(f"{started[future].title()}: {future.exception()}")
                    else:
                        yield started[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(jobs)} jobs failed: " + "; ".join(failed))

    def save(self) -> None:
        """Write all rows, also those that another process has added."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX)
            self.read()
            self._write()

    def _write(self) -> None:
        seen = {", ".join(k): v for k, v in sorted(self.seen.items())}
        if self.rows:
            rows = [[*key, losses] for key, losses in sorted(self.rows.items())]
            write_table(self.folder / "losses.csv", [*self.KEY, "losses"], rows)
        if self.seen:
            checkpoints.write_atomically(self.folder / "watch.json", json.dumps(seen))


def windows(losses: Tensor) -> Tensor:
    """Means over POINTS equal windows of a run, (steps, n) -> (POINTS, n); fewer if it is short."""
    parts = losses.tensor_split(min(POINTS, len(losses)))
    return torch.stack([part.mean(0) for part in parts])
