"""Transfer: tasks that no shipped optimizer was meta-trained on, against AdamW of several kinds.

    found = transfer(Suite(), Results(Path("results")))       # `python evaluate.py transfer`

Beyond the paper. Learned optimizers run untuned, at a constant rate and under a cosine from 2 to
0.2, a peak chosen by trial on validation tasks. AdamW and μAdam have their rate tuned at each
task's smallest width; `adamw_oracle` under the cosine has it tuned at every width, and
`adamw_default` is torch's AdamW as it comes. What is not yet tuned is tuned first, over
`baselines.RATES`. CIFAR-10 and a text are read from $MULO_DATA.
"""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean

import torch
from torch import Tensor

from mulo import training
from mulo.evaluate import Results
from mulo.paper.baselines import Tuning, tune_missing
from mulo.paper.claims import EXPERIMENTS, Suite, cells, guess, ranked
from mulo.paper.report import Finding, colour, label

HELD_OUT = ("c10", "text")  # data sets that mulo_x was not meta-trained on
ENTRANTS = [  # optimizer, schedule
    *(("mulo_m", s) for s in ("constant", "cosine2")),
    *(("mulo_x", s) for s in ("constant", "cosine2")),
    *((name, "constant") for name in ("adamw", "muadam", "adamw_default")),
    ("adamw_oracle", "cosine"),
]
ASIDE = ("muon", "constant")  # on MLPs of width 64 only, so it has no rank


def tunings(suite: Suite) -> list[Tuning]:
    """What the baselines need: rates at each task's smallest width, and at every width."""
    found = []
    for name, widths in suite.transfer.items():
        small = name.format(widths[0])
        found += [Tuning(which, small, suite.steps) for which in ("adamw", "muadam")]
        found += [Tuning("adamw", name.format(w), suite.steps, "cosine", True) for w in widths]
        if "mlp" in name:
            found.append(Tuning("muon", small, suite.steps))
    return found


def transfer(suite: Suite, results: Results) -> Finding:
    """Untuned on other data sets, input sizes and models, against AdamW of several kinds."""
    tune_missing(tunings(suite), results)
    who, jobs = suite.contenders(*(name for name, _ in [*ENTRANTS, ASIDE])), {}
    for name, widths in suite.transfer.items():
        for w, (optimizer, schedule) in product(widths, [*ENTRANTS, ASIDE]):
            if optimizer == "muon" and (w > 64 or "mlp" not in name):
                continue
            task, seeds = name.format(w), suite.transfer_seeds
            jobs[name, w, optimizer, schedule] = suite.job(who[optimizer], task, 1, schedule, seeds)
    results.run(jobs.values(), "transfer")
    final = {}
    for (name, w, *entrant), job in jobs.items():
        bound = guess(job.get_task().kind)
        loss = training.final_loss(results.losses(job)).nan_to_num(bound).clamp_max(bound)
        final.setdefault((name, w), {})[tuple(entrant)] = loss
    found = Finding(2, ("task", "optimizer", "schedule", "loss", "stderr"))
    for (name, w), by_entrant in final.items():
        for entrant, x in by_entrant.items():
            found.rows.append([name.format(w), *entrant, *cells(x)])
    describe(found, final)
    return found


def average_ranks(final: dict, entrants: list, held_out: bool = False) -> dict[tuple, float]:
    """Average rank of each entrant over the tasks and widths, best first."""
    some = [x for (name, _), x in final.items() if not held_out or name.startswith(HELD_OUT)]
    some = some or list(final.values())
    rows = [ranked(torch.stack([x[e].mean() for e in entrants])) for x in some]
    means = torch.stack(rows).mean(0).tolist()
    return dict(sorted(zip(entrants, means, strict=True), key=lambda x: x[1]))


def describe(found: Finding, final: dict[tuple, dict[tuple, Tensor]]) -> None:
    """Add sentences, checks and the figure."""
    constant = [e for e in ENTRANTS if e[1] == "constant"]
    everyone, held_out = average_ranks(final, ENTRANTS), average_ranks(final, ENTRANTS, True)
    plain = average_ranks(final, constant)
    for what, ranks in (
        ("constant rates", plain),
        ("all", everyone),
        ("all, on data that mulo_x has not seen", held_out),
    ):
        parts = (f"{entrant(e)} {rank:.2f}" for e, rank in ranks.items())
        found.said.append(f"Average rank, {what}: {', '.join(parts)}.")
    m, m_cosine = ("mulo_m", "constant"), ("mulo_m", "cosine2")
    oracle, default = ("adamw_oracle", "cosine"), ("adamw_default", "constant")
    means = {key: {e: float(x.mean()) for e, x in some.items()} for key, some in final.items()}
    worse = [name.format(w) for (name, w), x in means.items() if x[m] > x[default]]
    ratios = [math.log(x[m_cosine] / x[oracle]) for x in means.values()]
    found.said.append(
        f"μLO_M ends above AdamW at its default rate on {', '.join(worse) or 'no task'}."
    )
    for name in ("adamw", "muadam"):
        claim = f"μLO_M, untuned, has a better average rank than {label(name)} tuned at one width"
        found.checks[claim] = plain[m] < plain[name, "constant"]
    found.checks |= {
        "μLO_M, untuned, is nowhere behind AdamW at its default rate": not worse,
        "μLO_M with a cosine is ahead of AdamW with a cosine retuned at every width, on "
        "average": fmean(ratios) < 0,
    }
    for how, x in (("at a constant rate", "constant"), ("with a cosine", "cosine2")):
        claim = f"μLO_X {how} has a better average rank, on data it has not seen, than all that are"
        others = [rank for (name, _), rank in held_out.items() if name not in ("mulo_x", "mulo_m")]
        found.checks[f"{claim} tuned"] = held_out["mulo_x", x] < min(others)
    for ax, (title, ranks) in zip(
        found.axes, (("all tasks", everyone), ("data not seen by μLO_X", held_out)), strict=True
    ):
        names = list(ranks)[::-1]
        colours = [colour(name) for name, _ in names]
        hatches = ["" if schedule == "constant" else "//" for _, schedule in names]
        ax.barh(
            [entrant(e) for e in names], [ranks[e] for e in names], color=colours, hatch=hatches
        )
        ax.set(xlabel="average rank", title=title)


def entrant(e: tuple[str, str]) -> str:
    name, schedule = e
    return label(name) + ("" if schedule == "constant" else ", cosine")


EXPERIMENTS["transfer"] = transfer
