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
from collections.abc import Sequence
from itertools import chain, pairwise, product
from pathlib import Path

import torch
from torch import Tensor

import checkpoints
import metatrain
import mulo
import roles
import tasks
from evaluate import Contender, Job, Results, contender, mean_stderr
from paper.report import Finding, colour, draw_curves, draw_final, label, width_axis
from training import final_loss

PAIRS = {"mulo_m": "lo_m", "muvelo_m": "velo_m"}  # the same recipe in μP and in SP


WIDE = (64, 256, 1024)
TRANSFER = {  # tasks of `transfer` by name, but for the width: widths
    "c10s_mlp_w{}_d3": WIDE, "c10b_mlp_w{}_d3": WIDE, "fashion_mlp_w{}_d3": WIDE,
    "teacher256_mlp_w{}_d3": WIDE, "teacher1024_mlp_w{}_d3": WIDE, "teacher2_mlp_w{}_d3": WIDE,
    "teacher100_mlp_w{}_d3": WIDE, "c10s_conv_w{}_d3_b16": (64, 128), "c10s_vit_w{}_d3_b16": (64,),
    "text_lm_w{}_d2_b8": (64,),
}  # fmt: skip

RESNETS = tuple(f"fashion_resnet_w{w}_b16" for w in (32, 64, 128, 256, 384))
IMAGES = {64: "fashion8_mlp", 196: "fashion14_mlp", 784: "fashion_mlp"}  # input size: kind


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
    transfer: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: TRANSFER)
    images: dict[int, str] = dataclasses.field(default_factory=lambda: IMAGES)
    resnets: tuple[str, ...] = RESNETS
    seeds: int = 5
    scale: str = "desk"
    ablate_widths: tuple[int, ...] = (64, 256, 1024, 4096)  # the last for epsilons only
    ablate_seeds: int = 2  # of meta-training
    ablate_recipe: tuple[tuple[str, int], ...] = ()  # changes to every recipe

    def contenders(self) -> dict[str, Contender]:
        """By the names of their recipes, also where they come from the folders of runs."""
        found = [contender(name) for name in self.who]
        named = {c.recipe or c.name: c for c in found}
        if len(named) < len(found):
            raise ValueError("--who has two runs of one recipe: compare these by evaluate.py task.")
        return {name: dataclasses.replace(c, name=name) for name, c in named.items()}

    def job(
        self, who: Contender, task: str, times: int = 1, schedule: str = "constant",
        seeds: int | None = None, probe_at: Sequence[int] = (),
    ) -> Job:  # fmt: skip
        seeds = tuple(range(self.seeds))[:seeds]
        return Job(who, task, times * self.steps, schedule, seeds, tuple(probe_at))


SUITES = {
    "desk": Suite(),
    "paper": Suite(
        kinds=("in32_mlp", "in64_mlp", "c10_mlp"), widest=1024,
        widths=(128, 256, 512, 1024, 2048, 4096, 8192), columns=(2048, 4096, 8192),
        steps=1000, scale="paper", images={},
        resnets=tuple(f"resnet_w{w}" for w in (128, 256, 512, 1024, 2048)),
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


def final_losses(results: Results, jobs: dict[tuple, Job], desc: str) -> dict[tuple, Tensor]:
    """Final losses by the same keys, the first cells of a table's rows; trains what is missing."""
    results.run(jobs.values(), desc)
    return {key: final_loss(results.losses(job)) for key, job in jobs.items()}


def lines(final: dict[tuple, Tensor], part: str) -> dict[str, dict[int, Tensor]]:
    """Final losses with keys (part, name, size) as {name: {size: losses}}."""
    found = {}
    for (where, name, size), x in final.items():
        if where == part:
            found.setdefault(name, {})[size] = x
    return found


# ---------------------------------------------------------------- experiments


def width(suite: Suite, results: Results) -> Finding:
    """Final loss against width, and training curves at the largest width."""
    head = ("kind", "optimizer", "width", "loss", "stderr", "change", "its stderr")
    found, who, top = Finding(2 * len(suite.kinds), head), suite.contenders(), suite.widths[-1]
    jobs = {}
    for kind, name, w in product(suite.kinds, who, suite.widths):
        jobs[kind, name, w] = suite.job(who[name], f"{kind}_w{w}_d3")
    final = final_losses(results, jobs, "width")
    for kind, ax, beside in zip(suite.kinds, found.axes[::2], found.axes[1::2], strict=True):
        losses, parts = lines(final, kind), []
        for name, by_width in losses.items():
            some = list(by_width.values())
            changes = [["", ""], *(cells(b - a) for a, b in pairwise(some))]
            for w, x, change in zip(by_width, some, changes, strict=True):
                change = ["" if v == "nan" else v for v in change]
                found.rows.append([kind, name, w, *cells(x), *change])
            means = [float(x.mean()) for x in some]
            low = min((m for m in means if not math.isnan(m)), default=math.nan)
            shape = "falls" if falls(some) else f"lowest {low:.3f}"
            parts.append(f"{label(name)} {means[0]:.3f} -> {means[-1]:.3f} ({shape})")
        found.said.append(
            f"{kind}, width {suite.widths[0]} to {top}: {'; '.join(parts)}. "
            "(Falls: nowhere up by more than the standard error.)"
        )
        found.checks |= width_checks(kind, suite, losses)
        draw_final(ax, losses, title=kind, ylim=(None, 1.1 * guess(kind)))
        ax.axvline(suite.widest, color="0.8", zorder=0)
        curves = {name: results.losses(jobs[kind, name, top]) for name in who}
        draw_curves(beside, curves, suite.steps, title=f"{kind}, width {top}")
        beside.set_ylim(top=1.2 * guess(kind))
    found.axes[0].legend(fontsize=8)
    return found


def width_checks(kind: str, suite: Suite, losses: dict[str, dict[int, Tensor]]) -> dict[str, bool]:
    checks, top, seen = {}, f"width {suite.widths[-1]}", 4 * suite.widest
    for mu, sp in PAIRS.items():
        if mu in losses and sp in losses:
            of_mu, of_sp = list(losses[mu].values()), list(losses[sp].values())
            beyond = [w for w in suite.widths if w > seen]
            claim, other = f"{kind}: the loss of {label(mu)} falls", f"{kind}: {label(sp)}"
            checks |= {
                f"{claim}, within the standard error, up to {top}": falls(of_mu),
                f"{claim} up to {top} within the (smaller) standard error of differences between "
                "nets of one seed": falls(of_mu, paired=True),
                f"{other} is worse at every width beyond {seen}": all(
                    worse(losses[sp][w], losses[mu][w]) for w in beyond
                ),
                f"{other} has stopped improving by {top}": stopped(of_sp),
            }
    return checks


def rank(suite: Suite, results: Results) -> Finding:
    """Average rank over tasks at each column's width, at 1, 3 and 5 horizons.

    VeLO is told the length of its run: at 3 horizons, read from the run of 5, it is midway. A net
    that diverged counts as one that guesses.
    """
    who, runs = suite.contenders(), {1: 1, 3: 5, 5: 5}  # horizons: length of the run
    names, columns = list(who), list(product(runs, suite.columns))
    jobs = {}
    for kind, (t, w) in product(suite.kinds, columns):
        task = f"{kind}_w{w}_d3"
        jobs[kind, t, w] = [suite.job(c, task, runs[t], seeds=3) for c in who.values()]
    results.run(chain(*jobs.values()), "rank")
    ranks = {kind: torch.empty(len(columns), len(who)) for kind in suite.kinds}
    for (kind, t, w), some in jobs.items():
        losses = torch.stack([final_loss(results.losses(job), t / runs[t]) for job in some])
        losses = losses.nan_to_num(guess(kind)).clamp_max(guess(kind))  # (who, seeds)
        ranks[kind][columns.index((t, w))] = ranked(losses.mean(1))
    ranks = {"all": torch.stack(list(ranks.values())).mean(0)} | ranks
    found = Finding(len(ranks), ["tasks", "optimizer", *(f"{t}x, width {w}" for t, w in columns)])
    for kind, rows in ranks.items():
        for name, row in zip(names, rows.T.tolist(), strict=True):
            found.rows.append([kind, name, *(f"{x:.2f}" for x in row)])
    for kind, t in [*product(["all"], runs), *product(suite.kinds, [1])]:
        average = ranks[kind][[k for k, column in enumerate(columns) if column[0] == t]].mean(0)
        parts = [f"{label(names[k])} {float(average[k]):.2f}" for k in average.argsort()]
        where = "" if kind == "all" else f" on {kind} alone"
        found.said.append(
            f"Average rank after {t} horizon(s){where}, best first: {', '.join(parts)}."
        )
    found.said.append(
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
                found.checks[claim] = max(inside) < min(others)
    draw_ranks(found.axes, ranks, names, columns)
    return found


def draw_ranks(axes: list, ranks: dict, names: list[str], columns: list[tuple[int, int]]) -> None:
    for ax, (kind, rows) in zip(axes, ranks.items(), strict=True):
        for name, line in zip(names, rows.T, strict=True):
            for k, part in enumerate(line.chunk(3)):  # one for each horizon
                at = range(k * len(part), (k + 1) * len(part))
                ax.plot(at, part, "o-", label="" if k else label(name), color=colour(name))
        ax.set_xticks(range(len(columns)), [f"{t}x\n{w}" for t, w in columns], fontsize=7)
        ax.set(xlabel="horizons, width", title=f"{kind} tasks" if kind == "all" else kind)
        ax.invert_yaxis()
    axes[0].set_ylabel("average rank")
    axes[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def depth(suite: Suite, results: Results) -> Finding:
    """Nets of 3 to 16 layers."""
    found, who = Finding(2, ("kind", "optimizer", "depth", "loss", "stderr")), suite.contenders()
    kind, deepest = suite.kinds[0], suite.depths[-1]
    task = f"{kind}_w{suite.widest}_d"
    jobs = {(kind, n, d): suite.job(who[n], f"{task}{d}") for n, d in product(who, suite.depths)}
    final = final_losses(results, jobs, "depth")
    found.rows += [[*key, *cells(x)] for key, x in final.items()]
    curves = {name: results.losses(jobs[kind, name, deepest]) for name in who}
    title, ylim = f"{kind}, width {suite.widest}", (None, 1.2 * guess(kind))
    draw_final(found.axes[0], lines(final, kind), "layers", title=title, ylim=ylim)
    title = f"{kind}, {deepest} layers"
    draw_curves(found.axes[1], curves, suite.steps, title=title, ylim=ylim)
    found.axes[0].legend(fontsize=8)
    last = {name: final[kind, name, deepest] for name in who}
    found.said.append(f"{deepest} layers, final loss: {ordered(last)}.")
    for mu, sp in PAIRS.items():
        if mu in last and sp in last:
            claim = f"{label(mu)} is ahead of {label(sp)} at {deepest} layers"
            found.checks[claim] = worse(last[sp], last[mu])
    for name in [name for name in last if name in PAIRS]:
        bound = min(1.05 * float(curves[name].mean(1).min()), 0.9 * guess(kind))
        claim = f"{label(name)} trains {deepest} layers, its loss not rising"
        found.checks[claim] = float(last[name].mean()) <= bound
    return found


def horizon(suite: Suite, results: Results) -> Finding:
    """Training for 25 horizons, at constant rates and under a cosine schedule."""
    found = Finding(2, ("schedule", "horizons", "optimizer", "loss", "stderr", "lowest"))
    who, longest, kind = suite.contenders(), suite.horizons[-1], suite.kinds[0]
    task = f"{kind}_w{suite.widest}_d3"
    runs = [("constant", longest), *(("cosine", times) for times in suite.horizons)]
    jobs = {(s, t): {n: suite.job(c, task, t, s) for n, c in who.items()} for s, t in runs}
    results.run(chain(*(some.values() for some in jobs.values())), "horizon")
    for (schedule, times), some in jobs.items():
        curves = {name: results.losses(job) for name, job in some.items()}
        final = {name: final_loss(x) for name, x in curves.items()}
        for name, x in curves.items():
            tenth = min(5, len(x))
            lowest = float(x.mean(1).unfold(0, tenth, 1).mean(-1).min())  # of any tenth
            found.rows.append([schedule, times, name, *cells(final[name]), f"{lowest:.4f}"])
            if schedule == "constant" and name in PAIRS:
                claim = f"{label(name)} does not rise by more than 5% over {times} horizons"
                found.checks[claim] = float(final[name].mean()) <= 1.05 * lowest
        if schedule == "cosine" and {"mulo_m", "adamw"} <= final.keys():
            claim = f"μLO_M with cosine is level with AdamW with cosine, {times} horizons"
            found.checks[claim] = bool(final["mulo_m"].mean() <= 1.02 * final["adamw"].mean())
        if times == longest:
            ax, title = found.axes[schedule == "cosine"], f"{task}, {schedule}"
            draw_curves(ax, curves, times, xlabel="meta-trained horizons", title=title)
            ax.set_ylim(0, 0.5 * guess(kind))
        found.said.append(f"After {times} horizons, {schedule}: {ordered(final)}.")
    found.axes[0].legend(fontsize=8)
    return found


def coord(suite: Suite, results: Results) -> Finding:
    """Coordinate check over 500 steps: does a layer's drift depend on width, or on input size?"""
    who, kind, verdicts = suite.contenders(), suite.kinds[0], []
    widths = [w for w in suite.widths if w <= 16 * suite.widest]
    at = [t for t in (5, 10, 50, 100, 250, 499) if t < suite.steps]  # before, hidden layers rest
    head = ["optimizer", "against", "layer", "mean |slope|", *(f"t={t}" for t in at)]
    tests = {(c.name, "width"): (c, widths, [f"{kind}_w{w}_d3" for w in widths])
             for c in who.values()}  # fmt: skip
    if "mulo_m" in who and suite.images:
        mine, sizes = who["mulo_m"], list(suite.images)
        named = [f"{suite.images[n]}_w{suite.widest}_d3_b64" for n in sizes]
        off = dataclasses.replace(
            mine, name="mulo_m without input rule", lo=mine.lo.with_config(input_base=None)
        )
        tests |= {(c.name, "input size"): (c, sizes, named) for c in (mine, off)}
    found, jobs = Finding(len(tests), head), {}
    for key, (c, _, named) in tests.items():
        jobs[key] = [suite.job(c, task, seeds=3, probe_at=at) for task in named]
    results.run(chain(*jobs.values()), "coord")
    for ax, ((name, against), (c, sizes, _)) in zip(found.axes, tests.items(), strict=True):
        probed, worst = [results.activations(job) for job in jobs[name, against]], 0.0
        for layer in probed[0]:
            drift = torch.tensor([[change for change, _ in x[layer]] for x in probed]).double()
            slopes = roles.slope(sizes, drift.T)  # (times,)
            mean = float(slopes.abs().mean())
            numbers = (f"{x:.3f}" for x in (mean, *slopes.tolist()))
            found.rows.append([name, against, layer, *numbers])
            worst = math.inf if math.isnan(mean) else max(worst, mean)
            ax.plot(sizes, drift[:, -1], marker="o", label=f"{layer} ({mean:.2f})")
        verdict, of = "pass" if worst <= 0.1 else "fail", f"{label(name)}, {against}"
        verdicts.append(f"{of} {verdict} ({worst:.2f})")
        passes = bool(c.rules) and name != "mulo_m without input rule"
        claim = f"{label(name)} {'passes' if passes else 'fails'} the coordinate check in {against}"
        found.checks[claim] = (worst <= 0.1) == passes
        width_axis(ax, sizes)
        ax.set(xlabel=against, yscale="log", title=f"{of}: {verdict}")
        ax.legend(fontsize=7)
    found.axes[0].set_ylabel(f"change of pre-activations, step {at[-1]}")
    head = "Mean |slope| of log drift against log width or input size, in the worst layer"
    found.said.append(f"{head}: {'; '.join(verdicts)}.")
    return found


def stability(suite: Suite, results: Results) -> Finding:
    """L1 norms of first-layer pre-activations and logits: a deep net, and a long run."""
    found, who = Finding(4, ("task", "optimizer", "layer", "early", "late")), suite.contenders()
    task, deepest, jobs = f"{suite.kinds[0]}_w{suite.widest}_d", suite.depths[-1], {}
    for title, d, times in ((f"{deepest} layers", deepest, 1), ("5 horizons", 3, 5)):
        every = max(1, times * suite.steps // 25)
        at = range(every, times * suite.steps, every)
        jobs[title] = [
            suite.job(c, f"{task}{d}", times, seeds=2, probe_at=at) for c in who.values()
        ]
    results.run(chain(*jobs.values()), "stability")
    for title, axes in zip(jobs, (found.axes[:2], found.axes[2:]), strict=True):
        late, parts = {}, []  # of the first layer; of the sentence on the long run
        for job in jobs[title]:
            probed, name = results.activations(job), job.who.name
            layers = list(probed)
            for ax, layer in zip(axes, (layers[0], layers[-1]), strict=True):
                norms = [norm for _, norm in probed[layer]]
                ax.plot(job.probe_at, norms, label=label(name), color=colour(name))
                ax.set(xlabel="step", yscale="log", title=f"{title}: {layer}")
                ends = [f"{norms[0]:.4g}", f"{norms[-1]:.4g}"]
                found.rows.append([job.task, name, layer, *ends])
                parts.append(f"{label(name)} {' -> '.join(ends)}")
                late.setdefault(name, norms[-1])
        if {"mulo_m", "lo_m"} <= late.keys():
            claim = f"{title}: first-layer pre-activations are smaller with μLO_M than LO_M"
            found.checks[claim] = late["mulo_m"] < math.inf and not late["lo_m"] <= late["mulo_m"]
    found.axes[0].set_ylabel("mean |pre-activation|")
    found.axes[0].legend(fontsize=7)
    head = "Mean |first-layer pre-activation| and |logit|, early to late"
    found.said.append(f"{head}: {', '.join(parts)}.")
    return found


def distribution(suite: Suite, results: Results) -> Finding:
    """One width in meta-training against three, with μP and without."""
    found, kind = Finding(1, ("kind", "optimizer", "width", "loss", "stderr")), suite.kinds[0]
    widths = [w for w in suite.widths if w <= 16 * suite.widest]
    jobs, given = {}, suite.contenders()
    for name in ("mulo_m", "mulo_s", "lo_m", "lo_s"):
        c = given.get(name) or contender(name)
        jobs |= {(kind, name, w): suite.job(c, f"{kind}_w{w}_d3") for w in widths}
    final = final_losses(results, jobs, "distribution")
    found.rows += [[*key, *cells(x)] for key, x in final.items()]
    draw_final(found.axes[0], lines(final, kind), title=kind, ylim=(None, 1.1 * guess(kind)))
    found.axes[0].legend(fontsize=8)
    last = {name: losses[widths[-1]] for name, losses in lines(final, kind).items()}
    found.said.append(f"{kind}, width {widths[-1]}, final loss: {ordered(last)}.")
    for a, b in (("mulo_m", "mulo_s"), ("mulo_s", "lo_s"), ("mulo_m", "lo_m")):
        claim = f"{label(a)} is ahead of {label(b)} at width {widths[-1]}"
        found.checks[claim] = worse(last[b], last[a])
    return found


# ---------------------------------------------------------------- ablations
# Variants of mulo_s, which is meta-trained in minutes on one width, are kept in results/ablate;
# the others are mulo_m with something switched off.

BASE = "mulo_s"
ABLATED = {  # the desk's recipe when the variants were meta-trained: more noise, shorter
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

    recipe: metatrain.Recipe
    path: Path

    def __str__(self) -> str:
        return self.path.stem

    def cost(self) -> int:
        return self.recipe.steps * self.recipe.pairs

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
        trainer = metatrain.Trainer(recipe, metatrain.new_lo(recipe, device))
        with contextlib.suppress(FloatingPointError):  # a variant that fails is kept as it is then
            for _ in range(self.recipe.steps):
                trainer.advance()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mulo.save(trainer.result(), self.path, recipe=dataclasses.asdict(self.recipe))


def variants(suite: Suite, results: Results) -> dict[str, list[Contender]]:
    """Variants of BASE, from several seeds each; meta-trains what is missing."""
    base, runs = metatrain.recipe(BASE, suite.scale), {}
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
    meta, kind, (*widths, widest) = variants(suite, results), suite.kinds[0], suite.ablate_widths
    shipped = suite.contenders().get("mulo_m") or contender("mulo_m")

    def job(who: Contender, width: int, times: int = 1, schedule: str = "constant") -> Job:
        task, seeds = f"{kind}_w{width}_d3", 1 if width >= 1024 else 2
        return suite.job(who, task, times, schedule, seeds)

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
        jobs["time", name, suite.widest] = [job(who, suite.widest, 5, schedule)]
    results.run(chain(*jobs.values()), "ablate")
    final = {key: torch.cat([final_loss(results.losses(job)) for job in some])
             for key, some in jobs.items()}  # fmt: skip
    for (part, name, w), x in final.items():
        found.rows.append([part, name, w, 5 if part == "time" else 1, *cells(x), len(x)])
    for ax, part in zip(found.axes, PARTS, strict=True):
        draw_final(ax, lines(final, part), title=part)
        width_axis(ax, suite.ablate_widths)
        means = [float(x.mean()) for key, x in final.items() if key[0] == part]
        seen = [m for m in means if m < guess(kind)]  # divergence is off the scale
        if seen:
            ax.set_ylim(0.95 * min(seen), 1.05 * max(seen))
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


EXPERIMENTS = {
    f.__name__: f for f in (width, rank, depth, horizon, coord, stability, distribution, ablate)
}
