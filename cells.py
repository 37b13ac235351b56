"""The losses of every net trained in evaluation, kept: what is finished is not run again.

    cells = Cells(Path("results/losses.csv"))
    losses = cells.get(contender("mulo_m"), task, steps=500, schedule="constant", seeds=[0, 1, 2])

One row of the file is one net: which optimizer trained it, on which task, for how long, under which
schedule of the rate, from which seed, and its smoothed training loss at 50 equally spaced times.
All seeds of a cell are trained side by side. A net that diverges is a result like any other: its
loss is nan from there on.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import baselines
import checkpoints
import metatrain
import mulo
import stacked
import tasks

POINTS = 50


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer under test, with its parametrization."""

    name: str
    mup: bool
    lo: mulo.LO | None = None  # None: the baseline of that name

    def optimizer(self, kind: str, steps: int, schedule: str, nets: int) -> mulo.LO | Callable:
        """For `stacked.train`."""
        if self.lo is not None:
            return self.lo
        return baselines.optimizer(self.name, self._values(kind, steps, schedule), nets)

    def digest(self, kind: str, steps: int, schedule: str, batch_size: int) -> str:
        """What distinguishes optimizers of one name: weights or tuned values, and the batch."""
        if self.lo is not None:
            what = checkpoints.digest(self.lo)
        else:
            values = self._values(kind, steps, schedule)
            what = repr([values[k] for k in baselines.FIELDS])
        return hashlib.sha256(f"{what} {batch_size}".encode()).hexdigest()[:8]

    def _values(self, kind: str, steps: int, schedule: str) -> dict:
        """A baseline's hyperparameters; under a schedule with the rate tuned for it."""
        tuned_for = steps if schedule != "constant" else metatrain.recipe("mulo_m").unroll
        values = baselines.best(self.name, kind, tuned_for, schedule)
        if values is None:
            flags = f"--steps {tuned_for} --schedule {schedule} --rates-only"
            flags = "" if schedule == "constant" else f" {flags}"
            raise ValueError(
                f"{self.name} is not tuned for {kind}: run python evaluate.py tune {kind}{flags}"
            )
        return values


def contender(name: str) -> Contender:
    """By name: adamw, muadam, a shipped optimizer, or the folder of a meta-training run."""
    if name in baselines.NAMES:
        return Contender(name, name == "muadam")
    folder = Path(name)
    path = folder / "lo.pt" if (folder / "lo.pt").is_file() else name
    lo = mulo.load(path)
    shipped = checkpoints.SHIPPED / f"{name}.pt"
    about = checkpoints.about(path if Path(path).is_file() else shipped)
    if "recipe" not in about:
        raise ValueError(f"{name} does not tell its recipe: take one that metatrain.py made.")
    label = folder.parent.name if folder.name == "lo.pt" else folder.name
    return Contender(label, about["recipe"]["mup"], lo)


class Cells:
    """A file of trained nets; rows are added as cells are finished, by rename."""

    KEY = ("optimizer", "digest", "task", "steps", "schedule", "seed")

    def __init__(self, path: Path, device: str = "cpu"):
        self.path, self.device, self.rows = path, device, {}
        if path.exists():
            with open(path, newline="") as file:
                for row in csv.DictReader(file):
                    self.rows[tuple(row[k] for k in self.KEY)] = row["losses"]

    def get(
        self, who: Contender, task: tasks.Task, steps: int, schedule: str, seeds: list[int]
    ) -> Tensor:
        """Smoothed losses at POINTS times, (POINTS, seeds); trained now where they are missing."""
        kind = task.name[: task.name.rindex("_w")]
        digest = who.digest(kind, steps, schedule, task.batch_size)
        keys = [(who.name, digest, task.name, str(steps), schedule, str(s)) for s in seeds]
        missing = [(k, seed) for k, seed in zip(keys, seeds, strict=True) if k not in self.rows]
        if missing:
            todo = [seed for _, seed in missing]
            losses = stacked.train(
                stacked.with_rules(task, who.mup),
                who.optimizer(kind, steps, schedule, len(todo)),
                steps,
                todo,
                schedule=baselines.schedule_of(schedule, steps),
                device=self.device,
            )
            for (key, _), curve in zip(missing, windows(losses).T.tolist(), strict=True):
                self.rows[key] = " ".join(f"{x:.4f}" for x in curve)
            self.save()
        found = [[float(x) for x in self.rows[key].split()] for key in keys]
        return torch.tensor(found).T

    def save(self) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.KEY, "losses"])
        writer.writerows([*key, losses] for key, losses in sorted(self.rows.items()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        checkpoints.write_atomically(self.path, lambda file: file.write(text.getvalue().encode()))


def windows(losses: Tensor) -> Tensor:
    """Means over POINTS equal windows of a run, (steps, n) -> (POINTS, n); fewer if it is short."""
    parts = losses.tensor_split(min(POINTS, len(losses)))
    return torch.stack([part.mean(0) for part in parts])
