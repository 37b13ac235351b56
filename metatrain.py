"""Meta-train a learned optimizer by Persistent Evolution Strategies (PES): recipes, runs, resume.

    python metatrain.py                         # mulo_m at desk scale: minutes on a laptop
    python metatrain.py lo_m --seed 1           # the same recipe in standard parametrization
    python metatrain.py mulo_x                  # on a mixture of tasks and families
    python metatrain.py --mixture fashion8_mlp_w32_d3 teachera_mlp_w16_d2_b32     # your own
    python metatrain.py mulo_m --scale paper --device cuda     # the paper's recipe, on one GPU
    python metatrain.py mulo_m --scale paper --dry-run         # memory and time on a GPU, estimated
    torchrun --nproc-per-node 2 metatrain.py    # the perturbations split over processes
    python metatrain.py --resume runs/mulo_m_desk_seed0        # go on where a run stopped
    python metatrain.py --resume runs/mulo_m_desk_seed0 --steps 800    # and further than planned

Paper: appendix C. `pes.py` has the estimator, the nets in training and the outer step; here are the
recipes and what makes them runs: a folder with log.csv, the last checkpoints, lo.pt and a picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import mulo
from mulo import checkpoints, estimate, kernels, pes, roles, tasks, training
from mulo.pes import Trainer, pes_gradient

__all__ = ["RECIPES", "Recipe", "Run", "Trainer", "pes_gradient", "recipe"]

SCALES = ("desk", "paper")


def number(default: float, meaning: str):
    """A field of Recipe that is a flag too; --help prints its meaning."""
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All numbers of a run. Defaults are the paper's (appendix C); DESK is what a laptop can do."""

    name: str = "mulo_m"
    scale: str = "paper"
    seed: int = number(0, "of all random numbers of the run")
    net: str = "small_fc"  # or "velo"
    mup: bool = True
    start: str = ""  # a learned optimizer to start from, in place of random weights
    only: tuple[str, ...] = ()  # names of the weights that are meta-trained; (): all
    kind: str = "in32_mlp"  # of task, or the path of a file; widths and depth complete its name
    widths: tuple[int, ...] = (128, 512, 1024)
    depth: int = number(3, "layers of the nets in training")
    batch_size: int = number(4096, "examples per inner step")
    mixture: tuple[str, ...] = ()  # names of tasks, in place of the four above
    per_step: int = number(0, "tasks that an outer step unrolls, in turn, 0 for all")
    hidden_size: int = number(32, "of the learned optimizer's MLP; the authors' is 32, VeLO's 4")
    lstm_hidden: int = number(128, "VeLO: size of the LSTM")
    param_inits: int = number(64, "VeLO: size of the bank of MLPs")
    # VeLO's factor RMS(W) on the update. DIVERGES: off in SP too, or output layers, which are 0 at
    # first, never move; μP rules it out.
    param_scale_mult: bool = False
    eps: str = "reference"  # or "relative", "fan_in": see features.Eps
    eps_rms: float = number(1e-5, "epsilon in the normaliser of the features")
    anneal: float = number(0.0, "beyond the unroll, updates shrink as (unroll / t)^N")
    input_base: float = number(0.0, "input size of the input rule (see README), 0 for off")
    by_channels: bool = False  # the channel rule
    multipliers: bool = False  # learned factors by kind of tensor: see mulo.LOConfig
    lam1: float = number(0.01, "lambda_1, the factor on the update; 0.001 in SP and for VeLO")
    pairs: int = number(8, "antithetic pairs of perturbations per task")
    micro_batch: int = number(4, "pairs that advance at a time: less memory, the same result")
    sigma: float = number(0.01, "standard deviation of the perturbations")
    unroll: int = number(1000, "inner steps of the longest unroll")
    shortest: int = number(100, "inner steps of the shortest unroll; lengths are log-uniform")
    truncation: int = number(50, "inner steps per outer step")
    late: float = number(0.0, "weight of late losses: 0 is the mean, 1 favours the last")
    cosine: float = number(0.0, "share of the pairs whose nets train under the cosine schedule")
    steps: int = number(5000, "outer steps")
    warmup: int = number(100, "outer steps over which the outer learning rate rises")
    lr: float = number(3e-3, "outer learning rate after the warm-up")
    lr_end: float = number(1e-3, "outer learning rate at the end")
    weight_decay: float = number(1e-4, "of the outer AdamW")
    # DIVERGES: the reference clips the update.
    clip: float = number(1.0, "largest norm of the meta-gradient")
    backend: str = "auto"  # of the learned optimizer's step: see mulo.MuLO
    tf32: bool = False  # matrix products of the nets in TF32, never the optimizer's

    def __post_init__(self):
        counts = ("pairs", "micro_batch", "unroll", "shortest", "truncation", "steps", "batch_size")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}.")
        for name in ("sigma", "lr", "lr_end", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number above 0, not {getattr(self, name)}.")
        if min(self.widths, default=0) < 1 or self.warmup < 0:
            raise ValueError(
                f"widths must be 1 or more, warmup 0 or more, not {self.widths} and {self.warmup}."
            )
        if not 0 <= self.seed < 10**9:
            raise ValueError(f"seed must be between 0 and 999,999,999, not {self.seed}.")
        if self.shortest > self.unroll:
            raise ValueError(f"shortest={self.shortest} exceeds unroll={self.unroll}: lower it.")

    def tasks(self) -> list[tasks.Task]:
        if self.mixture:
            return [tasks.get(name) for name in self.mixture]
        names = (f"{self.kind}_w{width}_d{self.depth}" for width in self.widths)
        return [tasks.get(name, batch_size=self.batch_size) for name in names]


# Found to be dependable at this size: a larger sigma, unrolls of one length, and small batches,
# whose noise teaches the optimizer to average gradients.
DESK = {
    "scale": "desk", "kind": "fashion8_mlp", "widths": (16, 32, 64), "batch_size": 16,
    "hidden_size": 8, "sigma": 0.05, "unroll": 500, "shortest": 500, "truncation": 25,
    "steps": 800, "warmup": 50, "lr": 3e-3, "lr_end": 3e-4, "micro_batch": 8, "anneal": 0.5,
}  # fmt: skip
SP = {"mup": False, "lam1": 0.001}
VELO = {"net": "velo", "lam1": 0.001, "hidden_size": 4, "truncation": 20, "steps": 45_000}
DESK_VELO = {  # a bank of 256, as in the authors' VeLO: small ones make large MLPs, and noise
    "lstm_hidden": 16, "param_inits": 256, "sigma": 0.02, "lr": 4e-3, "lr_end": 4e-4, "steps": 500,
    "anneal": 0.0,
}  # fmt: skip
DESK_VELO_SP = {"lam1": 1e-4}  # DIVERGES: 0.001 kills SP nets before PES sees why
MIXTURE = (  # small images, teachers and, for the learned multipliers, other families
    "fashion8_mlp_w32_d3", "fashion_conv_w16_d3_b16", "teachera_mlp_w32_d3_b32",
    "fashion14_mlp_w48_d2_b32", "pixels_lm_w24_d2_b4", "teacherb_mlp_w48_d2",
    "fashion8_mlp_w64_d5_b16", "fashion_vit_w24_d2_b4", "teacherc_mlp_w16_d3",
    "fashion_mlp_w24_d4", "teacherb_mlp_w16_d4_b16",
)  # fmt: skip
GENERAL = {
    "start": "mulo_m", "only": ("multipliers",), "mixture": MIXTURE, "per_step": 4, "late": 0.5,
    "cosine": 0.5, "input_base": 64.0, "by_channels": True, "multipliers": True, "unroll": 1000,
    "shortest": 200, "steps": 250, "warmup": 10, "sigma": 0.1, "lr": 2e-2, "lr_end": 1e-3,
    "weight_decay": 0.0,
}  # fmt: skip
RECIPES = {
    "mulo_s": {},
    "mulo_m": {},
    "muvelo_m": VELO,
    "lo_s": SP,
    "lo_m": SP,
    "velo_m": VELO | SP,
    "mulo_x": GENERAL,
}


def recipe(name: str, scale: str = "desk", **changes) -> Recipe:
    """A named recipe; an `_s` optimizer sees only the narrowest of the three widths."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: use one of {', '.join(RECIPES)}.")
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}: use one of {', '.join(SCALES)}.")
    if "mixture" in RECIPES[name] and scale != "desk":
        raise ValueError(f"{name} is not in the paper: leave --scale out.")
    fields = {"name": name} | (DESK if scale == "desk" else {}) | RECIPES[name]
    if scale == "desk" and fields.get("net") == "velo":
        fields |= DESK_VELO if fields.get("mup", True) else DESK_VELO | DESK_VELO_SP
    if name.endswith("_s"):
        fields["widths"] = fields.get("widths", Recipe.widths)[:1]
    r = Recipe(**(fields | changes))
    if not r.mup or "input_base" in fields | changes:
        return r
    return dataclasses.replace(r, by_channels=True, input_base=input_size(r.tasks()[0]))


def input_size(task: tasks.Task) -> float:
    """The fan_in of a task's first input layer, the base of the input rule; 0 if there is none."""
    weights = ((w, task.roles()[w.name]) for w in roles.weights_of(task.skeleton()))
    return next((float(w.fan_in) for w, role in weights if roles.kind_of(w, role) == "input"), 0.0)


def new_lo(r: Recipe, device: str = "cpu") -> mulo.LO:
    """The learned optimizer that a run starts from."""
    config = {
        f.name: getattr(r, f.name) for f in dataclasses.fields(mulo.LOConfig) if hasattr(r, f.name)
    }
    config |= {"input_base": r.input_base or None}
    config |= {"t_max": float(r.unroll)} if r.net == "small_fc" else {}
    lo = mulo.NETS[r.net](mulo.LOConfig(**config), torch.Generator().manual_seed(r.seed))
    if r.start:
        try:
            lo.load_state_dict(lo.state_dict() | mulo.load(r.start).state_dict())
        except RuntimeError:
            raise ValueError(f"{r.start} has other sizes: give it the recipe's net.") from None
    return lo.to(device)


class Run:
    """A trainer with a folder: log.csv, the last checkpoints, and lo.pt at the end.

    Of several processes each keeps its own nets' checkpoints; the first also writes the rest.
    """

    KEEP = 3  # checkpoints: the last may be damaged, or processes may be killed as they write it
    HISTORY = ("rows", "seconds", "command", "commit")

    def __init__(self, trainer: Trainer, out: Path):
        self.trainer, self.out, self.rows, self.seconds = trainer, out, [], 0.0
        self.stop = False  # set by Ctrl-C
        self.command, self.commit = shlex.join(["python", *sys.argv]), commit()
        out.mkdir(parents=True, exist_ok=True)
        for half_written in out.glob(".checkpoint_*"):  # by a process that was killed
            half_written.unlink(missing_ok=True)

    @staticmethod
    def checkpoints(out: Path, rank: int = 0) -> dict[int, Path]:
        """The checkpoints of one process by their step, oldest first."""
        paths = sorted(out.glob(f"checkpoint_{'[0-9]' * 6}{_suffix(rank)}"))
        return {int(path.name.removeprefix("checkpoint_")[:6]): path for path in paths}

    def save(self) -> None:
        """Checkpoint and log, each written whole and renamed."""
        state = self.trainer.state_dict() | {k: getattr(self, k) for k in self.HISTORY}
        rank = self.trainer.rank
        buffer = io.BytesIO()  # torch.save to a full disk fails with an error of its own
        torch.save(state, buffer)
        path = self.out / f"checkpoint_{self.trainer.step:06}{_suffix(rank)}"
        checkpoints.write_atomically(path, buffer.getbuffer())
        for old in list(self.checkpoints(self.out, rank).values())[: -self.KEEP]:
            old.unlink()
        if rank == 0:
            lines = [",".join(self.rows[0]), *(",".join(map(repr, r.values())) for r in self.rows)]
            checkpoints.write_atomically(self.out / "log.csv", "\n".join(lines) + "\n")

    @classmethod
    def resume(cls, out: Path, device: str) -> Run:
        """Continue from the newest checkpoint that can be read, by every process."""
        rank, world = pes.rank_and_world()
        made_by = 1 + len({f.name.split(".")[1] for f in out.glob("checkpoint_*.rank*.pt")})
        if made_by != world:
            raise ValueError(
                f"the run was split over {made_by} process(es), not {world}: resume it with "
                f"{launcher(made_by)} metatrain.py."
            )
        paths = cls.checkpoints(out, rank)
        for step in sorted(set.intersection(*of_all_processes(set(paths))), reverse=True):
            try:
                state = checkpoints.read(paths[step])
            except ValueError as error:
                print(f"{error} Trying the checkpoint before.", file=sys.stderr)
                state = None
            if all(of_all_processes(state is not None)):
                break
        else:
            fix = "give the folder of a run, or start anew"
            raise FileNotFoundError(f"no checkpoint that can be read in {out}: {fix}.")
        if state.get("recipe", {}).keys() != {f.name for f in dataclasses.fields(Recipe)}:
            raise ValueError(
                f"the run in {out} was made by other code ({state.get('commit')}): resume it with "
                "that, or start anew."
            )
        r = Recipe(**state["recipe"])
        run = cls(Trainer(r, new_lo(r, device)), out)
        run.trainer.load_state_dict(state)
        for name in cls.HISTORY:
            setattr(run, name, state[name])
        return run

    def extend(self, steps: int) -> None:
        """End at `steps` outer steps; the cosine of the outer rate is stretched to that end."""
        trainer, before = self.trainer, self.trainer.rate()
        if steps <= trainer.step:
            raise ValueError(
                f"the run in {self.out} is at step {trainer.step}: give --steps more than that."
            )
        planned = trainer.recipe.steps
        trainer.recipe = dataclasses.replace(trainer.recipe, steps=steps)
        more = ["python", "metatrain.py", "--resume", str(self.out), "--steps", str(steps)]
        self.command += f" && {shlex.join(more)}"
        if trainer.rank == 0:
            print(
                f"{steps} steps in place of {planned}: the cosine of the outer rate is stretched "
                f"to the new end, so at step {trainer.step} it is {trainer.rate():.2g} in place "
                f"of {before:.2g}, and {trainer.recipe.lr_end:.2g} at the end."
            )

    def train(self, minutes: float) -> None:
        """Train to the end with a checkpoint every `minutes` (0: after every step).

        Ctrl-C stops after the current step, so the checkpoint is consistent.
        """
        trainer, before = self.trainer, signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *_: setattr(self, "stop", True))
        try:
            self._train(minutes)
        finally:
            signal.signal(signal.SIGINT, before)
        if trainer.step < trainer.recipe.steps:
            raise KeyboardInterrupt
        if trainer.rank == 0:
            about = {"recipe": dataclasses.asdict(trainer.recipe), "command": self.command}
            about |= {"commit": self.commit, "minutes": self.seconds / 60}
            about["meta_loss"] = mean_loss(self.rows[-20:])
            mulo.save(trainer.result(), self.out / "lo.pt", **about)

    def _train(self, minutes: float) -> None:
        trainer, r = self.trainer, self.trainer.recipe
        inner = r.truncation * (r.per_step or len(trainer.tasks)) * 2 * r.pairs
        how = {"initial": trainer.step, "desc": r.name, "disable": trainer.rank > 0}
        with tqdm(total=r.steps, unit="step", **how) as bar:
            stop, saved = False, time.monotonic()
            while trainer.step < r.steps and not stop:
                start = time.monotonic()
                self.rows.append(trainer.advance())
                now = time.monotonic()
                self.seconds += now - start
                bar.update()
                speed = f"{inner / (now - start):,.0f}/s"
                bar.set_postfix(loss=f"{self.rows[-1]['meta_loss']:.3f}", inner=speed)
                wishes = of_all_processes((self.stop, now - saved >= 60 * minutes))
                stop, save = map(any, zip(*wishes, strict=True))
                over = stop or trainer.step == r.steps
                if save or over:
                    saved = now
                    try:
                        self.save()
                    except OSError as error:  # a full disk: what was saved before is still there
                        bar.write(f"checkpoint not saved ({error}): make room.")
                        if over:
                            raise


def _suffix(rank: int) -> str:
    return f".rank{rank}.pt" if rank else ".pt"


def of_all_processes(x) -> list:
    """x of every process, under torchrun; of this one otherwise."""
    everyone = [x] * pes.rank_and_world()[1]
    if dist.is_initialized():
        dist.all_gather_object(everyone, x)
    return everyone


def mean_loss(rows: list[dict]) -> float:
    return sum(row["meta_loss"] for row in rows) / len(rows)


def launcher(processes: int) -> str:
    return "python" if processes == 1 else f"torchrun --nproc-per-node {processes}"


def commit() -> str:
    """The commit that this code is at, if it is a git checkout."""
    args = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(args, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def start_processes(device: str) -> str:
    """The device that --device stands for, said by the first process. Under torchrun: join the
    others, and take the GPU of this process."""
    device, sentence = kernels.pick_device(device)
    if os.environ.get("RANK", "0") == "0":
        print(sentence)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="metatrain.py [recipe] [flags]",
        description="Meta-train a learned optimizer by PES.",
        epilog="example: python metatrain.py lo_m --steps 200 --out runs/try",
    )
    parser.add_argument(
        "recipe", nargs="?", default="mulo_m", help=f"{', '.join(RECIPES)} (default: mulo_m)"
    )
    parser.add_argument("--scale", choices=SCALES, default="desk", help="a laptop's or the paper's")
    parser.add_argument("--device", default="auto", help=kernels.DEVICE_HELP)
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/<name>)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in DIR")
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=10,
        metavar="MINUTES",
        help="time between checkpoints (default: 10; 0: after every step)",
    )
    parser.add_argument("--dry-run", action="store_true", help="estimate memory and time on a GPU")
    parser.add_argument("--card", default="a6000", help="that GPU: a6000, a100, or GB/s,TFLOP/s")
    parser.add_argument("--no-picture", action="store_true", help="skip the comparison at the end")
    numbers = parser.add_argument_group("numbers of the recipe, to override (here: mulo_m's)")
    for field in dataclasses.fields(Recipe):
        if "help" in field.metadata:
            flag, kind = f"--{field.name.replace('_', '-')}", type(field.default)
            values = (f"{k} {getattr(recipe('mulo_m', k), field.name):g}" for k in SCALES)
            meaning = f"{field.metadata['help']} ({', '.join(values)})"
            numbers.add_argument(flag, type=kind, metavar="N", help=meaning)
    numbers.add_argument(
        "--widths",
        type=int,
        nargs="+",
        metavar="N",
        help="of the nets in training: one task for each",
    )
    numbers.add_argument(
        "--mixture", nargs="+", metavar="TASK", help="tasks by name, in place of kind and widths"
    )
    numbers.add_argument("--start", metavar="LO", help="a learned optimizer to start from")
    numbers.add_argument("--kind", help="of task, see `python tasks.py`; a .py file: one's own")
    numbers.add_argument("--eps", help="reference, relative or fan_in: how epsilons scale")
    numbers.add_argument("--tf32", action="store_true", default=None, help="train the nets in TF32")
    numbers.add_argument("--backend", choices=kernels.BACKENDS, help="of the optimizer's step")
    return parser


def _changes(args: argparse.Namespace) -> dict:
    """The numbers given on the command line."""
    found = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(Recipe)}
    found = {k: v for k, v in found.items() if v is not None and k != "scale"}
    if found.get("kind", "").endswith(".py"):
        found["kind"] = os.path.abspath(found["kind"])  # so that a run resumes from any folder
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def _start(args: argparse.Namespace, device: str) -> Run:
    """The run that the command line asks for, new or resumed."""
    changes = _changes(args)
    if args.resume:
        steps = changes.pop("steps", None)
        if changes or args.out or (args.recipe, args.scale) != ("mulo_m", "desk"):
            raise ValueError(
                "a resumed run keeps its numbers, but for --steps, and its folder: leave them out."
            )
        run = Run.resume(args.resume, device)
        if steps is not None:
            run.extend(steps)
        return run
    r = recipe(args.recipe, args.scale, **changes)
    out = args.out or Path("runs") / f"{r.name}_{r.scale}_seed{r.seed}"
    if Run.checkpoints(out):
        raise FileExistsError(f"{out} has a run already: add --resume {out}, or --out.")
    return Run(Trainer(r, new_lo(r, device)), out)


def main() -> None:
    args, run = _parser().parse_args(), None
    training.keep_freed_memory()
    try:
        if args.dry_run:
            r = recipe(args.recipe, args.scale, **_changes(args))
            trainer = Trainer(r, new_lo(r, "meta"), data=False)
            return print(estimate.report(trainer, estimate.card(args.card)))
        device = start_processes(args.device)
        run = _start(args, device)
        if device == "cpu" and run.trainer.recipe.scale == "desk":
            torch.set_num_threads(1)  # on tensors this small, threads only wait for each other
        run.train(args.checkpoint_every)
        if run.trainer.rank == 0 and args.no_picture:
            print(f"The optimizer is {run.out / 'lo.pt'}.")
        elif run.trainer.rank == 0:
            from mulo.paper import choose  # which imports this file

            print(choose.closing_report(run, device))
    except KeyboardInterrupt:
        if run is None or not run.rows:
            again = "resume" if args.resume else "start"
            sys.exit(f"stopped before the first step: {again} again.")
        how = f"{launcher(run.trainer.world)} metatrain.py --resume {run.out}"
        sys.exit(f"stopped at step {run.trainer.step}: {how}")
    except torch.OutOfMemoryError:
        sys.exit("metatrain.py: out of memory: use a smaller --micro-batch (--dry-run tells more).")
    except (ValueError, OSError, FloatingPointError) as error:
        if tasks.in_own_file(error):
            raise
        sys.exit(f"metatrain.py: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
