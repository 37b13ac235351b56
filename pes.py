"""Persistent Evolution Strategies: the meta-gradient of a learned optimizer, from nets in training.

    particles = Particles(task, r, lo, range(8), seed=0)
    delta, finished, eps, loss = particles.truncation(phi)
    grad, particles.xi = pes_gradient(delta, finished, mask, eps, particles.xi, r.sigma)

Paper: eq. 1 (the meta-objective), section 2 and appendix C. Pairs of nets are trained side by side
with phi + eps and phi - eps for a few steps at a time (a truncation); each pair remembers its past
perturbations xi, so that unrolls of many truncations are not biased. The two halves of a pair share
initial weights, data and length; everything else about a pair follows from its own seed, so the
result does not depend on how pairs are spread over micro-batches or processes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import stacked
import tasks
from lo import LO, Phi


def pes_gradient(
    delta: Tensor,  # (T, n): loss of the positive less that of the negative half of a pair
    finished: Tensor,  # (T, n) bool: the step belongs to an unroll that began in this truncation
    mask: Tensor,  # (T, n) bool: the step counts
    eps: Tensor,  # (n, D): this truncation's perturbations
    xi: Tensor,  # (n, D): those of the unroll's earlier truncations, summed
    sigma: float,
) -> tuple[Tensor, Tensor]:
    """The PES meta-gradient (D,) and the new xi.

    mean over pairs of (sum_old delta (xi + eps) + sum_new delta eps) / (2 sigma^2 count). Losses of
    an unroll that is still running depend on all its perturbations, those of a new one on eps
    alone. A pair with a loss that is not finite is left out. DIVERGES: in the reference code an
    unroll's last loss counts as the next one's, and a NaN makes the whole gradient 0.
    """
    good = good_pairs(delta, mask)  # (n,)
    weight = mask / mask.sum(0).clamp_min(1)  # (T, n)
    delta = torch.where(good & mask, delta, 0) * weight
    old, new = (delta * ~finished).sum(0), (delta * finished).sum(0)  # (n,)
    total = xi + eps
    grad = (old.unsqueeze(1) * total + new.unsqueeze(1) * eps).sum(0)
    grad = grad / (2 * sigma**2 * good.sum().clamp_min(1))
    return grad, torch.where(finished[-1].unsqueeze(1), eps, total)


def good_pairs(delta: Tensor, mask: Tensor) -> Tensor:
    """Which pairs count, (n,) bool: those whose differences are all finite."""
    return torch.where(mask, delta, 0).isfinite().all(0)


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
        r,  # the numbers of the run: a metatrain.Recipe
        lo: LO,
        pairs: range,  # which of the task's pairs these are
        seed: int,  # of the task; that of a pair follows
        data=None,
    ):
        device = next(lo.parameters()).device
        self.task, self.r, self.lo, self.data = task, r, lo, data
        self.opt = stacked.Learned(lo.config, task)
        self.bound = 1.5 * math.log(task.classes)  # losses are clipped to [0, bound]
        # On the CPU whatever the device, so that a GPU repeats the same run.
        self.generators = [torch.Generator().manual_seed(seed * 10_000 + k) for k in pairs]
        n, weights = len(pairs), list(lo.parameters())
        shapes = {k: p.shape for k, p in task.skeleton().named_parameters()}
        self.theta = {k: torch.zeros(2 * n, *shape, device=device) for k, shape in shapes.items()}
        self.t, self.length = torch.zeros(n), torch.zeros(n)  # so that all begin at once
        self.xi = torch.zeros(n, sum(w.numel() for w in weights), device=device)
        phi = {k: w.unsqueeze(0) for k, w in lo.named_parameters()}
        self.state = self.opt.init(self.theta, phi, torch.full((2 * n,), float(r.unroll)))
        self.begun = False

    def truncation(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Train all nets for a truncation with phi + eps and phi - eps, eps drawn for each pair.

        Returns delta and finished, (T, n), eps, (n, D), and the mean clipped loss.
        """
        n, device = len(self.t), phi.device
        noise = [torch.randn(len(phi), generator=g) for g in self.generators]
        eps = self.r.sigma * torch.stack(noise).to(device)
        weights = unflatten(torch.cat([phi + eps, phi - eps]), self.lo)
        net = self.opt.prepare(weights)
        finished, flags, deltas, total = torch.zeros(n, dtype=torch.bool), [], [], 0.0
        for _ in range(self.r.truncation):
            over = self.t >= self.length
            if over.any():
                self._restart(over, weights)
                finished = finished | over
            batch = stacked.batches(self.data, self.generators, self.r.batch_size, copies=2)
            losses = self.inner_step(net, batch)
            clipped = torch.nan_to_num(losses, nan=self.bound).clamp(0, self.bound)
            deltas.append(clipped[:n] - clipped[n:])
            flags.append(finished)
            total += clipped.mean()
            self.t += 1
            diverged = ~losses.isfinite().view(2, n).all(0).cpu()
            self.length = torch.where(diverged, self.t, self.length)  # restart at the next step
        return torch.stack(deltas), torch.stack(flags).to(device), eps, total / self.r.truncation

    def inner_step(self, net, batch: tuple[Tensor, ...]) -> Tensor:
        """One step of every net; their losses before it, (2n,)."""
        losses, grads = stacked.gradients(self.task, self.theta, batch)
        t = torch.cat([self.t, self.t]).to(losses.device)
        self.state, self.theta = self.opt.step(net, self.state, self.theta, grads, losses, t)
        return losses

    def _restart(self, over: Tensor, phi: Phi) -> None:
        """Begin a new unroll in the pairs that are over, (n,) bool."""
        n, which = len(self.t), over.nonzero().flatten().tolist()
        length = torch.stack([self._length(self.generators[k]) for k in which])
        self.t[which], self.length[which] = 0, length
        if not self.begun:  # the first unrolls are cut short, so that pairs do not reset together
            cut = [torch.rand((), generator=self.generators[k]) for k in which]
            self.length[which] = (length * torch.stack(cut)).ceil()
            self.begun = True
        rows = which + [n + k for k in which]
        inits = [self.task.init(1, self.generators[k]) for k in which]
        for name, p in self.theta.items():
            p[rows] = torch.cat([init[name] for init in inits] * 2).to(p.device)
        theta = {k: p[rows] for k, p in self.theta.items()}
        phi = {k: w[rows] for k, w in phi.items()}
        for name, x in self.opt.init(theta, phi, torch.cat([length, length])).items():
            self.state[name][rows] = x

    def _length(self, generator: torch.Generator) -> Tensor:
        """The length of an unroll, log-uniform between the recipe's bounds."""
        low, high = math.log(self.r.shortest), math.log(self.r.unroll)
        return (low + (high - low) * torch.rand((), generator=generator)).exp().round()

    def state_dict(self) -> dict:
        names = ("theta", "state", "t", "length", "xi", "begun")
        generators = [g.get_state() for g in self.generators]
        return {k: getattr(self, k) for k in names} | {"generators": generators}

    def load_state_dict(self, state: dict) -> None:
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved.cpu())
        for name, value in state.items():
            if name != "generators":
                setattr(self, name, value)
        self.t, self.length = self.t.cpu(), self.length.cpu()
