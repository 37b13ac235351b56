"""Meta-testing: train nets with learned optimizers and tuned baselines, and save their losses.

    python evaluate.py tune fashion8_mlp_w64_d3          # AdamW and μAdam over the paper's grids
    python evaluate.py task fashion8_mlp_w256_d3 --optimizers mulo_m lo_m adamw muadam

    job = Job(contender("mulo_m"), "fashion8_mlp_w256_d3", steps=500, seeds=(0, 1, 2))
    losses = Results(Path("results")).losses(job)        # (50, seeds); trains only what is missing

A row of results/losses.csv is a net: its optimizer, task, steps, schedule and seed, and its
training loss averaged over 50 equal windows (nan after divergence). With --test, nets train on the
train split only, and a second row has their test losses. Saved nets are not trained again; to
train them again, give another folder with --out. `paper.py` has the paper's experiments.

Baselines (paper, appendix B): `adamw` and `muadam` are tuned at one width and keep their values at
all other widths, depths and batch sizes; results/tuned has these values. `adamw_default` is AdamW
with torch's defaults. `muon` is orthogonalised momentum (training.Muon) at one rate for all tasks
and widths, always under its own schedule. `adamw_oracle` and `muon_oracle` have their rates tuned
at every width.
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
from filelock import FileLock  # torch requires it
from torch import Tensor
from tqdm import tqdm

import mulo
from mulo import checkpoints, kernels, roles, tasks, training
from mulo.checkpoints import write_atomically
from mulo.recipes import DESK, SCALES, Recipe

WINDOWS = 50  # windows over which the losses of a run are averaged
DATA_SEED = 10_000  # offset of the seeds of batches: nets of all widths see the same batches
HORIZONS = DESK["unroll"], Recipe.unroll  # inner steps of meta-training, at desk and paper scale
COLUMNS = ("optimizer", "digest", "task", "steps", "schedule")  # of both tables
TABLES = {  # file: columns of the key, columns of the numbers
    "losses.csv": ((*COLUMNS, "seed", "split"), [f"loss_{k}" for k in range(WINDOWS)]),
    "activations.csv": ((*COLUMNS, "seeds", "step", "layer"), ["change", "size"]),
}

# ---------------------------------------------------------------- tuned baselines

TUNED = Path(__file__).parent / "results" / "tuned"
SCHEDULES = {  # factor on the learning rate at step t of a run
    "constant": None,
    "cosine": lambda t, steps: float(training.cosine(t / steps)),  # from 1 to 0.1
    "cosine2": lambda t, steps: 2 * float(training.cosine(t / steps)),  # short runs of a μLO
    "warmup": training.warmup_cosine,  # always for Muon
}
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
HYPERPARAMETERS = ("lr", "b1", "b2", "weight_decay")
ADAMW_DEFAULTS = {"lr": 1e-3, "b1": 0.9, "b2": 0.999, "weight_decay": 0.01}  # torch.optim.AdamW's
MUON = {"lr": training.Muon.LR, "b1": 0.9, "b2": 0.95, "weight_decay": 0.0}  # b1, b2: of Adam
RATES = {  # learning rates that a `Tuning` tries
    "adamw": GRIDS["adamw"]["lr"][2:10], "muadam": GRIDS["muadam"]["lr"][15::2],
    "muon": [MUON["lr"] * 2.0**k for k in range(-2, 3)],
}  # fmt: skip
CHUNK = 64  # nets that are tuned side by side


def schedule_of(name: str, steps: int) -> Callable[[int], float] | None:
    return functools.partial(SCHEDULES[name], steps=steps) if SCHEDULES[name] else None


def adam(values: list[dict], name: str = "adamw") -> Callable[[tasks.Task], training.Adam]:
    """A baseline for `training.train`, with the hyperparameters of each net."""
    columns = {k: torch.tensor([v[k] for v in values]) for k in HYPERPARAMETERS}
    baseline = training.Muon if name.startswith("muon") else training.Adam
    return lambda task: baseline(task, **columns)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A search for a baseline's hyperparameters, as a job for `Results.execute`. It tries the
    learning rates in RATES or, with `full`, the paper's grid."""

    name: str  # "adamw", "muadam" or "muon"
    task: str
    steps: int
    schedule: str = "constant"
    every_width: bool = False  # for the oracles: save the values for the task's width only
    seeds: tuple[int, ...] = (5001, 5002, 5003)
    full: bool = False

    def file_and_key(self) -> tuple[Path, str]:
        """Values are saved by kind of task, and by width if they are tuned at every width."""
        task = tasks.get(self.task)
        key = f"{self.name}, {self.steps} steps, {self.schedule}"
        key += f", width {task.width}" if self.every_width else ""
        return TUNED / f"{task.kind}.json", key

    def saved(self) -> dict | None:
        path, key = self.file_and_key()
        return json.loads(path.read_text()).get(key) if path.exists() else None

    def save(self, values: dict) -> Path:
        path, key = self.file_and_key()
        known = json.loads(path.read_text()) if path.exists() else {}
        known[key] = values | {"command": shlex.join(["python", *sys.argv])}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        return path

    def configurations(self) -> list[dict]:
        if self.full:
            grid = itertools.product(*GRIDS[self.name].values())
            return [dict(zip(HYPERPARAMETERS, values, strict=True)) for values in grid]
        lengths = self.steps, *HORIZONS
        saved = [Tuning(self.name, self.task, steps).saved() for steps in lengths]
        default = MUON if self.name == "muon" else ADAMW_DEFAULTS | {"weight_decay": 0.0}
        others = next(filter(None, saved), default)
        return [{k: others[k] for k in HYPERPARAMETERS} | {"lr": lr} for lr in RATES[self.name]]

    def run(self, device: str = "cpu") -> dict:
        """Return the configuration with the lowest final loss (mean over seeds), and that loss."""
        task = tasks.get(self.task, rules=roles.ALL if self.name == "muadam" else ())
        configs, seeds, scores = self.configurations(), list(self.seeds), []
        size, schedule = max(1, CHUNK // len(seeds)), schedule_of(self.schedule, self.steps)
        for start in tqdm(range(0, len(configs), size), f"tuning {self.name} on {self.task}"):
            chunk = configs[start : start + size]
            opt = adam([values for values in chunk for _ in seeds], self.name)
            losses = training.train(task, opt, self.steps, seeds, len(chunk), schedule, device)
            scores.append(training.final_loss(losses).view(len(chunk), len(seeds)).mean(1))
        scores = torch.cat(scores)  # (configurations,)
        k = int(scores.nan_to_num(math.inf).argmin())
        size = {"width": task.width, "depth": task.depth, "seeds": len(seeds)}
        return configs[k] | {"loss": float(scores[k])} | size | {"configurations": len(configs)}


def tuned(name: str, task: tasks.Task, steps: int, schedule: str) -> dict:
    """A baseline's saved hyperparameters: the first that exist of those for runs of 500, 1000 and
    `steps` steps; under a schedule of those for `steps` and, for Muon, 500 and 1000."""
    fixed = {"adamw_default": ADAMW_DEFAULTS, "muon": MUON}
    if name in fixed:
        return fixed[name]
    every_width, kind = name.endswith("_oracle"), name.removesuffix("_oracle")
    lengths = [steps, *HORIZONS] if kind == "muon" else [steps]
    if schedule == "constant":
        lengths = [*HORIZONS, steps]
    for length in lengths:
        if values := Tuning(kind, task.name, length, schedule, every_width).saved():
            return {k: values[k] for k in HYPERPARAMETERS}
    narrow = task.name if every_width else task.name.replace(f"_w{task.width}", "_w64")
    fix = f"run python evaluate.py tune {narrow} --steps {steps} --schedule {schedule}"
    fix += " --every-width" if every_width else ""
    if task.own:
        fix = "compare with adamw_default or muon, which need no tuning"
    elif kind == "muon":
        fix = "use muon, or run python paper.py tune, which tunes the tasks of paper.py"
    raise ValueError(f"{name} is not tuned for {task.name}: {fix}.")


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
    run = Path(name) / "lo.pt"
    path = checkpoints.find(run if run.is_file() else name)
    lo = mulo.load(path)
    if lo.mup is None:
        fix = "save it again with mulo.save(lo, path, mup=True), or False"
        raise ValueError(f"{path} does not say whether it was meta-trained under μP: {fix}.")
    label = path.resolve().parent.name if path.name == "lo.pt" else path.stem
    recipe = (lo.about.get("recipe") or {}).get("name")
    return Contender(label, roles.ALL if lo.mup else (), lo, recipe)


@dataclasses.dataclass
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
    values: dict | None = None  # a baseline's hyperparameters; None: the tuned ones

    def __post_init__(self):
        lo, rules, name = self.optimizer.lo, self.optimizer.rules, self.optimizer.name
        self.split = "train" if self.test else "all"  # of the data that nets train on
        task = tasks.get(self.task, rules=rules, split=self.split)  # raises if unknown
        if lo is None and name.startswith("muon"):
            self.schedule = "warmup"
        if lo is None and self.values is None:
            # Read once: another process may tune the baseline while this job waits.
            self.values = tuned(name, task, self.steps, self.schedule)
        identity = f"{checkpoints.digest(lo) if lo else list(self.values.values())} {rules}"
        identity += f" {task.batch_size}" + (task.own.digest if task.own else "")
        self.digest = hashlib.sha256((identity + " test" * self.test).encode()).hexdigest()[:8]

    def keys(self, split: str = "") -> list[tuple[str, ...]]:
        """Keys of the results: one per seed, or one per probed step and layer; with split="test",
        those of the test losses. The digest distinguishes optimizers of the same name."""
        head = (self.optimizer.name, self.digest, self.task, str(self.steps), self.schedule)
        if not self.probe_at:
            return [(*head, str(seed), split or self.split) for seed in self.seeds]
        modules = tasks.get(self.task).skeleton().named_modules()
        layers = [name for name, module in modules if roles.is_layer(module)]
        head = (*head, " ".join(map(str, self.seeds)))
        return [(*head, str(t), layer) for t in self.probe_at for layer in layers]

    def run(self, device: str = "cpu") -> dict[tuple, list[float]]:
        """Train, and return the results by key."""
        task = tasks.get(self.task, rules=self.optimizer.rules, split=self.split)
        callback, records = None, []
        if self.probe_at:
            callback, records = training.probe(task, self.probe_at, device)
        elif self.test:
            callback, records = training.watch_test_loss(task, self.steps, device)
        optimizer = self.optimizer.lo or adam([self.values] * len(self.seeds), self.optimizer.name)
        losses = training.train(
            task, optimizer, self.steps, list(self.seeds), device=device, callback=callback,
            schedule=schedule_of(self.schedule, self.steps),
            data_seeds=[DATA_SEED + seed for seed in self.seeds],
        )  # fmt: skip
        if self.probe_at:
            return {key: records[int(key[-2]), key[-1]] for key in self.keys()}
        windows = [x.mean(0) for x in losses.tensor_split(min(WINDOWS, len(losses)))]
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


class Results:
    """Finished jobs in a folder: losses.csv and activations.csv. Each job is saved as it ends, so
    an interrupted evaluation can be resumed."""

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        processes: int | None = 1,  # None: one per core, 1 on a GPU
    ):
        self.folder, self.device = folder, device
        self.processes = processes or (os.cpu_count() if device == "cpu" else 1)
        self.kept: dict[tuple, list[float]] = {}
        self.requested, self.trained = set(), set()  # keys
        self.read()

    def read(self) -> None:
        """Add the results in the files."""
        for name, (key, _) in TABLES.items():
            path, n = self.folder / name, len(key)
            if path.exists():
                with open(path, newline="") as file:
                    head, *rows = csv.reader(file)
                if tuple(head[:n]) != key:
                    raise ValueError(f"{path} has other columns: move it away.")
                self.kept |= {tuple(row[:n]): [float(x) for x in row[n:] if x] for row in rows}

    def run(self, jobs: Iterable[Job], desc: str = "training") -> None:
        """Train what is missing, each net once."""
        missing, known = [], set(self.kept)
        for job in jobs:
            keys = job.keys()
            absent = [key not in known for key in keys]
            if any(absent):
                seeds = tuple(itertools.compress(job.seeds, absent))
                missing.append(job if job.probe_at else dataclasses.replace(job, seeds=seeds))
            known.update(keys)
            self.requested.update(keys)
        for _, by_key in self.execute(missing, desc) if missing else ():
            self.kept |= by_key
            self.trained.update(by_key)
            self.save()

    def losses(self, job: Job, split: str = "") -> Tensor:
        """Mean losses in WINDOWS windows, (WINDOWS, seeds); trains what is missing.

        With split="test" the test losses, (TEST_TIMES + 1, seeds), the last at the end.
        """
        self.run([job])
        return torch.tensor([self.kept[key] for key in job.keys(split)]).T

    def activations(self, job: Job) -> dict[str, list[list[float]]]:
        """Change and size of each layer's pre-activations at the probed steps."""
        self.run([job])
        by_layer = {}
        for *key, layer in job.keys():
            by_layer.setdefault(layer, []).append(self.kept[*key, layer])
        return by_layer

    def read_or_trained(self) -> str:
        read, total = len(self.requested - self.trained), len(self.requested)
        return f"{read} of {total} results were read from {self.folder}, not trained."

    def execute(self, jobs: list[Job | Tuning], desc: str) -> Iterator[tuple]:
        """Run jobs, those of long runs and wide nets first; yield each with its result. A failure
        stops the rest."""
        jobs = sorted(jobs, key=lambda job: -job.steps * tasks.get(job.task).width ** 2)
        if min(self.processes, len(jobs)) < 2:
            _prepare_process()
            yield from ((job, job.run(self.device)) for job in tqdm(jobs, desc))
            return
        with ProcessPoolExecutor(self.processes, get_context("spawn"), _prepare_process) as pool:
            futures = {pool.submit(job.run, self.device): job for job in jobs}
            try:
                for future in tqdm(as_completed(futures), desc, len(jobs)):
                    yield futures[future], future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def save(self) -> None:
        """Write all results, including those that another process has added."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):
            self.read()
            for name, (key, columns) in TABLES.items():
                rows = [(*k, *numbers) for k, numbers in self.kept.items() if len(k) == len(key)]
                rows.sort(key=lambda row: row[: len(COLUMNS) + 1])
                if rows:
                    write_table(self.folder / name, [(*key, *columns), *rows])


# ---------------------------------------------------------------- command line


def tune(args: argparse.Namespace) -> None:
    """Tune AdamW and μAdam over the paper's grids; with a schedule, their learning rates only."""
    first, full = Tuning.seeds[0], args.schedule == "constant"
    seeds = tuple(range(first, first + (args.seeds or 3)))  # not those of evaluations
    for name, label in BASELINES.items():
        tuning = Tuning(name, args.task, args.steps, args.schedule, args.every_width, seeds, full)
        values = tuning.run(args.device)
        print(f"{label}: {values}, saved in {tuning.save(values)}")


def compare(args: argparse.Namespace) -> None:
    """Print final losses: a row for each task, or two with --test; a column for each optimizer."""
    results = Results(args.out or Path("results"), args.device, args.processes)
    optimizers = [contender(x) for x in args.optimizers or ("mulo_m", "adamw_default")]
    options = args.steps, args.schedule, range(args.seeds or 5), (), args.test
    jobs = {task: [Job(c, task, *options) for c in optimizers] for task in args.tasks}
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
    print(results.read_or_trained())


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of 1 or more")
    return int(text)


FLAGS = {
    "task": dict(help="name of a task of the width to tune at, such as fashion8_mlp_w64_d3"),
    "tasks": dict(nargs="+", help="names of tasks, such as fashion8_mlp_w256_d3"),
    "--scale": dict(choices=SCALES, default="desk", help="desk (the default) or paper"),
    "--steps": dict(type=positive, default=500, help="length of runs (default: 500)"),
    "--seeds": dict(type=positive, help="nets per optimizer (default: 5; tune: 3)"),
    "--schedule": dict(choices=SCHEDULES, default="constant", help="of the lr (default: constant)"),
    "--test": dict(action="store_true", help="hold out the test data and print the test loss too"),
    "--every-width": dict(action="store_true", help="save the values for this width only (oracle)"),
    "--optimizers": dict(nargs="+", help="shipped names, files, folders of runs, baselines"),
    "--out": dict(type=Path, help="folder of the results (default: results)"),
    "--processes": dict(type=positive, help="workers (default: one per core, 1 on a GPU)"),
    "--device": dict(default="auto", help=kernels.DEVICE_HELP),
}  # fmt: skip


@contextlib.contextmanager
def exit_with_message(program: str) -> Iterator[None]:
    """Exit with one sentence, without a traceback, on Ctrl-C and on expected errors."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(f"{program}: stopped. Results saved so far are kept.")
    except (ValueError, OSError, RuntimeError) as error:
        if any(kind.own for kind in tasks.KINDS.values()):  # errors in user code need a traceback
            raise
        sys.exit(f"{program}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Test learned optimizers against baselines.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, flags in (
        ("tune", tune, "task --steps --schedule --every-width"),
        ("task", compare, "tasks --optimizers --steps --schedule --test --out --processes"),
    ):
        command = commands.add_parser(name, help=run.__doc__)
        for flag in (*flags.split(), "--seeds", "--device"):
            command.add_argument(flag, **FLAGS[flag])
        command.set_defaults(run=run)
    args = parser.parse_args()
    with exit_with_message("evaluate.py"):
        args.device, sentence = kernels.pick_device(args.device)
        print(sentence)
        args.run(args)


if __name__ == "__main__":
    main()
