"""The variants of mulo_s that `python paper.py ablate` compares. Their files are in this folder.

Paper: appendix C varies λ1, rates, steps and perturbations; the epsilons are ours. The base is an
earlier desk recipe, with larger batches and fewer steps. Delete a file to meta-train it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from itertools import product
from pathlib import Path
from typing import NamedTuple

import mulo
from mulo import metatrain, roles
from mulo.evaluate import Contender, Results

BASE = {
    "batch_size": 64, "steps": 400, "lr": 1e-2, "lr_end": 1e-3, "input_base": 0.0,
    "by_channels": False,
}  # fmt: skip
SEEDS = 2


class MetaTraining(NamedTuple):
    """A meta-training run, as a job for `Results.execute`."""

    recipe: metatrain.Recipe
    path: Path

    def __str__(self) -> str:
        return self.path.stem

    def run(self, device: str = "cpu", backend: str = "auto") -> None:
        recipe = dataclasses.replace(self.recipe, backend=backend)
        trainer = metatrain.Trainer(recipe, metatrain.new_lo(recipe, device))
        with contextlib.suppress(FloatingPointError):  # keep a variant that diverged as it is
            for _ in range(recipe.steps):
                trainer.advance()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mulo.save(trainer.result(), self.path, recipe=dataclasses.asdict(self.recipe))


def load(results: Results, scale: str) -> dict[str, list[Contender]]:
    """Load SEEDS optimizers of each variant; meta-trains those that are missing."""
    base = metatrain.recipe("mulo_s", scale, **(BASE if scale == "desk" else {}))
    changes = {
        "base": {}, "eps_rms 0": {"eps_rms": 0.0}, "relative epsilons": {"eps": "relative"},
        "lr / 3": {"lr": base.lr / 3, "lr_end": base.lr_end / 3},
        "lr x 3": {"lr": 3 * base.lr, "lr_end": 3 * base.lr_end},
        "lam1 0.001": {"lam1": 0.001}, "lam1 0.1": {"lam1": 0.1},
        "half the steps": {"steps": base.steps // 2}, "twice the steps": {"steps": 2 * base.steps},
        "4 pairs": {"pairs": 4}, "16 pairs": {"pairs": 16},
    }  # fmt: skip
    runs, contenders = {}, {}
    for (name, fields), seed in product(changes.items(), range(SEEDS)):
        file = f"{name.replace(' ', '_').replace('/', 'by')}_seed{seed}.pt"
        recipe = dataclasses.replace(base, **fields, seed=seed)
        runs[name, seed] = MetaTraining(recipe, results.folder / "ablate" / file)
    list(results.execute([x for x in runs.values() if not x.path.exists()], "meta-training"))
    for (name, seed), run in runs.items():
        c = Contender(f"{name}, seed {seed}", roles.ALL, mulo.load(run.path))
        contenders.setdefault(name, []).append(c)
    return contenders
