"""Persistent Evolution Strategies: the meta-gradient of a learned optimizer, from nets in training.

    trainer = Trainer(recipe, lo)
    for _ in range(recipe.steps):
        row = trainer.advance()             # an outer step: its meta-loss, and so on

Paper: eq. 1 (the meta-objective), section 2 and appendix C. Pairs of nets are trained side by side
with phi + eps and phi - eps for a few steps at a time (a truncation); each pair keeps xi, the sum
of its past perturbations, which removes the bias of truncation. The two halves of a pair share
initial weights, data and length; everything else about a pair follows from its own seed, so the
result does not depend on how pairs are spread over micro-batches or processes. `metatrain.py` has
the recipes, and runs that can be resumed.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import mulo
from mulo import LO, features, roles, tasks, training
from mulo.features import Phi


def pes_gradient(
    delta: Tensor,  # (steps, n): loss of the positive less that of the negative half of a pair
    began: Tensor,  # (steps, n) bool: the step belongs to an unroll that began in this truncation
    mask: Tensor,  # (steps, n) bool: the step counts
    eps: Tensor,  # (n, D): this truncation's perturbations
    xi: Tensor,  # (n, D): those of the unroll's earlier truncations, summed
    sigma: float,
) -> tuple[Tensor, Tensor]:
    """The PES meta-gradient (D,) and the new xi.

    mean over pairs of (sum_old delta (xi + eps) + sum_new delta eps) / (2 sigma^2 count). Losses of
    an unroll that is still running depend on all its perturbations, those of a new one on eps
    alone. Losses are clipped before, so a net that diverged counts at the bound; a pair whose
    difference is still not finite is left out. DIVERGES: in the reference code an unroll's last
    loss counts as the next one's, and a NaN makes the whole gradient 0.
    """
    good = torch.where(mask, delta, 0).isfinite().all(0)  # (n,)
    weight = mask / mask.sum(0).clamp_min(1)  # (steps, n)
    delta = torch.where(good & mask, delta, 0) * weight
    old, new = (delta * ~began).sum(0), (delta * began).sum(0)  # (n,)
    new_xi = xi + eps
    grad = (old.unsqueeze(1) * new_xi + new.unsqueeze(1) * eps).sum(0)
    grad = grad / (2 * sigma**2 * good.sum().clamp_min(1))
    return grad, torch.where(began[-1].unsqueeze(1), eps, new_xi)


def unflatten(phi: Tensor, like: LO) -> Phi:
    """Vectors of weights (P, D) as the stacked dict that a learned optimizer takes."""
    parts = phi.split([w.numel() for w in like.parameters()], 1)
    return {
        name: part.unflatten(1, w.shape)
        for (name, w), part in zip(like.named_parameters(), parts, strict=True)
    }


class Particles:
    """The nets of n antithetic pairs on one task, (2n, ...), all positive halves first."""

    def __init__(
        self,
        task: tasks.Task,
        recipe,  # metatrain.Recipe
        lo: LO,
        pairs: range,  # which of the task's pairs these are
        seed: int,  # of the task; that of a pair follows
        data=None,
    ):
        device = next(lo.parameters()).device
        self.task, self.recipe, self.lo, self.data = task, recipe, lo, data
        self.opt = training.Learned(lo.config, task, device, recipe.backend)
        self.bound = task.loss_bound  # losses are clipped to [0, bound]
        # On the CPU whatever the device, so that a GPU draws the same numbers.
        self.generators = [torch.Generator().manual_seed(seed * 10_000 + k) for k in pairs]
        n, names = len(pairs), [name for name, _ in lo.named_parameters()]
        shapes = {k: p.shape for k, p in task.skeleton().named_parameters()}
        self.theta = {k: torch.zeros(2 * n, *shape, device=device) for k, shape in shapes.items()}
        self.t, self.length = torch.zeros(n), torch.zeros(n)  # t >= length: all start at once
        self.scheduled = torch.tensor([k < recipe.cosine * recipe.pairs for k in pairs])
        only = [name in (recipe.only or names) for name in names]
        sizes = torch.tensor([w.numel() for w in lo.parameters()])
        self.trained = torch.tensor(only).repeat_interleave(sizes)  # (D,): weights to perturb
        self.xi = torch.zeros(n, len(self.trained), device=device)
        lengths = torch.full((2 * n,), float(recipe.unroll))
        self.state = self.opt.init(self.theta, mulo.stacked(lo), lengths)

    def truncation(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Train all nets for a truncation with phi + eps and phi - eps, eps drawn for each pair.

        Returns delta and began, (steps, n), eps, (n, D), the mean clipped loss, and how many pairs
        diverged. DIVERGES: these restart, at once on a CPU and after the truncation on a GPU; in
        the reference they stay at the bound to the end.
        """
        n, device = len(self.t), phi.device
        noise = [torch.randn(len(phi), generator=g) for g in self.generators]
        eps = self.recipe.sigma * features.send(torch.stack(noise) * self.trained, device)
        phis = unflatten(torch.cat([phi + eps, phi - eps]), self.lo)
        weights = self.opt.prepare(phis)
        began, flags, deltas = torch.zeros(n, dtype=torch.bool), [], []
        loss_sum, num_diverged, diverged = 0.0, 0, torch.zeros(n, dtype=torch.bool, device=device)
        for k in range(self.recipe.truncation):
            finished = self.t >= self.length
            if finished.any():
                self._restart(finished, phis)
                diverged &= ~features.send(finished, device)
                began = began | finished  # not |=: `flags` holds the old tensor
            batch = training.batches(self.data, self.generators, self.task.batch_size, copies=2)
            losses = self.inner_step(weights, batch)
            finite = losses.isfinite()
            clipped = torch.where(finite, losses, self.bound).clamp(0, self.bound)
            deltas.append(clipped[:n] - clipped[n:])
            if late := self.recipe.late:
                weight = 1 - late + late * 2 * self.t / self.length  # 1 on average
                deltas[-1] *= features.send(weight, device)
            flags.append(began)
            loss_sum += clipped.mean()
            self.t += 1
            diverged |= ~finite.view(2, n).all(0)
            if device.type == "cpu" or k == self.recipe.truncation - 1:  # reading it syncs a GPU
                to_restart = diverged.cpu()
                self.length = torch.where(to_restart, self.t, self.length)  # at the next step
                num_diverged += int(to_restart.sum())
                diverged.zero_()
        flags = torch.stack(flags).to(device)
        return torch.stack(deltas), flags, eps, loss_sum / self.recipe.truncation, num_diverged

    def inner_step(self, weights, batch: tuple[Tensor, ...]) -> Tensor:
        """One step of every net; their losses before it, (2n,)."""
        t = features.send(torch.cat([self.t, self.t]), self.xi.device)
        lr = 1.0
        if self.recipe.cosine:
            lr = torch.where(self.scheduled, training.cosine(self.t / self.length), 1.0)
            lr = features.send(torch.cat([lr, lr]), self.xi.device).unsqueeze(1)
        losses, grads = training.gradients(self.task, self.theta, batch, self.recipe.tf32)
        self.opt.step(weights, self.state, self.theta, grads, losses, t, lr)
        return losses

    def _restart(self, finished: Tensor, phi: Phi) -> None:
        """Begin a new unroll in the pairs that are finished, (n,) bool."""
        n, which = len(self.t), finished.nonzero().flatten().tolist()
        low, high = math.log(self.recipe.shortest), math.log(self.recipe.unroll)
        length = (low + (high - low) * self._random(which)).exp().round()  # log-uniform
        first = not self.length.any()
        # Cut the first unrolls short, so that pairs do not reset together.
        self.length[which] = (length * self._random(which)).ceil() if first else length
        self.t[which] = 0
        device = self.xi.device
        rows = features.send(torch.tensor(which + [n + k for k in which]), device)
        inits = [self.task.init(1, self.generators[k]) for k in which]
        theta = {
            name: features.send(torch.cat([init[name] for init in inits] * 2), device)
            for name in self.theta
        }
        phi = {k: w[rows] for k, w in phi.items()}
        state = self.opt.init(theta, phi, torch.cat([length, length]))
        for old, new in ((self.theta, theta), (self.state, state)):
            for name, x in new.items():
                old[name].index_copy_(0, rows, x)

    def _random(self, which: list[int]) -> Tensor:
        """A number in [0, 1) for each of these pairs."""
        return torch.stack([torch.rand((), generator=self.generators[k]) for k in which])

    def state_dict(self) -> dict:
        names = ("theta", "state", "t", "length", "xi")
        generators = [g.get_state() for g in self.generators]
        return {k: getattr(self, k) for k in names} | {"generators": generators}

    def load_state_dict(self, state: dict) -> None:
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved.cpu())
        for name in ("t", "length", "xi"):
            getattr(self, name).copy_(state[name])
        for mine, saved in ((self.theta, state["theta"]), (self.state, state["state"])):
            for name, x in mine.items():
                if name not in saved or x.shape != saved[name].shape:
                    wrong = f"the run's {name} does not fit {self.task.name}"
                    raise ValueError(f"{wrong}: was the task edited? Undo that, or start anew.")
                x.copy_(saved[name])


def rank_and_world() -> tuple[int, int]:
    """Which of how many processes this is, under torchrun; (0, 1) otherwise."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Trainer:
    """The outer loop: perturb, unroll each width in turn, average, clip, AdamW."""

    def __init__(self, recipe, lo: LO, data: bool = True):
        self.recipe, self.lo, self.step = recipe, lo, 0
        self.rank, self.world = rank_and_world()
        if recipe.pairs % self.world:
            raise ValueError(
                f"{recipe.pairs} pairs cannot be split over {self.world} processes: change --pairs."
            )
        self.phi = torch.nn.Parameter(parameters_to_vector(lo.parameters()))
        self.adamw = torch.optim.AdamW([self.phi], lr=recipe.lr, weight_decay=recipe.weight_decay)
        rules = roles.ALL if recipe.mup else ()
        self.tasks = [dataclasses.replace(task, rules=rules) for task in recipe.tasks()]
        share, datasets = recipe.pairs // self.world, {}
        mine = range(recipe.pairs)[self.rank * share : (self.rank + 1) * share]
        parts = [mine[k : k + recipe.micro_batch] for k in range(0, share, recipe.micro_batch)]
        self.particles = []
        for n, task in enumerate(self.tasks):
            if data and task.kind not in datasets:
                datasets[task.kind] = task.data(device=str(self.phi.device))
            rest = 100 * recipe.seed + n, datasets.get(task.kind)
            self.particles.append([Particles(task, recipe, lo, part, *rest) for part in parts])

    def rate(self) -> float:
        """Linear warm-up, then a cosine from lr to lr_end."""
        recipe = self.recipe
        if self.step < recipe.warmup:
            return recipe.lr * (self.step + 1) / recipe.warmup
        x = (self.step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
        return recipe.lr_end + (recipe.lr - recipe.lr_end) * 0.5 * (1 + math.cos(math.pi * x))

    def estimate(self, groups: list[Particles]) -> Tensor:
        """Sums over a task's pairs, (D + 2,): meta-gradient, loss, diverged pairs."""
        parts = zip(*(p.truncation(self.phi.detach()) for p in groups), strict=True)
        delta, began, eps, losses, diverged = parts  # one entry per micro-batch
        delta, began, eps = torch.cat(delta, 1), torch.cat(began, 1), torch.cat(eps)
        xi, mask = torch.cat([p.xi for p in groups]), torch.ones_like(began)  # every step counts
        grad, xi = pes_gradient(delta, began, mask, eps, xi, self.recipe.sigma)
        for p, part in zip(groups, xi.split([len(p.xi) for p in groups]), strict=True):
            p.xi = part
        loss = sum(x * len(p.xi) for p, x in zip(groups, losses, strict=True))
        counts = torch.stack([loss, torch.full_like(loss, sum(diverged))])
        return torch.cat([grad * len(xi), counts])  # sums, so that processes can add them

    @torch.no_grad()
    def advance(self) -> dict[str, float]:
        """One outer step; returns what goes into the log."""
        recipe, D, n = self.recipe, len(self.phi), len(self.tasks)
        start = self.step * recipe.per_step
        chosen = [k % n for k in range(start, start + recipe.per_step)] or range(n)  # tasks
        sums = torch.stack([self.estimate(self.particles[k]) for k in chosen])  # (tasks, D + 2)
        if self.world > 1:
            dist.all_reduce(sums)
        grads, losses = sums[:, :D] / recipe.pairs, sums[:, D] / recipe.pairs
        if recipe.mixture:  # clip each task's, so that none dominates
            grads = grads / grads.norm(dim=1, keepdim=True).clamp_min(recipe.clip)
        grad = grads.mean(0)  # tasks count alike
        norm, loss = float(grad.norm()), float(losses.mean())
        no_signal = norm == 0 and self.step > 0  # the first is 0 with truncation=1
        if no_signal or not math.isfinite(norm + loss):
            raise FloatingPointError(
                f"the meta-gradient is {norm:g} at step {self.step + 1}, as when every net "
                "diverges: start anew with a smaller --lr or --sigma."
            )
        self.phi.grad = grad * min(1.0, recipe.clip / (norm + 1e-12))
        rate = self.adamw.param_groups[0]["lr"] = self.rate()
        self.adamw.step()
        self.step += 1
        row = {"step": self.step, "meta_loss": loss, "grad_norm": norm, "lr": rate}
        row["diverged"] = int(sums[:, D + 1].sum())
        names = [f"loss_{x}" for x in recipe.mixture or (f"w{w}" for w in recipe.widths)]
        by_task = {names[k]: x for k, x in zip(chosen, losses.tolist(), strict=True)}
        return row | {name: by_task.get(name, math.nan) for name in names}

    @torch.no_grad()
    def result(self) -> LO:
        """Copy phi into the learned optimizer and return it: the same object each time."""
        vector_to_parameters(self.phi.clone(), self.lo.parameters())
        return self.lo

    def state_dict(self) -> dict:
        return {
            "recipe": dataclasses.asdict(self.recipe),
            "step": self.step,
            "phi": self.phi.detach(),
            "adamw": self.adamw.state_dict(),
            "particles": [[p.state_dict() for p in groups] for groups in self.particles],
        }

    def load_state_dict(self, state: dict) -> None:
        if state["phi"].shape != self.phi.shape:
            raise ValueError(
                f"the run's optimizer has {len(state['phi']):,} weights, this code's "
                f"{len(self.phi):,}, as with other features: start anew, or use the older code."
            )
        self.step = state["step"]
        self.phi.data.copy_(state["phi"])
        self.adamw.load_state_dict(state["adamw"])
        for groups, saved in zip(self.particles, state["particles"], strict=True):
            for p, s in zip(groups, saved, strict=True):
                p.load_state_dict(s)


if __name__ == "__main__":
    raise SystemExit("pes.py is a module, not a command: use `from mulo import pes`.")
