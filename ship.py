"""After meta-training: the picture that ends a run, validation, the choice of what is shipped.

    print(close(run, "cpu"))                                   # what `metatrain.py` ends with
    choose("mulo_m", [Path("runs/mulo_m_desk_seed0"), ...])    # `python evaluate.py choose`

Among several meta-training seeds the best is chosen by its final losses on tasks that no evaluation
uses; it goes into weights/ together with the record of all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

import baselines
import checkpoints
import metatrain
import mulo
import tasks
import training
from checkpoints import write_atomically

# For choosing among meta-training seeds only: other widths and depths than in any evaluation.
# Width in units of the widest meta-training task, depth, horizon in units of its unroll, schedule.
VALIDATION = ((1.5, 2, 1, "constant"), (1.5, 2, 5, "constant"), (1.5, 2, 5, "cosine"),
              (3, 4, 1, "constant"), (1.5, 2, 25, "constant"))  # fmt: skip
VALIDATION_SEEDS = [7001, 7002]


def compare(
    lo: mulo.LO, r: metatrain.Recipe, width: int, seeds: list[int], device: str
) -> dict[str, Tensor]:
    """Training curves, (steps, seeds), of an optimizer, its start, AdamW and μAdam at a width."""
    task = tasks.get(f"{r.kind}_w{width}_d{r.depth}", batch_size=r.batch_size)
    here = training.with_rules(task, r.mup)
    curves = {r.name: training.train(here, lo, r.unroll, seeds, device=device)}
    start = metatrain.new_lo(r, device)
    curves["its start"] = training.train(here, start, r.unroll, seeds, device=device)
    for which, name in baselines.NAMES.items():
        values = baselines.best(which, r.kind, r.unroll)
        if values is None:  # tune the rate, on the widest of the meta-training tasks
            small = tasks.get(f"{r.kind}_w{max(r.widths)}_d{r.depth}", batch_size=r.batch_size)
            found = baselines.tune(
                which, small, r.unroll, seeds[:1], fixed=baselines.USUAL, device=device
            )
            values = found[0]
        adam = baselines.adam(values, len(seeds))
        there = training.with_rules(task, which == "muadam")
        curves[f"tuned {name}"] = training.train(there, adam, r.unroll, seeds, device=device)
    return curves


def close(run: metatrain.Run, device: str) -> str:
    """The end of a meta-training run: a picture in its folder, and the sentence that matters."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    r, lo = run.trainer.r, mulo.load(run.out / "lo.pt").to(device)
    width = max(r.widths)
    curves = {w: compare(lo, r, w, list(range(9001, 9004)) if w == width else [9001], device)
              for w in (width, 8 * width)}  # fmt: skip
    fig, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    meta = torch.tensor([row["meta_loss"] for row in run.rows])
    axes[0].plot(meta, color="0.7")
    axes[0].plot(smooth(meta), "k")
    axes[0].set(xlabel="outer step", ylabel="meta-loss", title=f"meta-training {r.name}")
    for ax, (w, found) in zip(axes[1:], curves.items(), strict=True):
        for name, losses in found.items():
            ax.plot(smooth(losses.mean(1)), label=name)
        low = min(float(training.final_loss(x).mean()) for x in found.values())
        ax.set(xlabel="step", ylabel="training loss", title=f"{r.kind}, width {w}")
        ax.set_ylim(0.8 * low, 1.1 * float(found[r.name][0].mean()))
        ax.legend()
    write_atomically(run.out / "picture.png", lambda file: fig.savefig(file, dpi=110))
    plt.close(fig)
    lines = [
        f"meta-loss {metatrain.mean_loss(run.rows[:20]):.3f} -> "
        f"{metatrain.mean_loss(run.rows[-20:]):.3f} in {run.seconds / 60:.1f} minutes."
    ]
    for w, found in curves.items():
        ends = {k: float(training.final_loss(x).mean()) for k, x in found.items()}
        others = ", ".join(f"{k} {x:.3f}" for k, x in ends.items() if k != r.name)
        nets = found[r.name].shape[1]
        nets = "one net" if nets == 1 else f"{nets} nets"
        lines.append(f"Final loss at width {w}, {nets}: {r.name} {ends[r.name]:.3f}; {others}.")
    lines.append(f"The optimizer is {run.out / 'lo.pt'}, the picture {run.out / 'picture.png'}.")
    return "\n".join(lines)


def smooth(x: Tensor, window: int = 20) -> Tensor:
    """Mean over the last `window` steps at each step."""
    total = torch.cat([x.new_zeros(1), x.cumsum(0)])
    k = torch.arange(1, len(x) + 1)
    low = (k - window).clamp_min(0)
    return (total[k] - total[low]) / (k - low)


def validate(
    lo: mulo.LO, r: dict | None, device: str = "cpu", known: dict[str, float] | None = None
) -> dict[str, float]:
    """Final losses on the validation tasks; a run that diverged counts as its clipped loss."""
    if r is None:
        raise ValueError("an optimizer that metatrain.py did not make cannot be validated.")
    scores = {}
    widest = max(metatrain.recipe("mulo_m", r["scale"]).widths)  # alike for _s and _m
    for times, depth, horizon, schedule in VALIDATION:
        task = tasks.get(f"{r['kind']}_w{int(times * widest)}_d{depth}", batch_size=r["batch_size"])
        task, steps = training.with_rules(task, r["mup"]), horizon * r["unroll"]
        name = f"{task.name}, {steps} steps, {schedule}"
        if known and name in known:
            scores[name] = known[name]
            continue
        losses = training.train(
            task,
            lo,
            steps,
            VALIDATION_SEEDS,
            schedule=baselines.schedule_of(schedule, steps),
            device=device,
        )
        bound = 1.5 * math.log(task.classes)
        end = training.final_loss(losses).nan_to_num(nan=bound).clamp_max(bound)
        scores[name] = float(end.mean())
    return scores


def score(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def choose(name: str, folders: list[Path], device: str = "cpu") -> Path:
    """Put the best of several meta-training runs into weights/, with the record of all of them."""
    tried = []
    for folder in folders:
        lo, about = mulo.load(folder / "lo.pt"), checkpoints.about(folder / "lo.pt")
        r = about["recipe"]
        if r["scale"] != "desk":
            raise ValueError(f"{folder} is not at desk scale: keep its lo.pt where you like.")
        if r["name"] != name:
            raise ValueError(f"{folder} is a run of {r['name']}, not of {name}: leave it out.")
        keep, which = folder / "validation.json", checkpoints.digest(lo)
        known = json.loads(keep.read_text()) if keep.exists() else {}
        scores = validate(lo, r, device, known.get(which))
        write_atomically(keep, json.dumps({which: scores}, indent=1))
        digest = hashlib.sha256((folder / "lo.pt").read_bytes()).hexdigest()
        tried.append({
            "seed": r["seed"], "validation": score(scores), "scores": scores,
            "meta_loss": about["meta_loss"], "minutes": about["minutes"],
            "commit": about["commit"], "sha256_of_run": digest, "command": about["command"],
        })  # fmt: skip
        print(f"{folder}: validation {score(scores):.4f}, meta-loss {about['meta_loss']:.4f}")
    tried_best = min(tried, key=lambda x: x["validation"])
    folder = folders[tried.index(tried_best)]
    about = checkpoints.about(folder / "lo.pt") | {"chosen_among": json.dumps(tried)}
    mulo.save(mulo.load(folder / "lo.pt"), checkpoints.SHIPPED / f"{name}.pt", **about)
    write_record()
    return checkpoints.SHIPPED / f"{name}.pt"


def write_record() -> None:
    """weights/README.md, from what the files themselves say."""
    lines = [
        "# Shipped learned optimizers",
        "",
        '`mulo.load("mulo_m")` reads `mulo_m.pt`, and so on. Each was chosen among the seeds below',
        "by its mean final loss on validation tasks that no evaluation uses, of other widths,",
        "after 500, 2,500 and 12,500 steps (`python evaluate.py choose`, which also wrote",
        "this file). Annealing beyond the horizon of 500 steps (`anneal` in the config) does not",
        "touch meta-training, which never gets there, but it counts in validation.",
        "Meta-loss: mean of the last 20 outer steps. SHA-256: of the shipped file.",
        "",
        "| name | seed | | validation | meta-loss | minutes | commit | command |",
        "|---|---|---|---|---|---|---|---|",
    ]
    digests = []
    for path in sorted(checkpoints.SHIPPED.glob("*.pt")):
        about = checkpoints.about(path)
        if "chosen_among" not in about:
            continue
        digests.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
        for run in sorted(json.loads(about["chosen_among"]), key=lambda run: run["seed"]):
            mark = "shipped" if run["seed"] == about["recipe"]["seed"] else ""
            lines.append(
                f"| {path.stem} | {run['seed']} | {mark} | {run['validation']:.4f} | "
                f"{run['meta_loss']:.4f} | {run['minutes']:.1f} | {run['commit']} | "
                f"`{run['command']}` |"
            )
    lines += ["", "```text", *digests, "```", ""]
    write_atomically(checkpoints.SHIPPED / "README.md", "\n".join(lines))
