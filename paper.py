"""The paper's experiments and ours, from trained nets to RESULTS.md.

Each is a function that returns a table, a figure and checks; its docstring has a title and the
paper's claim.

    python paper.py width                # one of EXPERIMENTS: results/width.csv and .png
    python paper.py all                  # all of them, README's picture and RESULTS.md
    python paper.py tune                 # tune baselines that are not tuned yet
    python paper.py width --scale paper --device cuda --optimizers runs/mulo_m_paper_seed0 adamw

Paper: section 5 and appendices. `evaluate.Results` trains the nets and saves their losses, so a
second run only computes tables and draws figures. A horizon is the length of runs in meta-training.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
from itertools import chain, product
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure

from mulo import evaluate, kernels, roles, tasks
from mulo.evaluate import Contender, Job, Results, Tuning, contender, mean_stderr
from mulo.results import report
from mulo.results.report import LABELS, Finding, falls, figure, guess, listing, worse
from mulo.training import final_loss

PAIRS = {"mulo_m": "lo_m", "muvelo_m": "velo_m"}  # the same recipe in μP and in SP
SIZES = ("Large", "XL", "XXL")  # columns of the paper's table of ranks
IMAGES = {64: "fashion8_mlp", 196: "fashion14_mlp", 784: "fashion_mlp"}  # input size: kind
MUON_WIDEST, IN_TRANSFER = 1024, 256  # Muon is slow: its widest nets, and those in `transfer`
PROBED = (5, 10, 50, 100, 250, 499)  # steps of `coord`; hidden layers barely move before step 5
SEEDS = 5  # of `transfer` and `resnet`
WIDE, NARROW = (64, 256, 1024), (64, 128)
TRANSFER = {  # tasks of `transfer`: widths
    "c10s_mlp_w{}_d3": WIDE, "c10b_mlp_w{}_d3": WIDE, "fashion_mlp_w{}_d3": WIDE,
    "teacher256_mlp_w{}_d3": WIDE, "teacher1024_mlp_w{}_d3": WIDE, "teacher2_mlp_w{}_d3": WIDE,
    "teacher100_mlp_w{}_d3": WIDE, "c10s_conv_w{}_d3_b16": NARROW, "c10s_vit_w{}_d3_b16": NARROW,
    "text_lm_w{}_d2_b8": NARROW,
}  # fmt: skip


def transfer_tasks() -> list[str]:
    return [name.format(width) for name, widths in TRANSFER.items() for width in widths]


def trains(optimizer: str, task: str, widest: int) -> bool:
    """Whether an optimizer is trained on a task: Muon on nets up to `widest`, others on all."""
    return not optimizer.startswith("muon") or tasks.get(task).width <= widest


@dataclasses.dataclass(frozen=True)
class Family:
    """Nets of one kind, and the sizes at which they are tested."""

    kind: str
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    columns: tuple[int, ...] = (128, 256, 512)  # widths of SIZES
    base: int = 64  # width for deep nets, long runs and tuning
    depths: tuple[int, ...] = ()
    horizons: tuple[int, ...] = ()  # run lengths under a cosine schedule, in meta-trained horizons
    longest: int = 0  # run length at a constant rate; 0: no long run
    seeds: int = 5
    few_seeds: int = 5  # for ranks and for the longest runs
    suffix: str = ""  # of task names, such as _b8 for batches of 8

    def task(self, width: int, depth: int = 3) -> str:
        return f"{self.kind}_w{width}_d{depth}{self.suffix}"


TRANSFORMER = {
    "widths": (16, 32, 64, 128), "columns": (32, 64, 128), "base": 32, "depths": (3, 16),
    "longest": 25, "few_seeds": 2, "suffix": "_b8",
}  # fmt: skip
PAPER_MLP = {
    "widths": (128, 256, 512, 1024, 2048, 4096, 8192), "columns": (2048, 4096, 8192), "base": 1024,
}  # fmt: skip
PAPER_TRANSFORMER = {
    "widths": (192, 384, 768, 1024, 2048, 3072), "columns": (2048, 3072, 3072), "base": 1024,
    "depths": (3, 16), "longest": 25,
}  # fmt: skip
DEEP_AND_LONG = {"depths": (3, 4, 8, 16), "horizons": (5, 10, 25), "longest": 25}


@dataclasses.dataclass(frozen=True)
class Suite:
    """Optimizers and tasks. The first family is the one of meta-training."""

    optimizers: tuple[str, ...] = (*PAIRS, *PAIRS.values(), "adamw", "muadam", "muon")
    families: tuple[Family, ...] = (
        Family("fashion8_mlp", **DEEP_AND_LONG), Family("teacher_mlp"),
        Family("fashion_vit", **TRANSFORMER), Family("pixels_lm", **TRANSFORMER),
    )  # fmt: skip
    steps: int = 500  # the meta-trained horizon
    resnets: tuple[str, ...] = tuple(f"fashion_resnet_w{w}_b16" for w in (32, 64, 128, 192, 256))
    scale: str = "desk"

    def contenders(self, *names: str) -> dict[str, Contender]:
        """By name of recipe: the suite's optimizers without Muon or, if names are given, these. At
        desk scale, a named one that the suite lacks is the shipped one."""
        given = [contender(name) for name in self.optimizers if name != "muon"]
        known = {c.recipe or c.name: c for c in given}
        if len(known) < len(given):
            raise ValueError("two of --optimizers are runs of one recipe: use evaluate.py task.")
        for name in names:
            if name not in known and name not in evaluate.MORE_BASELINES and self.scale == "paper":
                raise ValueError(f"this experiment needs {name}: add its run to --optimizers.")
        chosen = {name: known.get(name) or contender(name) for name in names or known}
        return {name: dataclasses.replace(c, name=name) for name, c in chosen.items()}

    def muon(self, *task_names: str) -> dict[str, Contender]:
        """Muon at one rate and tuned at every width; {} if one of these tasks is too wide."""
        fits = "muon" in self.optimizers and all(trains("muon", x, MUON_WIDEST) for x in task_names)
        return self.contenders("muon", "muon_oracle") if fits else {}


SUITES = {
    "desk": Suite(),
    "paper": Suite(
        families=(
            Family("in32_mlp", **PAPER_MLP, **DEEP_AND_LONG),
            Family("in64_mlp", PAPER_MLP["widths"][:-1], (2048, 4096, 4096), base=1024),
            Family("c10_mlp", **PAPER_MLP), Family("vit", **PAPER_TRANSFORMER),
            Family("lm", **PAPER_TRANSFORMER),
        ),
        steps=1000, scale="paper",
        resnets=tuple(f"resnet_w{w}" for w in (128, 256, 512, 1024, 2048)),
    ),
}  # fmt: skip


# ---------------------------------------------------------------- experiments


def sweep(
    suite: Suite, results: Results, optimizers: dict[str, Contender], axis: str,
    sizes: dict[Family, dict[int, str]],
) -> tuple[dict, dict, list, Figure]:  # fmt: skip
    """Train every optimizer on {size: task} of each family. Returns final losses and curves, both
    by optimizer for each (kind, size), a table, and a figure."""
    jobs = {
        (f.kind, name, size): Job(c, task, suite.steps, seeds=range(f.seeds))
        for (f, tested), (name, c) in product(sizes.items(), optimizers.items())
        for size, task in tested.items()
        if trains(name, task, MUON_WIDEST)
    }
    results.run(jobs.values(), axis)
    final, curves, rows = {}, {}, [["kind", "optimizer", axis, "loss", "stderr"]]
    for (kind, name, size), job in jobs.items():
        losses = results.losses(job)
        curves.setdefault((kind, size), {})[name] = losses
        final.setdefault((kind, size), {})[name] = final_loss(losses)
        rows.append([kind, name, size, *mean_stderr(final_loss(losses))])
    fig, axes = figure(2 * len(sizes))
    for (f, tested), ax, beside in zip(sizes.items(), axes[::2], axes[1::2], strict=True):
        kind, size = f.kind, max(tested)
        report.draw_final(ax, kind, rows, xlabel=axis, title=kind)
        title = f"{kind}, {axis} {size}"
        report.draw_curves(beside, kind, curves[kind, size], suite.steps, title=title)
    axes[0].legend(fontsize=8)
    return final, curves, rows, fig


def width(suite: Suite, results: Results) -> Finding:
    """Wider nets.

    The final loss of μLOs falls with width far beyond the widths of meta-training; LOs in standard
    parametrization (SP) stop improving or diverge (figures 3 and 4).
    """
    sizes = {f: {w: f.task(w) for w in f.widths} for f in suite.families}
    optimizers = suite.contenders() | suite.muon()
    final, _, rows, fig = sweep(suite, results, optimizers, "width", sizes)
    checks, summary = {}, []
    for f in suite.families:
        kind, top, last = f.kind, f"width {f.widths[-1]}", final[f.kind, f.widths[-1]]
        beyond = [w for w in f.widths if w >= f.columns[-1]]
        for mu, sp in PAIRS.items():
            if {mu, sp} <= last.keys():
                claim, other = f"{kind}: the loss of {LABELS[mu]} falls", f"{kind}: {LABELS[sp]}"
                by_mu, by_sp = ([final[kind, w][name] for w in f.widths] for name in (mu, sp))
                behind = all(worse(final[kind, w][sp], final[kind, w][mu]) for w in beyond)
                checks |= {
                    f"{claim} to {top}, within the standard error": falls(by_mu),
                    f"{claim} to {top}, within the error of paired differences": falls(by_mu, True),
                    f"{other} is worse from width {beyond[0]} on": behind,
                    f"{other} has stopped improving by {top}": report.stopped(by_sp),
                }
        summary.append(f"{kind}, {top}: {listing(last)}")
    return Finding(rows, fig, checks, "; ".join(summary))


def rank(suite: Suite, results: Results) -> Finding:
    """Average rank.

    At widths from 2048 (Large) to 8192 (XXL), μLO_M and μVeLO_M have the two best average ranks
    (1.2 to 2.6); VeLO_M and LO_M have the worst (4.0 to 6.0) (table 1).
    """
    # Losses at 3 horizons are from the runs of 5, so VeLO, which is told the length of its run, and
    # Muon, which has a cosine, have not finished there. A diverged net has the loss of guessing.
    runs, jobs, means = {1: 1, 3: 5, 5: 5}, {}, []  # horizons: length of the run
    tested = [f.task(w) for f in suite.families for w in f.columns]
    optimizers = suite.contenders() | suite.muon(*tested)
    names, columns = list(optimizers), list(product(runs, SIZES))
    for f, (t, size) in product(suite.families, columns):
        task, steps = f.task(f.columns[SIZES.index(size)]), runs[t] * suite.steps
        seeds = range(f.few_seeds)
        jobs[f, t, size] = [Job(c, task, steps, seeds=seeds) for c in optimizers.values()]
    results.run(chain(*jobs.values()), "rank")
    for (f, t, _), of_task in jobs.items():
        losses = torch.stack([final_loss(results.losses(job), t / runs[t]) for job in of_task])
        losses = losses.nan_to_num(guess(f.kind)).clamp_max(guess(f.kind))  # (optimizers, seeds)
        means.append(losses.mean(1))
    means = torch.stack(means).unflatten(0, (-1, len(columns)))  # (kinds, columns, optimizers)
    ranks, kinds = report.ranked(means), [f.kind for f in suite.families]
    overall = ranks.mean(0)  # (columns, optimizers)
    rows = [["tasks", "optimizer", *(f"{t}x, {size}" for t, size in columns)]]
    fig, axes = figure(1 + len(kinds))
    for ax, kind, by_column in zip(axes, ["all", *kinds], [overall, *ranks], strict=True):
        for name, row in zip(names, by_column.T, strict=True):
            rows.append([kind, name, *(f"{x:.2f}" for x in row.tolist())])
            ax.plot(row, "o-", **report.style(name))
        ax.set_xticks(range(len(columns)), [f"{t}x\n{size}" for t, size in columns], fontsize=6)
        ax.set(xlabel="horizons, size", ylabel="average rank", title=f"{kind} tasks")
        ax.invert_yaxis()
    axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)).set_in_layout(False)
    checks, summary = {}, []
    others = [name for name in names if not name.startswith("muon")]  # Muon is not in the paper
    ranks_of_others = report.ranked(means[..., [names.index(name) for name in others]]).mean(0)
    for (t, size), row in zip(columns, ranks_of_others.tolist(), strict=True):
        for claim, best in (
            ("μLO_M and μVeLO_M have the two best average ranks", set(PAIRS)),
            ("LO_M and VeLO_M have the two worst", set(others) - set(PAIRS.values())),
        ):
            ahead = [x for name, x in zip(others, row, strict=True) if name in best]
            behind = [x for name, x in zip(others, row, strict=True) if name not in best]
            if ahead and behind:
                checks[f"{claim}, {size}, after {t}x the horizon"] = max(ahead) < min(behind)
    for t, row in zip(runs, overall.unflatten(0, (len(runs), -1)).mean(1), strict=True):
        text = listing(dict(zip(names, row, strict=True)), ".2f")
        summary.append(f"average rank after {t}x the horizon: {text}")
    return Finding(rows, fig, checks, "; ".join(summary))


def depth(suite: Suite, results: Results) -> Finding:
    """Deeper nets.

    At 16 layers μLO_M and μVeLO_M train stably and generally outperform LO_M and VeLO_M; on the
    deep MLP, LO_M diverges at once (figure 5).
    """
    sizes = {f: {d: f.task(f.base, d) for d in f.depths} for f in suite.families if f.depths}
    final, curves, rows, fig = sweep(suite, results, suite.contenders(), "depth", sizes)
    checks, summary = {}, []
    for f in sizes:
        kind, deepest, last = f.kind, f.depths[-1], final[f.kind, f.depths[-1]]
        layers = f"{deepest} {'layers' if kind.endswith('mlp') else 'blocks'}"
        for mu, sp in PAIRS.items():
            if {mu, sp} <= last.keys():
                claim = f"{kind}: {LABELS[mu]} is ahead of {LABELS[sp]} at {layers}"
                checks[claim] = worse(last[sp], last[mu])
        for name in filter(PAIRS.get, last):
            bound = min(1.05 * float(curves[kind, deepest][name].mean(1).min()), 0.9 * guess(kind))
            claim = f"{kind}: {LABELS[name]} trains {layers}, and the loss does not rise"
            checks[claim] = float(last[name].mean()) <= bound
        summary.append(f"{kind}, {layers}: {listing(last)}")
    return Finding(rows, fig, checks, "; ".join(summary))


def horizon(suite: Suite, results: Results) -> Finding:
    """Longer training.

    Over 25 times the meta-trained length the loss of μLOs keeps falling, while LO_M and VeLO_M stop
    improving or diverge (figure 6). The runs under a cosine schedule (1 to 0.1) are not in the
    paper. Here, at a constant rate, updates of LOs shrink as 1/√t beyond the horizon (μVeLO_M: as
    t^-0.75; VeLO_M: not at all).
    """
    jobs = {}
    for f in suite.families:
        runs = [("constant", f.longest, f.few_seeds)] * bool(f.longest)
        runs += [("cosine", times, f.seeds) for times in f.horizons]
        for schedule, times, seeds in runs:
            args = f.task(f.base), times * suite.steps, schedule, range(seeds)
            optimizers = suite.contenders()
            optimizers |= suite.muon(args[0]) if schedule == "cosine" else {}
            jobs[f, schedule, times] = {name: Job(c, *args) for name, c in optimizers.items()}
    results.run(chain(*(by_name.values() for by_name in jobs.values())), "horizon")
    rows = [["kind", "schedule", "horizons", "optimizer", "loss", "stderr", "lowest"]]
    (fig, axes), checks, summary = figure(sum(n == f.longest for f, _, n in jobs)), {}, []
    panels = iter(axes)
    for (f, schedule, times), by_name in jobs.items():
        curves = {name: results.losses(job) for name, job in by_name.items()}
        final = {name: final_loss(losses) for name, losses in curves.items()}
        for name, losses in curves.items():
            lowest = float(losses.mean(1).unfold(0, 5, 1).mean(-1).min())  # of any tenth
            rows.append([f.kind, schedule, times, name, *mean_stderr(final[name]), lowest])
            if schedule == "constant" and name in PAIRS:
                claim = f"{f.kind}: the loss of {LABELS[name]} rises by at most 5% over {times}"
                checks[f"{claim} horizons"] = float(final[name].mean()) <= 1.05 * lowest
        if schedule == "cosine" and {"mulo_m", "adamw"} <= final.keys():
            claim = f"{f.kind}: with cosine, μLO_M is level with AdamW after {times} horizons"
            checks[claim] = bool(final["mulo_m"].mean() <= 1.02 * final["adamw"].mean())
        if times == f.longest:
            labels = {"xlabel": "horizons", "title": f"{f.task(f.base)}, {schedule}"}
            report.draw_curves(next(panels), f.kind, curves, times, **labels)
            summary.append(f"{f.kind}, {times} horizons, {schedule}: {listing(final)}")
    max(axes, key=lambda ax: len(ax.lines)).legend(fontsize=8)  # Muon is in some panels only
    return Finding(rows, fig, checks, "; ".join(summary))


def coord(suite: Suite, results: Results) -> Finding:
    """Coordinate check.

    Under μP the change of pre-activations over the first 500 steps does not depend on width; in SP
    it grows with width (figure 2, appendix). The check against the input size is not in the paper.
    """
    first = suite.families[0]
    widths = {w: first.task(w) for w in first.widths if w <= 16 * first.base}
    optimizers = suite.contenders()
    steps = [t for t in PROBED if t < suite.steps]
    panels = [(c, "width", widths) for c in optimizers.values()]
    if "mulo_m" in optimizers and suite.scale == "desk":
        mine = optimizers["mulo_m"]
        lo = mine.lo.with_config(input_base=None)
        without = dataclasses.replace(mine, name="mulo_m without input rule", lo=lo)
        images = {n: f"{kind}_w{first.base}_d3_b64" for n, kind in IMAGES.items()}
        panels += [(c, "input size", images) for c in (mine, without)]
    jobs = [
        [Job(c, task, suite.steps, seeds=range(3), probe_at=steps) for task in by_size.values()]
        for c, _, by_size in panels
    ]
    results.run(chain(*jobs), "coord")
    rows = [["optimizer", "against", "layer", "mean |slope|", *(f"t={t}" for t in steps)]]
    (fig, axes), checks, worst_layer = figure(len(panels)), {}, {}
    for ax, (c, against, by_size), of_panel in zip(axes, panels, jobs, strict=True):
        probed, sizes, worst = [results.activations(job) for job in of_panel], list(by_size), 0.0
        for layer in probed[0]:
            drift = torch.tensor([[change for change, _ in x[layer]] for x in probed]).double()
            slopes = roles.slope(sizes, drift.T)  # (steps,)
            mean = float(slopes.abs().mean())
            rows.append([c.name, against, layer, *(f"{x:.3f}" for x in (mean, *slopes.tolist()))])
            worst = math.inf if math.isnan(mean) else max(worst, mean)
            ax.plot(sizes, drift[:, -1], marker="o", label=f"{layer} ({mean:.2f})")
        name = LABELS.get(c.name, c.name)
        worst_layer[f"{name} ({against})"] = worst
        expected = bool(c.rules) and "without" not in c.name
        claim = f"{name} {'passes' if expected else 'fails'} the coordinate check"
        checks[f"{claim} in {against}"] = (worst <= 0.1) == expected
        report.size_axis(ax, sizes)
        ax.set(xlabel=against, yscale="log", title=f"{name}, {against}: {worst:.2f}")
        ax.legend(fontsize=7)
    axes[0].set_ylabel(f"change of pre-activations, step {steps[-1]}")
    return Finding(rows, fig, checks, f"|slope| in the worst layer: {listing(worst_layer, '.2f')}")


def stability(suite: Suite, results: Results) -> Finding:
    """Stable activations.

    In a deep net first-layer pre-activations stay stable with μLO_M and grow with LO_M (appendix).
    """
    first, deepest, jobs = suite.families[0], suite.families[0].depths[-1], {}
    for title, d, horizons in ((f"{deepest} layers", deepest, 1), ("5 horizons", 3, 5)):
        task, steps = first.task(first.base, d), horizons * suite.steps
        at = range(max(1, steps // 25), steps, max(1, steps // 25))
        optimizers = suite.contenders().values()
        jobs[title] = [Job(c, task, steps, seeds=range(2), probe_at=at) for c in optimizers]
    results.run(chain(*jobs.values()), "stability")
    rows = [["task", "optimizer", "layer", "early", "late"]]
    (fig, axes), checks, summary = figure(4), {}, []
    for title, pair in zip(jobs, (axes[:2], axes[2:]), strict=True):
        late = {}  # of the first layer
        for job in jobs[title]:
            probed, name = results.activations(job), job.optimizer.name
            layers = list(probed)
            for ax, layer in zip(pair, (layers[0], layers[-1]), strict=True):
                norms = [norm for _, norm in probed[layer]]
                ax.plot(job.probe_at, norms, **report.style(name))
                ax.set(xlabel="step", yscale="log", title=f"{title}: {layer}")
                rows.append([job.task, name, layer, f"{norms[0]:.4g}", f"{norms[-1]:.4g}"])
                late.setdefault(name, norms[-1])
        if {"mulo_m", "lo_m"} <= late.keys():
            claim = f"{title}: first-layer pre-activations are smaller with μLO_M than with LO_M"
            checks[claim] = late["mulo_m"] < math.inf and not late["lo_m"] <= late["mulo_m"]
        summary.append(f"mean |first-layer pre-activation|, {title}: {listing(late, '.1f')}")
    axes[0].set_ylabel("mean |pre-activation|")
    axes[0].legend(fontsize=7)
    return Finding(rows, fig, checks, "; ".join(summary))


def distribution(suite: Suite, results: Results) -> Finding:
    """Meta-training on one width or on three.

    μLO_M, meta-trained on three widths, generalizes better than μLO_S, meta-trained on one, and
    both better than LOs in SP (figure 3).
    """
    first, checks = suite.families[0], {}
    sizes = {w: first.task(w) for w in first.widths if w <= 16 * first.base}
    optimizers = suite.contenders("mulo_m", "mulo_s", "lo_m", "lo_s")
    final, _, rows, fig = sweep(suite, results, optimizers, "width", {first: sizes})
    widest = max(sizes)
    last = final[first.kind, widest]
    for a, b in (("mulo_m", "mulo_s"), ("mulo_s", "lo_s"), ("mulo_m", "lo_m")):
        checks[f"{LABELS[a]} is ahead of {LABELS[b]} at width {widest}"] = worse(last[b], last[a])
    return Finding(rows, fig, checks, f"{first.kind}, width {widest}: {listing(last)}")


def resnet(suite: Suite, results: Results) -> Finding:
    """ResNets, train and test loss.

    At every width from 128 to 2048 μLO_M ends below LO_M in train loss and in test loss, which is
    within 8% of the train loss (appendix).
    """
    optimizers = suite.contenders("mulo_m", "lo_m")
    jobs = {
        (name, tasks.get(task).width): Job(c, task, suite.steps, seeds=range(SEEDS), test=True)
        for (name, c), task in product(optimizers.items(), suite.resnets)
    }
    results.run(jobs.values(), "resnet")
    train = {key: final_loss(results.losses(job)) for key, job in jobs.items()}
    test = {key: results.losses(job, "test")[-1] for key, job in jobs.items()}
    rows = [["optimizer", "width", "train loss", "stderr", "test loss", "its stderr"]]
    rows += [[*key, *mean_stderr(train[key]), *mean_stderr(test[key])] for key in jobs]
    (fig, axes), kind = figure(2), tasks.get(suite.resnets[0]).kind
    for ax, split, losses in zip(axes, ("train", "test"), (train, test), strict=True):
        points = [[kind, *key, *mean_stderr(x)] for key, x in losses.items()]
        report.draw_final(ax, kind, points, xlabel="width", title=f"{kind}, {split} loss")
    axes[0].legend(fontsize=8)
    widest = max(w for _, w in jobs)
    last = {name: train[name, widest] for name in optimizers}
    checks = report.resnet_checks(train, test)
    return Finding(rows, fig, checks, f"train loss, width {widest}: {listing(last)}")


ENTRANTS = [  # of `transfer`: optimizer, schedule
    ("mulo_m", "constant"), ("mulo_m", "cosine2"), ("adamw", "constant"), ("muadam", "constant"),
    ("adamw_default", "constant"), ("adamw_oracle", "cosine"), ("muon", "warmup"),
    ("muon_oracle", "warmup"),
]  # fmt: skip


def transfer(suite: Suite, results: Results) -> Finding:
    """Other data sets, input sizes and models.

    Not in the paper. μLO_M runs untuned, at a constant rate and under a cosine from 2 to 0.2; AdamW
    at its default rate, with its rate tuned at each task's smallest width, and under a cosine with
    its rate tuned at every width; Muon (orthogonalised momentum for all matrices) under its own
    cosine, at one rate for all tasks and tuned at every width, on nets up to width 256. Ranks are
    over the tasks that all have run.
    """
    optimizers = suite.contenders(*dict(ENTRANTS))
    jobs = {
        (task, entrant): Job(optimizers[entrant[0]], task, suite.steps, entrant[1], range(SEEDS))
        for task, entrant in product(transfer_tasks(), ENTRANTS)
        if trains(entrant[0], task, IN_TRANSFER)
    }
    results.run(jobs.values(), "transfer")
    rows, by_task = [["task", "optimizer", "schedule", "loss", "stderr"]], {}
    for (task, entrant), job in jobs.items():
        bound = guess(tasks.get(task).kind)
        loss = final_loss(results.losses(job)).nan_to_num(bound).clamp_max(bound)
        rows.append([task, *entrant, *mean_stderr(loss)])
        by_task.setdefault(task, {})[entrant] = float(loss.mean())
    means = by_task.values()

    def average_ranks(entrants: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
        losses = [[x[e] for e in entrants] for x in means if x.keys() >= set(entrants)]
        ranks = report.ranked(torch.tensor(losses)).mean(0)
        return dict(zip(entrants, ranks.tolist(), strict=True))

    def ahead(a: tuple[str, str], b: tuple[str, str]) -> bool:
        """Whether a has the lower loss, by the mean of log ratios over the tasks of both."""
        return fmean(math.log(x[a] / x[b]) for x in means if {a, b} <= x.keys()) < 0

    overall = average_ranks(ENTRANTS)
    constant = average_ranks([e for e in ENTRANTS if e[1] == "constant"])
    mine, cosine = ("mulo_m", "constant"), ("mulo_m", "cosine2")
    checks, claim = {}, "μLO_M, untuned, has a better average rank than"
    for name, title in evaluate.BASELINES.items():
        checks[f"{claim} {title} tuned at one width"] = constant[mine] < constant[name, "constant"]
    claim = "μLO_M, untuned, is behind AdamW at its default rate on no task"
    checks[claim] = all(x[mine] <= x["adamw_default", "constant"] for x in means)
    claim = "μLO_M with a cosine is ahead of AdamW with a cosine retuned at every width, on average"
    checks[claim] = ahead(cosine, ("adamw_oracle", "cosine"))
    claim = "μLO_M with a cosine is ahead of Muon at its one rate, on average"
    checks[claim] = ahead(cosine, ("muon", "warmup"))
    fig, [ax] = figure(1)
    values = {LABELS[x] + " + cosine" * (s != "constant"): y for (x, s), y in overall.items()}
    order = sorted(values, key=values.get, reverse=True)
    ax.barh(order, [values[name] for name in order])
    ax.set(xlabel="average rank", title=f"{sum(len(x) == len(ENTRANTS) for x in means)} tasks")
    return Finding(rows, fig, checks, f"average rank: {listing(values, '.2f')}")


# ---------------------------------------------------------------- command line

EXPERIMENTS = (width, rank, distribution, depth, horizon, transfer, resnet, coord, stability)
EXPERIMENTS = {experiment.__name__: experiment for experiment in EXPERIMENTS}


def tune(suite: Suite, results: Results) -> None:
    """Tune the learning rates of baselines that are not tuned yet."""
    families, transfer = suite.families, transfer_tasks()
    long = [(f.task(f.base), n * suite.steps) for f in families for n in f.horizons]
    narrowest = [name.format(widths[0]) for name, widths in TRANSFER.items()]
    runs = [(task, suite.steps) for task in (*(f.task(f.base) for f in families), *narrowest)]
    runs += [(*run, "cosine") for run in long]
    tunings = [Tuning(name, *run) for name, run in product(evaluate.BASELINES, runs)]
    tunings += [Tuning("adamw", task, suite.steps, "cosine", True) for task in transfer]
    muon = [(task, suite.steps, IN_TRANSFER) for task in transfer]
    muon += [(f.task(w), suite.steps, MUON_WIDEST) for f in families for w in f.widths]
    muon += [(*run, MUON_WIDEST) for run in long]
    for task, steps, widest in muon:
        if trains("muon", task, widest):
            tunings.append(Tuning("muon", task, steps, "warmup", True, (5001,)))
    missing = [tuning for tuning in tunings if not tuning.saved()]
    for tuning, values in results.execute(missing, "tuning"):
        tuning.save(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "all", "tune"])
    for flag in ("--scale", "--optimizers", "--out", "--processes", "--device"):
        parser.add_argument(flag, **evaluate.FLAGS[flag])
    args = parser.parse_args()
    with evaluate.exit_with_message("paper.py"):
        device, sentence = kernels.pick_device(args.device)
        print(sentence)
        suite = SUITES[args.scale]
        out = args.out or Path("results" if args.scale == "desk" else f"results_{args.scale}")
        if args.optimizers:
            suite = dataclasses.replace(suite, optimizers=tuple(args.optimizers))
        results = Results(out, device, args.processes)
        if args.experiment == "tune":
            return tune(suite, results)
        findings = {}
        for name in EXPERIMENTS if args.experiment == "all" else [args.experiment]:
            finding = findings[name] = EXPERIMENTS[name](suite, results)
            report.write_finding(finding, name, out)
            print(f"{name}: {finding.summary}.")
            for claim, holds in finding.checks.items():
                print("yes" if holds else "NO ", claim)
        if args.experiment == "all":
            page = Path("RESULTS.md") if out == Path("results") else out / "RESULTS.md"
            docs = {name: inspect.getdoc(EXPERIMENTS[name]) for name in findings}
            report.write_results(findings, docs, out, page)
            base, picture = suite.families[0].base, out / "picture.png"
            report.draw_picture(findings["width"], findings["coord"], base, picture)
        print(results.read_or_trained())


if __name__ == "__main__":
    main()
