"""P nets of one task trained side by side, by a learned optimizer or by Adam.

    opt = Learned(config, task)
    theta, state = task.init(P, generator), opt.init(theta, phi)
    losses, grads = gradients(task, theta, batch)
    state, theta = opt.step(opt.prepare(phi), state, theta, grads, losses, t)

Nets, weights phi and optimizer state are dicts of tensors with the nets along the first axis, so
one set of kernels advances them all: the particles of meta-training, which differ in phi, or the
seeds and configurations of an evaluation, which share it. `mulo.MuLO` is the optimizer for one net.
"""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import features
import fused
import lo as lo_module
import rule
import tasks
from features import Accumulators, LossBuffer, trailing
from lo import LO, LOConfig, Phi
from roles import ALL, power, weights_of
from rule import Net

if TYPE_CHECKING:
    from inductor import Graph

# Entries of a stack beyond which its step is in place, in blocks: for the cache, or for memory.
LARGE, LARGE_GPU = 500_000, 50_000_000
LONG = 2e9  # parameters times steps from which on a minute of compiling is paid back
Theta = dict[str, Tensor]  # (P, *shape) each
State = dict[str, Tensor]  # (P, ...) each


def gradients(task: tasks.Task, theta: Theta, batch: tuple[Tensor, ...]) -> tuple[Tensor, Theta]:
    """The loss of every net, (P,), and its gradient."""
    theta = {k: p.detach().requires_grad_() for k, p in theta.items()}
    with torch.enable_grad():
        losses = task.losses(theta, batch)
        grads = torch.autograd.grad(losses.sum(), list(theta.values()))
    return losses.detach(), dict(zip(theta, grads, strict=True))


def update_scales(task: tasks.Task) -> dict[str, float]:
    """The μP factor on each tensor's update: 1/fan_in for hidden weights, 1 in SP."""
    roles = task.roles()
    return {
        w.name: float(w.fan_in) ** power(roles[w.name], "update", task.rules)
        for w in weights_of(task.skeleton())
    }


class Learned:
    """A learned optimizer, small_fc or VeLO, for the nets of a task."""

    def __init__(self, config: LOConfig, task: tasks.Task, compile: bool = False):
        self.task, self.config, self.compile = task, config, compile
        self.scale = update_scales(task)
        self.eps_scale = {
            w.name: 1 / w.fan_in if config.eps == "fan_in" else 1.0
            for w in weights_of(task.skeleton())
        }
        self.dims = {
            w.name: features.factored_dims(tuple(w.param.shape), w.out_axis)
            for w in weights_of(task.skeleton())
        }
        self.names = list(self.dims)
        self._graph = Advance() if compile else None

    def init(self, theta: Theta, phi: Phi, num_steps: Tensor | None = None) -> State:
        """State at the start of training; VeLO's depends on num_steps, (P,) on the CPU."""
        state = {}
        for name, p in theta.items():
            acc = features.init_accumulators(p, self.dims[name], apart=self.compile)
            state |= {f"{k}/{name}": x for k, x in acc._asdict().items()}
        if self.config.net == "velo":
            P, device = len(p), p.device
            bugged = self.config.use_bugged_loss_features
            state["num_steps"] = num_steps.to(device)
            decays = [features.loss_decays(int(n), bugged, device) for n in num_steps]
            state["loss_decays"] = torch.stack(decays)
            buffer = features.init_loss_buffer(P, device=device)
            state |= {f"loss/{k}": x for k, x in buffer._asdict().items()}
            shape = (P, len(theta), self.config.lstm_hidden)
            state |= {k: phi[f"{k}0"].expand(shape).clone() for k in ("hidden", "cell")}
        return state

    def prepare(self, phi: Phi) -> Net | Phi:
        """What `step` wants of phi, (P, ...) or (1, ...): done once for many steps."""
        return phi if self.config.net == "velo" else rule.prepare(self.config, phi)

    def step(
        self,
        net: Net | Phi,
        state: State,
        theta: Theta,
        grads: Theta,
        losses: Tensor,  # (P,)
        t: Tensor,  # (P,), 0 at the first step
        lr: float = 1.0,
        in_place: Callable | None = None,  # what steps a tensor, if not chosen by size
    ) -> tuple[State, Theta]:
        """One step of every net; the old state and theta may be overwritten."""
        new, new_theta = dict(state), {}
        if self.config.net == "velo":
            nets, alphas = self._generate(net, new, theta, losses, t)
        else:
            nets, alphas = [net.at(t).settled()] * len(self.names), [1.0] * len(self.names)
        one = torch.ones_like(losses)
        for name, now, alpha in zip(self.names, nets, alphas, strict=True):
            p = theta[name]
            acc = Accumulators(*(state[f"{k}/{name}"] for k in Accumulators._fields))
            scale = lr * self.scale[name] * alpha * one
            args = (now, acc, p, grads[name], scale, self.dims[name], 0.0, self.eps_scale[name])
            large = p.numel() > (LARGE if p.device.type == "cpu" else LARGE_GPU)
            step_ = in_place or (fused.step_ if self.compile else rule.step_ if large else None)
            if step_:
                step_(*args)
                new_theta[name] = p
                continue
            acc, new_theta[name] = rule.step(*args)
            new |= {f"{k}/{name}": x for k, x in acc._asdict().items()}
        return new, new_theta

    @torch.no_grad()
    def advance(
        self, net: Net | Phi, state: State, theta: Theta, batch: tuple[Tensor, ...], t: Tensor
    ) -> tuple[Tensor, State, Theta]:
        """Losses, (P,), their gradients, and a step of every net, compiled as one graph if at all.

        For long runs, as every size of nets is compiled anew: `step` has one graph for all sizes.
        """
        if self._graph and fused.compiles(self.config, t.device.type):
            try:
                self._graph.prepare(self, net, state, theta, batch, t)
            except Exception as error:  # nothing has changed yet
                self._graph = None
                warnings.warn(
                    f"a step of training {self.task.name} cannot be compiled as one graph, so only "
                    f"the optimizer's part is: leave out --compile. ({fused.why(error)})",
                    stacklevel=2,
                )
            else:
                return self._graph.run(batch, t), state, theta
        losses, grads = gradients(self.task, theta, batch)
        return losses, *self.step(net, state, theta, grads, losses, t)

    def advance_(self, net, state: State, theta: Theta, batch, t: Tensor) -> Tensor:
        """The same in place, to be traced; the losses."""
        losses, grads = gradients(self.task, theta, batch)
        now, _ = self.step(net, state, theta, grads, losses, t, in_place=fused.traced_)
        for k, x in now.items():
            if x is not state[k]:
                state[k].copy_(x)
        return losses

    def _generate(
        self, phi: Phi, state: State, theta: Theta, losses: Tensor, t: Tensor
    ) -> tuple[list[Net], list[Tensor]]:
        """VeLO: every tensor's MLPs and alphas, (P, ...); the LSTM's part of `state` moves on."""
        config = self.config
        buffer = LossBuffer(*(state[f"loss/{k}"] for k in LossBuffer._fields))
        buffer, x_loss = features.loss_features(buffer, losses, state["loss_decays"])
        x_time = features.fraction_features(t, state["num_steps"], config.spec)
        x_net = torch.cat([x_time, x_loss], -1).unsqueeze(1)  # (P, 1, 18)
        x_tensor = [
            features.tensor_features(p, whole(state[f"M/{k}"]), state[f"V/{k}"])
            for k, p in theta.items()
        ]
        x = torch.cat([x_net.expand(-1, len(theta), -1), torch.stack(x_tensor, 1)], -1)
        h, cell = lo_module.lstm_step(phi, x, state["hidden"], state["cell"])
        state |= {f"loss/{k}": v for k, v in buffer._asdict().items()}
        state |= {"hidden": h, "cell": cell}
        weights, alpha = lo_module.hypernetwork(config, phi, h)
        if config.param_scale_mult:
            alpha = alpha * torch.stack([features.param_scale(p) for p in theta.values()], 1)
        nets = [
            rule.prepare(config, {k: w[:, n] for k, w in weights.items()})
            for n in range(len(theta))
        ]
        return nets, alpha.unbind(1)


def whole(M: features.Momenta) -> Tensor:
    """M, (P, 3, *shape), of its pieces."""
    return M if isinstance(M, Tensor) else torch.cat(M, 1)


class Advance:
    """`Learned.advance` compiled, in place on state and theta: a graph for every size of nets, and
    shared by all that train nets of that size."""

    graphs: ClassVar[dict[tuple, Graph]] = {}

    def __init__(self):
        self.given, self.flat = [], []

    def prepare(self, opt: Learned, net: Net | Phi, state: State, theta: Theta, batch, t) -> None:
        """Find the graph, or compile it: only if these are not the tensors of the last step.
        The batch and t are always new."""
        kinds = [(x.shape, x.stride(), x.dtype) for x in (*batch, t)]
        given = [net, *state.values(), *theta.values()]
        same = len(given) == len(self.given) and all(map(operator.is_, given, self.given))
        if same and kinds == self.kinds:
            return
        import inductor  # now, as importing the compiler takes seconds

        # M as one tensor to a decay: see `fused.py`
        args = ({k: x.split(1, 1) if k[:2] == "M/" else x for k, x in state.items()}, theta)
        flat = inductor.leaves((net, *args))
        key = opt.config, opt.task, *state, *theta, *kinds
        key += tuple((x.shape, x.stride(), x.dtype, x.device) for x in flat)
        if key not in self.graphs:
            tracer = inductor.Tracer(fused.careful_rank(*theta.values()))

            def fake(x: Tensor) -> Tensor:
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

            with tracer.mode:
                fakes = tree_map_only(Tensor, fake, (net, *args, batch, t))
            self.graphs[key] = tracer.compile(opt.advance_, *fakes)
        self.given, self.kinds, self.flat, self.graph = given, kinds, flat, self.graphs[key]

    def run(self, batch: tuple[Tensor, ...], t: Tensor) -> Tensor:
        """The losses, (P,)."""
        [losses] = self.graph.run(*self.flat, *batch, t)
        return losses


class Adam:
    """Adam and AdamW for the nets of a task, each net with its own hyperparameters.

    With the task's μP rules it is μAdam: the same factors on the update as for a learned optimizer.
    Decoupled weight decay shrinks a weight by lr * weight_decay a step, as in torch.
    """

    def __init__(
        self,
        task: tasks.Task,
        lr: Tensor,  # (P,)
        b1: Tensor | float = 0.9,
        b2: Tensor | float = 0.999,
        weight_decay: Tensor | float = 0.0,
        eps: float = 1e-8,
    ):
        self.scale, self.eps = update_scales(task), eps
        self.lr = torch.as_tensor(lr, dtype=torch.float32)
        self.b1, self.b2, self.weight_decay = (
            torch.as_tensor(x, dtype=torch.float32).expand_as(self.lr)
            for x in (b1, b2, weight_decay)
        )

    def init(self, theta: Theta) -> State:
        return {f"{k}/{name}": torch.zeros_like(p) for name, p in theta.items() for k in "mv"}

    def step(
        self, state: State, theta: Theta, grads: Theta, t: int, lr: float = 1.0
    ) -> tuple[State, Theta]:
        """One step of every net, in place; t is 0 at the first."""
        corrections = 1 - self.b1 ** (t + 1), (1 - self.b2 ** (t + 1)).sqrt()
        rate, root = lr * self.lr / corrections[0], corrections[1]
        for name, p in theta.items():
            g, m, v = grads[name], state[f"m/{name}"], state[f"v/{name}"]
            per_net = [
                trailing(x.to(p.device), p.ndim)
                for x in (self.b1, self.b2, rate * self.scale[name], root, lr * self.lr)
            ]
            b1, b2, rate_, root_, lr_ = per_net
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g * (1 - b2))
            if self.weight_decay.any():
                p.mul_(1 - lr_ * trailing(self.weight_decay.to(p.device), p.ndim))
            p.sub_(rate_ * m / ((v.sqrt() / root_).add_(self.eps)))
        return state, theta


@torch.no_grad()
def train(
    task: tasks.Task,
    optimizer: LO | Callable[[tasks.Task], Adam],
    steps: int,
    seeds: list[int],
    copies: int = 1,
    schedule: Callable[[int], float] | None = None,  # of the rate, in place of annealing
    device: str = "cpu",
    look: Callable[[int, Theta], None] | None = None,
    num_steps: int | None = None,  # what VeLO is told, if not `steps`
    data_seeds: list[int] | None = None,  # of the batches; None: they go on from the seeds
) -> Tensor:
    """Train `copies` nets from each seed; the losses before each step, (steps, copies * seeds).

    Nets are ordered seeds within copies. Those of a seed share initial weights and batches; with
    `data_seeds` so do nets of other widths share batches. An `optimizer` for Adam is called with
    the task. `look(t, theta)` may watch.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    inits = [task.init(1, g) for g in generators]
    if data_seeds is not None:
        generators = [torch.Generator().manual_seed(seed) for seed in data_seeds]
    theta = {
        k: torch.cat([init[k] for init in inits] * copies).to(device) for k in inits[0]
    }  # (P, ...)
    data, P = task.data(device=device), copies * len(seeds)
    if isinstance(optimizer, LO):
        optimizer = optimizer.with_config(anneal=0.0) if schedule else optimizer
        size = sum(p.numel() for p in theta.values())
        opt = Learned(optimizer.config, task, compile=size * steps > LONG)
        phi = {k: w.to(device) for k, w in lo_module.stacked(optimizer).items()}
        net, state = (
            opt.prepare(phi),
            opt.init(theta, phi, torch.full((P,), float(num_steps or steps))),
        )
    else:
        opt = optimizer(task)
        state = opt.init(theta)
    history = []
    for t in range(steps):
        if look:
            look(t, theta)
        batch = batches(data, generators, task.batch_size, copies)
        losses, grads = gradients(task, theta, batch)
        history.append(losses.cpu())
        if t % 50 == 49 and not look and not torch.stack(history[-50:]).isfinite().any():
            history += [torch.full((P,), torch.nan)] * (steps - t - 1)  # all have diverged
            break
        lr = schedule(t) if schedule else 1.0
        if isinstance(opt, Adam):
            state, theta = opt.step(state, theta, grads, t, lr)
        else:
            now = torch.full((P,), float(t), device=device)
            state, theta = opt.step(net, state, theta, grads, losses, now, lr)
    return torch.stack(history)


def batches(
    data, generators: list[torch.Generator], size: int, copies: int = 1
) -> tuple[Tensor, ...]:
    """A batch from each generator, (copies * len(generators), size, ...): alike in all copies."""
    return tuple(torch.cat([x] * copies) for x in data.batch(generators, size))


def final_loss(losses: Tensor, share: float = 1.0) -> Tensor:
    """The final loss of each net: its mean over the last tenth of the first `share` of a run."""
    losses = losses[: max(1, round(share * len(losses)))]
    return losses[-max(1, len(losses) // 10) :].mean(0)


def with_rules(task: tasks.Task, mu: bool) -> tasks.Task:
    """The same task in μP or in SP."""
    return dataclasses.replace(task, rules=ALL if mu else ())
