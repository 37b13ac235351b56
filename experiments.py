"""The paper's claims, each tested by an experiment: a table, a figure, a sentence.

    report = width(Suite(), Cells(Path("results/losses.csv")), Path("results"))

Paper: section 5. `python evaluate.py width` and so on run them. Everything that trains a net goes
through `Cells`, so a second run only draws. Where a net diverged, its loss counts as that of
guessing when optimizers are ranked, and is drawn as a cross at the top of a figure.
"""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from tqdm import tqdm

import mup
import stacked
import tasks
from cells import Cells, Contender, contender
from checkpoints import write_atomically

LABELS = {
    "mulo_m": "μLO_M", "mulo_s": "μLO_S", "muvelo_m": "μVeLO_M", "lo_m": "LO_M", "lo_s": "LO_S",
    "velo_m": "VeLO_M", "adamw": "AdamW", "muadam": "μAdam",
}  # fmt: skip


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
    seeds: int = 5

    def contenders(self) -> list[Contender]:
        return [contender(name) for name in self.who]


PAPER = Suite(
    kinds=("in32_mlp", "in64_mlp", "c10_mlp"),
    widest=1024,
    widths=(128, 256, 512, 1024, 2048, 4096, 8192),
    columns=(2048, 4096, 8192),
    steps=1000,
)
SMOKE = Suite(
    kinds=("fashion8_mlp",), widths=(8, 16), columns=(8,), depths=(3, 4), steps=10, seeds=2
)

SUITES = {"desk": Suite(), "paper": PAPER, "smoke": SMOKE}


def losses_of(
    cells: Cells, who: Contender, name: str, steps: int, suite: Suite, schedule: str = "constant"
) -> Tensor:
    return cells.get(who, tasks.get(name), steps, schedule, list(range(suite.seeds)))


def end(losses: Tensor, share: float = 1.0) -> Tensor:
    """The final loss of each net, (seeds,): mean of the last tenth before `share` of the run."""
    last = max(1, round(share * len(losses)))
    return losses[max(0, last - max(1, len(losses) // 10)) : last].mean(0)


def summary(x: Tensor) -> tuple[float, float]:
    """Mean and standard error over seeds."""
    return float(x.mean()), float(x.std() / math.sqrt(len(x))) if len(x) > 1 else 0.0


def label(who: Contender | str) -> str:
    name = who if isinstance(who, str) else who.name
    return LABELS.get(name, name)


def figure(panels: int, height: float = 3.6):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        1, panels, figsize=(4.4 * panels, height), constrained_layout=True, squeeze=False
    )
    return fig, list(axes[0])


def save(fig, path: Path) -> None:
    import matplotlib.pyplot as plt

    write_atomically(path, lambda file: fig.savefig(file, dpi=120))
    plt.close(fig)


def write_table(path: Path, head: list[str], rows: list[list]) -> None:
    lines = [",".join(map(str, row)) for row in [head, *rows]]
    write_atomically(path, lambda file: file.write(("\n".join(lines) + "\n").encode()))


def draw_ends(ax, x: list[int], ends: list[Tensor], name: str) -> None:
    """Final losses with error bars; a cross at the top where a net diverged."""
    values = [summary(e) for e in ends]
    line = ax.errorbar(
        x, [m for m, _ in values], [s for _, s in values], marker="o", capsize=2, label=label(name)
    )
    gone = [a for a, (m, _) in zip(x, values, strict=True) if math.isnan(m)]
    top = [0.98 - 0.03 * len(ax.lines) % 0.2] * len(gone)
    ax.plot(gone, top, "x", color=line[0].get_color(), transform=ax.get_xaxis_transform())


def width(suite: Suite, cells: Cells, out: Path) -> str:
    """Final loss against width, and training curves at the largest (the paper's figures 1c, 4)."""
    who, rows, said = suite.contenders(), [], []
    fig, axes = figure(2 * len(suite.kinds))
    for k, kind in enumerate(suite.kinds):
        ends: dict[str, list[Tensor]] = {c.name: [] for c in who}
        for w in tqdm(suite.widths, desc=f"width, {kind}"):
            for c in who:
                losses = losses_of(cells, c, f"{kind}_w{w}_d3", suite.steps, suite)
                ends[c.name].append(end(losses))
                rows.append([kind, c.name, w, *(f"{x:.4f}" for x in summary(end(losses)))])
        for c in who:
            draw_ends(axes[2 * k], list(suite.widths), ends[c.name], c.name)
            curve = losses_of(cells, c, f"{kind}_w{suite.widths[-1]}_d3", suite.steps, suite)
            times = torch.arange(1, len(curve) + 1) * suite.steps / len(curve)
            axes[2 * k + 1].plot(times, curve.mean(1), label=label(c))
        start = math.log(tasks.get(f"{kind}_w8_d3").classes)
        axes[2 * k].set(xscale="log", xlabel="width", ylabel="final loss", title=kind)
        axes[2 * k].set_ylim(top=1.1 * start)
        axes[2 * k].axvline(suite.widest, color="0.8", zorder=0)
        axes[2 * k + 1].set(xlabel="step", ylabel="loss", title=f"{kind}, width {suite.widths[-1]}")
        axes[2 * k + 1].set_ylim(top=1.2 * start)
        said.append(_width_sentence(kind, suite, ends))
    axes[0].legend(fontsize=8)
    save(fig, out / "width.png")
    write_table(out / "width.csv", ["kind", "optimizer", "width", "loss", "stderr"], rows)
    return "\n".join(said)


def _width_sentence(kind: str, suite: Suite, ends: dict[str, list[Tensor]]) -> str:
    parts = []
    for name, found in ends.items():
        values = [summary(e) for e in found]
        falls = all(b <= a + math.hypot(s, t) for (a, s), (b, t) in pairwise(values))
        shape = "falls throughout" if falls else "does not fall throughout"
        parts.append(f"{label(name)} {values[0][0]:.3f} -> {values[-1][0]:.3f} ({shape})")
    return f"{kind}, width {suite.widths[0]} to {suite.widths[-1]}: " + "; ".join(parts) + "."


def rank(suite: Suite, cells: Cells, out: Path) -> str:
    """Average rank over tasks at each column's width, at 1, 3 and 5 horizons (table 1)."""
    who, long, times = suite.contenders(), 5 * suite.steps, (1, 3, 5)
    ranks: dict[tuple[int, int], list[Tensor]] = {}
    for w in suite.columns:
        for kind in tqdm(suite.kinds, desc=f"rank, width {w}"):
            guess = math.log(tasks.get(f"{kind}_w8_d3").classes)
            curves = [losses_of(cells, c, f"{kind}_w{w}_d3", long, suite) for c in who]
            for t in times:
                ends = torch.stack([end(x, t / 5).nan_to_num(guess).mean() for x in curves])
                ranks.setdefault((t, w), []).append(ends.argsort().argsort() + 1.0)
    mean = {key: torch.stack(found).mean(0) for key, found in ranks.items()}
    head = ["optimizer", *(f"{t}x, width {w}" for t in times for w in suite.columns)]
    rows = [
        [c.name, *(f"{float(mean[t, w][k]):.2f}" for t in times for w in suite.columns)]
        for k, c in enumerate(who)
    ]
    write_table(out / "rank.csv", head, rows)
    first = torch.stack([mean[1, w] for w in suite.columns]).mean(0)
    order = [label(who[k]) for k in first.argsort().tolist()]
    return f"Average rank at the meta-trained horizon, best first: {', '.join(order)}."


def depth(suite: Suite, cells: Cells, out: Path) -> str:
    """Nets of 3 to 16 layers (figure 5)."""
    who, rows = suite.contenders(), []
    fig, axes = figure(2)
    kind = suite.kinds[0]
    ends: dict[str, list[Tensor]] = {c.name: [] for c in who}
    for d in tqdm(suite.depths, desc="depth"):
        for c in who:
            losses = losses_of(cells, c, f"{kind}_w{suite.widest}_d{d}", suite.steps, suite)
            ends[c.name].append(end(losses))
            rows.append([kind, c.name, d, *(f"{x:.4f}" for x in summary(end(losses)))])
            if d == suite.depths[-1]:
                times = torch.arange(1, len(losses) + 1) * suite.steps / len(losses)
                axes[1].plot(times, losses.mean(1), label=label(c))
    for c in who:
        draw_ends(axes[0], list(suite.depths), ends[c.name], c.name)
    axes[0].set(xlabel="layers", ylabel="final loss", title=f"{kind}, width {suite.widest}")
    axes[1].set(xlabel="step", ylabel="loss", title=f"{suite.depths[-1]} layers")
    axes[0].legend(fontsize=8)
    save(fig, out / "depth.png")
    write_table(out / "depth.csv", ["kind", "optimizer", "depth", "loss", "stderr"], rows)
    last = {n: summary(e[-1])[0] for n, e in ends.items()}
    parts = [
        f"{label(n)} {x:.3f}" for n, x in sorted(last.items(), key=lambda p: (p[1] != p[1], p))
    ]
    return f"{suite.depths[-1]} layers, final loss: {', '.join(parts)}."


def horizon(suite: Suite, cells: Cells, out: Path, times: int = 25) -> str:
    """Training for 25 horizons, at constant rates and under one cosine schedule (figure 6)."""
    who, rows, said = suite.contenders(), [], []
    kind, steps = suite.kinds[0], times * suite.steps
    fig, axes = figure(2)
    for ax, schedule in zip(axes, ("constant", "cosine"), strict=True):
        parts = []
        for c in tqdm(who, desc=f"horizon, {schedule}"):
            name = f"{kind}_w{suite.widest}_d3"
            losses = losses_of(cells, c, name, steps, suite, schedule)
            ax.plot(torch.arange(1, len(losses) + 1) / len(losses) * times, losses.mean(1),
                    label=label(c))  # fmt: skip
            (mean, error), low = summary(end(losses)), float(losses.mean(1).min())
            rows.append([schedule, c.name, f"{mean:.4f}", f"{error:.4f}", f"{low:.4f}"])
            parts.append(f"{label(c)} {mean:.3f} (lowest {low:.3f})")
        ax.set(xlabel="meta-trained horizons", ylabel="loss", title=f"{name}, {schedule}")
        ax.set_ylim(top=1.0)
        said.append(f"After {steps} steps, {schedule}: " + ", ".join(parts) + ".")
    axes[0].legend(fontsize=8)
    save(fig, out / "horizon.png")
    write_table(out / "horizon.csv", ["schedule", "optimizer", "loss", "stderr", "lowest"], rows)
    return "\n".join(said)


def pre_activations(task: tasks.Task, theta: stacked.Theta, probe: Tensor) -> dict[str, Tensor]:
    """The output of every layer for a probe, (P, b, ...) each; the last are the logits."""
    model, found = task.skeleton(), {}
    for name, module in model.named_modules():
        if isinstance(module, mup.LAYERS):
            module.register_forward_hook(lambda m, args, y, name=name: found.__setitem__(name, y))
    P = len(next(iter(theta.values())))
    functional_call(model, theta, (probe.expand(P, *probe.shape),))
    return found


def watch(
    who: Contender, task: tasks.Task, steps: int, seeds: list[int], at: list[int], keep: Path
) -> dict[str, list[tuple[float, float]]]:
    """Per layer, at each time: std of the change of pre-activations since the start, and mean |y|.

    What was seen is kept in a file, like the losses of `Cells`.
    """
    known = json.loads(keep.read_text()) if keep.exists() else {}
    key = f"{who.name}, {task.name}, {steps} steps, {len(seeds)} seeds"
    if key not in known:
        task = stacked.with_rules(task, who.mup)
        probe = task.data().batch(torch.Generator().manual_seed(123), 64)[0]
        first, found = {}, {}

        def look(t: int, theta: stacked.Theta) -> None:
            if t == 0 or t in at:
                for name, y in pre_activations(task, theta, probe).items():
                    first.setdefault(name, y)
                    change = (y - first[name]).flatten(1).std(1).mean()
                    if t:
                        found.setdefault(name, []).append((float(change), float(y.abs().mean())))

        kind = task.name[: task.name.rindex("_w")]
        optimizer = who.optimizer(kind, steps, "constant", len(seeds))
        stacked.train(task, optimizer, max(at) + 1, seeds, look=look)
        known[key] = found
        keep.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(known)
        write_atomically(keep, lambda file: file.write(text.encode()))
    return known[key]


def coord(suite: Suite, cells: Cells, out: Path) -> str:
    """Coordinate check over the first 500 steps: does the drift of a layer depend on width?"""
    widths = [w for w in suite.widths if w <= 16 * suite.widest]
    at = [t for t in (1, 10, 50, 100, 250, 499) if t < suite.steps]
    seeds, kind = list(range(min(3, suite.seeds))), suite.kinds[0]
    log_width = torch.tensor(widths).double().log()
    log_width -= log_width.mean()
    who = [c for c in suite.contenders()]
    fig, axes = figure(len(who))
    rows, verdicts = [], []
    for ax, c in zip(axes, tqdm(who, desc="coordinate check"), strict=True):
        seen = [
            watch(c, tasks.get(f"{kind}_w{w}_d3"), suite.steps, seeds, at, out / "watch.json")
            for w in widths
        ]
        worst = 0.0
        for layer in seen[0]:
            drift = torch.tensor([[change for change, _ in s[layer]] for s in seen]).double()
            slopes = (drift.clamp_min(1e-30).log() * log_width.unsqueeze(1)).sum(0)
            slopes = slopes / log_width.square().sum()  # (times,)
            mean = float(slopes.mean())
            rows.append([c.name, layer, f"{mean:.3f}", *(f"{x:.3f}" for x in slopes.tolist())])
            worst = max(worst, abs(mean)) if not math.isnan(mean) else math.inf
            ax.plot(widths, drift[:, -1], marker="o", label=f"{layer} ({mean:+.2f})")
        verdict = "pass" if worst <= 0.1 else "fail"
        verdicts.append(f"{label(c)} {verdict} ({worst:.2f})")
        ax.set(xscale="log", yscale="log", xlabel="width", title=f"{label(c)}: {verdict}")
        ax.legend(fontsize=7)
    axes[0].set_ylabel(f"change of pre-activations, step {at[-1]}")
    save(fig, out / "coord.png")
    write_table(out / "coord.csv", ["optimizer", "layer", "slope", *(f"t={t}" for t in at)], rows)
    return "Largest mean |slope| of log drift against log width: " + ", ".join(verdicts) + "."


def stability(suite: Suite, cells: Cells, out: Path) -> str:
    """L1 norms of first-layer pre-activations and logits: a deep net, and a long run."""
    kind, seeds = suite.kinds[0], list(range(min(2, suite.seeds)))
    cases = {
        f"{suite.depths[-1]} layers": (f"{kind}_w{suite.widest}_d{suite.depths[-1]}", suite.steps),
        "5 horizons": (f"{kind}_w{suite.widest}_d3", 5 * suite.steps),
    }
    fig, axes = figure(2 * len(cases))
    rows = []
    for k, (title, (name, steps)) in enumerate(cases.items()):
        at = list(range(max(1, steps // 25), steps, max(1, steps // 25)))
        for c in tqdm(suite.contenders(), desc=f"stability, {title}"):
            seen = watch(c, tasks.get(name), steps, seeds, at, out / "watch.json")
            layers = list(seen)
            for j, layer in enumerate((layers[0], layers[-1])):
                norms = [norm for _, norm in seen[layer]]
                axes[2 * k + j].plot(at, norms, label=label(c))
                axes[2 * k + j].set(xlabel="step", yscale="log", title=f"{title}: {layer}")
                rows.append([name, c.name, layer, f"{norms[0]:.4g}", f"{norms[-1]:.4g}"])
    axes[0].set_ylabel("mean |pre-activation|")
    axes[0].legend(fontsize=7)
    save(fig, out / "stability.png")
    write_table(out / "stability.csv", ["task", "optimizer", "layer", "early", "late"], rows)
    grown = [f"{label(r[1])} {r[3]} -> {r[4]}" for r in rows if r[0] == cases["5 horizons"][0]]
    return "Mean |first-layer pre-activation| and |logit|, early to late: " + ", ".join(grown) + "."


EXPERIMENTS = {f.__name__: f for f in (width, rank, depth, horizon, coord, stability)}
