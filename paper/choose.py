"""After meta-training: validation, the choice of what is shipped.

    choose("mulo_m", [Path("runs/mulo_m_desk_seed0"), ...])    # `python evaluate.py choose`

Among several meta-training seeds the best is chosen by its final losses on tasks that no evaluation
uses; it goes into weights/ together with the record of all of them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import geometric_mean

import mulo
from mulo import checkpoints, tasks
from mulo.checkpoints import write_atomically
from mulo.paper import baselines
from mulo.training import final_loss, train, with_rules

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


def validate(lo: mulo.LO, r: dict | None, device: str = "cpu") -> dict[str, float]:
    """Final losses on the validation tasks; divergence counts as a bound."""
    if r is None or r["scale"] != "desk":
        raise ValueError("only optimizers that metatrain.py made at desk scale can be validated.")
    scores = {}
    for name, steps, schedule in VALIDATION + (OTHER_FAMILIES if r.get("mixture") else ()):
        task, rate = tasks.get(name), baselines.schedule_of(schedule, steps)
        losses = train(
            with_rules(task, r["mup"]), lo, steps, VALIDATION_SEEDS, schedule=rate, device=device
        )
        score = final_loss(losses).nan_to_num(nan=task.loss_bound).clamp_max(task.loss_bound).mean()
        scores[f"{name}, {steps} steps, {schedule}"] = float(score)
    return scores


def choose(name: str, folders: list[Path], device: str = "cpu") -> Path:
    """Put the best of several meta-training runs into weights/, with the record of all of them."""
    tried = []
    for folder in folders:
        lo, about = mulo.load(folder / "lo.pt"), checkpoints.about(folder / "lo.pt")
        r = about["recipe"]
        if r["name"] != name:
            raise ValueError(f"{folder} is a run of {r['name']}, not of {name}: leave it out.")
        scores = validate(lo, r, device)
        mean = geometric_mean(scores.values())
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

mulo_x is mulo_m with learned multipliers. They differ widely between the seeds, so this recipe
determines them poorly. Other forms were tried and validated worse: time features cut off at 500
steps, and all weights meta-trained on the mixture, from random ones and from mulo_m's.

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
