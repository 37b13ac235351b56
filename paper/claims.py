"""The paper's claims, each tested by an experiment: a table, a figure, a sentence, checks.

    found = width(Suite(), Results(Path("results")))
    print(found.said, found.checks)

Paper: section 5. `python evaluate.py width` and so on run them. All training goes through
`Results`, so a second run only draws. Other experiments: ablations.py, resnet.py, transfer.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise, product

import torch
from torch import Tensor

from mulo import roles, tasks
from mulo.evaluate import Contender, Job, Results, contender, mean_stderr
from mulo.paper import baselines
from mulo.paper.baselines import Tuning
from mulo.paper.report import Finding, colour, draw_curves, draw_final, label, width_axis
from mulo.training import final_loss

Jobs = dict[tuple[str, str, int], Job]  # by kind, name and size
SIZES = ("Large", "XL", "XXL")  # of the paper's table of ranks
PAIRS = {"mulo_m": "lo_m", "muvelo_m": "velo_m"}  # the same recipe in μP and in SP
WIDE = (64, 256, 1024)
TRANSFER = {  # tasks of `transfer` by name, but for the width: widths
    "c10s_mlp_w{}_d3": WIDE, "c10b_mlp_w{}_d3": WIDE, "fashion_mlp_w{}_d3": WIDE,
    "teacher256_mlp_w{}_d3": WIDE, "teacher1024_mlp_w{}_d3": WIDE, "teacher2_mlp_w{}_d3": WIDE,
    "teacher100_mlp_w{}_d3": WIDE, "c10s_conv_w{}_d3_b16": (64, 128),
    "c10s_vit_w{}_d3_b16": (64, 128), "text_lm_w{}_d2_b8": (64, 128),
}  # fmt: skip
RESNETS = tuple(f"fashion_resnet_w{w}_b16" for w in (32, 64, 128, 192, 256))
IMAGES = {64: "fashion8_mlp", 196: "fashion14_mlp", 784: "fashion_mlp"}  # input size: kind


@dataclasses.dataclass(frozen=True)
class Family:
    """Nets of one kind, and the sizes at which they are tested."""

    kind: str
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    columns: tuple[int, ...] = (128, 256, 512)  # widths in the table of ranks: Large, XL, XXL
    base: int = 64  # of deep nets, long runs, tuning; in the first family the widest meta-trained
    depths: tuple[int, ...] = ()  # (): not among the deep nets
    horizons: tuple[int, ...] = ()  # lengths of the runs under a cosine
    longest: int = 0  # of the runs at a constant rate; 0: not among the long runs
    seeds: int = 5
    few: int = 5  # seeds of ranks and of the runs at `longest`
    suffix: str = ""  # of the tasks' names: the batch size

    def task(self, width: int, depth: int = 3) -> str:
        return f"{self.kind}_w{width}_d{depth}{self.suffix}"


TRANSFORMER = {
    "widths": (16, 32, 64, 128), "columns": (32, 64, 128), "base": 32, "depths": (3, 16),
    "longest": 25, "seeds": 3, "few": 2, "suffix": "_b8",
}  # fmt: skip
PAPER_MLP = {"widths": tasks.MLP_WIDTHS, "columns": (2048, 4096, 8192), "base": 1024}
PAPER_TRANSFORMER = {
    "widths": tuple(tasks.HEADS), "columns": (2048, 3072, 3072), "base": 1024, "depths": (3, 16),
    "longest": 25,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is tested. The first family is the kind of meta-training."""

    who: tuple[str, ...] = ("mulo_m", "muvelo_m", "lo_m", "velo_m", "adamw", "muadam")
    families: tuple[Family, ...] = (
        Family("fashion8_mlp", depths=(3, 4, 8, 16), horizons=(5, 10, 25), longest=25),
        Family("teacher_mlp"),
        Family("fashion_vit", **TRANSFORMER),
        Family("pixels_lm", **TRANSFORMER),
    )
    steps: int = 500  # the meta-trained horizon
    transfer: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: TRANSFER)
    transfer_seeds: int = 5
    images: dict[int, str] = dataclasses.field(default_factory=lambda: IMAGES)
    resnets: tuple[str, ...] = RESNETS
    scale: str = "desk"
    ablate_widths: tuple[int, ...] = (64, 256, 1024, 4096)  # the last for epsilons only
    ablate_seeds: int = 2  # of meta-training
    ablate_recipe: tuple[tuple[str, int], ...] = ()  # changes to every recipe

    def contenders(self, *names: str) -> dict[str, Contender]:
        """By the names of their recipes, also where they come from the folders of runs.

        Given names, these: the shipped ones where `who` has none.
        """
        found = [contender(name) for name in self.who]
        given = {c.recipe or c.name: c for c in found}
        if len(given) < len(found):
            raise ValueError("--who has two runs of one recipe: compare these by evaluate.py task.")
        some = {name: given.get(name) or contender(name) for name in names or given}
        return {name: dataclasses.replace(c, name=name) for name, c in some.items()}

    def job(
        self, who: Contender, task: str, times: int = 1, schedule: str = "constant",
        seeds: int = 5, probe_at: Sequence[int] = (),
    ) -> Job:  # fmt: skip
        return Job(who, task, times * self.steps, schedule, tuple(range(seeds)), tuple(probe_at))

    def sweep(self, who: dict[str, Contender], sizes: dict[Family, dict[int, str]]) -> Jobs:
        """Every optimizer on each family's tasks, which are given by size."""
        pairs = product(sizes.items(), who.items())
        return {
            (f.kind, name, size): self.job(c, task, seeds=f.seeds)
            for (f, by_size), (name, c) in pairs
            for size, task in by_size.items()
        }

    def tune_baselines(self, results: Results, cosine: bool = False) -> None:
        """Tune the rates of the baselines under test, on the families where none are known."""
        runs = [(f, self.steps, "constant") for f in self.families]
        if cosine:
            runs += [(f, n * self.steps, "cosine") for f in self.families for n in f.horizons]
        some = [which for which in baselines.BASELINES if which in self.who]
        tunings = [Tuning(x, f.task(f.base), *how) for (f, *how), x in product(runs, some)]
        baselines.tune_missing(tunings, results)


SUITES = {
    "desk": Suite(),
    "paper": Suite(
        families=(
            Family("in32_mlp", **PAPER_MLP, depths=(3, 4, 8, 16), horizons=(5, 10, 25), longest=25),
            Family("in64_mlp", tasks.WIDTHS["in64_mlp"], (2048, 4096, 4096), base=1024),
            Family("c10_mlp", **PAPER_MLP),
            Family("vit", **PAPER_TRANSFORMER),
            Family("lm", **PAPER_TRANSFORMER),
        ),
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


def number(x: float) -> str:
    return "diverged" if math.isnan(x) else f"{x:.3f}" if x < 100 else f"{x:.0e}"


def ordered(losses: dict[str, Tensor]) -> str:
    """Mean final losses as text, best first; what diverged is last."""
    means = {name: float(x.mean()) for name, x in losses.items()}
    order = sorted(means, key=lambda name: (math.isnan(means[name]), means[name]))
    return ", ".join(f"{label(name)} {number(means[name])}" for name in order)


def final_losses(results: Results, jobs: Jobs, desc: str) -> dict[tuple, Tensor]:
    """Final losses by the same keys, the first cells of a table's rows; trains what is missing."""
    results.run(jobs.values(), desc)
    return {key: final_loss(results.losses(job)) for key, job in jobs.items()}


def lines(final: dict[tuple, Tensor], part: str) -> dict[str, dict[int, Tensor]]:
    """Final losses with keys (part, name, size) as {name: {size: losses}}."""
    some = {(name, size): x for (where, name, size), x in final.items() if where == part}
    return {name: {size: x for (n, size), x in some.items() if n == name} for name, _ in some}


# ---------------------------------------------------------------- experiments


def width(suite: Suite, results: Results) -> Finding:
    """Final loss against width, and training curves at the largest width."""
    head = ("kind", "optimizer", "width", "loss", "stderr", "change", "its stderr")
    suite.tune_baselines(results)
    found = Finding(2 * len(suite.families), head)
    tested = {f: {w: f.task(w) for w in f.widths} for f in suite.families}
    jobs = suite.sweep(suite.contenders(), tested)
    final = final_losses(results, jobs, "width")
    for f, ax, beside in zip(suite.families, found.axes[::2], found.axes[1::2], strict=True):
        losses, parts, kind, top = lines(final, f.kind), [], f.kind, f.widths[-1]
        for name, by_width in losses.items():
            some = list(by_width.values())
            changes = [["", ""], *(cells(b - a) for a, b in pairwise(some))]
            for w, x, change in zip(by_width, some, changes, strict=True):
                change = ["" if v == "nan" else v for v in change]
                found.rows.append([kind, name, w, *cells(x), *change])
            means = [float(x.mean()) for x in some]
            low = min((m for m in means if not math.isnan(m)), default=math.nan)
            shape = "falls" if falls(some) else f"lowest {number(low)}"
            ends = f"{number(means[0])} -> {number(means[-1])}"
            parts.append(f"{label(name)} {ends} ({shape})")
        found.said.append(
            f"{kind}, width {f.widths[0]} to {top}: {'; '.join(parts)}. "
            "(Falls: nowhere up by more than the standard error.)"
        )
        found.checks |= width_checks(f, losses)
        draw_final(ax, losses, 1.1 * guess(kind), title=kind)
        ax.axvline(f.base, color="0.8", zorder=0)
        curves = {name: results.losses(jobs[kind, name, top]) for name in losses}
        draw_curves(beside, curves, suite.steps, 1.2 * guess(kind), title=f"{kind}, width {top}")
    found.axes[0].legend(fontsize=8)
    return found


def width_checks(family: Family, losses: dict[str, dict[int, Tensor]]) -> dict[str, bool]:
    kind, top = family.kind, f"width {family.widths[-1]}"
    beyond = [w for w in family.widths if w >= family.columns[-1]]
    checks = {}
    for mu, sp in PAIRS.items():
        if mu in losses and sp in losses:
            of_mu, of_sp = list(losses[mu].values()), list(losses[sp].values())
            claim, other = f"{kind}: the loss of {label(mu)} falls", f"{kind}: {label(sp)}"
            checks |= {
                f"{claim}, within the standard error, up to {top}": falls(of_mu),
                f"{claim} up to {top} within the (smaller) standard error of differences between "
                "nets of one seed": falls(of_mu, paired=True),
                f"{other} is worse from width {beyond[0]} on": all(
                    worse(losses[sp][w], losses[mu][w]) for w in beyond
                ),
                f"{other} has stopped improving by {top}": stopped(of_sp),
            }
    return checks


def rank(suite: Suite, results: Results) -> Finding:
    """Average rank over families at each column's width, at 1, 3 and 5 horizons.

    VeLO is told the length of its run: at 3 horizons, read from the run of 5, it is midway. A net
    that diverged counts as one that guesses.
    """
    suite.tune_baselines(results)
    who, runs = suite.contenders(), {1: 1, 3: 5, 5: 5}  # horizons: length of the run
    names, columns, jobs = list(who), list(product(runs, SIZES)), {}
    for f, (t, size) in product(suite.families, columns):
        task = f.task(f.columns[SIZES.index(size)])
        jobs[f, t, size] = [suite.job(c, task, runs[t], seeds=f.few) for c in who.values()]
    results.run(chain(*jobs.values()), "rank")
    ranks = {f.kind: [] for f in suite.families}
    for (f, t, _), some in jobs.items():
        losses = torch.stack([final_loss(results.losses(job), t / runs[t]) for job in some])
        losses = losses.nan_to_num(guess(f.kind)).clamp_max(guess(f.kind))  # (who, seeds)
        ranks[f.kind].append(ranked(losses.mean(1)))
    ranks = {kind: torch.stack(some) for kind, some in ranks.items()}  # (columns, who) each
    ranks = {"all": torch.stack(list(ranks.values())).mean(0)} | ranks
    found = Finding(len(ranks), ["tasks", "optimizer", *(f"{t}x, {size}" for t, size in columns)])
    for ax, (kind, by_column) in zip(found.axes, ranks.items(), strict=True):
        for name, row in zip(names, by_column.T, strict=True):
            found.rows.append([kind, name, *(f"{x:.2f}" for x in row.tolist())])
            for at in torch.arange(len(columns)).chunk(len(runs)):  # a line for each horizon
                ax.plot(at, row[at], "o-", label="" if at[0] else label(name), color=colour(name))
        ax.set_xticks(range(len(columns)), [f"{t}x\n{size}" for t, size in columns], fontsize=6)
        ax.set(xlabel="horizons, size", ylabel="average rank", title=f"{kind} tasks")
        ax.invert_yaxis()
    found.axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for kind, t in [*product(["all"], runs), *((f.kind, 1) for f in suite.families)]:
        average = ranks[kind][[k for k, column in enumerate(columns) if column[0] == t]].mean(0)
        parts = [f"{label(names[k])} {float(average[k]):.2f}" for k in average.argsort()]
        where = "" if kind == "all" else f" on {kind} alone"
        found.said.append(
            f"Average rank after {t} horizon(s){where}, best first: {', '.join(parts)}."
        )
    found.said.append(
        "(AdamW and μAdam are tuned on each kind of task; of these the learned optimizers have "
        f"seen {suite.families[0].kind} alone in meta-training.)"
    )
    for (t, size), row in zip(columns, ranks["all"].tolist(), strict=True):
        for claim, some, sign in (
            ("μLO_M and μVeLO_M have the two best average ranks", PAIRS.keys(), 1),
            ("LO_M and VeLO_M have the two worst", PAIRS.values(), -1),
        ):
            inside = [sign * x for name, x in zip(names, row, strict=True) if name in some]
            others = [sign * x for name, x in zip(names, row, strict=True) if name not in some]
            if inside and others:
                claim = f"{claim}, {size}, after {t} horizon(s)"
                found.checks[claim] = max(inside) < min(others)
    return found


def depth(suite: Suite, results: Results) -> Finding:
    """Nets of 3 to 16 layers or blocks."""
    suite.tune_baselines(results)
    tested = {f: {d: f.task(f.base, d) for d in f.depths} for f in suite.families if f.depths}
    found = Finding(2 * len(tested), ("kind", "optimizer", "depth", "loss", "stderr"))
    jobs = suite.sweep(suite.contenders(), tested)
    final = final_losses(results, jobs, "depth")
    found.rows += [[*key, *cells(x)] for key, x in final.items()]
    for f, ax, beside in zip(tested, found.axes[::2], found.axes[1::2], strict=True):
        kind, deepest, top = f.kind, f.depths[-1], 1.2 * guess(f.kind)
        layers = f"{deepest} {'layers' if kind.endswith('mlp') else 'blocks'}"
        last = {name: some[deepest] for name, some in lines(final, kind).items()}
        curves = {name: results.losses(jobs[kind, name, deepest]) for name in last}
        draw_final(ax, lines(final, kind), top, "depth", title=f"{kind}, width {f.base}")
        draw_curves(beside, curves, suite.steps, top, title=f"{kind}, {layers}")
        found.said.append(f"{kind}, {layers}, final loss: {ordered(last)}.")
        for mu, sp in PAIRS.items():
            if mu in last and sp in last:
                claim = f"{kind}: {label(mu)} is ahead of {label(sp)} at {layers}"
                found.checks[claim] = worse(last[sp], last[mu])
        for name in filter(PAIRS.get, last):
            bound = min(1.05 * float(curves[name].mean(1).min()), 0.9 * guess(kind))
            claim = f"{kind}: {label(name)} trains {layers}, its loss not rising"
            found.checks[claim] = float(last[name].mean()) <= bound
    found.axes[0].legend(fontsize=8)
    return found


def horizon(suite: Suite, results: Results) -> Finding:
    """Training for 25 horizons, at constant rates and, on MLPs, under a cosine schedule."""
    suite.tune_baselines(results, cosine=True)
    who, runs = suite.contenders(), []
    for f in suite.families:
        runs += [(f, "constant", f.longest)] * bool(f.longest)
        runs += [(f, "cosine", times) for times in f.horizons]
    panels = [run for run in runs if run[2] == run[0].longest]
    head = ("kind", "schedule", "horizons", "optimizer", "loss", "stderr", "lowest")
    found, jobs = Finding(len(panels), head), {}
    for f, schedule, times in runs:
        seeds = f.few if schedule == "constant" else f.seeds
        jobs[f, schedule, times] = {
            name: suite.job(c, f.task(f.base), times, schedule, seeds) for name, c in who.items()
        }
    results.run(chain(*(some.values() for some in jobs.values())), "horizon")
    for run, some in jobs.items():
        (f, schedule, times), final = run, {}
        curves = {name: results.losses(job) for name, job in some.items()}
        for name, losses in curves.items():
            final[name] = final_loss(losses)
            lowest = float(losses.mean(1).unfold(0, 5, 1).mean(-1).min())  # of any tenth
            row = [f.kind, schedule, times, name, *cells(final[name]), f"{lowest:.4f}"]
            found.rows.append(row)
            if schedule == "constant" and name in PAIRS:
                claim = f"{f.kind}: {label(name)} does not rise by more than 5% over {times}"
                found.checks[f"{claim} horizons"] = float(final[name].mean()) <= 1.05 * lowest
        if schedule == "cosine" and {"mulo_m", "adamw"} <= final.keys():
            claim = f"{f.kind}: μLO_M with cosine is level with AdamW with cosine, {times} horizons"
            found.checks[claim] = bool(final["mulo_m"].mean() <= 1.02 * final["adamw"].mean())
        if run in panels:
            ax, title = found.axes[panels.index(run)], f"{f.task(f.base)}, {schedule}"
            top = guess(f.kind) / (2 if f.horizons else 1)
            draw_curves(ax, curves, times, top, xlabel="meta-trained horizons", title=title)
        found.said.append(f"{f.kind}, {times} horizons, {schedule}: {ordered(final)}.")
    found.axes[0].legend(fontsize=8)
    return found


def coord(suite: Suite, results: Results) -> Finding:
    """Coordinate check over 500 steps: does a layer's drift depend on width, or on input size?"""
    who, first, verdicts = suite.contenders(), suite.families[0], []
    widths = [w for w in first.widths if w <= 16 * first.base]
    at = [t for t in (5, 10, 50, 100, 250, 499) if t < suite.steps]  # before, hidden layers rest
    head = ["optimizer", "against", "layer", "mean |slope|", *(f"t={t}" for t in at)]

    def jobs(c: Contender, named: Iterable[str]) -> list[Job]:
        return [suite.job(c, task, seeds=3, probe_at=at) for task in named]

    tests = {(name, "width"): (widths, jobs(c, map(first.task, widths))) for name, c in who.items()}
    if "mulo_m" in who and suite.images:
        mine, sizes = who["mulo_m"], list(suite.images)
        off = mine.lo.with_config(input_base=None)
        off = dataclasses.replace(mine, name="mulo_m without input rule", lo=off)
        named = [f"{kind}_w{first.base}_d3_b64" for kind in suite.images.values()]
        tests |= {(c.name, "input size"): (sizes, jobs(c, named)) for c in (mine, off)}
    found = Finding(len(tests), head)
    results.run(chain(*(some for _, some in tests.values())), "coord")
    for ax, ((name, against), (sizes, some)) in zip(found.axes, tests.items(), strict=True):
        probed, worst = [results.activations(job) for job in some], 0.0
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
        passes = bool(some[0].who.rules) and name != "mulo_m without input rule"
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
    first, jobs = suite.families[0], {}
    deepest = first.depths[-1]
    for title, d, times in ((f"{deepest} layers", deepest, 1), ("5 horizons", 3, 5)):
        every = max(1, times * suite.steps // 25)
        at = range(every, times * suite.steps, every)
        jobs[title] = [
            suite.job(c, first.task(first.base, d), times, seeds=2, probe_at=at)
            for c in who.values()
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
    found, first = Finding(1, ("kind", "optimizer", "width", "loss", "stderr")), suite.families[0]
    kind, widths = first.kind, [w for w in first.widths if w <= 16 * first.base]
    who = suite.contenders("mulo_m", "mulo_s", "lo_m", "lo_s")
    jobs = suite.sweep(who, {first: {w: first.task(w) for w in widths}})
    final = final_losses(results, jobs, "distribution")
    found.rows += [[*key, *cells(x)] for key, x in final.items()]
    draw_final(found.axes[0], lines(final, kind), 1.1 * guess(kind), title=kind)
    found.axes[0].legend(fontsize=8)
    last = {name: final[kind, name, widths[-1]] for name in who}
    found.said.append(f"{kind}, width {widths[-1]}, final loss: {ordered(last)}.")
    for a, b in (("mulo_m", "mulo_s"), ("mulo_s", "lo_s"), ("mulo_m", "lo_m")):
        claim = f"{label(a)} is ahead of {label(b)} at width {widths[-1]}"
        found.checks[claim] = worse(last[b], last[a])
    return found


EXPERIMENTS = {f.__name__: f for f in (width, rank, depth, horizon, coord, stability, distribution)}
