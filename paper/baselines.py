"""Baselines: AdamW and μAdam, tuned over the paper's grids, and what tuning found.

    best("adamw", "fashion8_mlp", 500)          # from results/tuned/fashion8_mlp.json
    Tuning("adamw", "c10s_mlp_w64_d3", 500, "cosine").run()

Paper: appendix B. `adamw` and `muadam` are tuned at one width and keep their values at all others;
`adamw_default` is AdamW as torch has it, `adamw_oracle` is AdamW whose rate is tuned at each width,
and `muon` is torch's Muon, with Adam for what is not a hidden matrix.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from mulo import recipes, tasks, training
from mulo.checkpoints import write_atomically

if TYPE_CHECKING:
    from mulo import evaluate

TUNED = Path(__file__).parents[1] / "results" / "tuned"
SCHEDULES = {"constant": None, "cosine": 1.0, "cosine2": 2.0}  # by the peak of the cosine
BASELINES = {"adamw": "AdamW", "muadam": "μAdam"}  # AdamW in SP, Adam with the rules of μP
OTHERS = {"adamw_default": "AdamW, default", "adamw_oracle": "AdamW, every width", "muon": "Muon"}
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
USUAL = {"b1": 0.9, "b2": 0.999, "weight_decay": 0.0}
DEFAULT = {"lr": 1e-3, "b1": 0.9, "b2": 0.999, "weight_decay": 0.01}  # torch.optim.AdamW's
RATES = {"adamw": GRIDS["adamw"]["lr"][2:10], "muadam": GRIDS["muadam"]["lr"][15::2]}  # `Tuning`'s
RATES["muon"] = RATES["adamw"]
PAPER = {  # the paper's best, tuned at width 1024 for 1000 steps
    ("adamw", "lm"): (7.02e-4, 0.9, 0.99, 0.001),
    ("adamw", "vit"): (1.70e-4, 0.9, 0.999, 0.01),
    ("adamw", "in32_mlp"): (7.02e-4, 0.9, 0.999, 0.01),
    ("adamw", "in64_mlp"): (7.02e-4, 0.9, 0.99, 0.001),
    ("adamw", "c10_mlp"): (2.89e-3, 0.9, 0.95, 0.0001),
    ("muadam", "lm"): (0.1077, 0.85, 0.999, 0.0),
    ("muadam", "vit"): (0.044173, 0.85, 0.999, 0.0),
    ("muadam", "in32_mlp"): (0.044173, 0.85, 0.999, 0.0),
    ("muadam", "in64_mlp"): (0.028289, 0.85, 0.99, 0.0),
    ("muadam", "c10_mlp"): (0.1473, 0.9, 0.95, 0.0),
}
FINALISTS = 3  # rates that `Tuning` tries with all its seeds
CHUNK = 64  # nets that are tuned side by side


def schedule_of(name: str, steps: int) -> Callable[[int], float] | None:
    """The factor on the learning rate at step t: a cosine decays to a tenth of its peak.

    "cosine2", from 2 to 0.2, is for learned optimizers in short runs.
    """
    peak = SCHEDULES[name]
    return (lambda t: peak * float(training.cosine(t / steps))) if peak else None


def adam(values: list[dict], which: str = "adamw") -> Callable[[tasks.Task], training.Adam]:
    """A baseline for `training.train`, with the hyperparameters of each net."""
    columns = {k: torch.tensor([v[k] for v in values]) for k in FIELDS}
    make = training.Muon if which == "muon" else training.Adam
    return lambda task: make(task, **columns)


def grid(which: str, fixed: dict | None = None) -> list[dict]:
    """All configurations of the paper's grid, or its learning rates with the rest fixed."""
    if fixed:
        return [fixed | {"lr": lr} for lr in GRIDS[which]["lr"]]
    return [dict(zip(FIELDS, v, strict=True)) for v in itertools.product(*GRIDS[which].values())]


def _key(which: str, steps: int, schedule: str, width: int | None) -> str:
    return f"{which}, {steps} steps, {schedule}" + (f", width {width}" if width else "")


def remember(
    entry: dict, which: str, kind: str, steps: int, schedule: str, width: int | None = None
) -> Path:
    """Keep what tuning found in results/tuned/<kind>.json, for one width if one is given."""
    path, command = TUNED / f"{kind}.json", shlex.join(["python", *sys.argv])
    known = json.loads(path.read_text()) if path.exists() else {}
    known[_key(which, steps, schedule, width)] = entry | {"command": command}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return path


def best(
    which: str, kind: str, steps: int, schedule: str = "constant", width: int | None = None
) -> dict | None:
    """The tuned values for tasks of this kind: found by `Tuning`, else the paper's, else None."""
    path, key = TUNED / f"{kind}.json", _key(which, steps, schedule, width)
    if path.exists() and key in (known := json.loads(path.read_text())):
        return known[key]
    if schedule == "constant" and (which, kind) in PAPER and not width:
        return dict(zip(FIELDS, PAPER[which, kind], strict=True))
    return None


def tuned(which: str, task: tasks.Task, steps: int, schedule: str) -> dict:
    """A baseline's hyperparameters: tuned at the meta-trained horizon, or for these steps."""
    if which == "adamw_default":
        return DEFAULT
    horizons = [recipes.recipe("mulo_m", scale).unroll for scale in recipes.SCALES]
    width = task.width if which == "adamw_oracle" else None
    which = "adamw" if width else which
    for length in [steps] if width or schedule != "constant" else [*horizons, steps]:
        if values := best(which, task.kind, length, schedule, width):
            return {k: values[k] for k in FIELDS}
    kind = task.kind
    flags = " --scale paper" if (which, kind) in PAPER else ""
    if width:
        flags += f" --width {width} --every-width"
    if schedule != "constant":
        flags += f" --steps {steps} --schedule {schedule} --rates-only"
    raise ValueError(f"{which} is not tuned for {kind}: run python evaluate.py tune {kind}{flags}.")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A search for a baseline's values, as a job for `evaluate.Results.execute`.

    Unless `configs` are given it is over rates: all by the first seed, the best by all seeds.
    """

    which: str  # "adamw", "muadam" or "muon"
    task: str
    steps: int
    schedule: str = "constant"
    every_width: bool = False  # the values hold for this width alone
    seeds: tuple[int, ...] = (5001, 5002, 5003)
    configs: list[dict] | None = None

    def __str__(self) -> str:
        return f"tuning {self.which} on {self.task}"

    def rates(self) -> list[float]:
        """Fewer for AdamW on wide nets, whose best rates are small."""
        few = self.which == "adamw" and tasks.get(self.task).width >= 1024
        return RATES[self.which][2:7] if few else RATES[self.which]

    def key(self) -> tuple:
        """For `best` and `remember`."""
        task = tasks.get(self.task)
        width = task.width if self.every_width else None
        return self.which, task.kind, self.steps, self.schedule, width

    def search(self, configs: list[dict], seeds: Sequence[int], device: str) -> list[dict]:
        """Every configuration with its final loss (mean over the seeds), best first."""
        task, found = training.with_rules(tasks.get(self.task), self.which == "muadam"), []
        size = max(1, CHUNK // len(seeds))
        for start in tqdm(range(0, len(configs), size), str(self)):
            some = configs[start : start + size]
            losses = training.train(
                task, adam([values for values in some for _ in seeds], self.which), self.steps,
                seeds, len(some), schedule_of(self.schedule, self.steps), device,
            )  # fmt: skip
            scores = training.final_loss(losses).view(len(some), len(seeds)).mean(1)
            found += [c | {"loss": float(x)} for c, x in zip(some, scores, strict=True)]
        return sorted(found, key=lambda c: math.inf if math.isnan(c["loss"]) else c["loss"])

    def run(self, device: str = "cpu", backend: str = "auto") -> dict:
        """The best values, and how they were found."""
        task, configs = tasks.get(self.task), self.configs
        if not configs:
            rest = best(self.which, task.kind, self.steps) or USUAL
            configs = [rest | {"lr": lr} for lr in self.rates()]
            configs = self.search(configs, self.seeds[:1], device)[:FINALISTS]
        found = self.search(configs, self.seeds, device)[0]
        return {k: found[k] for k in (*FIELDS, "loss")} | {
            "width": task.width, "depth": task.depth, "seeds": len(self.seeds),
            "configurations": len(self.configs or self.rates()),
        }  # fmt: skip


def tune_missing(tunings: list[Tuning], results: evaluate.Results) -> None:
    """Tune the baselines that have no values yet; each is kept as it is found."""
    missing = [tuning for tuning in tunings if not best(*tuning.key())]
    for tuning, entry in results.execute(missing, "tuning"):
        remember(entry, *tuning.key())
