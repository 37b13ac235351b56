"""Meta-train a learned optimizer by Persistent Evolution Strategies (PES).

    python metatrain.py                         # mulo_m at desk scale: minutes on a laptop
    python metatrain.py lo_m --seed 1           # the same recipe in standard parametrization
    python metatrain.py mulo_m --scale paper --device cuda     # the paper's recipe, on one GPU
    torchrun --nproc-per-node 2 metatrain.py    # split the perturbations over processes
    python metatrain.py --resume runs/mulo_m_desk_seed0 --steps 1600   # resume and extend a run

Paper: eq. 1 (the meta-objective), section 2 and appendix C. phi are the weights of the learned
optimizer, and an unroll is the training of one net with it. Each outer step trains pairs of nets
with phi + eps and phi - eps for part of an unroll (a truncation). Each pair keeps xi, the sum of
its past perturbations eps, which removes the bias of truncation. The two nets of a pair share
initial weights, batches and length. All of these follow from the pair's own seed, so the result
does not depend on how pairs are split over micro-batches or processes.

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
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

import mulo
from mulo import LO, checkpoints, features, kernels, recipes, tasks, training
from mulo.evaluate import BASELINES, Contender, Job, Results, Tuning, best, contender
from mulo.features import Phi
from mulo.recipes import RECIPES, SCALES, Recipe, new_lo, recipe

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


class Truncation(NamedTuple):
    """One truncation of n pairs: inputs of `pes_gradient`, and values for the log."""

    delta: Tensor  # (steps, n)
    began: Tensor  # (steps, n) bool
    eps: Tensor  # (n, D)
    loss: Tensor  # (): the mean clipped loss
    diverged: int  # number of diverged pairs


def unflatten(phi: Tensor, like: LO) -> Phi:
    """Convert vectors of weights (P, D) to the stacked dict that a learned optimizer takes."""
    parts = phi.split([w.numel() for w in like.parameters()], 1)
    pairs = zip(like.named_parameters(), parts, strict=True)
    return {name: part.unflatten(1, w.shape) for (name, w), part in pairs}


def leaves(x: Tensor | dict | tuple) -> list[Tensor]:
    """The tensors in nested dicts and tuples."""
    if isinstance(x, Tensor):
        return [x]
    return [y for part in (x.values() if isinstance(x, dict) else x) for y in leaves(part)]


class Particles:
    """The nets of n antithetic pairs on one task, (2n, ...): first all with phi + eps."""

    def __init__(self, task: tasks.Task, recipe: Recipe, lo: LO, pairs: range, seed: int, data):
        """`pairs`: the indices of these pairs among the task's pairs, for their seeds."""
        phi = parameters_to_vector(lo.parameters())
        n, device = len(pairs), phi.device
        self.task, self.recipe, self.lo, self.data = task, recipe, lo, data
        self.opt = training.Learned(lo.config, task, device, recipe.backend)
        # Generators are on the CPU for every device, so that a GPU draws the same numbers.
        self.generators = [torch.Generator().manual_seed(seed * 10_000 + k) for k in pairs]
        self.t, self.length = torch.zeros(n), torch.zeros(n)  # t >= length: all start an unroll
        self.scheduled = torch.tensor([k < recipe.cosine * recipe.pairs for k in pairs])
        self.xi = torch.zeros(n, len(phi), device=device)
        shapes = {k: p.shape for k, p in task.skeleton().named_parameters()}
        self.theta = {k: torch.zeros(2 * n, *shape, device=device) for k, shape in shapes.items()}
        lengths = torch.full((2 * n,), float(recipe.unroll))
        self.state = self.opt.init(self.theta, unflatten(phi.unsqueeze(0), lo), lengths)

    def truncation(self, phi: Tensor) -> Truncation:
        """Draw eps for each pair and train all nets for a truncation with phi + eps and phi - eps.

        DIVERGES: pairs that diverge start a new unroll, at the next step on a CPU and at the next
        truncation on a GPU; in the reference they stay at the bound to the end.
        """
        n, device, bound = len(self.t), phi.device, self.task.loss_bound
        noise = torch.stack([torch.randn(len(phi), generator=g) for g in self.generators])
        eps = self.recipe.sigma * features.send(noise, device)
        phis = unflatten(torch.cat([phi + eps, phi - eps]), self.lo)
        weights = self.opt.prepare(phis)
        began, flags, deltas = torch.zeros(n, dtype=torch.bool), [], []
        loss_sum, num_diverged, diverged = 0.0, 0, torch.zeros(n, dtype=torch.bool, device=device)
        for k in range(self.recipe.truncation):
            finished = self.t >= self.length
            if finished.any():
                self.restart(finished, phis)
                diverged &= ~features.send(finished, device)
                began = began | finished  # not |=: `flags` holds the old tensor
            losses = self.inner_step(weights)
            finite = losses.isfinite()
            clipped = torch.where(finite, losses, bound).clamp(0, bound)
            deltas.append(clipped[:n] - clipped[n:])
            flags.append(began)
            loss_sum += clipped.mean()
            self.t += 1
            diverged |= ~finite.view(2, n).all(0)
            if device.type == "cpu" or k == self.recipe.truncation - 1:  # reading it syncs a GPU
                ends = diverged.cpu()
                self.length = torch.where(ends, self.t, self.length)
                num_diverged += int(ends.sum())
                diverged.zero_()
        began, loss = torch.stack(flags).to(device), loss_sum / self.recipe.truncation
        return Truncation(torch.stack(deltas), began, eps, loss, num_diverged)

    def inner_step(self, weights) -> Tensor:
        """One step of every net; returns the losses before it, (2n,)."""
        device, lr = self.xi.device, 1.0
        t = features.send(torch.cat([self.t, self.t]), device)
        if self.recipe.cosine:
            lr = torch.where(self.scheduled, training.cosine(self.t / self.length), 1.0)
            lr = features.send(torch.cat([lr, lr]), device).unsqueeze(1)
        batch = training.batches(self.data, self.generators, self.task.batch_size, copies=2)
        losses, grads = training.gradients(self.task, self.theta, batch, self.recipe.tf32)
        self.opt.step(weights, self.state, self.theta, grads, losses, t, lr)
        return losses

    def restart(self, finished: Tensor, phi: Phi) -> None:
        """Start a new unroll in the pairs that are finished, (n,) bool."""
        n, device, pairs = len(self.t), self.xi.device, finished.nonzero().flatten().tolist()
        low, high = math.log(self.recipe.shortest), math.log(self.recipe.unroll)
        length = (low + (high - low) * self._random(pairs)).exp().round()  # log-uniform
        first = not self.length.any()
        # Cut the first unrolls short, so that pairs do not restart together.
        self.length[pairs] = (length * self._random(pairs)).ceil() if first else length
        self.t[pairs] = 0
        rows = features.send(torch.tensor(pairs + [n + k for k in pairs]), device)
        inits = [self.task.init(1, self.generators[k]) for k in pairs]
        theta = {
            name: features.send(torch.cat([init[name] for init in inits] * 2), device)
            for name in self.theta
        }
        phi = {k: w[rows] for k, w in phi.items()}
        state = self.opt.init(theta, phi, torch.cat([length, length]))
        new, old = leaves((theta, state)), leaves((self.theta, self.state))
        for x, y in zip(old, new, strict=True):
            x.index_copy_(0, rows, y)

    def _random(self, pairs: list[int]) -> Tensor:
        """A number in [0, 1) for each of these pairs."""
        return torch.stack([torch.rand((), generator=self.generators[k]) for k in pairs])

    def state_dict(self) -> dict[str, list[Tensor]]:
        tensors = leaves((self.t, self.length, self.xi, self.theta, self.state))
        return {"tensors": tensors, "generators": [g.get_state() for g in self.generators]}

    def load_state_dict(self, saved: dict[str, list[Tensor]]) -> None:
        mine = self.state_dict()["tensors"]
        if [x.shape for x in mine] != [x.shape for x in saved["tensors"]]:
            raise ValueError(
                f"the run's tensors do not fit: features, or {self.task.name}, were edited since. "
                "Undo the edit, or start a new run."
            )
        for x, y in zip(mine, saved["tensors"], strict=True):
            x.copy_(y)
        for generator, state in zip(self.generators, saved["generators"], strict=True):
            generator.set_state(state)


# ---------------------------------------------------------------- the outer step


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes under torchrun; else (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Trainer:
    """The outer loop: perturb, train each task's nets for a truncation, average, clip, AdamW."""

    def __init__(self, recipe: Recipe, lo: LO):
        self.recipe, self.lo, self.step = recipe, lo, 0
        self.rank, self.world = rank_and_world()
        if recipe.pairs % self.world:
            raise ValueError(
                f"{recipe.pairs} pairs cannot be split over {self.world} processes: change --pairs."
            )
        self.phi = torch.nn.Parameter(parameters_to_vector(lo.parameters()))
        self.adamw = torch.optim.AdamW([self.phi], lr=recipe.lr, weight_decay=recipe.weight_decay)
        self.tasks, share, datasets = recipe.tasks(), recipe.pairs // self.world, {}
        mine = range(self.rank * share, (self.rank + 1) * share)
        parts = [mine[k : k + recipe.micro_batch] for k in range(0, share, recipe.micro_batch)]
        self.particles = []  # a list of micro-batches for each task
        for n, task in enumerate(self.tasks):
            if task.kind not in datasets:
                datasets[task.kind] = task.data(device=str(self.phi.device))
            seed, data = 100 * recipe.seed + n, datasets[task.kind]
            groups = [Particles(task, recipe, lo, pairs, seed, data) for pairs in parts]
            self.particles.append(groups)

    def rate(self) -> float:
        """The outer learning rate: linear warm-up, then a cosine from lr to lr_end."""
        r = self.recipe
        if self.step < r.warmup:
            return r.lr * (self.step + 1) / r.warmup
        x = (self.step - r.warmup) / max(1, r.steps - r.warmup)
        return r.lr_end + (r.lr - r.lr_end) * 0.5 * (1 + math.cos(math.pi * x))

    def estimate(self, groups: list[Particles]) -> tuple[Tensor, Tensor, Tensor]:
        """Train a task's nets for a truncation. Returns sums over its pairs, which processes add:
        the meta-gradient (D,), the loss () and the number of diverged pairs ()."""
        sums = []
        for group in groups:
            x, n = group.truncation(self.phi.detach()), len(group.xi)
            grad, group.xi = pes_gradient(x.delta, x.began, x.eps, group.xi, self.recipe.sigma)
            sums.append((grad * n, x.loss * n, grad.new_full((), x.diverged)))
        grads, losses, diverged = zip(*sums, strict=True)
        return sum(grads), sum(losses), sum(diverged)

    @torch.no_grad()
    def advance(self) -> dict[str, float]:
        """One outer step; returns a row of the log."""
        r, n, start = self.recipe, len(self.tasks), self.step * self.recipe.per_step
        chosen = [k % n for k in range(start, start + r.per_step)] or range(n)  # tasks
        sums = zip(*(self.estimate(self.particles[k]) for k in chosen), strict=True)
        grads, losses, diverged = map(torch.stack, sums)  # (tasks, D), (tasks,), (tasks,)
        if self.world > 1:
            for x in (grads, losses, diverged):
                dist.all_reduce(x)
        grads, losses = grads / r.pairs, losses / r.pairs
        if r.mixture:  # clip each task's gradient, so that none dominates
            grads = grads / grads.norm(dim=1, keepdim=True).clamp_min(r.clip)
        grad = grads.mean(0)
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
        names = [f"loss_{x}" for x in r.mixture or (f"w{width}" for width in r.widths)]
        by_task = {names[k]: x for k, x in zip(chosen, losses.tolist(), strict=True)}
        return row | {name: by_task.get(name, math.nan) for name in names}

    @torch.no_grad()
    def result(self) -> LO:
        """Copy phi into the learned optimizer and return it: the same object each time."""
        vector_to_parameters(self.phi.clone(), self.lo.parameters())
        return self.lo

    def state_dict(self) -> dict:
        particles = [[group.state_dict() for group in groups] for groups in self.particles]
        mine = {"step": self.step, "phi": self.phi.detach(), "adamw": self.adamw.state_dict()}
        return mine | {"recipe": dataclasses.asdict(self.recipe), "particles": particles}

    def load_state_dict(self, saved: dict) -> None:
        for groups, parts in zip(self.particles, saved["particles"], strict=True):
            for group, part in zip(groups, parts, strict=True):
                group.load_state_dict(part)
        self.step = saved["step"]
        self.phi.data.copy_(saved["phi"])
        self.adamw.load_state_dict(saved["adamw"])


# ---------------------------------------------------------------- a run and its folder


def gather(x) -> list:
    """Return x of every process under torchrun, else [x]."""
    values = [x] * rank_and_world()[1]
    if dist.is_initialized():
        dist.all_gather_object(values, x)
    return values


class Run:
    """A trainer with a folder: log.csv, the last checkpoints and, at the end, lo.pt.

    Each rank checkpoints its own nets; rank 0 also writes log.csv and lo.pt.
    """

    KEEP = 3  # checkpoints: the last one may be damaged, or missing for a rank that was killed
    HISTORY = ("rows", "seconds", "command", "commit")  # saved along with the trainer

    def __init__(self, trainer: Trainer, out: Path):
        self.trainer, self.out, self.rows, self.seconds = trainer, out, [], 0.0
        self.command = shlex.join(["python", *sys.argv])
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        status, text = subprocess.getstatusoutput(shlex.join([*git, "--exclude=*"]))
        self.commit = "unknown" if status else text
        out.mkdir(parents=True, exist_ok=True)
        for temporary in out.glob(".checkpoint_*"):  # of a process that was killed
            temporary.unlink(missing_ok=True)

    @staticmethod
    def saved(out: Path, rank: int = 0) -> dict[str, Path]:
        """The checkpoints of a rank by their step, oldest first."""
        paths = sorted(out.glob(f"checkpoint_*_rank{rank}.pt"))
        return {path.name.split("_")[1]: path for path in paths}

    def save(self) -> None:
        """Write a checkpoint and the log."""
        trainer, buffer = self.trainer, io.BytesIO()  # torch.save to a full disk raises no OSError
        torch.save(trainer.state_dict() | {k: getattr(self, k) for k in self.HISTORY}, buffer)
        path = self.out / f"checkpoint_{trainer.step:06}_rank{trainer.rank}.pt"
        checkpoints.write_atomically(path, buffer.getbuffer())
        for old in list(self.saved(self.out, trainer.rank).values())[: -self.KEEP]:
            old.unlink()
        if trainer.rank == 0:
            lines = [",".join(self.rows[0]), *(",".join(map(repr, r.values())) for r in self.rows)]
            checkpoints.write_atomically(self.out / "log.csv", "\n".join(lines) + "\n")

    @classmethod
    def resume(cls, out: Path, device: str, steps: int | None = None) -> Run:
        """Continue from the newest checkpoint that every process can read; `steps` extends the run,
        and stretches the cosine of the outer learning rate to its new end."""
        rank, world = rank_and_world()
        ranks = {path.name.split("_")[2] for path in out.glob("checkpoint_*_rank*.pt")}
        if len(ranks) not in (0, world):
            split = f"the run in {out} was split over {len(ranks)} process(es)"
            raise ValueError(f"{split}: resume it under torchrun --nproc-per-node {len(ranks)}.")
        paths, state = cls.saved(out, rank), None
        for step in sorted(set.intersection(*gather(set(paths))), reverse=True):
            try:
                state = checkpoints.read(paths[step])
            except ValueError as error:
                print(f"{error} Trying the checkpoint before it.", file=sys.stderr)
            if all(gather(state is not None)):
                break
            state = None
        if state is None:
            raise FileNotFoundError(f"{out} has no checkpoint that can be read: start a new run.")
        if state.get("recipe", {}).keys() != {field.name for field in dataclasses.fields(Recipe)}:
            made = f"the run in {out} was made by other code ({state.get('commit')})"
            raise ValueError(f"{made}: resume it with that code, or start a new run.")
        r = Recipe(**state["recipe"])
        run = cls(Trainer(r, new_lo(r, device)), out)
        run.trainer.load_state_dict(state)
        for name in cls.HISTORY:
            setattr(run, name, state[name])
        if steps is not None:
            if steps <= run.trainer.step:
                raise ValueError(f"the run is at step {run.trainer.step}: give a larger --steps.")
            run.trainer.recipe = dataclasses.replace(r, steps=steps)
            run.command += f" && {shlex.join(['python', *sys.argv])}"
        return run

    def train(self, minutes: float) -> None:
        """Train to the end, with a checkpoint every `minutes` (0: after every step).

        Ctrl-C stops after the current step, with a checkpoint.
        """
        trainer, steps, interrupts = self.trainer, self.trainer.recipe.steps, []
        before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
        first, stop, saved, name = trainer.step, False, time.monotonic(), trainer.recipe.name
        try:
            bar = tqdm(total=steps, initial=first, desc=name, unit="step", disable=trainer.rank > 0)
            while trainer.step < steps and not stop:
                start = time.monotonic()
                self.rows.append(trainer.advance())
                now = time.monotonic()
                self.seconds += now - start
                bar.update()
                bar.set_postfix(loss=f"{self.rows[-1]['meta_loss']:.3f}")
                if trainer.step == first + 1 and trainer.rank == 0:
                    bar.write(self.forecast(now - start))
                flags = gather((bool(interrupts), now - saved >= 60 * minutes))
                stop, due = map(any, zip(*flags, strict=True))
                if stop or due or trainer.step == steps:
                    self.save()
                    saved = now
        finally:
            bar.close()
            signal.signal(signal.SIGINT, before)
        if trainer.step < steps:
            raise KeyboardInterrupt
        if trainer.rank == 0:
            about = {"recipe": dataclasses.asdict(trainer.recipe), "command": self.command}
            about |= {"commit": self.commit, "minutes": self.seconds / 60}
            about["meta_loss"] = fmean(row["meta_loss"] for row in self.rows[-20:])
            mulo.save(trainer.result(), self.out / "lo.pt", **about)

    def forecast(self, seconds: float) -> str:
        """Time of the first outer step, and an estimate for the rest of the run."""
        steps = self.trainer.recipe.steps - self.trainer.step
        text = f"{seconds:.2g} s per outer step, {steps * seconds / 3600:.2g} h for {steps:,} more"
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0
        return f"{text}, peak memory {memory:.1f} GiB." if memory else f"{text}."


# ---------------------------------------------------------------- the comparison at the end


def compare(run: Run, device: str) -> str:
    """Compare the result with tuned baselines; saves a picture and returns sentences.

    Baselines without tuned values for these tasks are tuned first (learning rates only).
    """
    r, results, tuned = run.trainer.recipe, Results(run.out, device), {}
    for name in BASELINES:
        tuning = Tuning(name, f"{r.kind}_w{max(r.widths)}_d{r.depth}", r.unroll)
        tuned[name] = best(*tuning.key()) or tuning.run(device)
    mine = dataclasses.replace(contender(str(run.out / "lo.pt")), name=r.name)
    contenders = [mine, Contender("untrained", mine.rules, new_lo(r)), *map(contender, tuned)]
    labels = [r.name, "untrained", *(f"tuned {label}" for label in BASELINES.values())]
    fig = Figure(figsize=(13.2, 3.6), layout="constrained")
    ax, *axes = fig.subplots(1, 3)
    meta = torch.tensor([row["meta_loss"] for row in run.rows])
    smooth = meta.unfold(0, min(20, len(meta)), 1).mean(-1)  # over windows of 20 outer steps
    ax.plot(meta, color="0.7")
    ax.plot(range(len(meta) - len(smooth), len(meta)), smooth, "k")
    ax.set(xlabel="outer step", ylabel="meta-loss", title=f"meta-training {r.name}")
    lines = [f"Meta-loss {smooth[0]:.3f} -> {smooth[-1]:.3f} in {run.seconds / 60:.1f} minutes."]
    for ax, width, nets in zip(axes, (max(r.widths), 8 * max(r.widths)), (3, 1), strict=True):
        task, seeds = f"{r.kind}_w{width}_d{r.depth}", tuple(range(9001, 9001 + nets))
        jobs = [Job(c, task, r.unroll, seeds=seeds, values=tuned.get(c.name)) for c in contenders]
        results.run(jobs, f"comparison at width {width}")
        curves = [results.losses(job) for job in jobs]  # (windows of the run, nets) each
        final = []
        for losses, label in zip(curves, labels, strict=True):
            ax.plot(torch.linspace(0, r.unroll, len(losses) + 1)[1:], losses.mean(1), label=label)
            final.append(f"{label} {training.final_loss(losses).mean():.4g}")
        ax.set(xlabel="step", ylabel="loss", title=task, ylim=(0, 1.1 * float(curves[0][0].mean())))
        ax.legend()
        lines.append(f"Final loss at width {width}: {', '.join(final)}.")
    checkpoints.write_atomically(run.out / "picture.png", lambda f: fig.savefig(f, dpi=120))
    lines.append(f"The optimizer is {run.out / 'lo.pt'}, the picture {run.out / 'picture.png'}.")
    return "\n".join(lines)


# ---------------------------------------------------------------- the command


def start_processes(device: str) -> str:
    """Return the device for --device. Under torchrun, join the other processes: one GPU each."""
    device, sentence = kernels.pick_device(device)
    if os.environ.get("RANK", "0") == "0":
        print(sentence)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def parse_args(**defaults) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [recipe] [flags]",
        description="Meta-train a learned optimizer by PES.",
        epilog="example: python metatrain.py lo_m --steps 200 --out runs/try",
    )
    add = parser.add_argument
    add("recipe", nargs="?", help=f"{', '.join(RECIPES)} (default: mulo_m)")
    add("--scale", choices=SCALES, help="desk (a laptop; the default) or paper")
    add("--device", default="auto", help=kernels.DEVICE_HELP)
    add("--out", type=Path, help="folder of the run (default: runs/<recipe>_<scale>_seed<seed>)")
    add("--resume", type=Path, metavar="DIR", help="continue the run in DIR")
    add("--checkpoint-every", type=float, default=10, metavar="MINUTES",
        help="time between checkpoints (default: 10; 0: after every step)")  # fmt: skip
    add("--no-picture", action="store_true", help="skip the comparison at the end")
    recipes.add_flags(parser)
    parser.set_defaults(**defaults)
    return parser.parse_args()


def new_or_resumed(args: argparse.Namespace, device: str) -> Run:
    """Start or resume a run, as the command line says."""
    changes = recipes.changes(args)
    if not args.resume:
        r = recipe(args.recipe or "mulo_m", args.scale or "desk", **changes)
        out = args.out or Path("runs") / f"{r.name}_{r.scale}_seed{r.seed}"
        if Run.saved(out):
            raise FileExistsError(f"{out} has a run already: add --resume {out}, or --out.")
        return Run(Trainer(r, new_lo(r, device)), out)
    run = Run.resume(args.resume, device, changes.pop("steps", None))
    kept = vars(run.trainer.recipe) | {"out": args.resume}
    changes |= {"name": args.recipe, "scale": args.scale, "out": args.out}
    for name, value in changes.items():
        if value not in (None, kept[name]):
            raise ValueError(f"a resumed run keeps its {name}: only --steps can change.")
    return run


def main(**defaults) -> None:
    """Run the command. `defaults` replace defaults of flags: main(kind="sines")."""
    args, run = parse_args(**defaults), None
    training.keep_freed_memory()
    try:
        device = start_processes(args.device)
        run = new_or_resumed(args, device)
        if device == "cpu" and run.trainer.recipe.scale == "desk":
            torch.set_num_threads(1)  # tensors are so small that threads slow it down
        if run.trainer.rank == 0:
            print(f"Backend: {run.trainer.particles[0][0].opt.backend}.")
        run.train(args.checkpoint_every)
        if run.trainer.rank == 0:
            optimizer = f"The optimizer is {run.out / 'lo.pt'}."
            print(optimizer if args.no_picture else compare(run, device))
    except KeyboardInterrupt:
        step = run.trainer.step if run else 0
        sys.exit(f"stopped at step {step}" + (f": to continue, --resume {run.out}" if step else ""))
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
