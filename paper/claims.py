"""The paper's claims, each tested by an experiment: a table, a figure, a sentence, checks.

    found = width(Suite(), Results(Path("results")))
    print(found.said, found.checks)

Paper: section 5, and appendix C for the ablations, most of which go beyond it. `python evaluate.py
width` and so on run them. All training goes through `Results`, so a second run only draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from itertools import chain, pairwise
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import checkpoints
import metatrain
import mulo
import roles
import tasks
from evaluate import Contender, Job, Results, contender, mean_stderr
from paper.report import Finding, colour, draw_curves, draw_final, figure, label, width_axis
from training import final_loss

PAIRS = {"mulo_m": "lo_m", "muvelo_m": "velo_m"}  # the same recipe in μP and in SP


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is tested. The paper's widths are 2, 4 and 8 times those seen in meta-training too."""

    who: tuple[str, ...] = ("mulo_m", "muvelo_m", "lo_m", "velo_m", "adamw", "muadam")
    kinds: tuple[str, ...] = ("fashion8_mlp", "teacher_mlp")  # the second was not meta-trained on
    widest: int = 64  # of the meta-training tasks
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    columns: tuple[int, ...] = (128, 256, 512)  # widths in the table of ranks: Large, XL, XXL
    depths: tuple[int, ...] = (3, 4, 8, 16)
    steps: int = 500  # the meta-trained horizon
    horizons: tuple[int, ...] = (5, 10, 25)
    seeds: int = 5
    scale: str = "desk"
    ablate_widths: tuple[int, ...] = (64, 256, 1024, 4096)  # the last for epsilons only
    ablate_seeds: int = 2  # of meta-training
    ablate_recipe: tuple[tuple[str, int], ...] = ()  # changes to every recipe

    def contenders(self) -> list[Contender]:
        """By the names of their recipes, also where they come from the folders of runs."""
        found = [contender(name) for name in self.who]
        found = [dataclasses.replace(c, name=c.recipe or c.name) for c in found]
        if len({c.name for c in found}) < len(found):
            raise ValueError("--who has two runs of one recipe: compare these by evaluate.py task.")
        return found

    def get(self, name: str) -> Contender:
        """The contender of this name, or the shipped one."""
        return next((c for c in self.contenders() if c.name == name), None) or contender(name)

    def job(self, who: Contender, task: str, times: int = 1, schedule: str = "constant") -> Job:
        return Job(who, task, times * self.steps, schedule, tuple(range(self.seeds)))

    def probe(self, who: Contender, task: str, times: int, at: list[int], seeds: int) -> Job:
        seeds = tuple(range(min(seeds, self.seeds)))
        return dataclasses.replace(self.job(who, task, times), seeds=seeds, probe_at=tuple(at))


SUITES = {
    "desk": Suite(),
    "paper": Suite(
        kinds=("in32_mlp", "in64_mlp", "c10_mlp"), widest=1024,
        widths=(128, 256, 512, 1024, 2048, 4096, 8192), columns=(2048, 4096, 8192),
        steps=1000, scale="paper",
    ),
}  # fmt: skip


def guess(kind: str) -> float:
    """The loss of guessing."""
    return math.log(tasks.get(f"{kind}_w8_d3").classes)


def cells(x: Tensor) -> list[str]:
    """Mean and standard error over seeds, for a table."""
    return [f"{v:.4f}" for v in mean_stderr(x)]


def falls(losses: list[Tensor], paired: bool = False) -> bool:
    """Whether final losses fall: nowhere up by more than the standard error, and down overall.

    Nets of one seed see the same batches, so the error of their differences (paired) is smaller
    than that of two means, and the check is stricter.
    """
    for a, b in pairwise(losses):
        (before, s), (now, t) = mean_stderr(a), mean_stderr(b)
        error = mean_stderr(b - a)[1] if paired else math.hypot(s, t)
        if not now <= before + error:
            return False
    return bool(losses[-1].mean() < losses[0].mean())


def stopped(losses: list[Tensor]) -> bool:
    """Whether the last is not better than the best before it by more than the standard error."""
    *before, (mean, error) = map(mean_stderr, losses)
    best = min((x for x in before if not math.isnan(x[0])), default=(math.inf, 0.0))
    return not mean < best[0] - math.hypot(error, best[1])


def worse(a: Tensor, b: Tensor) -> bool:
    """Whether the mean final loss a is above b; divergence is above all."""
    return not float(a.nan_to_num(math.inf).mean()) <= float(b.nan_to_num(math.inf).mean())


def ranked(x: Tensor) -> Tensor:
    """Ranks from 1, (n,); ties share their mean rank."""
    below, equal = (x < x[:, None]).sum(1), (x == x[:, None]).sum(1)
    return 1 + below + (equal - 1) / 2


def ordered(losses: dict[str, Tensor]) -> str:
    """Mean final losses as text, best first; what diverged is last."""
    means = {name: float(x.mean()) for name, x in losses.items()}
    order = sorted(means, key=lambda name: (math.isnan(means[name]), means[name]))
    digits = {name: ".3f" if x < 100 else ".0e" for name, x in means.items()}
    return ", ".join(f"{label(n)} {means[n]:{digits[n]}}" for n in order).replace("nan", "diverged")


class Sweep:
    """Nets of several sizes trained by each optimizer: {optimizer: a tensor for each size}."""

    def __init__(
        self,
        suite: Suite,
        results: Results,
        who: list[Contender],
        task: str,
        sizes: tuple[int, ...],
    ):
        jobs = {c.name: [suite.job(c, task.format(size)) for size in sizes] for c in who}
        results.run(chain(*jobs.values()))
        self.curves = {n: [results.losses(job) for job in some] for n, some in jobs.items()}
        self.final = {n: [final_loss(x) for x in some] for n, some in self.curves.items()}
        self.last_curve = {n: some[-1] for n, some in self.curves.items()}  # (POINTS, seeds) each
        self.last = {n: some[-1] for n, some in self.final.items()}  # (seeds,) each


# ---------------------------------------------------------------- experiments


def width(suite: Suite, results: Results) -> Finding:
    """Final loss against width, and training curves at the largest width."""
    who, widths, said, checks = suite.contenders(), suite.widths, [], {}
    table = [["kind", "optimizer", "width", "loss", "stderr", "change", "its stderr"]]
    fig, axes = figure(2 * len(suite.kinds))
    for kind, ax, beside in zip(suite.kinds, axes[::2], axes[1::2], strict=True):
        sweep, top, parts = Sweep(suite, results, who, f"{kind}_w{{}}_d3", widths), guess(kind), []
        draw_final(ax, widths, sweep.final, kind, 1.1 * top)
        ax.axvline(suite.widest, color="0.8", zorder=0)
        title = f"{kind}, width {widths[-1]}"
        draw_curves(beside, sweep.last_curve, suite.steps, title, 1.2 * top)
        for name, losses in sweep.final.items():
            changes = [["", ""], *(cells(b - a) for a, b in pairwise(losses))]
            for w, x, change in zip(widths, losses, changes, strict=True):
                change = ["" if v == "nan" else v for v in change]
                table.append([kind, name, w, *cells(x), *change])
            means = [float(x.mean()) for x in losses]
            low = min((m for m in means if not math.isnan(m)), default=math.nan)
            shape = "falls" if falls(losses) else f"lowest {low:.3f}"
            parts.append(f"{label(name)} {means[0]:.3f} -> {means[-1]:.3f} ({shape})")
        said.append(
            f"{kind}, width {widths[0]} to {widths[-1]}: {'; '.join(parts)}. "
            "(Falls: nowhere up by more than the standard error.)"
        )
        checks |= width_checks(kind, suite, sweep.final)
    axes[0].legend(fontsize=8)
    return Finding("\n".join(said), checks, table, fig)


def width_checks(kind: str, suite: Suite, final: dict[str, list[Tensor]]) -> dict[str, bool]:
    checks, top, seen = {}, f"width {suite.widths[-1]}", 4 * suite.widest
    for mu, sp in PAIRS.items():
        if mu in final and sp in final:
            claim, other = f"{kind}: the loss of {label(mu)} falls", f"{kind}: {label(sp)}"
            beyond = [k for k, w in enumerate(suite.widths) if w > seen]
            checks |= {
                f"{claim}, within the standard error, up to {top}": falls(final[mu]),
                f"{claim} up to {top} within the (smaller) standard error of differences between "
                "nets of one seed": falls(final[mu], paired=True),
                f"{other} is worse at every width beyond {seen}": all(
                    worse(final[sp][k], final[mu][k]) for k in beyond
                ),
                f"{other} has stopped improving by {top}": stopped(final[sp]),
            }
    return checks


def rank(suite: Suite, results: Results) -> Finding:
    """Average rank over tasks at each column's width, at 1, 3 and 5 horizons.

    VeLO is told the length of its run: at 3 horizons, read from the run of 5, it is midway. A net
    that diverged counts as one that guesses.
    """
    who, runs = suite.contenders(), {1: 1, 3: 5, 5: 5}  # horizons: length of the run
    columns = [(t, w) for t in runs for w in suite.columns]
    jobs = {
        kind: [[suite.job(c, f"{kind}_w{w}_d3", runs[t]) for c in who] for t, w in columns]
        for kind in suite.kinds
    }
    results.run(chain(*chain(*jobs.values())), "rank")
    ranks = {}  # (columns, who) each
    for kind, columns_of_jobs in jobs.items():
        found = []
        for (t, _), some in zip(columns, columns_of_jobs, strict=True):
            losses = torch.stack([final_loss(results.losses(job), t / runs[t]) for job in some])
            losses = losses.nan_to_num(guess(kind)).clamp_max(guess(kind))  # (who, seeds)
            found.append(ranked(losses.mean(1)))
        ranks[kind] = torch.stack(found)
    ranks = {"all": torch.stack(list(ranks.values())).mean(0)} | ranks
    table = [["tasks", "optimizer", *(f"{t}x, width {w}" for t, w in columns)]]
    for kind, found in ranks.items():
        for c, row in zip(who, found.T.tolist(), strict=True):
            table.append([kind, c.name, *(f"{x:.2f}" for x in row)])
    said, checks, names = [], {}, [c.name for c in who]
    for kind, t in [*(("all", t) for t in runs), *((kind, 1) for kind in jobs)]:
        average = ranks[kind][[k for k, column in enumerate(columns) if column[0] == t]].mean(0)
        parts = [f"{label(names[k])} {float(average[k]):.2f}" for k in average.argsort()]
        where = "" if kind == "all" else f" on {kind} alone"
        said.append(f"Average rank after {t} horizon(s){where}, best first: {', '.join(parts)}.")
    said.append(
        "(AdamW and μAdam are tuned on each kind of task; of these the learned optimizers have "
        f"seen {suite.kinds[0]} alone in meta-training.)"
    )
    for (t, w), row in zip(columns, ranks["all"].tolist(), strict=True):
        for claim, some, sign in (
            ("μLO_M and μVeLO_M have the two best average ranks", PAIRS.keys(), 1),
            ("LO_M and VeLO_M have the two worst", PAIRS.values(), -1),
        ):
            inside = [sign * x for name, x in zip(names, row, strict=True) if name in some]
            others = [sign * x for name, x in zip(names, row, strict=True) if name not in some]
            if inside and others:
                claim = f"{claim} at width {w}, after {t} horizon(s)"
                checks[claim] = max(inside) < min(others)
    return Finding("\n".join(said), checks, table, draw_ranks(ranks, names, columns))


def draw_ranks(
    ranks: dict[str, Tensor], names: list[str], columns: list[tuple[int, int]]
) -> Figure:
    fig, axes = figure(len(ranks))
    for ax, (kind, found) in zip(axes, ranks.items(), strict=True):
        for name, line in zip(names, found.T, strict=True):
            for k, part in enumerate(line.chunk(3)):  # one for each horizon
                at = range(k * len(part), (k + 1) * len(part))
                ax.plot(at, part, "o-", label="" if k else label(name), color=colour(name))
        ax.set_xticks(range(len(columns)), [f"{t}x\n{w}" for t, w in columns], fontsize=7)
        ax.set(xlabel="horizons, width", title=f"{kind} tasks" if kind == "all" else kind)
        ax.invert_yaxis()
    axes[0].set_ylabel("average rank")
    axes[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return fig


def depth(suite: Suite, results: Results) -> Finding:
    """Nets of 3 to 16 layers."""
    kind, deepest = suite.kinds[0], suite.depths[-1]
    task = f"{kind}_w{suite.widest}_d{{}}"
    sweep = Sweep(suite, results, suite.contenders(), task, suite.depths)
    (fig, axes), top = figure(2), 1.2 * guess(kind)
    draw_final(axes[0], suite.depths, sweep.final, f"{kind}, width {suite.widest}", top, "layers")
    draw_curves(axes[1], sweep.last_curve, suite.steps, f"{kind}, {deepest} layers", top)
    axes[0].legend(fontsize=8)
    table = [["kind", "optimizer", "depth", "loss", "stderr"]]
    for name, losses in sweep.final.items():
        table += [[kind, name, d, *cells(x)] for d, x in zip(suite.depths, losses, strict=True)]
    last = sweep.last
    checks = {
        f"{label(mu)} is ahead of {label(sp)} at {deepest} layers": worse(last[sp], last[mu])
        for mu, sp in PAIRS.items()
        if mu in last and sp in last
    }
    for name in [name for name in last if name in PAIRS]:
        bound = min(1.05 * float(sweep.last_curve[name].mean(1).min()), 0.9 * guess(kind))
        claim = f"{label(name)} trains {deepest} layers, its loss not rising"
        checks[claim] = float(last[name].mean()) <= bound
    return Finding(f"{deepest} layers, final loss: {ordered(last)}.", checks, table, fig)


def horizon(suite: Suite, results: Results) -> Finding:
    """Training for 25 horizons, at constant rates and under a cosine schedule."""
    who, kind, longest, said, checks = (
        suite.contenders(),
        suite.kinds[0],
        suite.horizons[-1],
        [],
        {},
    )
    task = f"{kind}_w{suite.widest}_d3"
    runs = [("constant", longest), *(("cosine", times) for times in suite.horizons)]
    results.run([suite.job(c, task, t, schedule) for schedule, t in runs for c in who], "horizon")
    table = [["schedule", "horizons", "optimizer", "loss", "stderr", "lowest"]]
    fig, axes = figure(2)
    for schedule, times in runs:
        curves = {c.name: results.losses(suite.job(c, task, times, schedule)) for c in who}
        final = {name: final_loss(x) for name, x in curves.items()}
        for name, x in curves.items():
            lowest = float(x.mean(1).min())
            table.append([schedule, times, name, *cells(final[name]), f"{lowest:.4f}"])
            if schedule == "constant" and name in PAIRS:
                claim = f"{label(name)} does not rise by more than 5% over {times} horizons"
                checks[claim] = float(final[name].mean()) <= 1.05 * lowest
        if schedule == "cosine" and {"mulo_m", "adamw"} <= final.keys():
            claim = f"μLO_M with cosine is level with AdamW with cosine, {times} horizons"
            checks[claim] = float(final["mulo_m"].mean()) <= 1.02 * float(final["adamw"].mean())
        if times == longest:
            ax = axes[schedule == "cosine"]
            draw_curves(ax, curves, times, f"{task}, {schedule}", xlabel="meta-trained horizons")
            ax.set_ylim(0, 0.5 * guess(kind))
        said.append(f"After {times} horizons, {schedule}: {ordered(final)}.")
    axes[0].legend(fontsize=8)
    return Finding("\n".join(said), checks, table, fig)


def coord(suite: Suite, results: Results) -> Finding:
    """Coordinate check over the first 500 steps: does the drift of a layer depend on width?"""
    who, kind, verdicts, checks = suite.contenders(), suite.kinds[0], [], {}
    widths = [w for w in suite.widths if w <= 16 * suite.widest]
    at = [t for t in (5, 10, 50, 100, 250, 499) if t < suite.steps]  # before, hidden layers rest
    jobs = [[suite.probe(c, f"{kind}_w{w}_d3", 1, at, seeds=3) for w in widths] for c in who]
    results.run(chain(*jobs), "coord")
    table = [["optimizer", "layer", "mean |slope|", *(f"t={t}" for t in at)]]
    fig, axes = figure(len(who))
    for ax, c, some in zip(axes, who, jobs, strict=True):
        found, worst = [results.activations(job) for job in some], 0.0
        for layer in found[0]:
            drift = torch.tensor([[change for change, _ in x[layer]] for x in found]).double()
            slopes = roles.slope(widths, drift.T)  # (times,)
            mean = float(slopes.abs().mean())
            table.append([c.name, layer, f"{mean:.3f}", *(f"{x:.3f}" for x in slopes.tolist())])
            worst = math.inf if math.isnan(mean) else max(worst, mean)
            ax.plot(widths, drift[:, -1], marker="o", label=f"{layer} ({mean:.2f})")
        verdict = "pass" if worst <= 0.1 else "fail"
        verdicts.append(f"{label(c.name)} {verdict} ({worst:.2f})")
        claim = f"{label(c.name)} {'passes' if c.rules else 'fails'} the coordinate check"
        checks[claim] = (worst <= 0.1) == bool(c.rules)
        width_axis(ax, widths)
        ax.set(yscale="log", title=f"{label(c.name)}: {verdict}")
        ax.legend(fontsize=7)
    axes[0].set_ylabel(f"change of pre-activations, step {at[-1]}")
    said = "Mean |slope| of log drift against log width, in the worst layer: "
    return Finding(f"{said}{', '.join(verdicts)}.", checks, table, fig)


def stability(suite: Suite, results: Results) -> Finding:
    """L1 norms of first-layer pre-activations and logits: a deep net, and a long run."""
    who, task, checks = suite.contenders(), f"{suite.kinds[0]}_w{suite.widest}", {}
    deep, long = f"{suite.depths[-1]} layers", "5 horizons"
    jobs = {}
    for title, name, times in ((deep, f"{task}_d{suite.depths[-1]}", 1), (long, f"{task}_d3", 5)):
        every = max(1, times * suite.steps // 25)
        at = list(range(every, times * suite.steps, every))
        jobs[title] = [suite.probe(c, name, times, at, seeds=2) for c in who]
    results.run(chain(*jobs.values()), "stability")
    table, said = [["task", "optimizer", "layer", "early", "late"]], []
    fig, axes = figure(2 * len(jobs))
    for title, some, pair in zip(jobs, jobs.values(), (axes[:2], axes[2:]), strict=True):
        late = {}  # of the first layer
        for job in some:
            found, name = results.activations(job), job.who.name
            layers = list(found)
            for ax, layer in zip(pair, (layers[0], layers[-1]), strict=True):
                norms = [norm for _, norm in found[layer]]
                ax.plot(job.probe_at, norms, label=label(name), color=colour(name))
                ax.set(xlabel="step", yscale="log", title=f"{title}: {layer}")
                table.append([job.task, name, layer, f"{norms[0]:.4g}", f"{norms[-1]:.4g}"])
                said += [f"{label(name)} {norms[0]:.4g} -> {norms[-1]:.4g}"] * (title == long)
                late.setdefault(name, norms[-1])
        if {"mulo_m", "lo_m"} <= late.keys():
            claim = f"{title}: first-layer pre-activations are smaller with μLO_M than LO_M"
            checks[claim] = late["mulo_m"] < math.inf and not late["lo_m"] <= late["mulo_m"]
    axes[0].set_ylabel("mean |pre-activation|")
    axes[0].legend(fontsize=7)
    head = "Mean |first-layer pre-activation| and |logit|, early to late: "
    return Finding(f"{head}{', '.join(said)}.", checks, table, fig)


def distribution(suite: Suite, results: Results) -> Finding:
    """One width in meta-training against three, with μP and without."""
    who = [suite.get(name) for name in ("mulo_m", "mulo_s", "lo_m", "lo_s")]
    widths, kind = [w for w in suite.widths if w <= 16 * suite.widest], suite.kinds[0]
    sweep = Sweep(suite, results, who, f"{kind}_w{{}}_d3", widths)
    fig, [ax] = figure(1)
    draw_final(ax, widths, sweep.final, kind, 1.1 * guess(kind))
    ax.legend(fontsize=8)
    table, where = [["kind", "optimizer", "width", "loss", "stderr"]], f"width {widths[-1]}"
    for name, losses in sweep.final.items():
        table += [[kind, name, w, *cells(x)] for w, x in zip(widths, losses, strict=True)]
    checks = {
        f"{label(a)} is ahead of {label(b)} at {where}": worse(sweep.last[b], sweep.last[a])
        for a, b in (("mulo_m", "mulo_s"), ("mulo_s", "lo_s"), ("mulo_m", "lo_m"))
    }
    return Finding(f"{kind}, {where}, final loss: {ordered(sweep.last)}.", checks, table, fig)


# ---------------------------------------------------------------- ablations
# Variants of mulo_s, which is meta-trained in minutes on one width, are kept in results/ablate;
# the others are mulo_m with something switched off.

BASE = "mulo_s"
EPSILONS = ("as shipped", "eps_rms 0", "relative epsilons")  # these also on the widest net
TIME = {  # what happens after the meta-trained horizon
    "as shipped": {},
    "no annealing": {"anneal": 0.0},
    "no annealing, no t_max": {"anneal": 0.0, "t_max": None},
}


def recipes(base: metatrain.Recipe) -> dict[str, dict]:
    """Variants of a recipe, by what is changed."""
    return {
        "as shipped": {},
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
    }


@dataclasses.dataclass(frozen=True)
class MetaTraining:
    """A meta-training run, as a job for `Results.execute`."""

    recipe: metatrain.Recipe
    path: Path

    def title(self) -> str:
        return self.path.stem

    def cost(self) -> int:
        return self.recipe.steps * self.recipe.pairs

    def done(self) -> bool:
        """Whether the file is there, and was made by this recipe."""
        if not self.path.exists():
            return False
        found, wanted = checkpoints.about(self.path)["recipe"], dataclasses.asdict(self.recipe)
        return wanted | found | {"widths": tuple(found["widths"])} == wanted

    def run(self, device: str = "cpu") -> None:
        trainer = metatrain.Trainer(self.recipe, metatrain.new_lo(self.recipe, device))
        with contextlib.suppress(FloatingPointError):  # a variant that fails is kept as it is then
            for _ in range(self.recipe.steps):
                trainer.advance()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mulo.save(trainer.result(), self.path, recipe=dataclasses.asdict(self.recipe))


def variants(suite: Suite, results: Results) -> dict[str, list[Contender]]:
    """The variants of mulo_s, from several seeds each; meta-trains what is missing."""
    runs = {}
    for name, changes in recipes(metatrain.recipe(BASE, suite.scale)).items():
        for seed in range(suite.ablate_seeds):
            fields = changes | dict(suite.ablate_recipe) | {"seed": seed}
            file = f"{name.replace(' ', '_').replace('/', 'by')}_seed{seed}.pt"
            run = MetaTraining(
                metatrain.recipe(BASE, suite.scale, **fields), results.folder / "ablate" / file
            )
            runs.setdefault(name, []).append(run)
    missing = [run for run in chain(*runs.values()) if not run.done()]
    for _ in results.execute(missing, "meta-training"):
        pass
    return {
        name: [
            Contender(f"{name}, seed {seed}", roles.ALL, mulo.load(run.path))
            for seed, run in enumerate(some)
        ]
        for name, some in runs.items()
    }


def ablate(suite: Suite, results: Results) -> Finding:
    """Meta-training's numbers, epsilons, single μP rules, t_max and a schedule."""
    meta, shipped, kind = variants(suite, results), suite.get("mulo_m"), suite.kinds[0]
    *widths, widest = suite.ablate_widths

    def job(who: Contender, width: int, times: int = 1, schedule: str = "constant") -> Job:
        seeds = tuple(range(1 if width >= 1024 else min(2, suite.seeds)))
        whole = suite.job(who, f"{kind}_w{width}_d3", times, schedule)
        return dataclasses.replace(whole, seeds=seeds)

    jobs = {name: [[job(c, w) for c in some] for w in widths] for name, some in meta.items()}
    for name in EPSILONS:
        jobs[name].append([job(meta[name][0], widest)])
    rules = {"all rules": shipped}
    for left_out in roles.ALL:
        name, rest = f"without {left_out}", tuple(rule for rule in roles.ALL if rule != left_out)
        rules[name] = dataclasses.replace(shipped, name=f"mulo_m {name}", rules=rest)
    jobs |= {name: [[job(c, w)] for w in widths] for name, c in rules.items()}
    long = {"as shipped; cosine": job(shipped, suite.widest, 5, "cosine")}
    for name, config in TIME.items():
        c = dataclasses.replace(
            shipped, name=f"mulo_m, {name}", lo=shipped.lo.with_config(**config)
        )
        long[f"{name}; constant"] = job(c if config else shipped, suite.widest, 5)
    results.run([*chain(*chain(*jobs.values())), *long.values()], "ablate")

    final = {  # at each width, over nets and meta-training seeds
        name: [torch.cat([final_loss(results.losses(job)) for job in some]) for some in at_widths]
        for name, at_widths in jobs.items()
    }
    late = {name: final_loss(results.losses(job)) for name, job in long.items()}
    parts = {"meta-training": ["as shipped", *(name for name in meta if name not in EPSILONS)]}
    parts |= {"epsilons": EPSILONS, "μP rules": rules}
    table = [["part", "variant", "width", "horizons", "loss", "stderr", "nets"]]
    fig, axes = figure(3)
    for ax, (part, names) in zip(axes, parts.items(), strict=True):
        draw_final(ax, suite.ablate_widths, {name: final[name] for name in names}, part)
        for name in names:
            for w, x in zip(suite.ablate_widths, final[name], strict=False):
                table.append([part, name, w, 1, *cells(x), len(x)])
        means = [float(x.mean()) for name in names for x in final[name]]
        seen = [m for m in means if m < guess(kind)]  # divergence is off the scale
        if seen:
            ax.set_ylim(0.95 * min(seen), 1.05 * max(seen))
        ax.legend(fontsize=7)
    table += [["time", name, suite.widest, 5, *cells(x), len(x)] for name, x in late.items()]
    return Finding(*ablation_checks(suite, meta, final, late), table, fig)


def ablation_checks(suite: Suite, meta: dict, final: dict, late: dict) -> tuple[str, dict]:
    """The sentences of the ablations, and their checks."""
    *widths, widest = suite.ablate_widths
    top = {name: float(x[len(widths) - 1].mean()) for name, x in final.items()}
    last = {name: float(x[-1].mean()) for name, x in final.items()}
    late = {name.replace("; ", ", "): float(x.mean()) for name, x in late.items()}

    def listed(losses: dict[str, float], names) -> str:
        return ", ".join(f"{name} {losses[name]:.3f}" for name in names) + "."

    said = [
        f"Variants of {BASE}, width {widths[-1]}: {listed(top, meta)}",
        f"Epsilons, width {widest}: {listed(last, EPSILONS)}",
        f"mulo_m, width {widths[-1]}: {listed(last, (n for n in final if n not in meta))}",
        f"mulo_m after 5 horizons: {listed(late, late)}",
    ]
    base, free = top["as shipped"], late["no annealing, constant"]
    shipped = late["as shipped, constant"]
    checks = {
        "λ1 = 0.01 is ahead of 0.001 and 0.1": not (
            top["lam1 0.001"] <= base or top["lam1 0.1"] <= base
        ),
        "t_max helps beyond the horizon": free <= late["no annealing, no t_max, constant"],
        "annealing helps beyond the horizon": shipped <= free,
        "a cosine schedule helps beyond the horizon": late["as shipped, cosine"] <= shipped,
        "relative epsilons are ahead of the reference's on the widest net": (
            last["relative epsilons"] <= last["as shipped"]
        ),
    }
    for rule in roles.ALL:
        claim = f"without the rule on {rule} a net {widths[-1]} wide ends worse"
        checks[claim] = not last[f"without {rule}"] <= last["all rules"]
    return "\n".join(said), checks


EXPERIMENTS = {
    f.__name__: f for f in (width, rank, depth, horizon, coord, stability, distribution, ablate)
}
