"""Hand-designed baselines, AdamW in SP and μAdam, and their tuning over the paper's grids.

    values = best("muadam", "fashion8_mlp", steps=500)   # hyperparameters found by `tune`
    losses = training.train(task, adam(values), 500, seeds=[0, 1, 2])

Paper: appendix B. Both are tuned on the widest net that the learned optimizers are meta-trained on,
for as many steps, by the final smoothed training loss; `python evaluate.py tune` does that and
keeps what it finds in results/tuned. The paper's own best values are built in for its tasks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch

import tasks
import training
from checkpoints import write_atomically

TUNED = Path(__file__).parent / "results" / "tuned"
NAMES = {"adamw": "AdamW", "muadam": "μAdam"}
GRIDS = {  # the paper's tables: 504 and 512 configurations
    "adamw": {
        "lr": torch.logspace(-1, -5, 14).tolist(),
        "b1": [0.9, 0.95, 0.99],
        "b2": [0.95, 0.99, 0.999],
        "weight_decay": [0.1, 0.01, 0.001, 0.0001],
    },
    "muadam": {
        "lr": torch.logspace(-6, 0, 32).tolist(),
        "b1": [0.85, 0.9, 0.95, 0.99],
        "b2": [0.9, 0.95, 0.99, 0.999],
        "weight_decay": [0.0],
    },
}
USUAL = {"b1": 0.9, "b2": 0.999, "weight_decay": 0.0}
FIELDS = ("lr", "b1", "b2", "weight_decay")
PAPER = {  # the paper's best, tuned at width 1024 for 1000 steps
    "adamw": {
        "lm": (7.02e-4, 0.9, 0.99, 0.001),
        "vit": (1.70e-4, 0.9, 0.999, 0.01),
        "in32_mlp": (7.02e-4, 0.9, 0.999, 0.01),
        "in64_mlp": (7.02e-4, 0.9, 0.99, 0.001),
        "c10_mlp": (2.89e-3, 0.9, 0.95, 0.0001),
    },
    "muadam": {
        "lm": (0.1077, 0.85, 0.999, 0.0),
        "vit": (0.044173, 0.85, 0.999, 0.0),
        "in32_mlp": (0.044173, 0.85, 0.999, 0.0),
        "in64_mlp": (0.028289, 0.85, 0.99, 0.0),
        "c10_mlp": (0.1473, 0.9, 0.95, 0.0),
    },
}


def schedule_of(name: str, steps: int) -> Callable[[int], float] | None:
    """The factor on the rate at step t: none if "constant", "cosine" from 1 to 0.1 over the run."""
    if name == "constant":
        return None
    if name == "cosine":
        return lambda t: 0.55 + 0.45 * float(torch.cos(torch.tensor(torch.pi * t / steps)))
    raise ValueError(f"unknown schedule {name!r}: use constant or cosine.")


def adam(values: dict, nets: int = 1) -> Callable[[tasks.Task], training.Adam]:
    """For `training.train`: a baseline with these values, a number or (nets,) each."""
    numbers = {k: torch.as_tensor(values[k], dtype=torch.float32) for k in FIELDS}
    numbers = {k: v.expand(nets) if v.ndim == 0 else v for k, v in numbers.items()}
    return lambda task: training.Adam(task, **numbers)


def grid(which: str, fixed: dict | None = None) -> list[dict]:
    """All configurations of the paper's grid, or only its rates with the other values fixed."""
    if fixed:
        return [{**fixed, "lr": lr} for lr in GRIDS[which]["lr"]]
    return [dict(zip(FIELDS, v, strict=True)) for v in itertools.product(*GRIDS[which].values())]


def tune(
    which: str,
    task: tasks.Task,
    steps: int,
    seeds: list[int],
    schedule: str = "constant",
    fixed: dict | None = None,  # all but the rate, when only that is tuned
    device: str = "cpu",
    chunk: int = 64,  # nets at a time
    show: Callable = lambda x, **_: x,
) -> list[dict]:
    """Every configuration with its final loss (mean over the seeds), best first."""
    task, found = training.with_rules(task, which == "muadam"), []
    configs = grid(which, fixed)
    size = max(1, chunk // len(seeds))
    for start in show(range(0, len(configs), size), desc=f"{NAMES[which]} on {task.name}"):
        some = configs[start : start + size]
        values = {
            k: torch.tensor([c[k] for c in some]).repeat_interleave(len(seeds)) for k in FIELDS
        }
        losses = training.train(
            task,
            adam(values),
            steps,
            seeds,
            copies=len(some),
            schedule=schedule_of(schedule, steps),
            device=device,
        )
        scores = training.final_loss(losses).view(len(some), len(seeds)).mean(1)
        found += [c | {"loss": float(x)} for c, x in zip(some, scores, strict=True)]
    return sorted(found, key=lambda c: c["loss"] if c["loss"] == c["loss"] else float("inf"))


def _key(which: str, steps: int, schedule: str) -> str:
    return f"{which}, {steps} steps, {schedule}"


def remember(which: str, kind: str, steps: int, schedule: str, entry: dict) -> Path:
    """Keep what tuning found in results/tuned/<kind>.json."""
    path = TUNED / f"{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    known[_key(which, steps, schedule)] = entry
    text = json.dumps(dict(sorted(known.items())), indent=1) + "\n"
    write_atomically(path, text)
    return path


def best(which: str, kind: str, steps: int, schedule: str = "constant") -> dict | None:
    """The tuned values for tasks of this kind: found here, else the paper's, else None."""
    path = TUNED / f"{kind}.json"
    if path.exists():
        known = json.loads(path.read_text())
        if _key(which, steps, schedule) in known:
            return known[_key(which, steps, schedule)]
    if kind in PAPER[which] and schedule == "constant":
        return dict(zip(FIELDS, PAPER[which][kind], strict=True))
    return None
