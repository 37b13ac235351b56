"""Statistics and figures of the experiments in paper.py, and RESULTS.md, written from them."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from mulo import tasks
from mulo.checkpoints import write_atomically
from mulo.evaluate import BASELINES, MORE_BASELINES, mean_stderr, write_table

LABELS = {
    "mulo_m": "μLO_M", "mulo_s": "μLO_S", "muvelo_m": "μVeLO_M", "lo_m": "LO_M", "lo_s": "LO_S",
    "velo_m": "VeLO_M", **BASELINES, **MORE_BASELINES,
    "mulo_m without input rule": "μLO_M without input rule",
}  # fmt: skip
COLOURS = {name: f"C{k}" for k, name in enumerate(LABELS)} | {"muon": "k", "muon_oracle": "C1"}


class Finding(NamedTuple):
    """The result of an experiment."""

    rows: list[list]  # the table, its head first
    figure: Figure
    checks: dict[str, bool]  # claim: whether it holds
    summary: str


def listing(values: dict[str, float | Tensor], digits: str = ".3f") -> str:
    """Means by optimizer as text, best first."""
    means = {LABELS.get(name, name): float(torch.as_tensor(x).mean()) for name, x in values.items()}
    order = sorted(means, key=lambda name: (math.isnan(means[name]), means[name]))
    texts = {x: f"{means[x]:{digits if means[x] < 100 else '.0e'}}" for x in order}
    return ", ".join(f"{x} {text.replace('nan', 'diverged')}" for x, text in texts.items())


def style(name: str) -> dict:
    """Label and colour of an optimizer in figures; None is the next colour of the figure."""
    return {"label": LABELS.get(name, name), "color": COLOURS.get(name)}


def guess(kind: str) -> float:
    """The loss of uniform guessing."""
    return math.log(tasks.KINDS[kind].classes)


def falls(losses: list[Tensor], paired: bool = False) -> bool:
    """Whether losses fall overall, and none exceeds the previous one by more than the stderr.

    `paired` is stricter: nets of a seed see the same batches, so their differences vary less.
    """
    for a, b in pairwise(losses):
        (before, s), (now, t) = mean_stderr(a), mean_stderr(b)
        if not now <= before + (mean_stderr(b - a)[1] if paired else math.hypot(s, t)):
            return False
    return bool(losses[-1].mean() < losses[0].mean())


def stopped(losses: list[Tensor]) -> bool:
    """Whether the last loss does not beat the best before it by more than the standard error."""
    *before, (mean, error) = map(mean_stderr, losses)
    lowest = min((x for x in before if not math.isnan(x[0])), default=(math.inf, 0.0))
    return not mean < lowest[0] - math.hypot(error, lowest[1])


def worse(a: Tensor, b: Tensor) -> bool:
    """Whether the mean of a is above that of b; divergence counts as infinite."""
    return not float(a.nan_to_num(math.inf).mean()) <= float(b.nan_to_num(math.inf).mean())


def ranked(x: Tensor) -> Tensor:
    """Ranks from 1 along the last dimension; ties share their mean rank."""
    other = x.unsqueeze(-1)
    return 1 + (x.unsqueeze(-2) < other).sum(-1) + ((x.unsqueeze(-2) == other).sum(-1) - 1) / 2


def resnet_checks(train: dict[tuple, Tensor], test: dict[tuple, Tensor]) -> dict[str, bool]:
    """Checks of `resnet`, from final losses by optimizer and width."""
    widths, checks = list(dict.fromkeys(w for _, w in train)), {}
    for name in ("mulo_m", "lo_m"):
        gaps = [float((test[name, w].mean() / train[name, w].mean() - 1).abs()) for w in widths]
        claim = f"{LABELS[name]}: at every width, the test loss is within 10% of the train loss"
        checks[claim] = all(gap <= 0.1 for gap in gaps)  # in the paper it is within 8%
        for split, losses in {"train": train, "test": test}.items():
            claim = f"{LABELS[name]}: the {split} loss falls with width, within the standard error"
            checks[claim] = falls([losses[name, w] for w in widths])
    for split, losses in {"train": train, "test": test}.items():
        claim = f"μLO_M is ahead of LO_M at every width in {split} loss"
        checks[claim] = all(worse(losses["lo_m", w], losses["mulo_m", w]) for w in widths)
    return checks


def figure(panels: int) -> tuple[Figure, list]:
    """A figure and its axes, at most four in a row."""
    columns = min(panels, 4)
    rows = math.ceil(panels / columns)
    fig = Figure(figsize=(4.4 * columns, 3.6 * rows), layout="constrained")
    return fig, [fig.add_subplot(rows, columns, k + 1) for k in range(panels)]


def size_axis(ax, sizes: list[int]) -> None:
    """Make the x axis logarithmic, with ticks at the sizes."""
    ax.set_xscale("log")
    ax.set_xticks(sizes, [str(n) for n in sizes])
    ax.minorticks_off()


def limit_loss(ax, kind: str) -> None:
    """End the y axis below losses far above guessing, as of diverged nets."""
    top = 1.2 * guess(kind)
    losses = [y for line in ax.lines for y in line.get_ydata() if y < top] or [0.0, top]
    ax.set_ylim(min(losses) - 0.05, max(losses) + 0.05)


def draw_final(ax, kind: str, rows: list[list], **settings) -> None:
    """Draw final losses from the table of an experiment, whose rows are kind, optimizer, size, mean
    and standard error."""
    rows = [row for row in rows if row[0] == kind]
    for name in dict.fromkeys(row[1] for row in rows):
        x, y, error = zip(*(row[2:] for row in rows if row[1] == name), strict=True)
        ax.errorbar(x, y, error, marker="o", ms=4, capsize=2, **style(name))
    size_axis(ax, sorted({row[2] for row in rows}))
    ax.set(ylabel="final loss", **settings)
    limit_loss(ax, kind)


def draw_curves(ax, kind: str, curves: dict[str, Tensor], until: float, **settings) -> None:
    """Draw mean training curves over seeds; the last point is at `until`."""
    for name, losses in curves.items():
        times = torch.arange(1, len(losses) + 1) * until / len(losses)
        ax.plot(times, losses.mean(1), **style(name))
    ax.set(**({"xlabel": "step", "ylabel": "loss"} | settings))
    limit_loss(ax, kind)


def draw_picture(width: Finding, coord: Finding, widest: int, path: Path) -> None:
    """Draw README's picture; `widest` is the width of the widest net in meta-training."""
    fig, (left, right) = figure(2)
    kind, title = width.rows[1][0], "wider than meta-trained"
    rows = [row for row in width.rows if row[1] in ("mulo_m", "lo_m", "adamw", "muadam")]
    draw_final(left, kind, rows, xlabel="width of the net", title=f"{kind}: {title}")
    left.axvspan(left.get_xlim()[0], widest, color="0.93", zorder=0, label="meta-trained")
    left.legend(fontsize=8)
    slopes = {}
    for name, against, _, slope, *_ in coord.rows:
        if against == "width":
            slopes.setdefault(name, []).append(min(float(slope), 2.0))
    for x, (name, bars) in enumerate(slopes.items()):
        places = [x + 0.8 * (k + 0.5) / len(bars) - 0.4 for k in range(len(bars))]
        right.bar(places, bars, 0.7 / len(bars), color=style(name)["color"])
    right.axhline(0.1, color="k", lw=0.8, ls=":")
    right.set_xticks(range(len(slopes)), [style(name)["label"] for name in slopes], fontsize=8)
    right.set(title="Coordinate check (one bar per layer)")
    right.set(ylabel="|slope| of log drift over log width")
    write_atomically(path, lambda file: fig.savefig(file, dpi=120))


def write_finding(finding: Finding, name: str, folder: Path) -> None:
    """Write an experiment's table and its figure."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [[f"{x:.4f}" if isinstance(x, float) else x for x in row] for row in finding.rows]
    write_table(folder / f"{name}.csv", rows)
    write_atomically(folder / f"{name}.png", lambda file: finding.figure.savefig(file, dpi=120))


def write_results(
    findings: dict[str, Finding], docs: dict[str, str], folder: Path, path: Path
) -> None:
    """Write RESULTS.md below its introduction. `docs` has titles, and claims of the paper."""
    link, head = os.path.relpath(folder, path.parent), "| experiment | result | checks that hold |"
    introduction = path.read_text().partition(head)[0] if path.exists() else "# Results\n\n"
    overview, sections = f"{head}\n|---|---|---|\n", ""
    for name, finding in findings.items():
        title, _, claim = docs[name].partition(".\n\n")
        anchor = "".join(x for x in title.lower() if x.isalnum() or x in " -").replace(" ", "-")
        failed = [f"- {claim}\n" for claim, holds in finding.checks.items() if not holds]
        held = f"{len(finding.checks) - len(failed)} of {len(finding.checks)}"
        summary = finding.summary.partition(";")[0].replace("|", "\\|")
        overview += f"| [{title}](#{anchor}) | {summary} | {held} |\n"
        paper = "" if claim.startswith("Not in the paper") else "**Paper.** "
        failures = f"; these fail:\n\n{''.join(failed)}" if failed else ".\n"
        sections += f"""
## {title}

{paper}{claim}

**Here** (`python paper.py {name}`, [table]({link}/{name}.csv)). {held} checks hold{failures}
![{title}]({link}/{name}.png)
"""
    write_atomically(path, introduction + overview + sections)
