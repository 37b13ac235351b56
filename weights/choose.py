"""Validate meta-trained optimizers, and ship the best of several seeds.

    python weights/choose.py runs/*/lo.pt                           # validation losses
    python weights/choose.py runs/mulo_m_desk_seed* --ship mulo_m   # ship the best of these

Validation losses are final losses on tasks that no evaluation uses. The best run is saved in
weights/ with the record of all, from which the tables of weights/README.md are written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parents[1]))
import mulo
from mulo import checkpoints, kernels, roles, tasks
from mulo.evaluate import exit_with_message, schedule_of
from mulo.training import final_loss, train

VALIDATION = (  # task, steps, schedule: only for choosing among recipes and meta-training seeds
    ("fashion8_mlp_w96_d2", 500, "constant"), ("fashion8_mlp_w96_d2", 2500, "constant"),
    ("fashion8_mlp_w96_d2", 12_500, "cosine"), ("fashion8_mlp_w192_d4", 500, "constant"),
    ("teacherv_mlp_w48_d3", 500, "constant"), ("teacherv_mlp_w48_d3", 500, "cosine"),
    ("fashion14_mlp_w48_d4", 500, "cosine"), ("fashion14_mlp_w512_d3", 500, "constant"),
)  # fmt: skip
SEEDS = [7001, 7002]


def validate(path: Path, device: str = "cpu") -> dict:
    """The record of a run, with its final losses on the validation tasks (`scores`) and their
    geometric mean (`validation`). Divergence counts as the task's loss bound."""
    lo, scores = mulo.load(path), {}
    about, recipe = lo.about, lo.about.get("recipe")
    if recipe is None or recipe["scale"] != "desk":
        raise ValueError(f"{path} was not meta-trained at desk scale, so it cannot be validated.")
    for name, steps, schedule in VALIDATION:
        task = tasks.get(name, rules=roles.ALL if recipe["mup"] else ())
        rate = schedule_of(schedule, steps)
        losses = final_loss(train(task, lo, steps, SEEDS, schedule=rate, device=device))
        losses = losses.nan_to_num(nan=task.loss_bound).clamp_max(task.loss_bound)
        scores[f"{name}, {steps} steps, {schedule}"] = float(losses.mean())
    record = {"seed": recipe["seed"], "validation": geometric_mean(scores.values())}
    record |= {k: about[k] for k in ("meta_loss", "minutes", "commit", "command")}
    return record | {"scores": scores}


HEAD = "| name | seed | | validation | meta-loss | minutes | commit | command |"


def write_record() -> None:
    """Write weights/README.md, below its introduction, from the records in the files."""
    path, lines, digests = checkpoints.SHIPPED / "README.md", "", ""
    introduction = path.read_text().partition(HEAD)[0] if path.exists() else ""
    for file in sorted(checkpoints.SHIPPED.glob("*.pt")):
        about = mulo.load(file).about
        digests += f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for run in sorted(json.loads(about.get("chosen_among", "[]")), key=lambda run: run["seed"]):
            mark = "shipped" if run["seed"] == about["recipe"]["seed"] else ""
            row = file.stem, run["seed"], mark, f"{run['validation']:.4f}"
            row += f"{run['meta_loss']:.4f}", f"{run['minutes']:.1f}", run["commit"]
            lines += f"| {' | '.join(map(str, row))} | `{run['command']}` |\n"
    table = f"{HEAD}\n|{'---|' * 8}\n{lines}"
    digests = f"\nSHA-256 of the files:\n\n```text\n{digests}```\n"
    checkpoints.write_atomically(path, introduction + table + digests)


def main() -> None:
    parser = argparse.ArgumentParser(description="Validate runs, and ship the best.")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or their lo.pt")
    parser.add_argument("--ship", metavar="RECIPE", help="save the best run of it in weights/")
    parser.add_argument("--device", default="auto", help=kernels.DEVICE_HELP)
    args = parser.parse_args()
    with exit_with_message("choose.py"):
        device, sentence = kernels.pick_device(args.device)
        print(sentence)
        runs = [path / "lo.pt" if path.is_dir() else path for path in args.runs]
        for path in runs if args.ship else []:
            recipe = mulo.load(path).about.get("recipe", {}).get("name")
            if recipe != args.ship:
                raise ValueError(f"{path} is a run of {recipe}, not of {args.ship}: leave it out.")
        records = {}
        for path in runs:
            record = records[path] = validate(path, device)
            print(f"{path}: {record['validation']:.4f}  {record['scores']}")
        if args.ship:
            best = min(records, key=lambda path: records[path]["validation"])
            target, among = checkpoints.SHIPPED / f"{args.ship}.pt", list(records.values())
            mulo.save(mulo.load(best), target, chosen_among=json.dumps(among))
            write_record()
            print(f"chosen: {best}, saved as {target}")


if __name__ == "__main__":
    main()
