"""Ablations: meta-training's numbers, epsilons, single μP rules, what happens after the horizon.

    found = ablate(Suite(), Results(Path("results")))         # `python evaluate.py ablate`

Paper: appendix C varies λ1, rates, steps and perturbations; the rest goes beyond it. Variants of
mulo_s, which is meta-trained in minutes on one width, are kept in results/ablate; the others are
mulo_m with something switched off.
"""

from __future__ import annotations

import contextlib
import dataclasses
from itertools import chain
from pathlib import Path

import torch

import mulo
from mulo import checkpoints, metatrain, recipes, roles
from mulo.evaluate import Contender, Job, Results
from mulo.paper.claims import EXPERIMENTS, Suite, cells, guess, lines
from mulo.paper.report import Finding, draw_final
from mulo.training import final_loss

BASE = "mulo_s"
ABLATED = {  # the recipe of the variants: an earlier one, with larger batches and fewer steps
    "batch_size": 64, "steps": 400, "lr": 1e-2, "lr_end": 1e-3, "input_base": 0.0,
    "by_channels": False,
}  # fmt: skip
PARTS = ("meta-training", "epsilons", "μP rules")
EPSILONS = ("base", "eps_rms 0", "relative epsilons")  # these also on the widest net
TIME = {  # what happens after the meta-trained horizon: schedule, changes to the config
    "as shipped; cosine": ("cosine", {}),
    "as shipped; constant": ("constant", {}),
    "no annealing; constant": ("constant", {"anneal": 0.0}),
    "no annealing, no t_max; constant": ("constant", {"anneal": 0.0, "t_max": None}),
}


@dataclasses.dataclass(frozen=True)
class MetaTraining:
    """A meta-training run, as a job for `Results.execute`."""

    recipe: recipes.Recipe
    path: Path

    def __str__(self) -> str:
        return self.path.stem

    def done(self) -> bool:
        """Whether the file is there, and was made by this recipe."""
        if not self.path.exists():
            return False
        wanted = dataclasses.asdict(self.recipe)
        numbers = wanted.keys() - {"backend", "widths"}  # all backends compute the same
        found = checkpoints.about(self.path)["recipe"]
        same = all(k not in found or found[k] == wanted[k] for k in numbers)
        return same and tuple(found["widths"]) == self.recipe.widths

    def run(self, device: str = "cpu", backend: str = "auto") -> None:
        recipe = dataclasses.replace(self.recipe, backend=backend)
        trainer = metatrain.Trainer(recipe, recipes.new_lo(recipe, device))
        with contextlib.suppress(FloatingPointError):  # a variant that fails is kept as it is then
            for _ in range(self.recipe.steps):
                trainer.advance()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mulo.save(trainer.result(), self.path, recipe=dataclasses.asdict(self.recipe))


def variants(suite: Suite, results: Results) -> dict[str, list[Contender]]:
    """Variants of BASE, from several seeds each; meta-trains what is missing."""
    base, runs = recipes.recipe(BASE, suite.scale), {}
    if suite.scale == "desk":
        base = dataclasses.replace(base, **ABLATED)
    for name, changes in {
        "base": {},
        "eps_rms 0": {"eps_rms": 0.0},
        "relative epsilons": {"eps": "relative"},
        "lr / 3": {"lr": base.lr / 3, "lr_end": base.lr_end / 3},
        "lr x 3": {"lr": 3 * base.lr, "lr_end": 3 * base.lr_end},
        "lam1 0.001": {"lam1": 0.001},
        "lam1 0.1": {"lam1": 0.1},
        "half the steps": {"steps": base.steps // 2},
        "twice the steps": {"steps": 2 * base.steps},
        "4 pairs": {"pairs": 4},
        "16 pairs": {"pairs": 16},
    }.items():
        for seed in range(suite.ablate_seeds):
            fields = changes | dict(suite.ablate_recipe) | {"seed": seed}
            file = f"{name.replace(' ', '_').replace('/', 'by')}_seed{seed}.pt"
            r = dataclasses.replace(base, **fields)
            runs[name, seed] = MetaTraining(r, results.folder / "ablate" / file)
    missing = [run for run in runs.values() if not run.done()]
    for _ in results.execute(missing, "meta-training"):
        pass
    found = {}
    for (name, seed), run in runs.items():
        c = Contender(f"{name}, seed {seed}", roles.ALL, mulo.load(run.path))
        found.setdefault(name, []).append(c)
    return found


def ablate(suite: Suite, results: Results) -> Finding:
    """Meta-training's numbers, epsilons, single μP rules, t_max and a schedule."""
    found = Finding(3, ("part", "variant", "width", "horizons", "loss", "stderr", "nets"))
    meta, first, shipped = variants(suite, results), suite.families[0], suite.contenders("mulo_m")
    shipped, (*widths, widest) = shipped["mulo_m"], suite.ablate_widths

    def job(who: Contender, width: int, times: int = 1, schedule: str = "constant") -> Job:
        seeds = 1 if width >= 1024 else 2
        return suite.job(who, first.task(width), times, schedule, seeds)

    rules = {"all rules": [shipped]}
    for left_out in roles.ALL:
        name, rest = f"without {left_out}", tuple(rule for rule in roles.ALL if rule != left_out)
        rules[name] = [dataclasses.replace(shipped, name=f"mulo_m {name}", rules=rest)]
    epsilons = {name: meta[name] for name in EPSILONS}
    numbers = {name: c for name, c in meta.items() if name not in EPSILONS[1:]}
    jobs = {}
    for part, some in zip(PARTS, (numbers, epsilons, rules), strict=True):
        for name, who in some.items():
            jobs |= {(part, name, w): [job(c, w) for c in who] for w in widths}
            if name in EPSILONS:
                jobs[part, name, widest] = [job(who[0], widest)]
    for name, (schedule, config) in TIME.items():
        who = shipped
        if config:
            lo = shipped.lo.with_config(**config)
            who = dataclasses.replace(shipped, name=f"mulo_m, {name.split(';')[0]}", lo=lo)
        jobs["time", name, first.base] = [job(who, first.base, 5, schedule)]
    results.run(chain(*jobs.values()), "ablate")
    final = {key: torch.cat([final_loss(results.losses(job)) for job in some])
             for key, some in jobs.items()}  # fmt: skip
    for (part, name, w), x in final.items():
        found.rows.append([part, name, w, 5 if part == "time" else 1, *cells(x), len(x)])
    for ax, part in zip(found.axes, PARTS, strict=True):
        means = [float(x.mean()) for key, x in final.items() if key[0] == part]
        seen = [m for m in means if m < guess(first.kind)]  # divergence is off the scale
        top = 1.05 * max(seen, default=guess(first.kind))
        draw_final(ax, lines(final, part), top, title=part)
        ax.legend(fontsize=7)
    loss = {key: float(x.mean()) for key, x in final.items()}
    ablation_checks(found, suite, list(meta), loss)
    return found


def ablation_checks(found: Finding, suite: Suite, names: list[str], loss: dict) -> None:
    """Add the sentences of the ablations, and the checks, from mean final losses."""
    top, widest = suite.ablate_widths[-2:]
    variant = {name: loss[PARTS[name in EPSILONS], name, top] for name in names}
    wide = {name: loss["epsilons", name, widest] for name in EPSILONS}
    rules = {name: x for (part, name, w), x in loss.items() if (part, w) == ("μP rules", top)}
    late = {name.replace(";", ","): x for (part, name, _), x in loss.items() if part == "time"}
    for what, some in (
        (f"Variants of {BASE}, width {top}", variant),
        (f"Epsilons, width {widest}", wide),
        (f"mulo_m, width {top}", rules),
        ("mulo_m after 5 horizons", late),
    ):
        found.said.append(f"{what}: {', '.join(f'{name} {x:.3f}' for name, x in some.items())}.")
    relative = "relative epsilons are ahead of the reference's on the widest net"
    shipped, free = late["as shipped, constant"], late["no annealing, constant"]
    found.checks |= {
        "λ1 = 0.01 is ahead of 0.001 and 0.1": not any(
            variant[name] <= variant["base"] for name in ("lam1 0.001", "lam1 0.1")
        ),
        "t_max helps beyond the horizon": free <= late["no annealing, no t_max, constant"],
        "annealing helps beyond the horizon": shipped <= free,
        "a cosine schedule helps beyond the horizon": late["as shipped, cosine"] <= shipped,
        relative: wide["relative epsilons"] <= wide["base"],
    }
    for rule in roles.ALL:
        claim = f"without the rule on {rule} a net {top} wide ends worse"
        found.checks[claim] = not rules[f"without {rule}"] <= rules["all rules"]


EXPERIMENTS["ablate"] = ablate
