"""Meta-testing: baselines tuned, learned optimizers validated and compared.

    python evaluate.py tune fashion8_mlp                 # AdamW and μAdam over the paper's grids
    python evaluate.py validate runs/*/lo.pt             # on tasks kept for choosing among seeds
    python evaluate.py choose mulo_m runs/mulo_m_desk_seed*    # the best of these into weights/
    python evaluate.py task fashion8_mlp_w256_d3 --who mulo_m lo_m adamw muadam
    python evaluate.py width                             # one of the paper's claims; see --help
    python evaluate.py all                               # all of them, and RESULTS.md

Nets of all seeds and configurations are trained side by side (`training.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import torch
from tqdm import tqdm

import baselines
import checkpoints
import metatrain
import mulo
import report
import rule
import ship
import tasks
import training
from ablate import ablate
from cells import Cells, Job, contender
from experiments import EXPERIMENTS, SUITES

EXPERIMENTS = EXPERIMENTS | {"ablate": ablate}
SCHEDULES = ("constant", "cosine")
OF_SCHEDULE = "of the rate (default: constant)"
OF_SCALE = "a laptop's or the paper's (default: desk)"


def task(args: argparse.Namespace) -> str:
    """Final losses of any optimizers on any tasks: one row a task, one column an optimizer."""
    cells, who = Cells(args.out, args.device, args.processes), [contender(x) for x in args.who]
    seeds = tuple(range(args.seeds))
    jobs = {name: [Job(c, name, args.steps, args.schedule, seeds) for c in who]
            for name in args.tasks}  # fmt: skip
    cells.fill([job for some in jobs.values() for job in some])
    lines = [f"{'':26}" + "".join(f"{c.name:>24}" for c in who)]
    for name, some in jobs.items():
        row = f"{name:26}"
        for job in some:
            mean, error = report.summary(training.final_loss(cells.losses(job)))
            row += f"{f'{mean:.3f} ± {error:.3f}' if error == error else f'{mean:.3f}':>24}"
        lines.append(row)
    return "\n".join(lines)


def tune(args: argparse.Namespace) -> None:
    r = metatrain.recipe("mulo_m", args.scale)
    steps = args.steps or r.unroll
    task = tasks.get(f"{args.kind}_w{args.width or max(r.widths)}_d{args.depth}")
    for which in baselines.NAMES:
        fixed = None
        if args.rates_only:  # the rest as found by the full grid, at the meta-trained horizon
            known = baselines.best(which, args.kind, r.unroll)
            if known is None:
                raise ValueError(f"first run python evaluate.py tune {args.kind}, the full grid.")
            fixed = {k: known[k] for k in baselines.USUAL}
        found = baselines.tune(
            which, task, steps, list(range(args.seeds)), args.schedule, fixed, args.device,
            show=tqdm,
        )  # fmt: skip
        entry = found[0] | {
            "width": task.width, "depth": task.depth, "seeds": args.seeds,
            "configurations": len(found), "command": "python " + " ".join(sys.argv),
        }  # fmt: skip
        path = baselines.remember(which, args.kind, steps, args.schedule, entry)
        print(f"{baselines.NAMES[which]}: {found[0]} of {len(found)}, kept in {path}")


def _of_a_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("--who", nargs="+", help="adamw, muadam, shipped names, folders of runs")
    p.add_argument("--out", type=Path, help="results' folder (default: results or results_paper)")
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p.add_argument("--processes", type=int, help="at a time (default: all cores, 1 on a GPU)")


def run(name: str, args: argparse.Namespace) -> str:
    """One of the paper's claims: its sentence; table, figure and RESULTS.md are written."""
    suite = SUITES[args.scale]
    suite = dataclasses.replace(suite, who=tuple(args.who)) if args.who else suite
    args.out.mkdir(parents=True, exist_ok=True)
    found = EXPERIMENTS[name](suite, Cells(args.out, args.device, args.processes), args.out)
    report.keep(found, name, args.out)
    if all((args.out / f"{x}.csv").exists() for x in ("width", "coord")):
        report.picture(args.out, suite.kinds[0], suite.widest)
    at_home = args.out == Path("results")
    report.write(args.out, Path("RESULTS.md") if at_home else args.out / "RESULTS.md", suite.scale)
    return found.said


def _complete(args: argparse.Namespace) -> None:
    """Defaults that depend on other flags, and flags that cannot be."""
    counts = [getattr(args, k, None) for k in ("seeds", "steps", "width", "processes")]
    if any(n is not None and n < 1 for n in counts):
        raise ValueError("--seeds, --steps, --width and --processes must be 1 or more.")
    if "device" in args:
        metatrain.check_device(args.device)
    if "processes" in args:
        args.processes = args.processes or (os.cpu_count() if args.device == "cpu" else 1)
        scale = getattr(args, "scale", "desk")
        args.out = args.out or Path("results" if scale == "desk" else f"results_{scale}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Test learned optimizers against tuned baselines.",
        epilog="example: python evaluate.py task fashion8_mlp_w256_d3 --who mulo_m lo_m adamw",
    )
    sub = parser.add_subparsers(dest="what", required=True)
    p = sub.add_parser("tune", help="AdamW and μAdam over the paper's grids")
    p.add_argument("kind", help="of task, such as fashion8_mlp")
    p.add_argument("--scale", choices=metatrain.SCALES, default="desk", help=OF_SCALE)
    p.add_argument("--width", type=int, help="default: the widest of meta-training")
    p.add_argument("--depth", type=int, default=3, help="default: 3")
    p.add_argument("--steps", type=int, help="default: the meta-trained horizon")
    p.add_argument("--seeds", type=int, default=3, help="nets per configuration")
    p.add_argument("--schedule", choices=SCHEDULES, default="constant", help=OF_SCHEDULE)
    p.add_argument(
        "--rates-only", action="store_true", help="only the rates; the rest as tuned before"
    )
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p = sub.add_parser("validate", help="final losses on the validation tasks")
    p.add_argument("files", type=Path, nargs="+", help="lo.pt of runs")
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p = sub.add_parser("choose", help="the best of several runs into weights/")
    p.add_argument("name", choices=metatrain.RECIPES)
    p.add_argument("folders", type=Path, nargs="+", help="of runs")
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p = sub.add_parser("task", help="any optimizers on any tasks")
    p.add_argument("tasks", nargs="+", help="such as fashion8_mlp_w256_d3; see python tasks.py")
    p.add_argument("--steps", type=int, default=500, help="default: 500")
    p.add_argument("--seeds", type=int, default=5, help="nets of each (default: 5)")
    p.add_argument("--schedule", choices=SCHEDULES, default="constant", help=OF_SCHEDULE)
    _of_a_run(p)
    about = {name: run.__doc__.split("\n")[0].rstrip(".") for name, run in EXPERIMENTS.items()}
    for name, text in (about | {"all": "all of these, and RESULTS.md"}).items():
        p = sub.add_parser(name, help=text)
        p.add_argument("--scale", choices=SUITES, default="desk", help=OF_SCALE)
        _of_a_run(p)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rule.keep_freed_memory()
    try:
        _complete(args)
        if args.what == "tune":
            tune(args)
        elif args.what == "task":
            if not args.who:
                raise ValueError("say which optimizers to compare: --who mulo_m adamw")
            print(f"{task(args)}\n(kept in {args.out / 'losses.csv'})")
        elif args.what in EXPERIMENTS or args.what == "all":
            for name in EXPERIMENTS if args.what == "all" else [args.what]:
                print(run(name, args))
        elif args.what == "validate":
            for file in args.files:
                lo, recipe = mulo.load(file), checkpoints.about(file).get("recipe")
                scores = ship.validate(lo, recipe, args.device)
                print(f"{file}: {ship.score(scores):.4f}  {scores}")
        else:
            print(f"chosen: {ship.choose(args.name, args.folders, args.device)}")
    except KeyboardInterrupt:
        sys.exit("evaluate.py: stopped; what was finished is kept, the same command goes on.")
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"evaluate.py: {error}")


if __name__ == "__main__":
    main()
