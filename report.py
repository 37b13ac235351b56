"""What evaluation shows: figures, tables, and RESULTS.md, which is written from them.

    write(Path("results"), Path("RESULTS.md"))          # done by every `python evaluate.py <claim>`

An experiment leaves three files in results/: its table (.csv), its figure (.png) and what it found
(.json: a sentence and the claims it checked). RESULTS.md puts them together with what the paper
says, so its numbers are those of the files; tests draw both again from results/losses.csv.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoints import write_atomically

LABELS = {
    "mulo_m": "μLO_M", "mulo_s": "μLO_S", "muvelo_m": "μVeLO_M", "lo_m": "LO_M", "lo_s": "LO_S",
    "velo_m": "VeLO_M", "adamw": "AdamW", "muadam": "μAdam",
}  # fmt: skip


class Finding(NamedTuple):
    """What an experiment says, and which of the claims it tests hold."""

    said: str
    checks: dict[str, bool]


def summary(x: Tensor) -> tuple[float, float]:
    """Mean and standard error over seeds."""
    return float(x.mean()), float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan


def label(name: str) -> str:
    return LABELS.get(name, name)


# ---------------------------------------------------------------- figures and tables


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
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    write_atomically(path, text.getvalue())


def colour(name: str) -> str:
    """An optimizer has the same colour in every figure."""
    order = list(LABELS)
    return f"C{order.index(name)}" if name in order else "0.4"


def draw_ends(ax, x: list[int], ends: list[Tensor], name: str, c: str | None = None) -> None:
    """Final losses with error bars; a cross at the top where a net diverged."""
    c = c or colour(name)
    values = [summary(e) for e in ends]
    means, errors = [m for m, _ in values], [s for _, s in values]
    ax.errorbar(x, means, errors, marker="o", markersize=4, capsize=2, label=label(name), color=c)
    gone = [a for a, m in zip(x, means, strict=True) if math.isnan(m)]
    top = [0.98 - 0.03 * len(ax.lines) % 0.2] * len(gone)
    ax.plot(gone, top, "x", color=c, transform=ax.get_xaxis_transform())


def width_axis(ax, widths: list[int]) -> None:
    """Logarithmic, with the widths themselves as ticks."""
    ax.set_xscale("log")
    ax.set_xticks(widths, [str(w) for w in widths])
    ax.minorticks_off()
    ax.set_xlabel("width")


def draw_curve(ax, losses: Tensor, until: float, name: str) -> None:
    """The mean training curve over seeds; its last point is at `until`."""
    times = torch.arange(1, len(losses) + 1) * until / len(losses)
    ax.plot(times, losses.mean(1), label=label(name), color=colour(name))


def falls(ends: list[Tensor], paired: bool = False) -> bool:
    """Whether final losses fall: nowhere up by more than the standard error, and down in all.

    Nets of one seed see the same batches, so that the error of their differences (paired) is
    smaller than that of two means, and the claim with it stricter.
    """
    for a, b in pairwise(ends):
        (before, s), (now, t) = summary(a), summary(b)
        error = summary(b - a)[1] if paired else math.hypot(s, t)
        if not now <= before + error:
            return False
    return summary(ends[-1])[0] < summary(ends[0])[0]


def stopped(ends: list[Tensor]) -> bool:
    """Whether the last is not better than the best before it by more than the standard error."""
    *before, (mean, error) = [summary(e) for e in ends]
    best = min((x for x in before if not math.isnan(x[0])), default=(math.inf, 0.0))
    return not mean < best[0] - math.hypot(error, best[1])


def ranked(x: Tensor) -> Tensor:
    """Ranks from 1, (n,); equals share theirs."""
    below, equal = (x < x[:, None]).sum(1), (x == x[:, None]).sum(1)
    return 1 + below + (equal - 1) / 2


def worse(a: Tensor, b: Tensor) -> bool:
    """Whether the mean final loss a is above b; what diverged is above all."""
    return not float(a.nan_to_num(math.inf).mean()) <= float(b.nan_to_num(math.inf).mean())


def ordered(ends: dict[str, float]) -> str:
    """Final losses, best first; what diverged is last."""
    order = sorted(ends, key=lambda n: (math.isnan(ends[n]), ends[n]))
    return ", ".join(f"{label(n)} {number(ends[n])}" for n in order)


def number(loss: float) -> str:
    if math.isnan(loss):
        return "diverged"
    return f"{loss:.3f}" if loss < 100 else f"{loss:.0e}"


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def picture(results: Path, kind: str, seen: int) -> None:
    """README's: final loss against width and the coordinate check, from the tables of both."""
    fig, (wide, check) = figure(2)
    for name in ("mulo_m", "lo_m", "adamw", "muadam"):
        rows = rows_of(results / "width.csv")
        here = [r for r in rows if (r["kind"], r["optimizer"]) == (kind, name)]
        widths, *values = ([float(r[k]) for r in here] for k in ("width", "loss", "stderr"))
        style = "-" if name.endswith("_m") else "--"
        wide.errorbar(widths, *values, capsize=2, label=label(name), color=colour(name), ls=style)
    wide.axvspan(wide.get_xlim()[0], seen, color="0.93", zorder=0, label="meta-trained")
    width_axis(wide, [int(w) for w in widths])
    wide.set(xlabel="width of the net", ylabel="final loss, 500 steps", yscale="log")
    wide.set_yticks([0.5, 1, 2], ["0.5", "1", "2"])
    wide.minorticks_off()
    wide.set_title(f"{kind}: wider than meta-trained")
    wide.legend(fontsize=8)
    rows = rows_of(results / "coord.csv")
    names = list(dict.fromkeys(r["optimizer"] for r in rows))
    for x, name in enumerate(names):
        slopes = [min(float(r["mean |slope|"]), 2.0) for r in rows if r["optimizer"] == name]
        check.bar(
            [x + 0.8 * (k + 0.5) / len(slopes) - 0.4 for k in range(len(slopes))], slopes,
            0.7 / len(slopes), color=colour(name),
        )  # fmt: skip
    check.axhline(0.1, color="k", lw=0.8, ls=":")
    check.set_xticks(range(len(names)), [label(n) for n in names], fontsize=8)
    check.set_ylabel("|slope| of log drift over log width")
    check.set_title("Coordinate check, a bar a layer")
    save(fig, results / "picture.png")


# ---------------------------------------------------------------- RESULTS.md

CLAIMS = {  # experiment: title, what the paper says
    "width": ("Wider nets", """
The final loss of μLOs falls with width far beyond the widths of meta-training; LOs in standard
parametrization stop improving or diverge (figures 3 and 4)."""),
    "rank": ("Average rank", """
At widths 2048 to 8192, μLO_M and μVeLO_M have the two best average ranks (1.2 to 2.6), tuned AdamW
and μAdam follow (2.2 to 4.4), VeLO_M and LO_M are last (4.0 to 6.0) (table 1)."""),
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
that is worth is under Ablations); the others do not. Under one cosine schedule all are driven
alike, for which AdamW and μAdam are tuned anew."""),
    "coord": ("Coordinate check", """
Under μP the change of pre-activations over the first 500 steps does not depend on width; in SP it
grows with it (figure 2, appendix)."""),
    "stability": ("Stable activations", """
In a deep net first-layer pre-activations stay stable with μLO_M and grow with LO_M; over a long run
the logits of μLO_M grow steadily, those of LO_M jump (appendix)."""),
    "ablate": ("Ablations", """
The default recipe with λ1 = 0.01 (among rates, λ1, steps and perturbations) is one of the best for
μLO_S, fast and stable (appendix). Epsilons, single μP rules, what happens beyond the meta-trained
horizon and a schedule are not varied in the paper."""),
}  # fmt: skip
HEAD = """# Results

Written by `python evaluate.py {command}` from the files in [{link}]({link}): {about}

Nets of all widths and optimizers see the same batches. AdamW and μAdam are tuned over the paper's
grids; for the cosine schedule only their rates are tuned anew. 5 seeds, 3 in the coordinate check,
2 in the look at activations, 1 or 2 in the ablations. Final loss: mean training loss over the last
tenth of a run; errors: standard error over seeds.

## What did not reproduce
"""
ABOUT = {  # by scale
    "desk": """the shipped
optimizers, meta-trained for 500 steps on 8x8 Fashion-MNIST at widths 16, 32 and 64, each the best
of three seeds, μLO_M of five ([weights](weights/README.md)), on that data and, for width and rank,
also on a data set they have not seen (labels of a random teacher). The same commands with
`--scale paper --device cuda --who` and the folders of your runs are for the paper's sizes; that has
not been run. When these experiments were first run, batches came from each net's own generator and
differed from width to width; then μLO_M ended at 0.465 at width 512 and at 0.479 at 1024, a rise
beyond the standard error that AdamW, μAdam and μVeLO_M shared.""",
    "paper": """the
optimizers named by `--who`, else the shipped ones, on tasks of the paper's sizes.""",
}


def keep(found: Finding, name: str, out: Path) -> None:
    """What an experiment found, for `write`."""
    text = json.dumps(found._asdict(), indent=1, ensure_ascii=False)
    write_atomically(out / f"{name}.json", text + "\n")


def table(path: Path) -> list[str]:
    """A .csv as Markdown."""
    with open(path, newline="") as file:
        head, *rows = csv.reader(file)
    rows = [[label(x) for x in row] for row in rows]
    lines = ([x.replace("|", "\\|") for x in row] for row in (head, ["---"] * len(head), *rows))
    return ["| " + " | ".join(row) + " |" for row in lines]


def section(name: str, results: Path, checks: dict[str, bool], said: str, link: str) -> list[str]:
    title, paper = CLAIMS[name]
    lines = [f"## {title}", "", f"**Paper.** {paper.strip()}", ""]
    lines += [f"**Here** (`python evaluate.py {name}`). " + said.replace("\n", "\n\n"), ""]
    lines += [f"- {'yes' if holds else '**no**'}: {claim}" for claim, holds in checks.items()]
    if (results / f"{name}.png").exists():
        lines += ["", f"![{title}]({link}/{name}.png)"]
    rows = table(results / f"{name}.csv")
    lines += ["", f"<details><summary>{name}.csv, {len(rows) - 2} rows</summary>", ""]
    return [*lines, *rows, "", "</details>", ""]


def write(results: Path, path: Path, scale: str = "desk") -> None:
    """RESULTS.md, from the files that experiments left."""
    lines, failed, link = [], [], os.path.relpath(results, path.parent)
    command = "all" if scale == "desk" else f"all --scale {scale}"
    head = HEAD.format(command=command, link=link, about=ABOUT[scale])
    for name, (title, _) in CLAIMS.items():
        if (results / f"{name}.json").exists():
            found = json.loads((results / f"{name}.json").read_text())
            lines += section(name, results, found["checks"], found["said"], link)
            failed += [f"- {title}: {x}" for x, holds in found["checks"].items() if not holds]
    unknown = [name for name in CLAIMS if not (results / f"{name}.json").exists()]
    failed = failed or ["Every claim below held."]
    failed += [f"- Not run: `python evaluate.py {name}`" for name in unknown]
    write_atomically(path, "\n".join([head, *failed, "", *lines]))
