"""Meta-train a learned optimizer by Persistent Evolution Strategies (PES).

    python metatrain.py                         # mulo_m at desk scale: minutes on a laptop
    python metatrain.py lo_m --seed 1           # the same recipe in standard parametrization
    python metatrain.py mulo_m --scale paper    # the paper's recipe, on one GPU
    torchrun --nproc-per-node 2 metatrain.py    # split the perturbations over processes
    python metatrain.py --resume runs/mulo_m_desk_seed0 --steps 1600   # resume and extend a run

Paper: eq. 1 (the meta-objective), section 2 and appendix C. phi are the weights of the learned
optimizer. An unroll is the training of one net with it, a truncation a part of an unroll. An outer
step (`Trainer.advance`):

    for every pair of nets (`Particles.estimate`):
        draw eps ~ N(0, sigma^2)
        train one net with phi + eps and the other with phi - eps for a truncation
        xi = xi + eps                                            # 0 when an unroll begins
        gradient = xi * (loss of phi + eps - loss of phi - eps) / (2 sigma^2)    # `pes_gradient`
    average the gradients over pairs and tasks, clip, and step phi with AdamW

xi, the sum of a pair's perturbations, removes the bias of truncation. The two nets of a pair share
initial weights, batches and length. A pair draws these and eps from its own generator, so results
do not depend on how pairs are split over micro-batches or processes.

`recipes.py` has the settings, `training.py` the inner step.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import mulo
from mulo import LO, checkpoints, features, kernels, recipes, tasks, training
from mulo.evaluate import BASELINES, Job, Results, Tuning, contender, write_table
from mulo.features import Phi
from mulo.recipes import Recipe, new_lo, recipe

# ---------------------------------------------------------------- the estimator


def pes_gradient(
    delta: Tensor,  # (steps, n): loss with phi + eps minus loss with phi - eps
    began: Tensor,  # (steps, n) bool: the step belongs to an unroll that began in this truncation
    eps: Tensor,  # (n, D): this truncation's perturbations
    xi: Tensor,  # (n, D): those of the unroll's earlier truncations, summed
    sigma: float,
) -> tuple[Tensor, Tensor]:
    """The PES meta-gradient (D,) and the new xi.

    mean over pairs of (sum_old delta (xi + eps) + sum_new delta eps) / (2 sigma^2 steps). Losses of
    an old unroll depend on all its perturbations, those of a new one on eps only. Losses are
    clipped first, so a diverged net counts as the bound; pairs whose difference is still not finite
    are left out. DIVERGES: in the reference code an unroll's last loss counts as the next one's,
    and a NaN makes the whole gradient 0.
    """
    good = delta.isfinite().all(0)  # (n,)
    delta = torch.where(good, delta, 0) * (1 / len(delta))
    old, new = (delta * ~began).sum(0), (delta * began).sum(0)  # (n,)
    new_xi = xi + eps
    grad = (old.unsqueeze(1) * new_xi + new.unsqueeze(1) * eps).sum(0)
    grad = grad / (2 * sigma**2 * good.sum().clamp_min(1))
    return grad, torch.where(began[-1].unsqueeze(1), eps, new_xi)


# ---------------------------------------------------------------- the nets in training


def unflatten(phi: Tensor, like: LO) -> Phi:
    """Convert vectors of weights (P, D) to the stacked dict that a learned optimizer takes."""
    parts = phi.split([w.numel() for w in like.parameters()], 1)
    pairs = zip(like.named_parameters(), parts, strict=True)
    return {name: part.unflatten(1, w.shape) for (name, w), part in pairs}


class Particles:
    """n antithetic pairs of nets on one task, in tensors (2n, ...): nets with phi + eps first."""

    def __init__(self, task: tasks.Task, recipe: Recipe, lo: LO, pairs: range, seed: int, data):
        """`pairs`: the indices of these pairs among all of the task, to seed their generators."""
        phi = parameters_to_vector(lo.parameters())
        n, device = len(pairs), phi.device
        self.task, self.recipe, self.lo, self.data = task, recipe, lo, data
        self.opt = training.Learned(lo.config, task, device, recipe.backend)
        # Generators are on the CPU for every device, so that a GPU draws the same numbers.
        self.generators = [torch.Generator().manual_seed(seed * 10_000 + k) for k in pairs]
        self.t, self.length = torch.zeros(n), torch.zeros(n)  # t >= length: the unroll is finished
        self.xi = torch.zeros(n, len(phi), device=device)
        shapes = {name: p.shape for name, p in task.skeleton().named_parameters()}
        self.theta = {name: torch.zeros(2 * n, *s, device=device) for name, s in shapes.items()}
        lengths = torch.full((2 * n,), float(recipe.unroll))
        self.state = self.opt.init(self.theta, unflatten(phi.unsqueeze(0), lo), lengths)

    def estimate(self, phi: Tensor) -> tuple[Tensor, Tensor, int]:
        """Perturb phi (D,) and train all nets for a truncation.

        Returns the meta-gradient (D,), the mean clipped loss () and the number of diverged pairs.
        """
        noise = torch.stack([torch.randn(len(phi), generator=g) for g in self.generators])
        eps = self.recipe.sigma * features.send(noise, phi.device)  # (n, D)
        losses, began, diverged = self.truncation(torch.cat([phi + eps, phi - eps]))
        bound = self.task.loss_bound
        losses = torch.where(losses.isfinite(), losses, bound).clamp(0, bound)  # (steps, 2, n)
        delta = losses[:, 0] - losses[:, 1]  # (steps, n)
        grad, self.xi = pes_gradient(delta, began, eps, self.xi, self.recipe.sigma)
        return grad, losses.mean(), diverged

    def truncation(self, phi: Tensor) -> tuple[Tensor, Tensor, int]:
        """Train every net for a truncation, each with its own phi, (2n, D).

        Returns the losses (steps, 2, n), `began` (steps, n) for `pes_gradient` and the number of
        diverged pairs. DIVERGES: pairs that diverge start a new unroll, at the next step on a CPU
        and at the next truncation on a GPU; in the reference they stay at the bound to the end.
        """
        n, steps, device = len(self.t), self.recipe.truncation, phi.device
        phi = unflatten(phi, self.lo)
        weights = self.opt.prepare(phi)
        losses = torch.empty(steps, 2, n, device=device)
        began = torch.zeros(steps, n, dtype=torch.bool)
        start = torch.zeros(n)  # first step in this truncation of each pair's current unroll
        num_diverged = 0
        for k in range(steps):
            finished = self.t >= self.length
            if finished.any():
                self.restart(finished, phi)
                began[k:] |= finished
                start[finished] = k
            losses[k] = self.inner_step(weights).view(2, n)
            self.t += 1
            if device.type == "cpu" or k == steps - 1:  # on a GPU, reading losses is a sync
                bad = ~losses[: k + 1].isfinite().all(1).cpu()  # (k + 1, n)
                diverged = (bad & (torch.arange(k + 1).unsqueeze(1) >= start)).any(0)  # (n,)
                self.length = torch.where(diverged, self.t, self.length)
                num_diverged += int(diverged.sum())
        return losses, began.to(device), num_diverged

    def inner_step(self, weights) -> Tensor:
        """One step of every net; returns the losses before it, (2n,)."""
        t = torch.cat([self.t, self.t])
        batch = training.batches(self.data, self.generators, self.task.batch_size, copies=2)
        losses, grads = training.gradients(self.task, self.theta, batch, self.recipe.tf32)
        self.opt.step(weights, self.state, self.theta, grads, losses, t)
        return losses

    def restart(self, finished: Tensor, phi: Phi) -> None:
        """Start a new unroll in the pairs that are finished, (n,) bool."""
        n, device, pairs = len(self.t), self.xi.device, finished.nonzero().flatten().tolist()
        low, high = math.log(self.recipe.shortest), math.log(self.recipe.unroll)
        first = not self.length.any()  # cut the first unrolls short, or all pairs end at once
        u = torch.stack([torch.rand(1 + first, generator=self.generators[k]) for k in pairs])
        length = (low + (high - low) * u[:, 0]).exp().round()  # log-uniform
        self.length[pairs] = (length * u[:, 1]).ceil() if first else length
        self.t[pairs] = 0
        inits = [self.task.init(1, self.generators[k]) for k in pairs] * 2
        theta = {k: torch.cat([init[k] for init in inits]) for k in self.theta}
        theta = {k: features.send(p, device) for k, p in theta.items()}
        rows = features.send(torch.tensor(pairs + [n + k for k in pairs]), device)  # of both halves
        phi = {k: w[rows] for k, w in phi.items()}
        state = self.opt.init(theta, phi, torch.cat([length, length]))
        old, new = tree_leaves((self.theta, self.state)), tree_leaves((theta, state))
        for x, y in zip(old, new, strict=True):
            x.index_copy_(0, rows, y)


# ---------------------------------------------------------------- the outer step


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes under torchrun; else (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Trainer:
    """The outer loop: estimate the meta-gradient on each task, average, clip, step with AdamW."""

    def __init__(self, recipe: Recipe, lo: LO):
        self.recipe, self.lo, self.step, self.tasks = recipe, lo, 0, recipe.tasks()
        self.rank, self.world = rank_and_world()
        if recipe.pairs % self.world:
            raise ValueError(f"--pairs must be a multiple of the {self.world} processes.")
        self.phi = torch.nn.Parameter(parameters_to_vector(lo.parameters()))
        self.adamw = torch.optim.AdamW([self.phi], lr=recipe.lr, weight_decay=recipe.weight_decay)
        data = self.tasks[0].data(device=str(self.phi.device))  # of all tasks
        share, size = recipe.pairs // self.world, recipe.micro_batch
        pairs = range(self.rank * share, (self.rank + 1) * share)  # of this process
        self.particles = [  # micro-batches of every task
            Particles(task, recipe, lo, pairs[k : k + size], 100 * recipe.seed + n, data)
            for n, task in enumerate(self.tasks)
            for k in range(0, share, size)
        ]

    def rate(self) -> float:
        """The outer learning rate: linear warm-up, then a cosine from lr to lr_end."""
        r = self.recipe
        if self.step < r.warmup:
            return r.lr * (self.step + 1) / r.warmup
        x = (self.step - r.warmup) / max(1, r.steps - r.warmup)
        return r.lr_end + (r.lr - r.lr_end) * 0.5 * (1 + math.cos(math.pi * x))

    def estimate(self, task: tasks.Task) -> list[Tensor]:
        """Sums over a task's pairs: of meta-gradients (D,), losses () and diverged pairs ()."""
        sums = []
        for particles in self.particles:
            if particles.task is task:
                grad, loss, diverged = particles.estimate(self.phi.detach())
                n = len(particles.t)
                sums.append((grad * n, loss * n, grad.new_full((), diverged)))
        return [sum(column) for column in zip(*sums, strict=True)]

    @torch.no_grad()
    def advance(self) -> dict[str, float]:
        """One outer step; returns a row of the log."""
        r = self.recipe
        sums = zip(*map(self.estimate, self.tasks), strict=True)
        grads, losses, diverged = map(torch.stack, sums)  # (tasks, D), (tasks,), (tasks,)
        if self.world > 1:
            for x in (grads, losses, diverged):
                dist.all_reduce(x)
        losses = losses / r.pairs
        grad = (grads / r.pairs).mean(0)
        norm, loss = float(grad.norm()), float(losses.mean())
        no_signal = norm == 0 and self.step > 0  # with truncation=1, no net has moved at step 0
        if no_signal or not math.isfinite(norm + loss):
            raise FloatingPointError(
                f"the meta-gradient is {norm:g} at step {self.step + 1}, as when every net "
                "diverges: start a new run with a smaller --lr or --sigma."
            )
        self.phi.grad = grad * min(1.0, r.clip / (norm + 1e-12))
        rate = self.adamw.param_groups[0]["lr"] = self.rate()
        self.adamw.step()
        self.step += 1
        row = {"step": self.step, "meta_loss": loss, "grad_norm": norm, "lr": rate}
        row["diverged"] = int(diverged.sum())
        names = [f"loss_w{width}" for width in r.widths]
        return row | dict(zip(names, losses.tolist(), strict=True))

    @torch.no_grad()
    def result(self) -> LO:
        """Copy phi into the learned optimizer and return it: the same object each time."""
        vector_to_parameters(self.phi.clone(), self.lo.parameters())
        return self.lo

    def parts(self) -> tuple[list[Tensor], list[torch.Generator]]:
        """All tensors (but AdamW's) and generators that an outer step changes."""
        tensors = tree_leaves([(x.t, x.length, x.xi, x.theta, x.state) for x in self.particles])
        return [self.phi.data, *tensors], [g for x in self.particles for g in x.generators]

    def state_dict(self) -> dict:
        tensors, generators = self.parts()
        state = {"recipe": dataclasses.asdict(self.recipe), "step": self.step, "tensors": tensors}
        state["generators"] = [g.get_state() for g in generators]
        return state | {"adamw": self.adamw.state_dict()}

    def load_state_dict(self, saved: dict) -> None:
        tensors, generators = self.parts()
        if [x.shape for x in tensors] != [x.shape for x in saved["tensors"]]:
            raise ValueError("features or tasks have changed since this run: start a new one.")
        for x, y in zip(tensors, saved["tensors"], strict=True):
            x.copy_(y)
        for g, state in zip(generators, saved["generators"], strict=True):
            g.set_state(state)
        self.step = saved["step"]
        self.adamw.load_state_dict(saved["adamw"])


# ---------------------------------------------------------------- a run and its folder


class Run(Trainer):
    """A Trainer with a folder: log.csv, the last two checkpoints and, at the end, lo.pt.

    Each rank checkpoints its own nets; rank 0 also writes log.csv and lo.pt.
    """

    HISTORY = ("rows", "seconds", "command", "commit")  # saved along with the Trainer

    def __init__(self, recipe: Recipe, out: Path, device: str = "cpu"):
        super().__init__(recipe, new_lo(recipe, device))
        self.out, self.rows, self.seconds = out, [], 0.0
        self.command = shlex.join(["python", *sys.argv])
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        status, text = subprocess.getstatusoutput(shlex.join([*git, "--exclude=*"]))
        self.commit = "unknown" if status else text
        out.mkdir(parents=True, exist_ok=True)
        for temporary in out.glob(".checkpoint_*"):  # of a process that was killed
            temporary.unlink(missing_ok=True)

    def save(self) -> None:
        """Write a checkpoint and the log."""
        buffer = io.BytesIO()  # torch.save to a full disk does not raise an OSError
        torch.save(self.state_dict() | {k: getattr(self, k) for k in self.HISTORY}, buffer)
        path = self.out / f"checkpoint_{self.step:06}_rank{self.rank}.pt"
        checkpoints.write_atomically(path, buffer.getbuffer())
        for old in sorted(self.out.glob(f"checkpoint_*_rank{self.rank}.pt"))[:-2]:
            old.unlink()  # keep two: a rank that is killed may lack the last one
        if self.rank == 0:
            rows = [list(self.rows[0]), *(list(row.values()) for row in self.rows)]
            write_table(self.out / "log.csv", rows)

    @classmethod
    def resume(cls, out: Path, device: str, **settings) -> Run:
        """Continue from the newest checkpoint of all processes. Of the settings only `steps` may
        change: it stretches the cosine of the outer learning rate to the new end."""
        (rank, world), saved = rank_and_world(), defaultdict(set)  # steps by rank
        for path in out.glob("checkpoint_*_rank*.pt"):
            _, step, suffix = path.stem.split("_")
            saved[suffix].add(step)
        if not saved:
            raise FileNotFoundError(f"{out} has no checkpoint: start a new run.")
        if len(saved) != world:
            fix = f"resume it under torchrun --nproc-per-node {len(saved)}"
            raise ValueError(f"{out} has checkpoints of {len(saved)} process(es): {fix}.")
        steps = set.intersection(*saved.values())
        if not steps:
            raise ValueError(f"{out} has no step that all processes saved: start a new run.")
        path = out / f"checkpoint_{max(steps)}_rank{rank}.pt"
        try:
            state = checkpoints.read(path)
        except ValueError as error:
            raise ValueError(f"{error} Delete it to resume from the one before.") from None
        if state.get("recipe", {}).keys() != Recipe.__dataclass_fields__.keys():
            raise ValueError(f"{out} was made by other code, {state.get('commit')}: use that code.")
        for name, value in settings.items():
            if name == "steps" and value <= state["step"]:
                raise ValueError(f"the run is at step {state['step']}: give a larger --steps.")
            if name != "steps" and value != state["recipe"][name]:
                raise ValueError(f"a resumed run keeps its {name}: only --steps can change.")
        run = cls(Recipe(**state["recipe"] | settings), out, device)
        run.load_state_dict(state)
        for name in cls.HISTORY:
            setattr(run, name, state[name])
        run.command += f" && {shlex.join(['python', *sys.argv])}" if "steps" in settings else ""
        return run

    def train(self, minutes: float) -> None:
        """Train to the end, with a checkpoint every `minutes` (0: after every step).

        Ctrl-C stops after the current step, with a checkpoint.
        """
        r, first, interrupts, saved = self.recipe, self.step, [], time.monotonic()
        before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
        bar = tqdm(total=r.steps, initial=first, desc=r.name, unit="step", disable=self.rank > 0)
        try:
            while self.step < r.steps:
                start = time.monotonic()
                self.rows.append(self.advance())
                now = time.monotonic()
                self.seconds += now - start
                bar.update()
                bar.set_postfix(loss=f"{self.rows[-1]['meta_loss']:.3f}")
                if self.step == first + 1 and self.rank == 0:
                    bar.write(self.forecast(now - start))
                flags = torch.tensor([bool(interrupts), now - saved >= 60 * minutes]).int()
                if self.world > 1:  # all processes save and stop at the same step
                    flags = flags.to(self.phi.device)
                    dist.all_reduce(flags)
                stop, due = flags.tolist()
                if stop or due or self.step == r.steps:
                    self.save()
                    saved = now
                if stop and self.step < r.steps:
                    raise KeyboardInterrupt
        finally:
            bar.close()
            signal.signal(signal.SIGINT, before)
        if self.rank == 0:
            about = {"recipe": dataclasses.asdict(r), "command": self.command}
            about |= {"commit": self.commit, "minutes": self.seconds / 60}
            about["meta_loss"] = fmean(row["meta_loss"] for row in self.rows[-20:])
            mulo.save(self.result(), self.out / "lo.pt", **about)

    def forecast(self, seconds: float) -> str:
        """The time and memory of the first outer step, and the hours that the rest will take."""
        steps, device = self.recipe.steps - self.step, self.phi.device
        text = f"{seconds:.2g} s per outer step, {steps * seconds / 3600:.2g} h for {steps:,} more"
        if device.type == "cuda":
            text += f", peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"
        return f"{text}."


def compare(run: Run, device: str) -> None:
    """Train nets of the widest task, and 8 times wider ones, at their kind's batch size, with the
    result and with baselines, whose learning rates are tuned if results/tuned has none. Saves a
    picture, prints sentences."""
    r, results = run.recipe, Results(run.out, device)
    mine = dataclasses.replace(contender(str(run.out / "lo.pt")), name=r.name)
    task = max(run.tasks, key=lambda task: task.width)
    tunings = {name: Tuning(name, task.name, r.unroll) for name in BASELINES}
    tuned = {name: x.saved() or x.run(device) for name, x in tunings.items()}
    fig = Figure(figsize=(13.2, 3.6), layout="constrained")
    ax, *axes = fig.subplots(1, 3)
    meta = torch.tensor([row["meta_loss"] for row in run.rows])
    smooth = meta.unfold(0, min(20, len(meta)), 1).mean(-1)  # over windows of 20 outer steps
    ax.plot(meta, color="0.7")
    ax.plot(range(len(meta) - len(smooth), len(meta)), smooth, "k")
    ax.set(xlabel="outer step", ylabel="meta-loss", title=f"meta-training {r.name}")
    print(f"Meta-loss {smooth[0]:.3f} -> {smooth[-1]:.3f} in {run.seconds / 60:.1f} minutes.")
    for ax, width, seeds in zip(axes, (task.width, 8 * task.width), (3, 1), strict=True):
        name = task.name.replace(f"_w{task.width}", f"_w{width}")
        options = {"steps": r.unroll, "seeds": range(9001, 9001 + seeds)}
        jobs = {r.name: Job(mine, name, **options)}
        for k, label in BASELINES.items():
            jobs[f"tuned {label}"] = Job(contender(k), name, **options, values=tuned[k])
        results.run(jobs.values(), f"comparison at width {width}")
        final = []
        for label, job in jobs.items():
            losses = results.losses(job)  # (windows, seeds)
            ax.plot(torch.linspace(0, r.unroll, len(losses) + 1)[1:], losses.mean(1), label=label)
            final.append(f"{label} {training.final_loss(losses).mean():.4g}")
        ax.set(xlabel="step", ylabel="loss", title=name, ylim=(0, task.loss_bound))
        ax.legend()
        print(f"Final loss at width {width}: {', '.join(final)}.")
    checkpoints.write_atomically(run.out / "picture.png", lambda f: fig.savefig(f, dpi=120))
    print(f"The picture is {run.out / 'picture.png'}.")


# ---------------------------------------------------------------- the command


def parse_args(**defaults) -> argparse.Namespace:
    parser = argparse.ArgumentParser(usage="%(prog)s [recipe] [flags]")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--out", type=Path, help="folder (default: runs/<recipe>_<scale>_seed<N>)")
    either.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in DIR")
    parser.add_argument("--device", default="auto", help=kernels.DEVICE_HELP)
    every = "minutes between checkpoints (default: 1; paper: 10; 0: after every outer step)"
    parser.add_argument("--checkpoint-every", type=float, metavar="X", help=every)
    parser.add_argument("--no-picture", action="store_true", help="skip the comparison at the end")
    recipes.add_flags(parser)
    parser.set_defaults(**defaults)
    return parser.parse_args()


def join_processes(device: str) -> str:
    """Under torchrun, join the other processes. Returns the device of this one: a GPU each."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device.startswith("cuda"):
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def new_or_resumed(args: argparse.Namespace, device: str) -> Run:
    settings = recipes.settings(args)
    if args.resume:
        return Run.resume(args.resume, device, **settings)
    r = recipe(**{"name": "mulo_m"} | settings)
    out = args.out or Path("runs") / f"{r.name}_{r.scale}_seed{r.seed}"
    if any(out.glob("checkpoint_*.pt")):
        raise FileExistsError(f"{out} has a run already: add --resume {out}, or --out.")
    return Run(r, out, device)


def main(**defaults) -> None:
    """Run the command. `defaults` replace defaults of flags: main(kind="sines")."""
    args, run = parse_args(**defaults), None
    training.keep_freed_memory()
    try:
        device, sentence = kernels.pick_device(args.device)
        device = join_processes(device)
        run = new_or_resumed(args, device)
        if device == "cpu" and run.recipe.scale == "desk":
            torch.set_num_threads(1)  # tensors are so small that threads slow it down
        if run.rank == 0:
            print(f"{sentence} Backend: {run.particles[0].opt.backend}.", flush=True)
        minutes = args.checkpoint_every
        if minutes is None:
            minutes = 1 if run.recipe.scale == "desk" else 10  # large nets make large files
        run.train(minutes)
        if run.rank == 0:
            print(f"The optimizer is {run.out / 'lo.pt'}.", flush=True)
            if not args.no_picture:
                compare(run, device)
    except KeyboardInterrupt:
        resume = f" at step {run.step}: continue with --resume {run.out}" if run else ""
        sys.exit(f"metatrain.py: stopped{resume}.")
    except torch.OutOfMemoryError:
        sys.exit("metatrain.py: out of memory: use a smaller --micro-batch.")
    except (ValueError, OSError, FloatingPointError) as error:
        if any(kind.own for kind in tasks.KINDS.values()):  # errors in user code need a traceback
            raise
        sys.exit(f"metatrain.py: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
