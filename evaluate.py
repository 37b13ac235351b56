"""Meta-testing: train nets with learned optimizers and tuned baselines, and keep their losses.

    python evaluate.py tune fashion8_mlp                 # AdamW and μAdam over the paper's grids
    python evaluate.py validate runs/*/lo.pt             # on tasks kept for choosing among seeds
    python evaluate.py choose mulo_m runs/mulo_m_desk_seed*    # the best of these into weights/
    python evaluate.py task fashion8_mlp_w256_d3 --who mulo_m lo_m adamw muadam
    python evaluate.py width                             # one of the paper's claims; see --help
    python evaluate.py all                               # all of them, and RESULTS.md

    job = Job(contender("mulo_m"), "fashion8_mlp_w256_d3", steps=500, seeds=(0, 1, 2))
    losses = Results(Path("results")).losses(job)        # (50, seeds); trained unless kept

A row of results/losses.csv is a net: its optimizer, task, steps, schedule and seed, and its
training loss averaged over 50 equal windows, nan after divergence. With --test, nets train without
the test data, and their test losses follow after " | ". Nets that are there are not trained again,
unless with --fresh. The claims are in `paper/`, which builds on this file; only the commands, at
the end, import it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.func import functional_call
from tqdm import tqdm

import mulo
from mulo import checkpoints, kernels, recipes, roles, tasks, training
from mulo.checkpoints import write_atomically
from mulo.optimizees import datasets
from mulo.paper import baselines
from mulo.paper.baselines import BASELINES, OTHERS, SCHEDULES, adam, schedule_of, tuned

try:
    import fcntl
except ImportError:  # Windows: no lock, so run one evaluation at a time
    fcntl = None

POINTS = 50  # windows in which the losses of a run are averaged
TEST_SIZE, TEST_TIMES = 2000, 10  # examples that the test loss is a mean over; times in a run
DATA_SEED = 10_000  # batches have seeds of their own: nets of all widths see the same ones
Activations = dict[str, list[tuple[float, float]]]  # layer: (change, size) at each probed step


def mean_stderr(x: Tensor) -> tuple[float, float]:
    """Mean and standard error over seeds."""
    return float(x.mean()), float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan


def write_table(path: Path, rows: list[list]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, text.getvalue())


# ---------------------------------------------------------------- jobs


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer under test, with its parametrization."""

    name: str
    rules: tuple[str, ...]  # of μP; () is SP
    lo: mulo.LO | None = None  # None: the baseline of that name
    recipe: str | None = None  # name of the recipe that meta-trained it


def contender(name: str) -> Contender:
    """By name: a baseline, a shipped optimizer, a file, or the folder of a meta-training run."""
    if name in BASELINES | OTHERS:
        return Contender(name, roles.ALL if name == "muadam" else ())
    folder = Path(name)
    path = checkpoints.find(folder / "lo.pt" if (folder / "lo.pt").is_file() else name)
    recipe = checkpoints.about(path).get("recipe")
    recipe = recipe or {"mup": False, "name": None}  # others' weights, such as VeLO-4000: in SP
    label = folder.parent.name if folder.name == "lo.pt" else folder.name.removesuffix(".npz")
    return Contender(label, roles.ALL if recipe["mup"] else (), mulo.load(path), recipe["name"])


@dataclasses.dataclass(frozen=True)
class Job:
    """Nets to train side by side: one optimizer, one task, some seeds.

    With `test`, they train without the test data, and their test losses are kept too. With
    `probe_at`, the result is the activations at these steps in place of the losses.
    """

    who: Contender
    task: str
    steps: int
    schedule: str = "constant"
    seeds: tuple[int, ...] = (0,)
    probe_at: tuple[int, ...] = ()
    test: bool = False
    values: dict | None = dataclasses.field(default=None, compare=False)  # a baseline's

    def __post_init__(self):
        task = self.get_task()  # raises an error if there is none of that name
        object.__setattr__(self, "task", task.name)  # not a path, if it was given by its file
        if self.who.lo is None and self.values is None:  # read once: tuning may change the file
            with contextlib.suppress(ValueError):  # not tuned: `keys` says so
                object.__setattr__(self, "values", self._tuned())

    def _tuned(self) -> dict:
        return tuned(self.who.name, self.get_task(), self.steps, self.schedule)

    def get_task(self) -> tasks.Task:
        return tasks.get(self.task, rules=self.who.rules, split="train" if self.test else "all")

    def keys(self) -> list[tuple[str, ...]]:
        """Keys of the results: one for each seed, or one in all for activations.

        A digest of the weights or tuned values, rules, batch size, what was held out and the file
        of a registered task tells namesakes apart.
        """
        lo, task = self.who.lo, self.get_task()
        values = {} if lo else self.values or self._tuned()  # raises if it is not tuned
        what = checkpoints.digest(lo) if lo else list(values.values())
        what = f"{what} {self.who.rules} {task.batch_size}" + (task.own.digest if task.own else "")
        what += " test" * self.test
        digest = hashlib.sha256(what.encode()).hexdigest()[:8]
        head = (self.who.name, digest, self.task, str(self.steps), self.schedule)
        if self.probe_at:
            return [(*head, " ".join(map(str, self.seeds)), " ".join(map(str, self.probe_at)))]
        return [(*head, str(seed)) for seed in self.seeds]

    def __str__(self) -> str:
        return f"{self.who.name} on {self.task}"

    def run(self, device: str = "cpu", backend: str = "auto") -> list:
        """Train, and return the result for each of `keys`."""
        task = self.get_task()
        look, found = None, None
        if self.probe_at:
            look, found = probe(task, self.probe_at, device)
        elif self.test:
            look, found = watch_test_loss(task, self.steps, device)
        losses = training.train(
            task,
            self.who.lo or adam([self.values] * len(self.seeds), self.who.name),
            max(self.probe_at) + 1 if self.probe_at else self.steps,
            list(self.seeds),
            schedule=schedule_of(self.schedule, self.steps),
            device=device,
            backend=backend,
            look=look,
            num_steps=self.steps,
            data_seeds=[DATA_SEED + seed for seed in self.seeds],
        )
        if self.probe_at:
            return [found]
        windows = losses.tensor_split(min(POINTS, len(losses)))
        parts = [torch.stack([window.mean(0) for window in windows], 1)]  # (seeds, POINTS)
        if self.test:
            parts.append(torch.stack(found, 1))  # (seeds, TEST_TIMES + 1)
        digits = ".6g" if task.own else ".4f"  # losses of a registered task have any size
        texts = [[" ".join(f"{x:{digits}}" for x in y) for y in part.tolist()] for part in parts]
        return [" | ".join(both) for both in zip(*texts, strict=True)]


def probe(task: tasks.Task, steps: tuple[int, ...], device: str) -> tuple[Callable, Activations]:
    """A callback for `training.train`, and what it finds: pre-activations y of 64 inputs at some
    steps, as the standard deviation of their change so far, and mean |y|."""
    x = task.data(device=device).batch(torch.Generator().manual_seed(123), 64)[0]
    first, found = {}, {}

    def look(t: int, theta: training.Theta) -> None:
        if t and t not in steps:
            return
        for name, y in pre_activations(task, theta, x).items():
            change = (y - first.setdefault(name, y)).flatten(1).std(1).mean()
            if t:
                pair = tuple(float(f"{v:.5g}") for v in (change, y.abs().mean()))
                found.setdefault(name, []).append(pair)

    return look, found


def watch_test_loss(task: tasks.Task, steps: int, device: str) -> tuple[Callable, list[Tensor]]:
    """A callback for `training.train`, and what it finds: the mean loss of each net on TEST_SIZE
    examples of the test data, (P,), at TEST_TIMES evenly spaced steps and at the end."""
    test = dataclasses.replace(task, split="test").data(device=device)
    sample = datasets.fixed_sample(test, TEST_SIZE)
    chunks, n = list(zip(*(x.split(100) for x in sample), strict=True)), len(sample[0])
    at, found = {k * steps // TEST_TIMES for k in range(TEST_TIMES + 1)}, []

    def look(t: int, theta: training.Theta) -> None:
        if t in at:
            P, sums = len(next(iter(theta.values()))), []
            for chunk in chunks:
                losses = task.losses(theta, tuple(x.expand(P, *x.shape) for x in chunk))
                sums.append(losses * len(chunk[0]))
            found.append(torch.stack(sums).sum(0).cpu() / n)

    return look, found


def pre_activations(task: tasks.Task, theta: training.Theta, x: Tensor) -> dict[str, Tensor]:
    """The output of every layer for inputs x, (P, b, ...) each; the last are the logits."""
    model, found = task.skeleton(), {}
    for name, module in model.named_modules():
        if isinstance(module, roles.LAYERS):
            module.register_forward_hook(lambda m, args, y, name=name: found.__setitem__(name, y))
    P = len(next(iter(theta.values())))
    functional_call(model, theta, (x.expand(P, *x.shape),))
    return found


# ---------------------------------------------------------------- kept results


def _prepare_process() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # nets that a bad optimizer killed are full of them, and slow
    training.keep_freed_memory()


def _rough_cost(job) -> int:
    """Of a Job or a Tuning, in arbitrary units; runs of meta-training count alike."""
    task = tasks.get(job.task) if hasattr(job, "task") else None
    return job.steps * len(job.seeds) * (task.depth * task.width**2 + 20_000) if task else 0


class Results:
    """Finished jobs, in a folder: losses.csv, and watch.json for activations. Each job is saved as
    it ends, so an interrupted evaluation goes on from there."""

    KEY = ("optimizer", "digest", "task", "steps", "schedule", "seed")

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        processes: int = 1,
        fresh: bool = False,
        backend: str = "auto",
        at_once: int | None = None,  # seeds side by side (not for activations); None: all
    ):
        self.folder, self.processes, self.fresh = folder, processes, fresh
        self.at_once, self.how = at_once, (device, backend)
        self.kept: dict[tuple[str, ...], str | Activations] = {}
        self.asked, self.trained = set(), set()  # keys
        self.read()

    def read(self) -> None:
        """Add what the files have."""
        if (self.folder / "losses.csv").exists():
            with open(self.folder / "losses.csv", newline="") as file:
                for row in csv.DictReader(file):
                    self.kept[tuple(row[k] for k in self.KEY)] = row["losses"]
        if (self.folder / "watch.json").exists():
            known = json.loads((self.folder / "watch.json").read_text())
            self.kept |= {tuple(k.split(", ")): v for k, v in known.items()}

    def run(self, jobs: Iterable[Job], desc: str = "training") -> None:
        """Train what is missing, each net once."""
        missing, known = {}, self.trained if self.fresh else self.kept
        for job in jobs:
            self.asked.update(job.keys())
            left = [key not in known for key in job.keys()]
            seeds = tuple(itertools.compress(job.seeds, left))
            size = self.at_once or len(job.seeds)
            parts = [seeds[k : k + size] for k in range(0, len(seeds), size)]
            for part in [job.seeds] * any(left) if job.probe_at else parts:
                job = dataclasses.replace(job, seeds=part)
                missing[tuple(job.keys())] = job
        for job, found in self.execute(list(missing.values()), desc):
            self.kept.update(zip(job.keys(), found, strict=True))
            self.trained.update(job.keys())
            self.save()

    def losses(self, job: Job, test: bool = False) -> Tensor:
        """Mean losses in POINTS windows, (POINTS, seeds); trains what is missing.

        With `test` the test losses, (TEST_TIMES + 1, seeds), the last at the end.
        """
        self.run([job])
        texts = [self.kept[key].split(" | ")[test] for key in job.keys()]
        return torch.tensor([[float(x) for x in text.split()] for text in texts]).T

    def activations(self, job: Job) -> Activations:
        """Change and size of each layer's pre-activations at the probed steps."""
        self.run([job])
        return self.kept[job.keys()[0]]

    def execute(self, jobs: list, desc: str) -> Iterator[tuple]:
        """Run jobs, the longest first; yield each with its result."""
        jobs = sorted(jobs, key=_rough_cost, reverse=True)
        if min(self.processes, len(jobs)) > 1:
            done = self._in_processes(jobs)
        else:
            done = ((job, job.run(*self.how)) for job in jobs)
        yield from tqdm(done, desc, len(jobs), disable=not jobs)

    def _in_processes(self, jobs: list) -> Iterator[tuple]:
        with ProcessPoolExecutor(self.processes, get_context("spawn"), _prepare_process) as pool:
            started = {pool.submit(job.run, *self.how): job for job in jobs}
            try:
                for future in as_completed(started):
                    if not future.exception():  # after a failure the others go on
                        yield started[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        failed = [(job, x.exception()) for x, job in started.items() if x.exception()]
        if failed:
            texts = "; ".join(f"{job}: {error}" for job, error in failed)
            said = f"{len(failed)} of {len(jobs)} jobs failed: {texts}"
            raise RuntimeError(said) from failed[0][1]

    def origin(self) -> str:
        """Where the results came from, as a sentence."""
        read = len(self.asked - self.trained)
        if not read:
            return f"All nets were trained now; their losses are kept in {self.folder}."
        return (
            f"{read} of {len(self.asked)} results were read from {self.folder}, not trained now: "
            "--fresh trains them anew."
        )

    def save(self) -> None:
        """Write all results, including those that another process has added."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX)
            mine = {key: self.kept[key] for key in self.trained}
            self.read()
            self.kept |= mine
            found = sorted(self.kept.items())
            rows = [[*key, x] for key, x in found if isinstance(x, str)]
            probed = {", ".join(key): x for key, x in found if isinstance(x, dict)}
            if rows:
                write_table(self.folder / "losses.csv", [[*self.KEY, "losses"], *rows])
            if probed:
                write_atomically(self.folder / "watch.json", json.dumps(probed))


# ---------------------------------------------------------------- command line
# `paper` imports this file, so it is imported inside the commands that need it.


def _tune(args: argparse.Namespace) -> None:
    r = recipes.recipe("mulo_m", args.scale)
    task = f"{args.kind}_w{args.width or max(r.widths)}_d{args.depth}"
    steps, seeds = args.steps or r.unroll, tuple(range(args.seeds))
    for which, label in BASELINES.items():
        fixed = None
        if args.rates_only:  # the rest as found by the full grid, at the meta-trained horizon
            fixed = baselines.best(which, tasks.get(task).kind, r.unroll)
            if fixed is None:
                raise ValueError(f"first run python evaluate.py tune {args.kind}, the full grid.")
        configs = baselines.grid(which, fixed)
        how = (args.schedule, args.every_width, seeds, configs)
        tuning = baselines.Tuning(which, task, steps, *how)
        entry = tuning.run(args.device)
        path = baselines.remember(entry, *tuning.key())
        print(f"{label}: {entry} of {len(configs)}, kept in {path}")


def _task(args: argparse.Namespace) -> None:
    """Print final losses: a row for each task, or two with --test; a column for each optimizer."""
    if not args.who:
        raise ValueError("say which optimizers to compare: --who mulo_m adamw")
    results = Results(args.out, args.device, args.processes, args.fresh, args.backend)
    who, seeds = [contender(x) for x in args.who], tuple(range(args.seeds))
    jobs = [
        [Job(c, name, args.steps, args.schedule, seeds, test=args.test) for c in who]
        for name in args.tasks
    ]
    results.run(itertools.chain(*jobs))
    print(f"{'':26}" + "".join(f"{c.name:>24}" for c in who))
    for row in jobs:
        lines = {row[0].task: [training.final_loss(results.losses(job)) for job in row]}
        if args.test:
            lines["  test loss"] = [results.losses(job, test=True)[-1] for job in row]
        for head, losses in lines.items():
            found = map(mean_stderr, losses)
            cells = [f"{x:.4g}" + ("" if math.isnan(e) else f" ± {e:.1g}") for x, e in found]
            print(f"{head:26}" + "".join(f"{cell:>24}" for cell in cells))
    print(results.origin())


def _validate(args: argparse.Namespace) -> None:
    from mulo.paper import choose

    for file in args.files:
        lo, recipe = mulo.load(file), checkpoints.about(file).get("recipe")
        scores = choose.validate(lo, recipe, args.device)
        print(f"{file}: {geometric_mean(scores.values()):.4f}  {scores}")


def _choose(args: argparse.Namespace) -> None:
    from mulo.paper import choose

    print(f"chosen: {choose.choose(args.name, args.folders, args.device)}")


def _claims(args: argparse.Namespace) -> None:
    """Test one of the paper's claims, or all: print the sentences, write tables and figures."""
    from mulo.paper import claims, report

    suite = claims.SUITES[args.scale]
    suite = dataclasses.replace(suite, who=tuple(args.who)) if args.who else suite
    names = claims.EXPERIMENTS if args.command == "all" else [args.command]
    results = Results(args.out, args.device, args.processes, args.fresh, args.backend, args.at_once)
    page = Path("RESULTS.md") if args.out == Path("results") else args.out / "RESULTS.md"
    for name in names:
        found = claims.EXPERIMENTS[name](suite, results)
        report.keep(found, name, args.out)
        report.draw_readme_picture(args.out, suite.families[0].kind, suite.families[0].base)
        report.write(args.out, page, suite.scale)
        print("\n".join(found.said))
    print(results.origin())


def _complete(args: argparse.Namespace) -> None:
    """Check numbers, and fill in the defaults that depend on other flags."""
    counts = [getattr(args, k, None) for k in ("seeds", "steps", "width", "processes", "at_once")]
    if any(n is not None and n < 1 for n in counts):
        raise ValueError("--seeds, --steps, --width, --processes, --at-once must be 1 or more.")
    args.device, sentence = kernels.pick_device(args.device)
    print(sentence)
    if "processes" in args:
        args.processes = args.processes or (os.cpu_count() if args.device == "cpu" else 1)
        scale = getattr(args, "scale", "desk")
        args.out = args.out or Path("results" if scale == "desk" else f"results_{scale}")


ARGUMENTS = {
    "kind": dict(help="of task, such as fashion8_mlp, or a file that registers one"),
    "files": dict(type=Path, nargs="+", help="lo.pt of runs"),
    "name": dict(choices=recipes.RECIPES, help="of the recipe"),
    "folders": dict(type=Path, nargs="+", help="of runs"),
    "tasks": dict(nargs="+", help="such as fashion8_mlp_w256_d3 or my_task.py_w256_d3"),
    "--scale": dict(
        choices=recipes.SCALES,
        default="desk",
        help="tasks and lengths for a laptop (desk, the default) or the paper's",
    ),
    "--width": dict(type=int, help="at which to tune (default: the widest of meta-training)"),
    "--depth": dict(type=int, default=3, help="layers of the nets (default: 3)"),
    "--steps": dict(type=int, help="of training (default: 500; for tune, the meta-trained length)"),
    "--seeds": dict(type=int, help="nets to train with each optimizer (default: %(default)s)"),
    "--schedule": dict(
        choices=SCHEDULES, default="constant", help="of the learning rate (default: constant)"
    ),
    "--test": dict(action="store_true", help="hold out the test data and print the test loss too"),
    "--rates-only": dict(
        action="store_true", help="tune learning rates, keep the other tuned values"
    ),
    "--every-width": dict(
        action="store_true", help="keep the values for this width alone (adamw_oracle)"
    ),
    "--who": dict(nargs="+", help="optimizers: adamw, muadam, adamw_default, shipped names, files"),
    "--out": dict(type=Path, help="folder of the results (default: results, or results_paper)"),
    "--fresh": dict(action="store_true", help="train again what the folder already has"),
    "--processes": dict(type=int, help="worker processes (default: one per core, 1 on a GPU)"),
    "--at-once": dict(
        type=int, help="nets trained side by side; fewer take less memory (default: all)"
    ),
    "--device": dict(default="auto", help=kernels.DEVICE_HELP),
    "--backend": dict(
        default="auto", choices=kernels.BACKENDS, help="that runs the step of a learned optimizer"
    ),
}


def _parser() -> argparse.ArgumentParser:
    from mulo.paper import ablations, claims, resnet, transfer  # noqa: F401 (add experiments)

    parser = argparse.ArgumentParser(
        description="Test learned optimizers against tuned baselines.",
        epilog="example: python evaluate.py task fashion8_mlp_w256_d3 --who mulo_m lo_m adamw",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Callable, text: str, arguments: str, **defaults) -> None:
        command = commands.add_parser(name, help=text)
        for argument in arguments.split():
            command.add_argument(argument, **ARGUMENTS[argument])
        command.set_defaults(run=run, **defaults)

    tune = "kind --scale --width --depth --steps --seeds --schedule --rates-only --every-width "
    tune += "--device"
    task = "tasks --steps --seeds --schedule --test --who --out --fresh --processes --device "
    task += "--backend"
    claim = "--scale --who --out --fresh --processes --at-once --device --backend"
    add("tune", _tune, "AdamW and μAdam over the paper's grids", tune, seeds=3)
    add("validate", _validate, "final losses on the validation tasks", "files --device")
    add("choose", _choose, "the best of several runs into weights/", "name folders --device")
    add("task", _task, "any optimizers on any tasks", task, steps=500, seeds=5)
    for name, experiment in claims.EXPERIMENTS.items():
        add(name, _claims, experiment.__doc__.split("\n")[0].rstrip("."), claim)
    add("all", _claims, "all of these, and RESULTS.md", claim)
    return parser


def main() -> None:
    args = _parser().parse_args()
    _prepare_process()
    try:
        _complete(args)
        args.run(args)
    except KeyboardInterrupt:
        but = " without --fresh" if getattr(args, "fresh", False) else ""
        sys.exit(f"evaluate.py: stopped; finished nets are kept, the same command{but} goes on.")
    except (ValueError, OSError, RuntimeError) as error:
        if any(kind.own for kind in tasks.KINDS.values()):  # errors in user code need a traceback
            raise
        sys.exit(f"evaluate.py: {error}")


if __name__ == "__main__":
    from mulo import evaluate  # the module that `paper` imports, so that its classes exist once

    evaluate.main()
