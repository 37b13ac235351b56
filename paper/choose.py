"""After meta-training: the comparison that ends a run, validation, the choice of what is shipped.

    print(closing_report(run, "cpu"))                          # the last lines of `metatrain.py`
    choose("mulo_m", [Path("runs/mulo_m_desk_seed0"), ...])    # `python evaluate.py choose`

Among several meta-training seeds the best is chosen by its final losses on tasks that no evaluation
uses; it goes into weights/ together with the record of all of them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor
from tqdm import tqdm

import checkpoints
import metatrain
import mulo
import tasks
from checkpoints import write_atomically
from paper import baselines, report
from training import final_loss, train, with_rules

# Only for choosing among recipes and meta-training seeds: no evaluation uses these.
VALIDATION = (  # task, steps, schedule
    ("fashion8_mlp_w96_d2", 500, "constant"), ("fashion8_mlp_w96_d2", 2500, "constant"),
    ("fashion8_mlp_w96_d2", 12_500, "cosine"), ("fashion8_mlp_w192_d4", 500, "constant"),
    ("teacherv_mlp_w48_d3", 500, "constant"), ("teacherv_mlp_w48_d3", 500, "cosine"),
    ("fashion14_mlp_w48_d4", 500, "cosine"), ("fashion14_mlp_w512_d3", 500, "constant"),
)  # fmt: skip
OTHER_FAMILIES = (  # for optimizers that were meta-trained on a mixture
    ("fashion_conv_w24_d3_b16", 500, "constant"), ("fashion_vit_w48_d2_b8", 500, "cosine"),
    ("pixels_lm_w48_d2_b8", 500, "cosine"),
)  # fmt: skip
VALIDATION_SEEDS = [7001, 7002]


def tuned_for(r: metatrain.Recipe, device: str) -> dict[str, dict]:
    """Tuned values of AdamW and μAdam; where none are known, their rates are tuned now."""
    tunings = [
        baselines.Tuning(which, f"{r.kind}_w{max(r.widths)}_d{r.depth}", r.unroll)
        for which in baselines.BASELINES
    ]
    return {x.which: baselines.best(*x.key()) or x.run(device) for x in tunings}


def compare(
    lo: mulo.LO, r: metatrain.Recipe, tuned: dict, width: int, seeds: list[int], device: str
) -> dict[str, Tensor]:
    """Training curves, (steps, seeds), of an optimizer, meta-trained and not, and baselines."""
    task = tasks.get(f"{r.kind}_w{width}_d{r.depth}")
    contenders = {r.name: (lo, r.mup), "untrained": (metatrain.new_lo(r, device), r.mup)}
    for which, values in tuned.items():
        adam = baselines.adam([values] * len(seeds))
        contenders[f"tuned {baselines.BASELINES[which]}"] = adam, which == "muadam"
    return {
        name: train(with_rules(task, mup), optimizer, r.unroll, seeds, device=device)
        for name, (optimizer, mup) in tqdm(contenders.items(), f"comparison at width {width}")
    }


def closing_report(run: metatrain.Run, device: str) -> str:
    """Compare the result of a run with tuned baselines: a picture in its folder, and sentences."""
    r, lo = run.trainer.recipe, mulo.load(run.out / "lo.pt").to(device)
    widest, kind, tuned = max(r.widths), tasks.get(f"{r.kind}_w64_d3").kind, tuned_for(r, device)
    first, last = metatrain.mean_loss(run.rows[:20]), metatrain.mean_loss(run.rows[-20:])
    lines = [f"meta-loss {first:.4g} -> {last:.4g} in {run.seconds / 60:.1f} minutes."]
    fig, (ax, *axes) = report.figure(3)
    meta = torch.tensor([row["meta_loss"] for row in run.rows])
    ax.plot(meta, color="0.7")
    ax.plot(*smooth(meta), "k")
    ax.set(xlabel="outer step", ylabel="meta-loss", title=f"meta-training {r.name}")
    for ax, width, seeds in zip(axes, (widest, 8 * widest), (3, 1), strict=True):
        curves = compare(lo, r, tuned, width, list(range(9001, 9001 + seeds)), device)
        final = {name: float(final_loss(losses).mean()) for name, losses in curves.items()}
        for name, losses in curves.items():
            ax.plot(*smooth(losses.mean(1)), label=name)
        ax.set(xlabel="step", ylabel="training loss", title=f"{kind}, width {width}")
        ax.set_ylim(0.8 * min(final.values()), 1.1 * float(curves[r.name][0].mean()))
        ax.legend()
        nets, mine = "one net" if seeds == 1 else f"{seeds} nets", final.pop(r.name)
        others = ", ".join(f"{name} {x:.4g}" for name, x in final.items())
        lines.append(f"Final loss at width {width}, {nets}: {r.name} {mine:.4g}; {others}.")
    report.save(fig, run.out / "picture.png")
    lines.append(f"The optimizer is {run.out / 'lo.pt'}, the picture {run.out / 'picture.png'}.")
    return "\n".join(lines)


def smooth(x: Tensor, window: int = 20) -> tuple[range, Tensor]:
    """Steps, and the mean over the window of steps that ends at each."""
    window = min(window, len(x))
    return range(window - 1, len(x)), x.unfold(0, window, 1).mean(-1)


def validate(
    lo: mulo.LO, r: dict | None, device: str = "cpu", known: dict[str, float] | None = None
) -> dict[str, float]:
    """Final losses on the validation tasks that are not `known`; divergence counts as a bound."""
    if r is None or r["scale"] != "desk":
        raise ValueError("only optimizers that metatrain.py made at desk scale can be validated.")
    scores = {}
    for name, steps, schedule in VALIDATION + (OTHER_FAMILIES if r.get("mixture") else ()):
        key = f"{name}, {steps} steps, {schedule}"
        if known and key in known:
            scores[key] = known[key]
            continue
        task, rate = tasks.get(name), baselines.schedule_of(schedule, steps)
        losses = train(
            with_rules(task, r["mup"]), lo, steps, VALIDATION_SEEDS, schedule=rate, device=device
        )
        bound = task.loss_bound
        scores[key] = float(final_loss(losses).nan_to_num(nan=bound).clamp_max(bound).mean())
    return scores


def choose(name: str, folders: list[Path], device: str = "cpu") -> Path:
    """Put the best of several meta-training runs into weights/, with the record of all of them."""
    tried = []
    for folder in folders:
        lo, about = mulo.load(folder / "lo.pt"), checkpoints.about(folder / "lo.pt")
        r = about["recipe"]
        if r["name"] != name:
            raise ValueError(f"{folder} is a run of {r['name']}, not of {name}: leave it out.")
        cache, digest = folder / "validation.json", checkpoints.digest(lo)
        known = json.loads(cache.read_text()) if cache.exists() else {}
        scores = validate(lo, r, device, known.get(digest))
        mean = geometric_mean(scores.values())
        write_atomically(cache, json.dumps({digest: scores}, indent=1))
        tried.append({
            "seed": r["seed"], "validation": mean, "scores": scores,
            "meta_loss": about["meta_loss"], "minutes": about["minutes"],
            "commit": about["commit"], "sha256_of_run": sha256(folder / "lo.pt"),
            "command": about["command"],
        })  # fmt: skip
        print(f"{folder}: validation {mean:.4f}, meta-loss {about['meta_loss']:.4f}")
    best = min(range(len(tried)), key=lambda k: tried[k]["validation"])
    source, target = folders[best] / "lo.pt", checkpoints.SHIPPED / f"{name}.pt"
    about = checkpoints.about(source) | {"chosen_among": json.dumps(tried)}
    mulo.save(mulo.load(source), target, **about)
    write_record()
    return target


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


RECORD = """\
# Shipped learned optimizers

`mulo.load("mulo_m")` loads `mulo_m.pt`, and so on. `python evaluate.py choose` wrote this file. It
chose each optimizer among the meta-training seeds below by its validation loss: the geometric mean
of final losses after 500, 2,500 and 12,500 steps on tasks that no evaluation uses (`VALIDATION` in
paper/choose.py; for mulo_x also other families of nets, so its figures are not comparable with
the others'). `anneal` in the config shrinks updates beyond the horizon of meta-training (500
steps, 1,000 for mulo_x), so it matters in validation but not in meta-training. Meta-loss is the
mean of the last 20 outer steps.

mulo_x is mulo_m with learned multipliers; on its validation tasks mulo_m has 0.526. Other forms
validated worse, on the same tasks without fashion14_mlp_w512_d3, where mulo_x has 0.535: with the
time features cut off at 500 steps (0.556), and with all weights meta-trained on the mixture, from
random ones (0.593) and from mulo_m's (0.550).

| name | seed | | validation | meta-loss | minutes | commit | command |
|---|---|---|---|---|---|---|---|
"""


def write_record() -> None:
    """Write weights/README.md from what the files themselves say."""
    lines, digests = [], []
    for path in sorted(checkpoints.SHIPPED.glob("*.pt")):
        about = checkpoints.about(path)
        if "chosen_among" not in about:
            continue
        digests.append(f"{sha256(path)}  {path.name}")
        for run in sorted(json.loads(about["chosen_among"]), key=lambda run: run["seed"]):
            mark = "shipped" if run["seed"] == about["recipe"]["seed"] else ""
            lines.append(
                f"| {path.stem} | {run['seed']} | {mark} | {run['validation']:.4f} | "
                f"{run['meta_loss']:.4f} | {run['minutes']:.1f} | {run['commit']} | "
                f"`{run['command']}` |"
            )
    text = RECORD + "\n".join(
        [*lines, "", "SHA-256 of the files:", "", "```text", *digests, "```", ""]
    )
    write_atomically(checkpoints.SHIPPED / "README.md", text)
