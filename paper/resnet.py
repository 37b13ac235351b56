"""ResNets of five widths: train and test loss of μLO_M and LO_M.

    found = resnet(Suite(), Results(Path("results")))         # `python evaluate.py resnet`

Paper: the table and figure of train and test losses on ResNet tasks, in the appendix. Nets train
without the test data. The test loss is that of the trained net, on at most 2,000 test examples.
"""

from __future__ import annotations

import math
from itertools import chain, product

import torch
from torch import Tensor

from mulo.evaluate import Job, Results
from mulo.paper.claims import EXPERIMENTS, Suite, cells, falls, worse
from mulo.paper.report import Finding, draw_curves, label
from mulo.training import final_loss

NAMES = ("mulo_m", "lo_m")
CLOSE = 0.1  # how much of the train loss the test loss may differ by; in the paper at most 0.08
Final = dict[str, dict[tuple[str, int], Tensor]]  # split: optimizer and width: (seeds,)


def resnet(suite: Suite, results: Results) -> Finding:
    """Train and test loss of μLO_M and LO_M on ResNets of five widths."""
    head = ("optimizer", "width", "train loss", "stderr", "test loss", "its stderr")
    found, who, jobs = Finding(len(NAMES), head), suite.contenders(*NAMES), {}
    seeds = tuple(range(5))
    for name, task in product(NAMES, suite.resnets):
        job = Job(who[name], task, suite.steps, seeds=seeds, test=True)
        jobs[name, job.get_task().width] = job
    results.run(jobs.values(), "resnet")
    final = {
        "train": {key: final_loss(results.losses(job)) for key, job in jobs.items()},
        "test": {key: results.losses(job, test=True)[-1] for key, job in jobs.items()},
    }
    for key in jobs:
        found.rows.append([*key, *chain(*(cells(losses[key]) for losses in final.values()))])
    describe(found, final)
    for ax, name in zip(found.axes, NAMES, strict=True):
        draw(ax, name, {w: job for (n, w), job in jobs.items() if n == name}, results)
    found.axes[0].legend(title="width", fontsize=8)
    return found


def describe(found: Finding, final: Final) -> None:
    """Add the sentence and the checks."""
    widths, parts = list(dict.fromkeys(w for _, w in final["test"])), []
    for name in NAMES:
        train, test = ([losses[name, w] for w in widths] for losses in final.values())
        ends = (f"{train[k].mean():.3f} / {test[k].mean():.3f}" for k in (0, -1))
        parts.append(f"{label(name)} {' -> '.join(ends)}")
        gaps = [float((y.mean() / x.mean() - 1).abs()) for x, y in zip(train, test, strict=True)]
        claim = f"{label(name)}: at every width, the test loss is within {CLOSE:.0%} of the train"
        found.checks[f"{claim} loss"] = all(gap <= CLOSE for gap in gaps)
        for what, losses in (("train", train), ("test", test)):
            claim = f"{label(name)}: the {what} loss falls with width, within the standard error"
            found.checks[claim] = falls(losses)
    for what, losses in final.items():
        claim = f"μLO_M is ahead of LO_M at every width in {what} loss"
        found.checks[claim] = all(worse(losses["lo_m", w], losses["mulo_m", w]) for w in widths)
    where = f"width {widths[0]} to {widths[-1]}"
    found.said.append(f"Final train / test loss, {where}: {'; '.join(parts)}.")


def draw(ax, name: str, jobs: dict[int, Job], results: Results) -> None:
    """Losses against steps, a colour for each width: train solid, test dashed."""
    curves, [job, *_] = {str(w): results.losses(job) for w, job in jobs.items()}, jobs.values()
    top, title = 1.2 * math.log(job.get_task().classes), f"{label(name)} (dashed: test)"
    draw_curves(ax, curves, job.steps, top, title=title)
    for line, job in zip(list(ax.lines), jobs.values(), strict=True):
        test = results.losses(job, test=True).mean(1)
        ax.plot(torch.linspace(0, job.steps, len(test)), test, "--", color=line.get_color())


EXPERIMENTS["resnet"] = resnet
