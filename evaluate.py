"""Meta-testing: train nets with learned optimizers and tuned baselines, and save their losses.

    python evaluate.py tune fashion8_mlp                 # AdamW and μAdam over the paper's grids
    python evaluate.py task fashion8_mlp_w256_d3 --optimizers mulo_m lo_m adamw muadam

    job = Job(contender("mulo_m"), "fashion8_mlp_w256_d3", steps=500, seeds=(0, 1, 2))
    losses = Results(Path("results")).losses(job)        # (50, seeds); trains only what is missing

A row of results/losses.csv is a net: its optimizer, task, steps, schedule and seed, and its
training loss averaged over 50 equal windows (nan after divergence). With --test, nets train on the
train split only, and a second row has their test losses. Saved nets are not trained again unless
--fresh is given. `paper.py` has the paper's experiments, which use this file.

Baselines (paper, appendix B): `adamw` and `muadam` are tuned at one width and keep their values at
all others; results/tuned has these values. `adamw_default` is AdamW with torch's defaults,
`muon` is orthogonalised momentum (training.Muon) at one rate for all tasks and widths, always under
its own schedule. `adamw_oracle` and `muon_oracle` have their rates tuned at every width.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import mulo
from mulo import checkpoints, kernels, roles, tasks, training
from mulo.checkpoints import write_atomically
from mulo.recipes import DESK, SCALES, Recipe

try:
    import fcntl
except ImportError:  # Windows has no file lock: run one evaluation at a time
    fcntl = None

POINTS = 50  # windows over which the losses of a run are averaged
DATA_SEED = 10_000  # offset of the seeds of batches: nets of all widths see the same batches
HORIZONS = {"desk": DESK["unroll"], "paper": Recipe.unroll}  # length of unrolls in meta-training
WIDEST = {"desk": DESK["widths"][-1], "paper": Recipe.widths[-1]}  # net in meta-training

# ---------------------------------------------------------------- tuned baselines

TUNED = Path(__file__).parent / "results" / "tuned"
SCHEDULES = {"constant": None, "cosine": 1.0, "cosine2": 2.0, "warmup": None}  # peak of the cosine
BASELINES = {"adamw": "AdamW", "muadam": "μAdam"}  # AdamW in SP, Adam under μP
MORE_BASELINES = {
    "adamw_default": "AdamW (default)", "adamw_oracle": "AdamW (every width)", "muon": "Muon",
    "muon_oracle": "Muon (every width)",
}  # fmt: skip
GRIDS = {  # the paper's tables: 504 and 512 configurations
    "adamw": {
        "lr": torch.logspace(-1, -5, 14).tolist(), "b1": [0.9, 0.95, 0.99],
        "b2": [0.95, 0.99, 0.999], "weight_decay": [0.1, 0.01, 0.001, 0.0001],
    },
    "muadam": {
        "lr": torch.logspace(-6, 0, 32).tolist(), "b1": [0.85, 0.9, 0.95, 0.99],
        "b2": [0.9, 0.95, 0.99, 0.999], "weight_decay": [0.0],
    },
}  # fmt: skip
FIELDS = ("lr", "b1", "b2", "weight_decay")
ADAM_DEFAULTS = {"b1": 0.9, "b2": 0.999, "weight_decay": 0.0}
ADAMW_DEFAULTS = {"lr": 1e-3, "b1": 0.9, "b2": 0.999, "weight_decay": 0.01}  # torch.optim.AdamW's
RATES = {"adamw": GRIDS["adamw"]["lr"][2:10], "muadam": GRIDS["muadam"]["lr"][15::2]}  # of `Tuning`
MUON = {"lr": training.Muon.LR, "b1": 0.9, "b2": 0.95, "weight_decay": 0.0}  # b1, b2: of Adam
RATES["muon"] = [MUON["lr"] * 2.0**k for k in range(-2, 3)]
PAPER = {  # the paper's best, tuned at width 1024 for 1000 steps
    "adamw": {
        "lm": (7.02e-4, 0.9, 0.99, 0.001), "vit": (1.70e-4, 0.9, 0.999, 0.01),
        "in32_mlp": (7.02e-4, 0.9, 0.999, 0.01), "in64_mlp": (7.02e-4, 0.9, 0.99, 0.001),
        "c10_mlp": (2.89e-3, 0.9, 0.95, 0.0001),
    },
    "muadam": {
        "lm": (0.1077, 0.85, 0.999, 0.0), "vit": (0.044173, 0.85, 0.999, 0.0),
        "in32_mlp": (0.044173, 0.85, 0.999, 0.0), "in64_mlp": (0.028289, 0.85, 0.99, 0.0),
        "c10_mlp": (0.1473, 0.9, 0.95, 0.0),
    },
}  # fmt: skip
FINALISTS = 3  # rates that `Tuning` tries with all its seeds
CHUNK = 64  # nets that are tuned side by side


def schedule_of(name: str, steps: int) -> Callable[[int], float] | None:
    """The factor on the learning rate at step t: a cosine that decays to a tenth of its peak.

    "cosine2", from 2 to 0.2, is for learned optimizers in short runs, "warmup" is for Muon.
    """
    if name == "warmup":
        return functools.partial(training.warmup_cosine, steps=steps)
    peak = SCHEDULES[name]
    return (lambda t: peak * float(training.cosine(t / steps))) if peak else None


def adam(values: list[dict], name: str = "adamw") -> Callable[[tasks.Task], training.Adam]:
    """A baseline for `training.train`, with the hyperparameters of each net."""
    columns = {k: torch.tensor([v[k] for v in values]) for k in FIELDS}
    baseline = training.Muon if name.startswith("muon") else training.Adam
    return lambda task: baseline(task, **columns)


def grid(name: str) -> list[dict]:
    """All configurations of the paper's grid."""
    return [dict(zip(FIELDS, v, strict=True)) for v in itertools.product(*GRIDS[name].values())]


def best(
    name: str, kind: str, steps: int, schedule: str = "constant", width: int | None = None
) -> dict | None:
    """The tuned values for tasks of this kind: ours, else the paper's, else None."""
    path = TUNED / f"{kind}.json"
    key = f"{name}, {steps} steps, {schedule}" + (f", width {width}" if width else "")
    if path.exists() and key in (known := json.loads(path.read_text())):
        return known[key]
    values = None if width or schedule != "constant" else PAPER.get(name, {}).get(kind)
    return dict(zip(FIELDS, values, strict=True)) if values else None


def remember(
    values: dict, name: str, kind: str, steps: int, schedule: str, width: int | None = None
) -> Path:
    """Save tuned values in results/tuned/<kind>.json, for one width if one is given."""
    path, command = TUNED / f"{kind}.json", shlex.join(["python", *sys.argv])
    known = json.loads(path.read_text()) if path.exists() else {}
    key = f"{name}, {steps} steps, {schedule}" + (f", width {width}" if width else "")
    known[key] = values | {"command": command}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return path


def tuned(name: str, task: tasks.Task, steps: int, schedule: str) -> dict:
    """A baseline's hyperparameters: tuned at the meta-trained horizon, or for these steps."""
    if name in (fixed := {"adamw_default": ADAMW_DEFAULTS, "muon": MUON}):
        return fixed[name]
    width = task.width if name.endswith("_oracle") else None
    name = name.removesuffix("_oracle")
    constant = schedule == "constant" and not width
    for length in [*HORIZONS.values(), steps] if constant else [steps]:
        if values := best(name, task.kind, length, schedule, width):
            return {k: values[k] for k in FIELDS}
    if task.own or name == "muon":
        fix = "compare with adamw_default or muon, which need no tuning"
    else:
        flags = " --scale paper" if task.kind in PAPER["adamw"] else ""
        flags += f" --width {width} --every-width" if width else ""
        flags += f" --steps {steps} --schedule {schedule}" if schedule != "constant" else ""
        fix = f"run python evaluate.py tune {task.kind}{flags}"
    raise ValueError(f"{name} is not tuned for {task.kind}: {fix}.")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A search for a baseline's values, as a job for `Results.execute`.

    Tries learning rates with the first seed, then the best FINALISTS of them with all seeds; with
    `full`, tries the paper's grid with all seeds.
    """

    name: str  # "adamw", "muadam" or "muon"
    task: str
    steps: int
    schedule: str = "constant"
    every_width: bool = False  # for adamw_oracle: save the values for the task's width only
    seeds: tuple[int, ...] = (5001, 5002, 5003)
    full: bool = False

    def __str__(self) -> str:
        return f"tuning {self.name} on {self.task}"

    def key(self) -> tuple:
        """The arguments of `best`, and of `remember` after the values."""
        task = tasks.get(self.task)
        width = task.width if self.every_width else None
        return self.name, task.kind, self.steps, self.schedule, width

    def search(self, configs: list[dict], seeds: Sequence[int], device: str) -> list[dict]:
        """Return every configuration with its final loss (mean over seeds), best first."""
        task, scored = training.with_rules(tasks.get(self.task), self.name == "muadam"), []
        size = max(1, CHUNK // len(seeds))
        for start in tqdm(range(0, len(configs), size), str(self)):
            chunk = configs[start : start + size]
            losses = training.train(
                task, adam([values for values in chunk for _ in seeds], self.name), self.steps,
                seeds, len(chunk), schedule_of(self.schedule, self.steps), device,
            )  # fmt: skip
            scores = training.final_loss(losses).view(len(chunk), len(seeds)).mean(1)
            scored += [c | {"loss": float(x)} for c, x in zip(chunk, scores, strict=True)]
        return sorted(scored, key=lambda c: math.inf if math.isnan(c["loss"]) else c["loss"])

    def run(self, device: str = "cpu", backend: str = "auto") -> dict:
        """Return the best values, with the size of the search."""
        task, finalists = tasks.get(self.task), grid(self.name) if self.full else []
        tried = len(finalists)
        if not self.full:
            known = [best(self.name, task.kind, n) for n in (self.steps, *HORIZONS.values())]
            rest = MUON if self.name == "muon" else next(filter(None, known), ADAM_DEFAULTS)
            wide = self.name == "adamw" and task.width >= 1024  # its best rates are small
            rates = RATES[self.name][2:7] if wide else RATES[self.name]
            configs, tried = [rest | {"lr": lr} for lr in rates], len(rates)
            finalists = self.search(configs, self.seeds[:1], device)[:FINALISTS]
        several = self.full or len(self.seeds) > 1
        winner = (self.search(finalists, self.seeds, device) if several else finalists)[0]
        size = {"width": task.width, "depth": task.depth, "seeds": len(self.seeds)}
        return {k: winner[k] for k in (*FIELDS, "loss")} | size | {"configurations": tried}


# ---------------------------------------------------------------- jobs


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer under test, with its parametrization."""

    name: str
    rules: tuple[str, ...]  # of μP; () is SP
    lo: mulo.LO | None = None  # None: the baseline of that name
    recipe: str | None = None  # name of the recipe that meta-trained it


def contender(name: str) -> Contender:
    """Find an optimizer: a baseline, a shipped name, a file, or the folder of a run."""
    if name in BASELINES | MORE_BASELINES:
        return Contender(name, roles.ALL if name == "muadam" else ())
    folder = Path(name)
    path = checkpoints.find(folder / "lo.pt" if (folder / "lo.pt").is_file() else name)
    recipe = checkpoints.about(path).get("recipe")
    recipe = recipe or {"mup": False, "name": None}  # imported weights, such as VeLO-4000: in SP
    label = folder.parent.name if folder.name == "lo.pt" else folder.name.removesuffix(".npz")
    return Contender(label, roles.ALL if recipe["mup"] else (), mulo.load(path), recipe["name"])


@dataclasses.dataclass(frozen=True)
class Job:
    """Nets to train side by side: one optimizer, one task, several seeds.

    With `test`, nets train on the train split, and their test losses are saved too. With
    `probe_at`, activations at these steps are saved in place of the losses.
    """

    optimizer: Contender
    task: str
    steps: int
    schedule: str = "constant"
    seeds: Sequence[int] = (0,)
    probe_at: Sequence[int] = ()
    test: bool = False
    values: dict | None = dataclasses.field(default=None, compare=False)  # of a baseline
    split: str = dataclasses.field(init=False)  # of the data that nets train on
    digest: str = dataclasses.field(init=False)  # of the optimizer, its rules and the task

    def __post_init__(self):
        lo, rules, values = self.optimizer.lo, self.optimizer.rules, self.values
        muon = lo is None and self.optimizer.name.startswith("muon")
        schedule = "warmup" if muon else self.schedule
        split = "train" if self.test else "all"
        task = tasks.get(self.task, rules=rules, split=split)  # raises if the name is unknown
        if lo is None and values is None:
            # Read once: another process may tune the baseline while this job waits.
            values = tuned(self.optimizer.name, task, self.steps, schedule)
        identity = f"{checkpoints.digest(lo) if lo else list(values.values())} {rules}"
        identity += f" {task.batch_size}" + (task.own.digest if task.own else "")
        digest = hashlib.sha256((identity + " test" * self.test).encode()).hexdigest()[:8]
        fields = {"split": split, "values": values, "digest": digest, "schedule": schedule}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def keys(self, split: str = "") -> list[tuple]:
        """Keys of the results: one per seed, or one per probed step; with split="test", those of
        the test losses. The digest distinguishes optimizers of the same name."""
        head = (self.optimizer.name, self.digest, self.task, str(self.steps), self.schedule)
        if self.probe_at:
            return [(*head, " ".join(map(str, self.seeds)), t) for t in self.probe_at]
        return [(*head, str(seed), split or self.split) for seed in self.seeds]

    def __str__(self) -> str:
        return f"{self.optimizer.name} on {self.task}"

    def run(self, device: str = "cpu", backend: str = "auto") -> dict[tuple, list | dict]:
        """Train, and return the results by key."""
        task = tasks.get(self.task, rules=self.optimizer.rules, split=self.split)
        callback, records = None, []
        if self.probe_at:
            callback, records = training.probe(task, self.probe_at, device)
        elif self.test:
            callback, records = training.watch_test_loss(task, self.steps, device)
        optimizer = self.optimizer.lo or adam([self.values] * len(self.seeds), self.optimizer.name)
        steps = max(self.probe_at) + 1 if self.probe_at else self.steps
        losses = training.train(
            task, optimizer, steps, list(self.seeds), num_steps=self.steps,
            schedule=schedule_of(self.schedule, self.steps), device=device, backend=backend,
            callback=callback, data_seeds=[DATA_SEED + seed for seed in self.seeds],
        )  # fmt: skip
        if self.probe_at:
            return dict(zip(self.keys(), records, strict=True))
        windows = [x.mean(0) for x in losses.tensor_split(min(POINTS, len(losses)))]
        by_key = list(zip(self.keys(), torch.stack(windows, 1).tolist(), strict=True))
        if self.test:
            by_key += zip(self.keys("test"), torch.stack(records, 1).tolist(), strict=True)
        return {key: [float(f"{x:.6g}") for x in values] for key, values in by_key}


# ---------------------------------------------------------------- saved results


def mean_stderr(x: Tensor) -> tuple[float, float]:
    """Mean and standard error over seeds."""
    return float(x.mean()), float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan


def write_table(path: Path, rows: list[Sequence]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, text.getvalue())


def _prepare_process() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # diverged nets produce denormals, which are slow
    training.keep_freed_memory()


def _rough_cost(job) -> int:
    """The cost of a Job or Tuning in arbitrary units; 0 for other jobs."""
    task = tasks.get(job.task) if hasattr(job, "task") else None
    return job.steps * len(job.seeds) * (task.depth * task.width**2 + 20_000) if task else 0


class Results:
    """Finished jobs in a folder: losses.csv and activations.csv. Each job is saved as it ends, so
    an interrupted evaluation can be resumed."""

    KEY = ("optimizer", "digest", "task", "steps", "schedule")

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        processes: int | None = 1,  # None: one per core, 1 on a GPU
        fresh: bool = False,
        backend: str = "auto",
        at_once: int | None = None,  # seeds side by side (not for activations); None: all
    ):
        self.folder, self.fresh, self.at_once = folder, fresh, at_once
        self.processes = processes or (os.cpu_count() if device == "cpu" else 1)
        self.device, self.backend = device, backend
        self.kept: dict[tuple, list[float] | dict[str, tuple[float, float]]] = {}
        self.requested, self.trained = set(), set()  # keys
        self.read()

    def read(self) -> None:
        """Add the results in the files."""
        n, losses, activations = len(self.KEY), "losses.csv", "activations.csv"
        if (self.folder / losses).exists():
            with open(self.folder / losses, newline="") as file:
                head, *rows = csv.reader(file)
            if head[: n + 3] != [*self.KEY, "seed", "split", "loss_0"]:
                raise ValueError(f"{self.folder / losses} has other columns: move it away.")
            self.kept |= {tuple(x[: n + 2]): [float(y) for y in x[n + 2 :] if y] for x in rows}
        if (self.folder / activations).exists():
            with open(self.folder / activations, newline="") as file:
                _, *rows = csv.reader(file)
            for *key, step, layer, change, size in rows:
                record = self.kept.setdefault((*key, int(step)), {})
                record[layer] = float(change), float(size)

    def run(self, jobs: Iterable[Job], desc: str = "training") -> None:
        """Train what is missing, each net once."""
        missing, known = {}, self.trained if self.fresh else self.kept
        for job in jobs:
            keys = job.keys()
            self.requested.update(keys)
            absent = [key not in known for key in keys]
            if job.probe_at:
                parts = [job.seeds] * any(absent)
            else:
                seeds = tuple(itertools.compress(job.seeds, absent))
                size = self.at_once or len(job.seeds)
                parts = [seeds[k : k + size] for k in range(0, len(seeds), size)]
            for part in parts:
                job = dataclasses.replace(job, seeds=part)
                missing[tuple(job.keys())] = job
        if missing:
            for _, by_key in self.execute(list(missing.values()), desc):
                self.kept |= by_key
                self.trained.update(by_key)
                self.save()

    def losses(self, job: Job, split: str = "") -> Tensor:
        """Mean losses in POINTS windows, (POINTS, seeds); trains what is missing.

        With split="test" the test losses, (TEST_TIMES + 1, seeds), the last at the end.
        """
        self.run([job])
        return torch.tensor([self.kept[key] for key in job.keys(split)]).T

    def activations(self, job: Job) -> dict[str, list[tuple[float, float]]]:
        """Change and size of each layer's pre-activations at the probed steps."""
        self.run([job])
        records = [self.kept[key] for key in job.keys()]
        return {layer: [record[layer] for record in records] for layer in records[0]}

    def execute(self, jobs: list, desc: str) -> Iterator[tuple]:
        """Run jobs, the longest first; yield each with its result."""
        jobs = sorted(jobs, key=_rough_cost, reverse=True)
        if min(self.processes, len(jobs)) > 1:
            done = self._in_processes(jobs)
        elif jobs:
            _prepare_process()
            done = ((job, job.run(self.device, self.backend)) for job in jobs)
        else:
            return
        yield from tqdm(done, desc, len(jobs))

    def _in_processes(self, jobs: list) -> Iterator[tuple]:
        failed = []
        with ProcessPoolExecutor(self.processes, get_context("spawn"), _prepare_process) as pool:
            futures = {pool.submit(job.run, self.device, self.backend): job for job in jobs}
            try:
                for future in as_completed(futures):
                    if error := future.exception():  # the other jobs still run
                        failed.append(f"{futures[future]}: {error}")
                    else:
                        yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(jobs)} jobs failed: {'; '.join(failed)}")

    def save(self) -> None:
        """Write all results, including those that another process has added."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX)
            mine = {key: self.kept[key] for key in self.trained}
            self.read()
            self.kept |= mine
            losses = {key: x for key, x in self.kept.items() if isinstance(x, list)}
            probed = {key: x for key, x in self.kept.items() if isinstance(x, dict)}
            if losses:
                columns = [f"loss_{k}" for k in range(max(map(len, losses.values())))]
                rows = [(*key, *losses[key]) for key in sorted(losses)]
                head = (*self.KEY, "seed", "split", *columns)
                write_table(self.folder / "losses.csv", [head, *rows])
            if probed:
                pairs = [(key, layer) for key in sorted(probed) for layer in probed[key]]
                rows = [(*key, layer, *probed[key][layer]) for key, layer in pairs]
                head = (*self.KEY, "seeds", "step", "layer", "change", "size")
                write_table(self.folder / "activations.csv", [head, *rows])


# ---------------------------------------------------------------- command line


def tune(args: argparse.Namespace) -> None:
    """Tune AdamW and μAdam over the paper's grids; with a schedule, their learning rates only."""
    device, sentence = kernels.pick_device(args.device)
    print(sentence)
    task = f"{args.kind}_w{args.width or WIDEST[args.scale]}_d{args.depth}"
    steps, seeds = args.steps or HORIZONS[args.scale], tuple(range(args.seeds))
    full = args.schedule == "constant"
    for name in BASELINES:
        tuning = Tuning(name, task, steps, args.schedule, args.every_width, seeds, full)
        values = tuning.run(device)
        print(f"{BASELINES[name]}: {values}, saved in {remember(values, *tuning.key())}")


def compare(args: argparse.Namespace) -> None:
    """Print final losses: a row for each task, or two with --test; a column for each optimizer."""
    device, sentence = kernels.pick_device(args.device)
    print(sentence)
    if not args.optimizers:
        raise ValueError("name the optimizers to compare: --optimizers mulo_m adamw")
    out = args.out or Path("results")
    results = Results(out, device, args.processes, args.fresh, args.backend)
    optimizers, seeds = [contender(x) for x in args.optimizers], range(args.seeds)
    jobs = {
        task: [Job(c, task, args.steps, args.schedule, seeds, test=args.test) for c in optimizers]
        for task in args.tasks
    }
    results.run(itertools.chain(*jobs.values()))
    print(f"{'':26}" + "".join(f"{c.name:>24}" for c in optimizers))
    for task, row in jobs.items():
        lines = {task: [training.final_loss(results.losses(job)) for job in row]}
        if args.test:
            lines["  test loss"] = [results.losses(job, "test")[-1] for job in row]
        for head, losses in lines.items():
            pairs = [mean_stderr(x) for x in losses]
            cells = [f"{x:.4g}" + ("" if math.isnan(e) else f" ± {e:.1g}") for x, e in pairs]
            print(f"{head:26}" + "".join(f"{cell:>24}" for cell in cells))
    read = len(results.requested - results.trained)
    print(f"{read} of {len(results.requested)} results were read from {out}: --fresh retrains.")


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of 1 or more")
    return int(text)


FLAGS = {
    "kind": dict(help="kind of task, such as fashion8_mlp"),
    "tasks": dict(nargs="+", help="names of tasks, such as fashion8_mlp_w256_d3"),
    "--scale": dict(choices=SCALES, default="desk", help="desk (the default) or paper"),
    "--width": dict(type=positive, help="width (default: the widest of meta-training)"),
    "--depth": dict(type=positive, default=3, help="depth of the nets (default: 3)"),
    "--steps": dict(type=positive, help="length of runs (default: 500; tune: as in meta-training)"),
    "--seeds": dict(type=positive, help="nets per optimizer (default: 5; tune: 3)"),
    "--schedule": dict(choices=SCHEDULES, default="constant", help="of rates (default: constant)"),
    "--test": dict(action="store_true", help="hold out the test data and print the test loss too"),
    "--every-width": dict(action="store_true", help="use the values at this width only (oracle)"),
    "--optimizers": dict(nargs="+", help="shipped names, files, folders of runs, baselines"),
    "--out": dict(type=Path, help="folder of the results (default: results)"),
    "--fresh": dict(action="store_true", help="retrain nets that the folder already has"),
    "--processes": dict(type=positive, help="workers (default: one per core, 1 on a GPU)"),
    "--at-once": dict(type=positive, help="nets side by side: fewer take less memory"),
    "--device": dict(default="auto", help=kernels.DEVICE_HELP),
    "--backend": dict(default="auto", choices=kernels.BACKENDS, help="how learned optimizers step"),
}  # fmt: skip


@contextlib.contextmanager
def one_sentence(program: str) -> Iterator[None]:
    """Exit with one sentence, without a traceback, on Ctrl-C and on expected errors."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(f"{program}: stopped. Finished nets are saved; rerun without --fresh to resume.")
    except (ValueError, OSError, RuntimeError) as error:
        if any(kind.own for kind in tasks.KINDS.values()):  # errors in user code need a traceback
            raise
        sys.exit(f"{program}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Test learned optimizers against tuned baselines.",
        epilog="example: python evaluate.py task fashion8_mlp_w256_d3 --optimizers mulo_m adamw",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, flags, defaults in (
        ("tune", tune, "kind --scale --width --depth --steps --seeds --schedule "
         "--every-width --device", {"seeds": 3}),
        ("task", compare, "tasks --optimizers --steps --seeds --schedule --test --out --fresh "
         "--processes --device --backend", {"seeds": 5, "steps": 500}),
    ):  # fmt: skip
        command = commands.add_parser(name, help=run.__doc__)
        for flag in flags.split():
            command.add_argument(flag, **FLAGS[flag])
        command.set_defaults(run=run, **defaults)
    args = parser.parse_args()
    with one_sentence("evaluate.py"):
        args.run(args)


if __name__ == "__main__":
    main()
