"""Dry runs of the experiments: every job that is missing, with its memory and time on a GPU.

    print(report(["width"], SUITES["paper"], Path("results_paper"), estimate.card("a6000")))

`python evaluate.py width --scale paper --dry-run` prints this. Nothing is trained, no data set is
read, and nothing is written but to a temporary copy of the results. Test losses are not counted.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import mulo
from mulo import estimate, metatrain, tasks, training
from mulo.evaluate import Job, Results
from mulo.paper.ablations import MetaTraining
from mulo.paper.baselines import FIELDS, FINALISTS, Tuning
from mulo.paper.claims import EXPERIMENTS, Suite

UNTUNED = dict.fromkeys(FIELDS, math.nan)  # a baseline's values before tuning: as costly as others
GIB = 2**30


class _PlannedError(Exception):
    """Ends an experiment that would now read its results."""


class Plan(Results):
    """Results whose missing jobs are listed in place of being run."""

    def __init__(self, folder: Path, **how):
        super().__init__(folder, **how)
        self.jobs: list[Job | Tuning | MetaTraining] = []

    def run(self, jobs: Iterable[Job], desc: str = "training") -> None:
        known = [
            job if job.who.lo or job.values else dataclasses.replace(job, values=UNTUNED)
            for job in jobs
        ]
        super().run(known, desc)
        raise _PlannedError

    def execute(self, jobs: list, desc: str) -> Iterator[tuple]:
        self.jobs += [job for job in jobs if job not in self.jobs]
        for job in jobs:
            if isinstance(job, MetaTraining):  # an untrained optimizer costs as much
                job.path.parent.mkdir(exist_ok=True)
                mulo.save(metatrain.new_lo(job.recipe), job.path)
            elif isinstance(job, Job):  # so that the next experiment does not list it again
                yield job, [""] * len(job.keys())

    def save(self) -> None:
        """There is nothing to keep."""


class Cost(NamedTuple):
    """Of one job, estimated."""

    steps: int
    nets: int  # side by side
    parameters: int  # of one net, the largest
    bytes: float
    hours: float
    fit: int = 0  # nets that fit into the card's memory, if fewer at a time will do


def cost(job: Job | Tuning | MetaTraining, on: estimate.Card) -> Cost:
    """Memory and time of a job on a card."""
    if isinstance(job, MetaTraining):
        r = job.recipe
        trainer = metatrain.Trainer(r, metatrain.new_lo(r, "meta"), data=False)
        _, size, seconds = estimate.meta_training(trainer, on)
        most = max(sum(p.numel() for p in x.skeleton().parameters()) for x in trainer.tasks)
        return Cost(r.steps, 2 * r.pairs, most, size, seconds * r.steps / 3600)
    if isinstance(job, Tuning):
        task, optimizer = tasks.get(job.task), job.which
        nets = max(len(job.rates()), FINALISTS * len(job.seeds))
        steps = 2 * job.steps  # all rates, then the best with all seeds
    else:
        task, nets = job.get_task(), len(job.seeds)
        optimizer = job.who.lo.config if job.who.lo else job.who.name
        steps = max(job.probe_at) + 1 if job.probe_at else job.steps
    task = training.with_rules(task, True)  # costs as much in SP, and is counted once
    step = estimate.nets_step(task, optimizer, nets)
    fixed, more = estimate.CONTEXT + estimate.data_bytes([task]), step.held + step.count.peak
    splits = isinstance(job, Job) and not job.probe_at
    fit = int(min(nets, (on.memory - fixed) / more * nets)) if splits else 0
    hours = steps * step.seconds(on) / 3600
    return Cost(steps, nets, step.entries // nets, fixed + more, hours, fit)


def line(job: Job | Tuning | MetaTraining, found: Cost, memory: float) -> str:
    what = f"meta-training {job}" if isinstance(job, MetaTraining) else str(job)
    if getattr(job, "schedule", "constant") != "constant":
        what = f"{what}, {job.schedule}"
    text = f"{what:52}{found.steps:>7,} steps {found.nets:>3} nets {found.parameters:>13,} "
    text = f"{text}parameters {found.bytes / GIB:7.2f} GiB {found.hours:8.3f} h"
    if found.bytes <= memory:
        return text
    fix = f"fewer seeds at a time, --at-once {found.fit}" if found.fit > 0 else "use a larger card"
    return f"{text}  more than {memory / GIB:.0f} GiB: {fix}"


def report(names: Iterable[str], suite: Suite, out: Path, on: estimate.Card, **how) -> str:
    """Every missing job of some experiments, and totals; `how` is for `Results`."""
    lines, costs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        if out.is_dir():
            shutil.copytree(out, scratch, dirs_exist_ok=True)
        plan = Plan(Path(scratch), **how)
        for name in names:
            before = len(plan.jobs)
            try:
                EXPERIMENTS[name](suite, plan)
            except _PlannedError:
                pass
            found = [cost(job, on) for job in plan.jobs[before:]]
            pairs = zip(plan.jobs[before:], found, strict=True)
            lines += [f"{name}:", *(f"  {line(job, x, on.memory)}" for job, x in pairs)]
            costs += found
    hours, most = sum(x.hours for x in costs), max((x.bytes for x in costs), default=0)
    over = sum(x.bytes > on.memory for x in costs)
    fits = f"; {over} do not fit" if on.memory < math.inf else ""
    lines.append(
        f"{len(costs)} jobs that {out} does not have, {hours:.1f} GPU-hours, at most "
        f"{most / GIB:.1f} GiB{fits}. Estimated on an {on.name}. {estimate.HOW}"
    )
    return "\n".join(lines)
