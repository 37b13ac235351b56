"""What each choice is worth: meta-training's numbers, epsilons, the μP rules, time, a schedule.

    found = ablate(Suite(), Cells(Path("results")), Path("results"))      # `evaluate.py ablate`

Variants of mulo_s, which is meta-trained in minutes on one width, each from a few seeds, are kept
in results/ablate; other variants are the shipped mulo_m with something off. Paper: appendix C for
the first; the rest goes beyond it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

import checkpoints
import metatrain
import mulo
import roles
from cells import Cells, Contender, Job, contender
from experiments import Suite, guess
from report import Finding, draw_ends, figure, save, summary, width_axis, write_table
from training import final_loss

BASE = "mulo_s"
META: dict[str, dict | Callable[[metatrain.Recipe], dict]] = {  # changes to the recipe
    "as shipped": {},
    "eps_rms 0": {"eps_rms": 0.0},
    "relative epsilons": {"eps": "relative"},
    "lr / 3": lambda r: {"lr": r.lr / 3, "lr_end": r.lr_end / 3},
    "lr x 3": lambda r: {"lr": 3 * r.lr, "lr_end": 3 * r.lr_end},
    "lam1 0.001": {"lam1": 0.001},
    "lam1 0.1": {"lam1": 0.1},
    "half the steps": lambda r: {"steps": r.steps // 2},
    "twice the steps": lambda r: {"steps": 2 * r.steps},
    "4 pairs": {"pairs": 4},
    "16 pairs": {"pairs": 16},
}
WIDE = ("as shipped", "eps_rms 0", "relative epsilons")  # of these, also the widest net
TIME = {  # what happens after the meta-trained horizon
    "no annealing": {"anneal": 0.0},
    "no annealing, no t_max": {"anneal": 0.0, "t_max": None},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is run."""

    changes: dict  # to every recipe
    seeds: tuple[int, ...]  # of meta-training
    widths: tuple[int, ...]
    widest: int  # for the epsilons only
    single: int  # from this width on, one net each


DESK = Sizes({}, (0, 1), (64, 256, 1024), 4096, 1024)
TINY = {"steps": 2, "pairs": 1, "unroll": 10, "shortest": 10, "truncation": 5}
SMOKE = Sizes(TINY, (0,), (8,), 16, 16)


@dataclasses.dataclass(frozen=True)
class Training:
    """A meta-training run, for `Cells`."""

    recipe: metatrain.Recipe
    path: Path

    def title(self) -> str:
        return self.path.stem

    def cost(self) -> int:
        return self.recipe.steps * self.recipe.pairs

    def done(self) -> bool:
        """Whether the file is there, and of this recipe."""
        if not self.path.exists():
            return False
        found, wanted = checkpoints.about(self.path)["recipe"], dataclasses.asdict(self.recipe)
        return wanted | found | {"widths": tuple(found["widths"])} == wanted

    def run(self, device: str = "cpu") -> None:
        trainer = metatrain.Trainer(self.recipe, metatrain.new_lo(self.recipe, device))
        with contextlib.suppress(FloatingPointError):  # a variant that fails stays as it is then
            for _ in range(self.recipe.steps):
                trainer.advance()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mulo.save(trainer.result(), self.path, recipe=dataclasses.asdict(self.recipe))


def variants(sizes: Sizes, folder: Path, scale: str = "desk") -> dict[str, list[Training]]:
    """The meta-training runs behind each variant."""
    found, base = {}, metatrain.recipe(BASE, scale)
    for name, changes in META.items():
        changes = changes(base) if callable(changes) else changes
        found[name] = []
        for seed in sizes.seeds:
            r = metatrain.recipe(BASE, scale, seed=seed, **(changes | sizes.changes))
            path = folder / f"{name.replace(' ', '_').replace('/', 'by')}_seed{seed}.pt"
            found[name].append(Training(r, path))
    return found


def ablate(suite: Suite, cells: Cells, out: Path) -> Finding:
    """Meta-training's numbers, epsilons, single μP rules, t_max and a schedule."""
    sizes = SMOKE if suite.steps < 100 else DESK
    trained = variants(sizes, out / "ablate", suite.scale)
    missing = [x for some in trained.values() for x in some if not x.done()]
    for _ in cells.train(missing, "meta-training"):
        pass
    kind, seeds = suite.kinds[0], tuple(range(min(2, suite.seeds)))
    rows, fig, axes = [], *figure(3)

    def job(who: Contender, width: int, times: int = 1, schedule: str = "constant") -> Job:
        few = seeds[:1] if width >= sizes.single else seeds
        return Job(who, f"{kind}_w{width}_d3", times * suite.steps, schedule, few)

    meta: dict[str, list[Contender]] = {
        name: [
            Contender(f"{name}, seed {x.recipe.seed}", roles.ALL, mulo.load(x.path)) for x in some
        ]
        for name, some in trained.items()
    }
    shipped = next((c for c in suite.contenders() if c.name == "mulo_m"), contender("mulo_m"))
    rules = {"all rules": shipped} | {
        f"without {rule}": dataclasses.replace(
            shipped, name=f"mulo_m without {rule}", rules=tuple(r for r in roles.ALL if r != rule)
        )
        for rule in roles.ALL
    }
    limits = {"as shipped": shipped} | {
        name: dataclasses.replace(
            shipped, name=f"mulo_m, {name}", lo=shipped.lo.with_config(**fields)
        )
        for name, fields in TIME.items()
    }

    widths = (*sizes.widths, sizes.widest)
    jobs = [job(c, w) for some in meta.values() for c in some for w in sizes.widths]
    jobs += [job(meta[name][0], sizes.widest) for name in WIDE]
    jobs += [job(c, w) for c in rules.values() for w in sizes.widths]
    timed = [("as shipped", "cosine"), *((name, "constant") for name in limits)]
    jobs += [job(limits[name], suite.widest, 5, schedule) for name, schedule in timed]
    cells.fill(jobs, "ablate")

    ends = {}  # variant: final losses at each width, over all nets and meta-seeds
    for name, some in meta.items():
        ends[name] = [
            torch.cat([final_loss(cells.losses(job(c, w))) for c in some]) for w in sizes.widths
        ]
        if name in WIDE:
            ends[name].append(final_loss(cells.losses(job(some[0], sizes.widest))))
    for name, c in rules.items():
        ends[name] = [final_loss(cells.losses(job(c, w))) for w in sizes.widths]
    groups = {
        "meta-training": ["as shipped", *(name for name in META if name not in WIDE)],
        "epsilons": list(WIDE),
        "μP rules": list(rules),
    }
    for ax, (title, names) in zip(axes, groups.items(), strict=True):
        for k, name in enumerate(names):
            draw_ends(ax, list(widths)[: len(ends[name])], ends[name], name, f"C{k}")
            for w, x in zip(widths, ends[name], strict=False):
                rows.append([title, name, w, 1, *(f"{v:.4f}" for v in summary(x)), len(x)])
        width_axis(ax, list(widths))
        ax.set(ylabel="final loss", title=title)
        means = [summary(x)[0] for name in names for x in ends[name]]
        seen = [m for m in means if m < guess(kind)]  # what diverges is off the scale
        if seen:
            ax.set_ylim(0.95 * min(seen), 1.05 * max(seen))
        ax.legend(fontsize=7)
    long = {}
    for name, schedule in timed:
        x = final_loss(cells.losses(job(limits[name], suite.widest, 5, schedule)))
        long[f"{name}, {schedule}"] = summary(x)[0]
        values = (f"{v:.4f}" for v in summary(x))
        rows.append(["time", f"{name}; {schedule}", suite.widest, 5, *values, len(x)])
    save(fig, out / "ablate.png")
    head = ["part", "variant", "width", "horizons", "loss", "stderr", "nets"]
    write_table(out / "ablate.csv", head, rows)
    return _finding(ends, long, sizes)


def _finding(ends: dict, long: dict[str, float], sizes: Sizes) -> Finding:
    last = {name: summary(x[-1])[0] for name, x in ends.items()}
    top = {name: summary(x[len(sizes.widths) - 1])[0] for name, x in ends.items()}
    said = [
        f"Variants of {BASE}, width {sizes.widths[-1]}: "
        + ", ".join(f"{name} {top[name]:.3f}" for name in META) + ".",
        f"Epsilons, width {sizes.widest}: "
        + ", ".join(f"{name} {last[name]:.3f}" for name in WIDE) + ".",
        f"mulo_m, width {sizes.widths[-1]}: "
        + ", ".join(f"{name} {last[name]:.3f}" for name in ends if name not in META) + ".",
        "mulo_m after 5 horizons: " + ", ".join(f"{k} {x:.3f}" for k, x in long.items()) + ".",
    ]  # fmt: skip
    full = last["all rules"]
    checks = {
        "λ1 = 0.01 is ahead of 0.001 and 0.1": not (
            top["lam1 0.001"] <= top["as shipped"] or top["lam1 0.1"] <= top["as shipped"]
        ),
        "t_max helps beyond the horizon": long["no annealing, constant"]
        <= long["no annealing, no t_max, constant"],
        "annealing helps beyond the horizon": long["as shipped, constant"]
        <= long["no annealing, constant"],
        "a cosine schedule helps beyond the horizon": long["as shipped, cosine"]
        <= long["as shipped, constant"],
        "relative epsilons are ahead of the reference's on the widest net": last[
            "relative epsilons"
        ]
        <= last["as shipped"],
    }
    for rule in roles.ALL:
        without = last[f"without {rule}"]
        name = f"without the rule on {rule} a net {sizes.widths[-1]} wide ends worse"
        checks[name] = not without <= full
    return Finding("\n".join(said), checks)
