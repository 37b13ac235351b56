"""Muon as a torch Optimizer, to copy: the baseline `muon` of evaluate.py (training.Muon).

    python examples/muon.py

trains an MLP on 8x8 Fashion-MNIST with Muon and with mulo_m, and prints both final losses. Every
matrix moves by lr * sqrt(fan_out / fan_in) times its orthogonalised momentum, so that the best rate
depends little on width; biases, norms and embeddings move by Adam. Use it with `warmup_cosine`, in
standard parametrization: initialize by PyTorch's defaults or by mulo.init_(..., rules=()).
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import mulo
from mulo import tasks


def orthogonalise(d: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of a matrix near 1, by five steps of Newton-Schulz."""
    x = d if d.shape[0] <= d.shape[1] else d.mT
    x = x / (x.norm() + 1e-8)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if d.shape[0] <= d.shape[1] else x.mT


def warmup_cosine(t: int, steps: int) -> float:
    """A cosine schedule from 1 to 0.01, with linear warm-up over the first 5 % of the steps."""
    x = math.pi * min(t, steps) / steps
    return min(1.0, (t + 1) / (0.05 * steps)) * (0.505 + 0.495 * math.cos(x))


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum. `groups`: mulo.param_groups(model, roles, rules=())."""

    def __init__(
        self,
        groups: list[dict],
        lr: float = 0.024,
        vector_lr: float = 0.06,  # of biases, norms and embeddings
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),  # of Adam
    ):
        if any(group["scale"] != 1 for group in groups):
            raise ValueError("these groups are in μP: pass rules=() to init_ and param_groups.")
        for group in groups:
            is_vector = group["kind"] in ("bias", "norm", "table")
            group |= {"lr": vector_lr if is_vector else lr, "is_vector": is_vector, "t": 0}
        super().__init__(groups, {"momentum": momentum, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    (self.adam if group["is_vector"] else self.orthogonal)(p, group, self.state[p])
        return loss

    def adam(self, p: torch.Tensor, group: dict, state: dict) -> None:
        m, v = (state.setdefault(k, torch.zeros_like(p)) for k in "mv")
        (b1, b2), t = group["betas"], group["t"]
        m.lerp_(p.grad, 1 - b1)
        v.lerp_(p.grad.square(), 1 - b2)
        p -= group["lr"] * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-8)

    def orthogonal(self, p: torch.Tensor, group: dict, state: dict) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(p.grad, 1 - group["momentum"])
        d = p.grad.lerp(m, group["momentum"]).movedim(group["out_axis"], 0)
        matrix = orthogonalise(d.flatten(1))  # (fan_out, fan_in)
        rate = group["lr"] * (matrix.shape[0] / matrix.shape[1]) ** 0.5
        p -= rate * matrix.view_as(d).movedim(0, group["out_axis"])


def train(name: str, steps: int = 500) -> float:
    """Train a net with "muon" or a shipped optimizer; return its mean over the last 30 losses."""
    rules = () if name == "muon" else mulo.roles.ALL
    task, generator = tasks.get("fashion8_mlp_w64_d3", rules=rules), torch.Generator()
    generator.manual_seed(0)
    model, data = task.model(generator), task.data()
    groups = mulo.param_groups(model, task.roles(), rules)
    opt = Muon(groups) if name == "muon" else mulo.MuLO(groups, mulo.load(name))
    schedule = partial(warmup_cosine, steps=steps) if name == "muon" else lambda t: 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    losses = []
    for _ in range(steps):
        loss = task.loss(model, data.batch(generator, task.batch_size))
        opt.zero_grad()
        loss.backward()
        opt.step()
        scheduler.step()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


if __name__ == "__main__":
    for name in ("muon", "mulo_m"):
        print(f"{name}: {train(name):.4f}")
