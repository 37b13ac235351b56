"""The paper's claims, each tested by an experiment: a table, a figure, a sentence, checks.

    found = width(Suite(), Cells(Path("results")), Path("results"))
    print(found.said, found.checks)

Paper: section 5. `python evaluate.py width` and so on run them. Everything that trains a net goes
through `Cells`, so a second run only draws. Where a net diverged, its loss counts as that of
guessing when optimizers are ranked, and is drawn as a cross at the top of a figure.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import torch
from torch import Tensor

import roles
import tasks
from cells import Cells, Contender, Job, contender
from report import (
    Finding,
    colour,
    draw_curve,
    draw_ends,
    falls,
    figure,
    label,
    ordered,
    ranked,
    save,
    stopped,
    summary,
    width_axis,
    worse,
    write_table,
)
from training import final_loss


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is tested. The paper's widths are 2, 4 and 8 times those seen in meta-training too."""

    who: tuple[str, ...] = ("mulo_m", "muvelo_m", "lo_m", "velo_m", "adamw", "muadam")
    kinds: tuple[str, ...] = ("fashion8_mlp", "teacher_mlp")  # the second was not meta-trained on
    widest: int = 64  # of the meta-training tasks
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    columns: tuple[int, ...] = (128, 256, 512)  # Large, XL, XXL
    depths: tuple[int, ...] = (3, 4, 8, 16)
    steps: int = 500  # the meta-trained horizon
    horizons: tuple[int, ...] = (5, 10, 25)
    seeds: int = 5
    scale: str = "desk"

    def contenders(self) -> list[Contender]:
        """By the names of their recipes, also where they come from the folders of runs."""
        found = [contender(name) for name in self.who]
        return [dataclasses.replace(c, name=c.recipe or c.name) for c in found]

    def job(self, who: Contender, task: str, times: int = 1, schedule: str = "constant") -> Job:
        return Job(who, task, times * self.steps, schedule, tuple(range(self.seeds)))

    def watch(self, who: Contender, task: str, times: int, at: list[int], seeds: int) -> Job:
        seeds = tuple(range(min(seeds, self.seeds)))
        return dataclasses.replace(self.job(who, task, times), seeds=seeds, at=tuple(at))


PAPER = Suite(
    kinds=("in32_mlp", "in64_mlp", "c10_mlp"),
    widest=1024,
    widths=(128, 256, 512, 1024, 2048, 4096, 8192),
    columns=(2048, 4096, 8192),
    steps=1000,
    scale="paper",
)
SMOKE = Suite(  # for tests
    kinds=("fashion8_mlp",), widths=(8, 16), columns=(8,), depths=(3, 4), steps=10, horizons=(2, 3),
    seeds=2,
)  # fmt: skip

SUITES = {"desk": Suite(), "paper": PAPER}


def guess(kind: str) -> float:
    """The loss of guessing."""
    return math.log(tasks.get(f"{kind}_w8_d3").classes)


def width(suite: Suite, cells: Cells, out: Path) -> Finding:
    """Final loss against width, and training curves at the largest width."""
    who, rows, said, checks = suite.contenders(), [], [], {}
    jobs = {
        (kind, w, c.name): suite.job(c, f"{kind}_w{w}_d3")
        for kind in suite.kinds for w in suite.widths for c in who
    }  # fmt: skip
    cells.fill(jobs.values(), "width")
    fig, axes = figure(2 * len(suite.kinds))
    for k, kind in enumerate(suite.kinds):
        ends = {c.name: [final_loss(cells.losses(jobs[kind, w, c.name])) for w in suite.widths]
                for c in who}  # fmt: skip
        for name, found in ends.items():
            before = [torch.full_like(found[0], math.nan), *found[:-1]]
            for w, x, y in zip(suite.widths, found, before, strict=True):
                change = ("" if math.isnan(v) else f"{v:.4f}" for v in summary(x - y))
                rows.append([kind, name, w, *(f"{v:.4f}" for v in summary(x)), *change])
            draw_ends(axes[2 * k], list(suite.widths), found, name)
            curve = cells.losses(jobs[kind, suite.widths[-1], name])
            draw_curve(axes[2 * k + 1], curve, suite.steps, name)
        width_axis(axes[2 * k], list(suite.widths))
        axes[2 * k].set(ylabel="final loss", title=kind)
        axes[2 * k].set_ylim(top=1.1 * guess(kind))
        axes[2 * k].axvline(suite.widest, color="0.8", zorder=0)
        axes[2 * k + 1].set(xlabel="step", ylabel="loss", title=f"{kind}, width {suite.widths[-1]}")
        axes[2 * k + 1].set_ylim(top=1.2 * guess(kind))
        said.append(_width_sentence(kind, suite, ends))
        checks |= _width_checks(kind, suite, ends)
    axes[0].legend(fontsize=8)
    save(fig, out / "width.png")
    head = ["kind", "optimizer", "width", "loss", "stderr", "change", "its stderr"]
    write_table(out / "width.csv", head, rows)
    return Finding("\n".join(said), checks)


def _width_sentence(kind: str, suite: Suite, ends: dict[str, list[Tensor]]) -> str:
    parts = []
    for name, found in ends.items():
        first, last = summary(found[0])[0], summary(found[-1])[0]
        low = min((summary(x)[0] for x in found if not x.isnan().any()), default=math.nan)
        shape = "falls" if falls(found) else f"lowest {low:.3f}"
        parts.append(f"{label(name)} {first:.3f} -> {last:.3f} ({shape})")
    said = f"{kind}, width {suite.widths[0]} to {suite.widths[-1]}: " + "; ".join(parts)
    return f"{said}. (Falls: nowhere up by more than the standard error.)"


def _width_checks(kind: str, suite: Suite, ends: dict[str, list[Tensor]]) -> dict[str, bool]:
    checks = {}
    for mu, sp in (("mulo_m", "lo_m"), ("muvelo_m", "velo_m")):
        if mu in ends and sp in ends:
            beyond = [k for k, w in enumerate(suite.widths) if w > 4 * suite.widest]
            worst = all(worse(ends[sp][k], ends[mu][k]) for k in beyond)
            top = f"width {suite.widths[-1]}"
            checks |= {
                f"{kind}: the loss of {label(mu)} falls, within the standard error, up to {top}": (
                    falls(ends[mu])
                ),
                f"{kind}: the loss of {label(mu)} falls up to {top} within the (smaller) standard "
                "error of differences between nets of one seed": falls(ends[mu], paired=True),
                f"{kind}: {label(sp)} is worse at every width beyond {4 * suite.widest}": worst,
                f"{kind}: {label(sp)} has stopped improving by {top}": stopped(ends[sp]),
            }
    return checks


def rank(suite: Suite, cells: Cells, out: Path) -> Finding:
    """Average rank over tasks at each column's width, at 1, 3 and 5 horizons.

    VeLO is told how long it will train: at 3 horizons, seen in the run of 5, it is midway.
    """
    who, times = suite.contenders(), {1: 1, 3: 5, 5: 5}  # horizons: length of the run
    jobs = {
        (t, kind, w): [suite.job(c, f"{kind}_w{w}_d3", long) for c in who]
        for t, long in times.items() for kind in suite.kinds for w in suite.columns
    }  # fmt: skip
    cells.fill([job for some in jobs.values() for job in some], "rank")
    ranks = {}  # (kind or "all", horizons, width): (who,)
    for (t, kind, w), some in jobs.items():
        ends = torch.stack(
            [final_loss(cells.losses(job), t / times[t]) for job in some]
        )  # (who, seeds)
        ends = ends.nan_to_num(guess(kind)).clamp_max(guess(kind)).mean(1)
        ranks[kind, t, w] = ranked(ends)
    for t, w in itertools.product(times, suite.columns):
        ranks["all", t, w] = torch.stack([ranks[kind, t, w] for kind in suite.kinds]).mean(0)
    _draw_ranks(ranks, who, suite, list(times), out)
    said, checks = [], {}
    for kind, t in [("all", t) for t in times] + [(kind, 1) for kind in suite.kinds]:
        average = torch.stack([ranks[kind, t, w] for w in suite.columns]).mean(0)
        order = average.argsort().tolist()
        parts = [f"{label(who[k].name)} {float(average[k]):.2f}" for k in order]
        where = "" if kind == "all" else f" on {kind} alone"
        said.append(f"Average rank after {t} horizon(s){where}, best first: {', '.join(parts)}.")
    said.append(
        "(AdamW and μAdam are tuned on each kind of task; of these the learned optimizers have "
        f"seen {suite.kinds[0]} alone in meta-training.)"
    )
    for t in times:
        for w in suite.columns:
            of = dict(zip([c.name for c in who], ranks["all", t, w].tolist(), strict=True))
            where = f"at width {w}, after {t} horizon(s)"
            for claim, some, sign in (
                ("μLO_M and μVeLO_M have the two best average ranks", ("mulo_m", "muvelo_m"), 1),
                ("LO_M and VeLO_M have the two worst", ("lo_m", "velo_m"), -1),
            ):
                inside = [sign * x for name, x in of.items() if name in some]
                others = [sign * x for name, x in of.items() if name not in some]
                if inside and others:
                    checks[f"{claim} {where}"] = max(inside) < min(others)
    return Finding("\n".join(said), checks)


def _draw_ranks(ranks: dict, who: list[Contender], suite: Suite, times: list[int], out: Path):
    kinds, columns = ("all", *suite.kinds), list(itertools.product(times, suite.columns))
    head = ["tasks", "optimizer", *(f"{t}x, width {w}" for t, w in columns)]
    rows = [
        [kind, c.name, *(f"{float(ranks[kind, t, w][k]):.2f}" for t, w in columns)]
        for kind in kinds for k, c in enumerate(who)
    ]  # fmt: skip
    write_table(out / "rank.csv", head, rows)
    fig, axes = figure(len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        for (k, c), (n, t) in itertools.product(enumerate(who), enumerate(times)):
            line = [float(ranks[kind, t, w][k]) for w in suite.columns]
            at = range(n * len(line), (n + 1) * len(line))
            ax.plot(at, line, "o-", label="" if n else label(c.name), color=colour(c.name))
        ax.set_xticks(range(len(columns)), [f"{t}x\n{w}" for t, w in columns], fontsize=7)
        ax.set(xlabel="horizons, width", title=f"{kind} tasks" if kind == "all" else kind)
        ax.invert_yaxis()
    axes[0].set_ylabel("average rank")
    axes[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    save(fig, out / "rank.png")


def depth(suite: Suite, cells: Cells, out: Path) -> Finding:
    """Nets of 3 to 16 layers."""
    who, kind, rows = suite.contenders(), suite.kinds[0], []
    names = [f"{kind}_w{suite.widest}_d{d}" for d in suite.depths]
    cells.fill([suite.job(c, name) for name in names for c in who], "depth")
    fig, axes = figure(2)
    last = {}
    for c in who:
        curves = [cells.losses(suite.job(c, name)) for name in names]
        draw_ends(axes[0], list(suite.depths), [final_loss(x) for x in curves], c.name)
        draw_curve(axes[1], curves[-1], suite.steps, c.name)
        for d, x in zip(suite.depths, curves, strict=True):
            rows.append([kind, c.name, d, *(f"{v:.4f}" for v in summary(final_loss(x)))])
        last[c.name] = summary(final_loss(curves[-1]))[0]
    for ax, title in zip(
        axes, (f"width {suite.widest}", f"{suite.depths[-1]} layers"), strict=True
    ):
        ax.set(ylabel="loss", title=f"{kind}, {title}")
        ax.set_ylim(top=1.2 * guess(kind))
    axes[0].set(xlabel="layers", ylabel="final loss")
    axes[1].set(xlabel="step")
    axes[0].legend(fontsize=8)
    save(fig, out / "depth.png")
    write_table(out / "depth.csv", ["kind", "optimizer", "depth", "loss", "stderr"], rows)
    checks = {}
    for mu, sp in (("mulo_m", "lo_m"), ("muvelo_m", "velo_m")):
        if mu in last and sp in last:
            ahead = last[mu] < (math.inf if math.isnan(last[sp]) else last[sp])
            checks[f"{label(mu)} is ahead of {label(sp)} at {suite.depths[-1]} layers"] = ahead
    for c in who:
        if c.name in ("mulo_m", "muvelo_m"):
            curve = cells.losses(suite.job(c, names[-1])).mean(1)
            stable = last[c.name] <= min(1.05 * float(curve.min()), 0.9 * guess(kind))
            checks[f"{label(c.name)} trains {suite.depths[-1]} layers, its loss not rising"] = (
                stable
            )
    return Finding(f"{suite.depths[-1]} layers, final loss: {ordered(last)}.", checks)


def horizon(suite: Suite, cells: Cells, out: Path) -> Finding:
    """Training for 25 horizons, at constant rates and under a cosine schedule."""
    who, rows, said, checks = suite.contenders(), [], [], {}
    name, longest = f"{suite.kinds[0]}_w{suite.widest}_d3", suite.horizons[-1]
    runs = [("constant", longest), *(("cosine", times) for times in suite.horizons)]
    cells.fill([suite.job(c, name, t, schedule) for schedule, t in runs for c in who], "horizon")
    fig, axes = figure(2)
    for schedule, times in runs:
        ends = {}
        for c in who:
            losses = cells.losses(suite.job(c, name, times, schedule))
            (mean, error), lowest = summary(final_loss(losses)), float(losses.mean(1).min())
            rows.append([schedule, times, c.name, *(f"{x:.4f}" for x in (mean, error, lowest))])
            ends[c.name] = mean
            if schedule == "constant" and c.name in ("mulo_m", "muvelo_m"):
                claim = f"{label(c.name)} does not rise by more than 5% over {times} horizons"
                checks[claim] = mean <= 1.05 * lowest
            if times == longest:
                draw_curve(axes[schedule == "cosine"], losses, times, c.name)
        said.append(f"After {times} horizons, {schedule}: {ordered(ends)}.")
        if schedule == "cosine" and {"mulo_m", "adamw"} <= ends.keys():
            level = ends["mulo_m"] <= 1.02 * ends["adamw"]
            checks[f"μLO_M with cosine is level with AdamW with cosine, {times} horizons"] = level
    for ax, schedule in zip(axes, ("constant", "cosine"), strict=True):
        ax.set(xlabel="meta-trained horizons", ylabel="loss", title=f"{name}, {schedule}")
        ax.set_ylim(0, 0.5 * guess(suite.kinds[0]))
    axes[0].legend(fontsize=8)
    save(fig, out / "horizon.png")
    head = ["schedule", "horizons", "optimizer", "loss", "stderr", "lowest"]
    write_table(out / "horizon.csv", head, rows)
    return Finding("\n".join(said), checks)


def coord(suite: Suite, cells: Cells, out: Path) -> Finding:
    """Coordinate check over the first 500 steps: does the drift of a layer depend on width?"""
    who, kind = suite.contenders(), suite.kinds[0]
    widths = [w for w in suite.widths if w <= 16 * suite.widest]
    at = [t for t in (5, 10, 50, 100, 250, 499) if t < suite.steps]  # before, hidden layers rest
    jobs = [[suite.watch(c, f"{kind}_w{w}_d3", 1, at, seeds=3) for w in widths] for c in who]
    cells.fill([job for some in jobs for job in some], "coord")
    fig, axes = figure(len(who))
    rows, verdicts, checks = [], [], {}
    for ax, c, some in zip(axes, who, jobs, strict=True):
        seen, worst = [cells.watched(job) for job in some], 0.0
        for layer in seen[0]:
            drift = torch.tensor([[change for change, _ in s[layer]] for s in seen]).double()
            slopes = roles.slope(widths, drift.T)  # (times,)
            mean = float(slopes.abs().mean())
            rows.append([c.name, layer, f"{mean:.3f}", *(f"{x:.3f}" for x in slopes.tolist())])
            worst = max(worst, mean) if not math.isnan(mean) else math.inf
            ax.plot(widths, drift[:, -1], marker="o", label=f"{layer} ({mean:.2f})")
        verdict = "pass" if worst <= 0.1 else "fail"
        verdicts.append(f"{label(c.name)} {verdict} ({worst:.2f})")
        wanted = "passes" if c.rules else "fails"
        checks[f"{label(c.name)} {wanted} the coordinate check"] = (worst <= 0.1) == bool(c.rules)
        width_axis(ax, widths)
        ax.set(yscale="log", title=f"{label(c.name)}: {verdict}")
        ax.legend(fontsize=7)
    axes[0].set_ylabel(f"change of pre-activations, step {at[-1]}")
    save(fig, out / "coord.png")
    write_table(
        out / "coord.csv", ["optimizer", "layer", "mean |slope|", *(f"t={t}" for t in at)], rows
    )
    said = (
        "Mean |slope| of log drift against log width, in the worst layer: "
        + ", ".join(verdicts)
        + "."
    )
    return Finding(said, checks)


def stability(suite: Suite, cells: Cells, out: Path) -> Finding:
    """L1 norms of first-layer pre-activations and logits: a deep net, and a long run."""
    who, kind = suite.contenders(), suite.kinds[0]
    deep, long = f"{kind}_w{suite.widest}_d{suite.depths[-1]}", f"{kind}_w{suite.widest}_d3"
    cases = {f"{suite.depths[-1]} layers": (deep, 1), "5 horizons": (long, 5)}
    jobs = {}
    for title, (name, times) in cases.items():
        every = max(1, times * suite.steps // 25)
        at = list(range(every, times * suite.steps, every))
        jobs[title] = [suite.watch(c, name, times, at, seeds=2) for c in who]
    cells.fill([job for some in jobs.values() for job in some], "stability")
    fig, axes = figure(2 * len(cases))
    rows = []
    for k, (title, some) in enumerate(jobs.items()):
        for job in some:
            seen, name = cells.watched(job), job.who.name
            layers = list(seen)
            for ax, layer in zip(axes[2 * k :], (layers[0], layers[-1]), strict=False):
                norms = [norm for _, norm in seen[layer]]
                ax.plot(job.at, norms, label=label(name), color=colour(name))
                ax.set(xlabel="step", yscale="log", title=f"{title}: {layer}")
                rows.append([job.task, name, layer, f"{norms[0]:.4g}", f"{norms[-1]:.4g}"])
    axes[0].set_ylabel("mean |pre-activation|")
    axes[0].legend(fontsize=7)
    save(fig, out / "stability.png")
    write_table(out / "stability.csv", ["task", "optimizer", "layer", "early", "late"], rows)
    size = {(task, name, layer): float(late) for task, name, layer, _, late in rows}
    first, checks = rows[0][2], {}
    for title, (task, _) in cases.items():
        if {"mulo_m", "lo_m"} <= {c.name for c in who}:
            smaller = size[task, "mulo_m", first] < math.inf
            smaller &= not size[task, "lo_m", first] <= size[task, "mulo_m", first]
            checks[f"{title}: first-layer pre-activations are smaller with μLO_M than LO_M"] = (
                smaller
            )
    grown = [f"{label(r[1])} {r[3]} -> {r[4]}" for r in rows if r[0] == long]
    said = "Mean |first-layer pre-activation| and |logit|, early to late: " + ", ".join(grown)
    return Finding(f"{said}.", checks)


def distribution(suite: Suite, cells: Cells, out: Path) -> Finding:
    """One width in meta-training against three, with μP and without."""
    given = {c.name: c for c in suite.contenders()}
    who = [given.get(name) or contender(name) for name in ("mulo_m", "mulo_s", "lo_m", "lo_s")]
    widths, kind = [w for w in suite.widths if w <= 16 * suite.widest], suite.kinds[0]
    jobs = {c.name: [suite.job(c, f"{kind}_w{w}_d3") for w in widths] for c in who}
    cells.fill([job for some in jobs.values() for job in some], "distribution")
    fig, axes = figure(1)
    ends = {name: [final_loss(cells.losses(job)) for job in some] for name, some in jobs.items()}
    rows = []
    for name, found in ends.items():
        draw_ends(axes[0], widths, found, name)
        for w, x in zip(widths, found, strict=True):
            rows.append([kind, name, w, *(f"{v:.4f}" for v in summary(x))])
    width_axis(axes[0], widths)
    axes[0].set(ylabel="final loss", title=kind)
    axes[0].set_ylim(top=1.1 * guess(kind))
    axes[0].legend(fontsize=8)
    save(fig, out / "distribution.png")
    write_table(out / "distribution.csv", ["kind", "optimizer", "width", "loss", "stderr"], rows)
    last = {name: summary(found[-1])[0] for name, found in ends.items()}
    checks = {
        f"{label(a)} is ahead of {label(b)} at width {widths[-1]}": worse(ends[b][-1], ends[a][-1])
        for a, b in (("mulo_m", "mulo_s"), ("mulo_s", "lo_s"), ("mulo_m", "lo_m"))
    }
    return Finding(f"{kind}, width {widths[-1]}, final loss: {ordered(last)}.", checks)


EXPERIMENTS = {f.__name__: f for f in (width, rank, depth, horizon, coord, stability, distribution)}
