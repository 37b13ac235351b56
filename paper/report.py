"""Figures, tables, and RESULTS.md, which is written from them.

    write(Path("results"), Path("RESULTS.md"))          # done by every `python evaluate.py <claim>`

An experiment leaves three files in results/: its table (.csv), its figure (.png) and what it found
(.json: a sentence and the claims it checked). RESULTS.md joins them with what the paper says, so
its numbers are those of the files; tests make both again from results/losses.csv.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from mulo.checkpoints import write_atomically
from mulo.evaluate import mean_stderr, write_table
from mulo.paper.baselines import OTHERS

LABELS = {
    "mulo_m": "μLO_M", "mulo_s": "μLO_S", "muvelo_m": "μVeLO_M", "lo_m": "LO_M", "lo_s": "LO_S",
    "velo_m": "VeLO_M", "adamw": "AdamW", "muadam": "μAdam", "mulo_x": "μLO_X", **OTHERS,
}  # fmt: skip


class Finding:
    """What an experiment finds: a table, a figure, sentences, and which claims hold."""

    def __init__(self, panels: int, head: Iterable[str]):
        self.rows, self.said, self.checks = [list(head)], [], {}
        self.figure, self.axes = figure(panels)


def label(name: str) -> str:
    return LABELS.get(name, name)


# ---------------------------------------------------------------- figures


def figure(panels: int) -> tuple[Figure, list]:
    """A figure and its axes, at most four in a row."""
    columns = min(panels, 4)
    rows = math.ceil(panels / columns)
    fig = Figure(figsize=(4.4 * columns, 3.6 * rows), layout="constrained")
    return fig, [fig.add_subplot(rows, columns, k + 1) for k in range(panels)]


def save(fig: Figure, path: Path) -> None:
    write_atomically(path, lambda file: fig.savefig(file, dpi=120))


def colour(name: str, other: str = "0.4") -> str:
    """An optimizer of a recipe has the same colour in every figure."""
    known = dict(zip(LABELS, range(10), strict=False))  # there are ten
    return f"C{known[name]}" if name in known else "k" if name in LABELS else other


def draw_final(
    ax, losses: dict[str, dict[int, Tensor]], top: float, xlabel: str = "width", **settings
) -> None:
    """Draw final losses, {name: {size: (seeds,)}}; a cross at the top where a net diverged."""
    for k, (name, by_size) in enumerate(losses.items()):
        sizes, c = list(by_size), colour(name, f"C{k}")
        means, errors = zip(*map(mean_stderr, by_size.values()), strict=True)
        ax.errorbar(sizes, means, errors, marker="o", ms=4, capsize=2, label=label(name), color=c)
        diverged = [size for size, mean in zip(sizes, means, strict=True) if math.isnan(mean)]
        ax.plot(diverged, [(0.98 - 0.02 * k) * top] * len(diverged), "x", color=c)
    if xlabel == "width":
        width_axis(ax, sorted({size for by_size in losses.values() for size in by_size}))
    ax.set(xlabel=xlabel, ylabel="final loss", **settings)
    loss_axis(ax, top)


def draw_curves(ax, curves: dict[str, Tensor], until: float, top: float, **settings) -> None:
    """Draw mean training curves over seeds; the last point is at `until`."""
    for k, (name, losses) in enumerate(curves.items()):
        times = torch.arange(1, len(losses) + 1) * until / len(losses)
        ax.plot(times, losses.mean(1), label=label(name), color=colour(name, f"C{9 - k}"))
    ax.set(**({"xlabel": "step", "ylabel": "loss"} | settings))
    loss_axis(ax, top)


def loss_axis(ax, top: float) -> None:
    """End the y axis at `top`, so that divergence is off the scale."""
    low = min((y for line in ax.lines for y in line.get_ydata() if y < top), default=0.0)
    ax.set_ylim(low - 0.05 * (top - low), top)


def width_axis(ax, widths: list[int]) -> None:
    """Make the x axis logarithmic, with the widths themselves as ticks."""
    ax.set_xscale("log")
    ax.set_xticks(widths, [str(w) for w in widths])
    ax.minorticks_off()


def read_table(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def draw_readme_picture(folder: Path, kind: str, widest: int) -> None:
    """Draw README's picture from width.csv and coord.csv, if both are there."""
    tables = [folder / f"{name}.csv" for name in ("width", "coord")]
    if not all(path.exists() for path in tables):
        return
    (fig, (wide, check)), (losses, drifts) = figure(2), map(read_table, tables)
    for name in ("mulo_m", "lo_m", "adamw", "muadam"):
        here = [row for row in losses if row[:2] == [kind, name]]
        widths, *values = ([float(row[k]) for row in here] for k in (2, 3, 4))  # loss, stderr
        style = "-" if name.endswith("_m") else "--"
        wide.errorbar(widths, *values, capsize=2, label=label(name), color=colour(name), ls=style)
    wide.axvspan(wide.get_xlim()[0], widest, color="0.93", zorder=0, label="meta-trained")
    width_axis(wide, [int(w) for w in widths])
    wide.set(xlabel="width of the net", ylabel="final loss, 500 steps", yscale="log")
    wide.set_yticks([0.5, 1, 2], ["0.5", "1", "2"])
    wide.minorticks_off()
    wide.set_title(f"{kind}: wider than meta-trained")
    wide.legend(fontsize=8)
    rows = [row for row in drifts if row[1] == "width"]
    names = list(dict.fromkeys(row[0] for row in rows))
    for x, name in enumerate(names):
        slopes = [min(float(row[3]), 2.0) for row in rows if row[0] == name]
        places = [x + 0.8 * (k + 0.5) / len(slopes) - 0.4 for k in range(len(slopes))]
        check.bar(places, slopes, 0.7 / len(slopes), color=colour(name))
    check.axhline(0.1, color="k", lw=0.8, ls=":")
    check.set_xticks(range(len(names)), [label(n) for n in names], fontsize=8)
    check.set(ylabel="|slope| of log drift over log width", title="Coordinate check, a bar a layer")
    save(fig, folder / "picture.png")


# ---------------------------------------------------------------- RESULTS.md

CLAIMS = {  # experiment: title, what the paper says
    "width": ("Wider nets", """
The final loss of μLOs falls with width far beyond the widths of meta-training; LOs in standard
parametrization stop improving or diverge (figures 3 and 4)."""),
    "rank": ("Average rank", """
At widths 2048 (Large), 3072 or 4096 (XL) and up to 8192 (XXL), μLO_M and μVeLO_M have the two best
average ranks (1.2 to 2.6), tuned AdamW and μAdam follow (2.2 to 4.4), VeLO_M and LO_M are last (4.0
to 6.0) (table 1)."""),
    "distribution": ("Meta-training on one width or on three", """
μLO_M, meta-trained on three widths, generalizes better than μLO_S, meta-trained on one, and both
better than LOs in SP (figure 3)."""),
    "depth": ("Deeper nets", """
At 16 layers μLO_M and μVeLO_M train stably and generally outperform LO_M and VeLO_M; on the deep
MLP, LO_M diverges at once (figure 5)."""),
    "horizon": ("Longer training", """
Over 25 times the meta-trained length the loss of μLOs keeps falling, while LO_M and VeLO_M stop or
diverge (figure 6). There is no schedule on μLOs in the paper; here every optimizer runs twice. At a
constant rate μLO and LO, which know their horizon, anneal beyond it by themselves, as 1/√t (what
that is worth is under Ablations); the others do not. Under a cosine from 1 to 0.1 all are driven
alike, for which AdamW and μAdam are tuned anew. Transformers only run at a constant rate."""),
    "transfer": ("Other data sets, input sizes and models", """
Not in the paper. Learned optimizers untuned, at a constant rate and under a cosine from 2 to 0.2, a
peak chosen by trial on validation tasks; AdamW at its default rate, with its rate tuned at each
task's smallest width, and under a cosine with its rate tuned at every width. Tuning is over 5 to 9
rates, most by one seed, so less than the paper's. 5 seeds."""),
    "resnet": ("ResNets, train and test loss", """
At every width from 128 to 2048 μLO_M ends below LO_M in train loss (4.56 to 3.56 against 5.20 to
4.47) and in test loss, which is within 8% of the train loss; none diverges (appendix)."""),
    "coord": ("Coordinate check", """
Under μP the change of pre-activations over the first 500 steps does not depend on width; in SP it
grows with it (figure 2, appendix). The check against the size of the inputs, with the input rule
and without, is ours."""),
    "stability": ("Stable activations", """
In a deep net first-layer pre-activations stay stable with μLO_M and grow with LO_M; over a long run
the logits of μLO_M grow steadily, those of LO_M jump (appendix)."""),
    "ablate": ("Ablations", """
The default recipe with λ1 = 0.01 (among rates, λ1, steps and perturbations) is one of the best for
μLO_S, fast and stable (appendix). Variants here are of an earlier desk recipe (400 outer steps,
batches of 64). Epsilons, single μP rules, what happens beyond the meta-trained
horizon and a schedule are not varied in the paper."""),
}  # fmt: skip
SHORT = {  # the paper's findings, in a few words
    "width": "the loss of μLOs falls up to width 8192; LOs in SP diverge",
    "rank": "μLO_M and μVeLO_M first, 1.2 to 2.6; LO_M and VeLO_M last, 4.0 to 6.0",
    "distribution": "three widths are better than one, μP better than SP",
    "depth": "μLOs train 16 layers, LO_M diverges at once",
    "horizon": "μLOs improve for 25 horizons",
    "transfer": "not in the paper",
    "resnet": "μLO_M is ahead of LO_M at every width; test loss tracks train loss",
    "coord": "activations move alike at every width under μP",
    "stability": "stable with μLO_M, growing with LO_M",
    "ablate": "λ1 = 0.01 is one of the best",
}
HEAD = """# Results

Written by `python evaluate.py {command}` from the files in [{link}]({link}): {about}

Nets of all widths and optimizers see the same batches. Final loss: mean training loss over the last
tenth of a run; errors: standard error over seeds.

| experiment | paper | here | checks that hold |
|---|---|---|---|
"""
ABOUT = {  # by scale
    "desk": """the shipped
optimizers ([weights](weights/README.md)), meta-trained for 500 steps on 8x8 Fashion-MNIST at widths
16, 32 and 64. They are tested on four kinds of tasks: MLPs on that data (fashion8_mlp) and on the
labels of a random teacher (teacher_mlp), ViTs on Fashion-MNIST at 14x14 (fashion_vit) and
transformers that predict the grey levels of its pixels one by one (pixels_lm: a language model of
17 tokens, as no text is embedded here). In the table of ranks MLPs are 128, 256 and 512 wide,
transformers 32, 64 and 128. ResNets (fashion_resnet, 14x14) train on the first 8,000 images and are
tested on the other 2,000; meta-training used all 10,000, at 8x8. μLO_X is tested under "Other data
sets" only.

AdamW and μAdam are tuned on each kind: over the paper's grids of 504 and 512 configurations on
fashion8_mlp and teacher_mlp; elsewhere, and for the cosine schedule, only their rates are (on
transformers 8 and 7 of the grids' rates at width 32). MLPs and ResNets have 5 seeds, 3 in the
coordinate check, 2 in the look at activations, 1 or 2 in the ablations; transformers 3, 2 for ranks
and in long runs.

The same commands with `--scale paper --device cuda --who` and the folders of your runs are for the
paper's sizes; that has not been run.""",
    "paper": """the
optimizers named by `--who`, else the shipped ones, on tasks of the paper's sizes.""",
}


def keep(found: Finding, name: str, folder: Path) -> None:
    """Write an experiment's table, its figure and what it found."""
    write_table(folder / f"{name}.csv", found.rows)
    save(found.figure, folder / f"{name}.png")
    content = {"said": "\n".join(found.said), "checks": found.checks}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / f"{name}.json", text)


def markdown(path: Path) -> list[str]:
    """The lines of a .csv as a Markdown table."""
    head, *rows = read_table(path)
    rows = [head, ["---"] * len(head), *([label(x) for x in row] for row in rows)]
    return ["| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in rows]


def section(name: str, found: dict, folder: Path, link: str) -> list[str]:
    title, paper = CLAIMS[name]
    lines = [f"## {title}", "", f"**Paper.** {paper.strip()}", ""]
    lines += [f"**Here** (`python evaluate.py {name}`). " + found["said"].replace("\n", "\n\n"), ""]
    lines += [f"- {'yes' if holds else '**no**'}: {x}" for x, holds in found["checks"].items()]
    rows = markdown(folder / f"{name}.csv")
    lines += ["", f"![{title}]({link}/{name}.png)"]
    lines += ["", f"<details><summary>{name}.csv, {len(rows) - 2} rows</summary>", ""]
    return [*lines, *rows, "", "</details>", ""]


def write(folder: Path, path: Path, scale: str = "desk") -> None:
    """Write RESULTS.md from the files that experiments left."""
    sections, rows, link = [], [], os.path.relpath(folder, path.parent)
    for name, (title, _) in CLAIMS.items():
        anchor = f"[{title}](#{re.sub(r'[^a-z0-9 -]', '', title.lower()).replace(' ', '-')})"
        if not (folder / f"{name}.json").exists():
            rows.append(f"| {title} | {SHORT[name]} | not run: `python evaluate.py {name}` | |")
            continue
        found = json.loads((folder / f"{name}.json").read_text())
        sections += section(name, found, folder, link)
        checks = list(found["checks"].values())
        said = found["said"].partition("\n")[0].replace("|", "\\|")
        rows.append(f"| {anchor} | {SHORT[name]} | {said} | {sum(checks)} of {len(checks)} |")
    command = "all" if scale == "desk" else f"all --scale {scale}"
    head = HEAD.format(command=command, link=link, about=ABOUT[scale])
    write_atomically(path, "\n".join([head.rstrip("\n"), *rows, "", *sections]))
