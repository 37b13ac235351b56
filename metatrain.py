"""Meta-train a learned optimizer by Persistent Evolution Strategies (PES), on one machine.

    python metatrain.py                         # mulo_m at desk scale: minutes on a laptop
    python metatrain.py lo_m --seed 1           # the same recipe in standard parametrization
    python metatrain.py mulo_m --scale paper --device cuda     # the paper's recipe, hours on a GPU
    python metatrain.py --resume runs/mulo_m_desk_seed0        # go on where a run stopped

Paper: eq. 1 (the meta-objective) and appendix C (the recipes). PES estimates the meta-gradient from
pairs of nets trained side by side with phi + eps and phi - eps, for a few steps at a time (a
truncation), and remembers each pair's past perturbations xi so that long unrolls are not biased.
Everything is stacked: the nets of all pairs of a task are one dict of tensors (2n, ...), positive
halves first, and their learned optimizers another, so that one step advances them all.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from tqdm import tqdm

import features
import lo as lo_module
import mulo
import mup
import tasks
from checkpoints import write_atomically


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All numbers of a run. Defaults are the paper's (appendix C); DESK is what a laptop can do."""

    name: str = "mulo_m"
    scale: str = "paper"
    seed: int = 0
    mup: bool = True
    kind: str = "in32_mlp"  # of task; widths and depth complete its name
    widths: tuple[int, ...] = (128, 512, 1024)
    depth: int = 3
    batch_size: int = 4096
    hidden_size: int = 32  # of the learned optimizer: the authors' configuration
    lam1: float = 0.01  # 0.001 in SP
    pairs: int = 8  # perturbations per task
    sigma: float = 0.01  # their standard deviation
    unroll: int = 1000  # inner steps at most
    shortest: int = 100  # unrolls are log-uniform in [shortest, unroll]
    truncation: int = 50
    steps: int = 5000
    warmup: int = 100
    lr: float = 3e-3
    lr_end: float = 1e-3
    weight_decay: float = 1e-4
    clip: float = 1.0  # of the meta-gradient's norm. DIVERGES: the reference clips the update


# Found to be dependable at this size: a larger sigma and rate, unrolls of one length.
DESK = {
    "scale": "desk", "kind": "fashion8_mlp", "widths": (16, 32, 64), "batch_size": 64,
    "hidden_size": 8, "sigma": 0.05, "unroll": 500, "shortest": 500, "truncation": 25,
    "steps": 400, "warmup": 50, "lr": 1e-2, "lr_end": 1e-3,
}  # fmt: skip
RECIPES = {
    "mulo_s": {"widths": 1},
    "mulo_m": {},
    "lo_s": {"widths": 1, "mup": False, "lam1": 0.001},
    "lo_m": {"mup": False, "lam1": 0.001},
}


def recipe(name: str, scale: str = "desk", **changes) -> Recipe:
    """A named recipe; an `_s` optimizer sees only the narrowest of the three widths."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: use one of {', '.join(RECIPES)}.")
    fields = {"name": name} | (DESK if scale == "desk" else {}) | RECIPES[name]
    if fields.get("widths") == 1:
        fields["widths"] = (DESK["widths"] if scale == "desk" else Recipe.widths)[:1]
    return Recipe(**(fields | changes))


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
    good = torch.where(mask, delta, 0).isfinite().all(0)  # (n,)
    weight = mask / mask.sum(0).clamp_min(1)  # (T, n)
    delta = torch.where(good & mask, delta, 0) * weight
    old, new = (delta * ~finished).sum(0), (delta * finished).sum(0)  # (n,)
    total = xi + eps
    grad = (old.unsqueeze(1) * total + new.unsqueeze(1) * eps).sum(0)
    grad = grad / (2 * sigma**2 * good.sum().clamp_min(1))
    return grad, torch.where(finished[-1].unsqueeze(1), eps, total)


def unflatten(phi: Tensor, like: mulo.LO) -> lo_module.Phi:
    """Vectors of weights (P, D) as the stacked dict that `lo.step_` takes."""
    parts = phi.split([w.numel() for w in like.parameters()], 1)
    names = [name for name, _ in like.named_parameters()]
    return {
        name: part.unflatten(1, w.shape)
        for name, part, w in zip(names, parts, like.parameters(), strict=True)
    }


class Particles:
    """The nets of one task: n antithetic pairs, their accumulators, clocks and perturbations."""

    def __init__(self, task: tasks.Task, r: Recipe, size: int, generator: torch.Generator):
        self.task, self.r, self.generator = task, r, generator
        self.data = task.data(device=generator.device)
        self.bound = 1.5 * math.log(task.classes)  # losses are clipped to [0, bound]
        roles = task.roles()
        self.dims, self.scale = {}, {}
        for w in mup.weights_of(task.skeleton()):
            self.dims[w.name] = features.factored_dims(tuple(w.param.shape), w.out_axis)
            scale = float(w.fan_in) ** mup.power(roles[w.name], "update", task.rules)
            self.scale[w.name] = torch.full((2 * r.pairs,), scale, device=generator.device)
        n = r.pairs
        self.theta = self._initial()
        self.acc = {k: features.init_accumulators(p, self.dims[k]) for k, p in self.theta.items()}
        self.t = torch.zeros(n)
        # The first unrolls are cut short at random, so that pairs do not reset together.
        self.length = (self._lengths() * torch.rand(n, generator=generator)).ceil()
        self.xi = torch.zeros(n, size, device=generator.device)

    def _initial(self) -> dict[str, Tensor]:
        init = self.task.init(self.r.pairs, self.generator)
        return {k: torch.cat([p, p]) for k, p in init.items()}  # both halves start alike

    def _lengths(self) -> Tensor:
        low, high = math.log(self.r.shortest), math.log(self.r.unroll)
        u = torch.rand(self.r.pairs, generator=self.generator)
        return (low + (high - low) * u).exp().round()

    def _restart(self, over: Tensor) -> None:
        """Begin a new unroll in the pairs that are over, (n,) bool."""
        both = torch.cat([over, over])
        for k, fresh in self._initial().items():
            choose = features.trailing(both.to(fresh.device), fresh.ndim)
            self.theta[k] = torch.where(choose, fresh, self.theta[k])
            for x in self.acc[k]:
                x[both] = 0
        self.t[over] = 0
        self.length = torch.where(over, self._lengths(), self.length)

    def truncation(self, phi: Tensor, like: mulo.LO) -> tuple[Tensor, Tensor, Tensor]:
        """Train all nets for a truncation, those of pair k with phi[k] and phi[n + k], (2n, D).

        Returns delta and finished, (T, n), and the mean clipped loss.
        """
        n, weights = self.r.pairs, unflatten(phi, like)
        finished, deltas, total = torch.zeros(n, dtype=torch.bool), [], 0.0
        flags = []
        for _ in range(self.r.truncation):
            over = self.t >= self.length
            if over.any():
                self._restart(over)
                finished = finished | over
            losses, grads = self._gradients()
            clipped = torch.nan_to_num(losses, nan=self.bound).clamp(0, self.bound)
            deltas.append(clipped[:n] - clipped[n:])
            flags.append(finished)
            total += clipped.mean()
            t = torch.cat([self.t, self.t]).to(losses.device)
            for k, p in self.theta.items():
                rest = (grads[k], t, self.scale[k], self.dims[k])
                acc, p = lo_module.step(like.config, weights, self.acc[k], p, *rest)
                self.acc[k], self.theta[k] = acc, p
            self.t += 1
            diverged = ~losses.isfinite().view(2, n).all(0).cpu()
            self.length = torch.where(diverged, self.t, self.length)  # restart at the next step
        return torch.stack(deltas), torch.stack(flags), total / self.r.truncation

    def _gradients(self) -> tuple[Tensor, dict[str, Tensor]]:
        batch = self.data.batch(self.generator, self.r.batch_size, self.r.pairs)
        batch = tuple(torch.cat([b, b]) for b in batch)  # both halves see the same data
        theta = {k: p.detach().requires_grad_() for k, p in self.theta.items()}
        with torch.enable_grad():
            losses = self.task.losses(theta, batch)
            grads = torch.autograd.grad(losses.sum(), list(theta.values()))
        return losses.detach(), dict(zip(theta, grads, strict=True))

    def state_dict(self) -> dict:
        acc = {k: tuple(x) for k, x in self.acc.items()}
        return {"theta": self.theta, "acc": acc, "t": self.t, "length": self.length, "xi": self.xi}

    def load_state_dict(self, state: dict) -> None:
        self.theta, self.t, self.length, self.xi = (
            state[k] for k in ("theta", "t", "length", "xi")
        )
        self.acc = {k: features.Accumulators(*x) for k, x in state["acc"].items()}


class Trainer:
    """The outer loop: perturb, unroll each width in turn, average, clip, AdamW."""

    def __init__(self, r: Recipe, device: str = "cpu"):
        self.r, self.step = r, 0
        self.generator = torch.Generator(device).manual_seed(r.seed)
        config = mulo.LOConfig(hidden_size=r.hidden_size, lam1=r.lam1, t_max=float(r.unroll))
        self.lo = mulo.SmallFC(config, torch.Generator().manual_seed(r.seed)).to(device)
        self.phi = torch.nn.Parameter(parameters_to_vector(self.lo.parameters()))
        self.adamw = torch.optim.AdamW([self.phi], lr=r.lr, weight_decay=r.weight_decay)
        names = [f"{r.kind}_w{width}_d{r.depth}" for width in r.widths]
        rules = mup.ALL if r.mup else ()
        self.particles = [
            Particles(tasks.get(name, rules=rules), r, len(self.phi), self.generator)
            for name in names
        ]

    def rate(self) -> float:
        """Linear warm-up, then a cosine from lr to lr_end."""
        r = self.r
        if self.step < r.warmup:
            return r.lr * (self.step + 1) / r.warmup
        x = (self.step - r.warmup) / max(1, r.steps - r.warmup)
        return r.lr_end + (r.lr - r.lr_end) * 0.5 * (1 + math.cos(math.pi * x))

    @torch.no_grad()
    def advance(self) -> dict[str, float]:
        """One outer step; returns what goes into the log."""
        r, grads, losses, bad = self.r, [], [], 0
        for particles in self.particles:
            noise = torch.randn(
                r.pairs, len(self.phi), generator=self.generator, device=self.phi.device
            )
            eps = r.sigma * noise
            phi = torch.cat([self.phi + eps, self.phi - eps])
            delta, finished, loss = particles.truncation(phi, self.lo)
            finished = finished.to(delta.device)
            mask = torch.ones_like(finished)
            grad, particles.xi = pes_gradient(delta, finished, mask, eps, particles.xi, r.sigma)
            bad += int((~delta.isfinite().all(0)).sum())
            grads.append(grad)
            losses.append(float(loss))
        grad = torch.stack(grads).mean(0)
        norm = float(grad.norm())
        if not math.isfinite(norm):
            raise FloatingPointError("the meta-gradient is not finite")
        self.phi.grad = grad * min(1.0, r.clip / (norm + 1e-12))
        rate = self.adamw.param_groups[0]["lr"] = self.rate()
        self.adamw.step()
        self.step += 1
        row = {"step": self.step, "meta_loss": sum(losses) / len(losses), "grad_norm": norm}
        row |= {"lr": rate, "bad_pairs": bad}
        return row | {f"loss_w{w}": x for w, x in zip(r.widths, losses, strict=True)}

    def result(self) -> mulo.LO:
        """The learned optimizer as it is now."""
        torch.nn.utils.vector_to_parameters(self.phi.detach().clone(), self.lo.parameters())
        return self.lo

    def state_dict(self) -> dict:
        return {
            "recipe": dataclasses.asdict(self.r),
            "step": self.step,
            "phi": self.phi.detach(),
            "adamw": self.adamw.state_dict(),
            "generator": self.generator.get_state(),
            "particles": [p.state_dict() for p in self.particles],
        }

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]
        self.phi.data.copy_(state["phi"])
        self.adamw.load_state_dict(state["adamw"])
        self.generator.set_state(state["generator"].cpu())
        for p, s in zip(self.particles, state["particles"], strict=True):
            p.load_state_dict(s)


class Run:
    """A trainer with a folder: log.csv, the last checkpoints, and lo.pt at the end."""

    KEEP = 3

    def __init__(self, trainer: Trainer, out: Path):
        self.trainer, self.out, self.rows = trainer, out, []
        out.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        """Checkpoint and log, each written whole and renamed."""
        state = self.trainer.state_dict() | {"rows": self.rows}
        path = self.out / f"checkpoint_{self.trainer.step:06}.pt"
        write_atomically(path, lambda file: torch.save(state, file))
        for old in sorted(self.out.glob("checkpoint_*.pt"))[: -self.KEEP]:
            old.unlink()
        self.write_log()

    def write_log(self) -> None:
        def write(file) -> None:
            lines = [",".join(self.rows[0]), *(",".join(map(repr, r.values())) for r in self.rows)]
            file.write(("\n".join(lines) + "\n").encode())

        if self.rows:
            write_atomically(self.out / "log.csv", write)

    @classmethod
    def resume(cls, out: Path, device: str) -> Run:
        """Continue from the newest checkpoint that can be read."""
        for path in sorted(out.glob("checkpoint_*.pt"), reverse=True):
            try:
                state = torch.load(path, map_location=device, weights_only=True)
                run = cls(Trainer(_recipe_of(state["recipe"]), device), out)
                run.trainer.load_state_dict(state)
            except Exception as error:
                print(f"{path} cannot be read ({error}): trying the one before.", file=sys.stderr)
                continue
            run.rows = state["rows"]
            return run
        raise FileNotFoundError(f"no checkpoint that can be read in {out}: start the run anew.")

    def train(self, every: int) -> None:
        """Train to the end, or until Ctrl-C, which is heeded between steps: state is then whole."""
        stop = []
        before = signal.signal(signal.SIGINT, lambda *_: stop.append(True))
        try:
            self._train(every, stop)
        finally:
            signal.signal(signal.SIGINT, before)
        if stop:
            raise KeyboardInterrupt
        r = self.trainer.r
        about = {"recipe": dataclasses.asdict(r), "meta_loss": self.rows[-1]["meta_loss"]}
        mulo.save(self.trainer.result(), self.out / "lo.pt", **about)

    def _train(self, every: int, stop: list) -> None:
        r, started = self.trainer.r, self.trainer.step
        inner = r.truncation * len(r.widths) * 2 * r.pairs
        with tqdm(total=r.steps, initial=started, desc=r.name, unit="step") as bar:
            while self.trainer.step < r.steps and not stop:
                self.rows.append(self.trainer.advance())
                bar.update()
                speed = (
                    inner * (self.trainer.step - started) / max(1e-9, bar.format_dict["elapsed"])
                )
                bar.set_postfix(loss=f"{self.rows[-1]['meta_loss']:.3f}", inner=f"{speed:,.0f}/s")
                if self.trainer.step % every == 0:
                    self.save()
        self.save()


def _recipe_of(saved: dict) -> Recipe:
    return Recipe(**(saved | {"widths": tuple(saved["widths"])}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Meta-train a learned optimizer by PES.")
    parser.add_argument("recipe", nargs="?", default="mulo_m", help=", ".join(RECIPES))
    parser.add_argument(
        "--scale",
        choices=["desk", "paper"],
        default="desk",
        help="a laptop's numbers or the paper's",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/<name>)")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue the run in this folder"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=20,
        metavar="STEPS",
        help="outer steps (default: 20)",
    )
    numbers = parser.add_argument_group("numbers of the recipe, to override")
    for field in dataclasses.fields(Recipe):
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            flag, kind = f"--{field.name.replace('_', '-')}", type(field.default)
            numbers.add_argument(flag, type=kind, metavar="N", help=f"paper: {field.default}")
    numbers.add_argument("--widths", type=int, nargs="+", help="of the nets it is meta-trained on")
    numbers.add_argument("--kind", help="of task, see `python tasks.py`")
    return parser


def main() -> None:
    args, run = _parser().parse_args(), None
    try:
        names = [f.name for f in dataclasses.fields(Recipe)]
        changes = {k: v for k, v in vars(args).items() if k in names and v is not None}
        changes.pop("scale")
        if args.widths:
            changes["widths"] = tuple(args.widths)
        if args.resume:
            if changes or args.out:
                raise ValueError("a resumed run keeps its numbers and its folder: leave them out.")
            run = Run.resume(args.resume, args.device)
        else:
            r = recipe(args.recipe, args.scale, **changes)
            out = args.out or Path("runs") / f"{r.name}_{r.scale}_seed{r.seed}"
            if list(out.glob("checkpoint_*.pt")):
                raise FileExistsError(f"{out} has a run already: add --resume {out}, or --out.")
            run = Run(Trainer(r, args.device), out)
        run.train(args.checkpoint_every)
    except KeyboardInterrupt:
        if run is None or not run.rows:
            sys.exit("stopped before the first step: nothing to resume, start again.")
        sys.exit(f"stopped at step {run.trainer.step}: python metatrain.py --resume {run.out}")
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"metatrain.py: {error}")
    first, last = (
        sum(r["meta_loss"] for r in rows) / len(rows) for rows in (run.rows[:20], run.rows[-20:])
    )
    print(f"meta-loss {first:.3f} -> {last:.3f}; the optimizer is in {run.out / 'lo.pt'}")


if __name__ == "__main__":
    main()
