"""Train P nets of one task side by side, with a learned optimizer, Adam or Muon.

    opt = Learned(config, task)
    theta = task.init(P, generator)
    state = opt.init(theta, phi, num_steps)
    losses, grads = gradients(task, theta, batch)
    opt.step(opt.prepare(phi), state, theta, grads, losses, t)      # in place

Parameters theta, weights phi and optimizer state are nested dicts of tensors with a leading axis of
P nets: the particles of meta-training, each with its own phi, or the seeds and configurations of an
evaluation, which share it. `mulo.MuLO` is the optimizer for one net; both call `mulo.advance_`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import mulo
from mulo import LO, LOConfig, Stack, Weights, features, kernels, nets, tasks
from mulo.features import Numbers, Phi, trailing
from mulo.optimizees import datasets
from mulo.optimizees.datasets import Batch
from mulo.roles import group_options, layer_outputs, size_factor, weights_of
from mulo.tasks import Theta

State = dict  # of tensors (P, ...), possibly nested
TEST_SIZE, TEST_TIMES = 2000, 10  # examples in the test loss; evaluations of it during a run


def gradients(task: tasks.Task, theta: Theta, batch: Batch, tf32=False) -> tuple[Tensor, Theta]:
    """The loss of every net, (P,), and its gradients; `tf32` allows TF32 products on a GPU."""
    theta = {k: p.detach().requires_grad_() for k, p in theta.items()}
    with torch.enable_grad(), features.float32_products("tf32" if tf32 else "ieee"):
        losses = task.losses(theta, batch)
        grads = torch.autograd.grad(losses.sum(), list(theta.values()))
    return losses.detach(), dict(zip(theta, grads, strict=True))


def groups_of(task: tasks.Task) -> dict[str, dict]:
    """roles.group_options (the μP factor and more) of each parameter, under the task's rules."""
    roles, weights = task.roles(), weights_of(task.skeleton())
    return {w.name: group_options(w, roles[w.name], task.rules) for w in weights}


class Learned:
    """A learned optimizer, small_fc or VeLO, for the nets of a task."""

    def __init__(
        self, config: LOConfig, task: tasks.Task, device: str = "cpu", backend: str = "auto"
    ):
        self.config, self.device = config, torch.device(device)
        self.backend = kernels.choose(backend, config, self.device)
        self.dims, scale, eps_scale, skeleton = {}, [], [], task.skeleton()
        for name, g in groups_of(task).items():
            shape = tuple(skeleton.get_parameter(name).shape)
            self.dims[name] = features.factored_dims(shape, g["out_axis"])
            scale.append(g["scale"] * size_factor(g["kind"], g["fan_in"], g["area"], config))
            eps_scale.append(1 / g["fan_in"] if config.eps == "fan_in" else 1.0)
        no_decay = [0.0] * len(scale)
        self.fixed = torch.tensor([scale, no_decay, eps_scale]).unsqueeze(1)  # (3, 1, T)
        self._stacks: dict[str, Stack] = {}

    def init(self, theta: Theta, phi: Phi, num_steps: Tensor) -> State:
        """The initial state; VeLO's depends on num_steps, (P,) on the CPU."""
        acc = {k: features.init_accumulators(p, self.dims[k]) for k, p in theta.items()}
        if self.config.net == "small_fc":
            return {"acc": acc}
        device, bugged = self.device, self.config.use_bugged_loss_features
        decays = [features.loss_decays(int(n), bugged, device) for n in num_steps]
        shape = len(num_steps), len(theta), self.config.lstm_hidden
        return {
            "acc": acc,
            "num_steps": num_steps.to(device).unsqueeze(1),
            "decays": torch.stack(decays),
            "losses": features.init_loss_buffer(len(num_steps), device=device),
            "hidden": phi["hidden0"].expand(shape).clone(),
            "cell": phi["cell0"].expand(shape).clone(),
        }

    def prepare(self, phi: Phi) -> Weights | Phi:
        """Prepare phi, (P | 1, ...), for any number of calls of `step`."""
        if self.config.net == "velo":
            return nets.fused(self.config, phi)
        return Weights(self.config, phi, self.backend)

    def step(
        self,
        weights: Weights | Phi,  # from `prepare`
        state: State,
        theta: Theta,
        grads: Theta,
        losses: Tensor,  # (P,)
        t: Tensor,  # (P,) on the CPU, 0 at the first step
        lr: float = 1.0,
    ) -> None:
        """One step of every net, in place."""
        stacks = [self._stack(name, state, theta) for name in self.dims]
        shape = len(t), len(theta)
        t, scale, decay, eps_scale = (x.expand(shape) for x in (t.unsqueeze(1), *self.fixed))
        scale = scale * lr
        if self.config.net == "velo":
            weights = self._generate(weights, state, stacks, losses, t)
            scale = scale * features.annealing(t, self.config.t_max, self.config.anneal)
        numbers = Numbers(*(x.numpy() for x in (t, scale, decay, eps_scale)))
        grads = [grads[name] for name in self.dims]
        mulo.advance_(self.config, self.backend, weights, stacks, grads, numbers)

    def _stack(self, name: str, state: State, theta: Theta) -> Stack:
        """The nets' tensors of one name, cached until they are replaced."""
        p, acc, cached = theta[name], state["acc"][name], self._stacks.get(name)
        if cached is None or cached.p is not p or cached.acc is not acc:
            rows = kernels.rows(p, acc, self.dims[name])
            cached = self._stacks[name] = Stack(p, acc, self.dims[name], rows)
        return cached

    def _generate(
        self, phi: Phi, state: State, stacks: list[Stack], losses: Tensor, t: Tensor
    ) -> Weights:
        """VeLO: generate each tensor's MLP and alpha, and update the LSTM in `state`."""
        config = self.config
        statistics = mulo.statistics_of(config, self.backend, stacks)
        ranks = features.rank_one_hot([x.p.shape[1:] for x in stacks], self.device)
        x_tensor = features.tensor_features(statistics, ranks)
        t = features.send(t, self.device)
        x_time = features.fraction_features(t, state["num_steps"], config.spec)
        inputs = state["decays"], x_time, x_tensor, state["hidden"], state["cell"]
        state["losses"], state["hidden"], state["cell"], packed, alpha = mulo.generate(
            phi, state["losses"], losses, *inputs
        )
        if config.param_scale_mult:
            alpha = alpha * features.param_scale(statistics[..., 0])
        return Weights(config, packed, self.backend, alpha)


class Adam:
    """Adam and AdamW for the nets of a task, each net with its own hyperparameters.

    If the task's rules are μP it is μAdam: updates have the μP factors of a learned optimizer.
    Weight decay is decoupled, as in torch: a weight shrinks by lr * weight_decay per step.
    """

    def __init__(
        self,
        task: tasks.Task | dict[str, dict],  # or the options of each parameter, from groups_of
        lr: Tensor,  # (P,)
        b1: Tensor | float = 0.9,
        b2: Tensor | float = 0.999,
        weight_decay: Tensor | float = 0.0,
    ):
        self.groups = task if isinstance(task, dict) else groups_of(task)
        numbers = [torch.as_tensor(x, dtype=torch.float32) for x in (lr, b1, b2, weight_decay)]
        self.numbers = torch.stack([x.expand_as(numbers[0]) for x in numbers])  # (4, P)

    def init(self, theta: Theta) -> State:
        self.numbers = self.numbers.to(next(iter(theta.values())).device)
        return {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in theta.items()}

    def step(self, state: State, theta: Theta, grads: Theta, t: int, lr: float = 1.0) -> None:
        """One step of every net, in place; t is 0 at the first."""
        rate, b1, b2, weight_decay = self.numbers  # (P,) each
        rate, shrink = lr * rate / (1 - b1 ** (t + 1)), 1 - lr * rate * weight_decay
        numbers = rate, b1, b2, (1 - b2 ** (t + 1)).sqrt(), shrink
        for name, p in theta.items():
            g, (m, v) = grads[name], state[name]
            rate, b1, b2, root, shrink = (trailing(x, p.ndim) for x in numbers)  # (P, 1, ...) each
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g * (1 - b2))
            p.mul_(shrink)
            p.sub_(rate * self.groups[name]["scale"] * m / ((v.sqrt() / root).add_(1e-8)))


def orthogonalise(d: Tensor) -> Tensor:
    """Bring all singular values of d, (P, m, n), near 1, by five steps of Newton-Schulz."""
    x = d if d.shape[1] <= d.shape[2] else d.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-8)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if d.shape[1] <= d.shape[2] else x.mT


class Muon(Adam):
    """Orthogonalised momentum for all matrices; Adam for biases, norms and embeddings.

    A matrix moves by lr * sqrt(fan_out / fan_in) times an orthogonal matrix; with this factor the
    best lr depends little on width. A convolution is a matrix of its output channels. Made for the
    schedule `warmup_cosine`.
    """

    LR, VECTOR_LR, MOMENTUM = 0.024, 0.06, 0.95

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rates = self.numbers[0].clone()
        self.numbers[0] = self.VECTOR_LR  # of Adam

    def init(self, theta: Theta) -> State:
        kinds = {name: group["kind"] for name, group in self.groups.items()}
        self.vectors = [k for k in theta if kinds[k] in ("bias", "norm", "table")]
        return super().init(theta)

    def step(self, state: State, theta: Theta, grads: Theta, t: int, lr: float = 1.0) -> None:
        super().step(state, {k: theta[k] for k in self.vectors}, grads, t, lr)
        for name in theta.keys() - self.vectors:
            p, g, (m, _) = theta[name], grads[name], state[name]
            m.lerp_(g, 1 - self.MOMENTUM)
            d = g.lerp(m, self.MOMENTUM).flatten(2)  # (P, fan_out, fan_in)
            rate = lr * self.rates.to(d) * (d.shape[1] / d.shape[2]) ** 0.5
            p.sub_((trailing(rate, 3) * orthogonalise(d)).view_as(p))


def cosine(x: Tensor | float) -> Tensor:
    """The factor of a cosine schedule at the fraction x of a run: from 1 to 0.1."""
    return 0.55 + 0.45 * torch.cos(torch.as_tensor(torch.pi * x))


def warmup_cosine(t: int, steps: int) -> float:
    """A cosine schedule from 1 to 0.01, with linear warm-up over the first 5 % of the steps."""
    x = math.pi * min(t, steps) / steps
    return min(1.0, (t + 1) / (0.05 * steps)) * (0.505 + 0.495 * math.cos(x))


@torch.no_grad()
def train(
    task: tasks.Task,
    optimizer: LO | Callable[[tasks.Task], Adam],  # an LO, or a factory task -> Adam
    steps: int,
    seeds: list[int],
    copies: int = 1,  # nets per seed
    schedule: Callable[[int], float] | None = None,  # t -> factor on lr; no annealing
    device: str = "cpu",
    callback: Callable[[int, Theta], None] | None = None,  # before every step and after the last
    data_seeds: list[int] | None = None,  # of batches; None: continue with the init generators
) -> Tensor:
    """Train `copies` nets from each seed. Returns losses of shape (steps, copies * seeds).

    Copies of a seed share init and batches. Pass data_seeds to give nets of different widths the
    same batches.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    inits = [task.init(1, g) for g in generators]
    if data_seeds is not None:
        generators = [torch.Generator().manual_seed(seed) for seed in data_seeds]
    theta = {k: torch.cat([x[k] for x in inits] * copies).to(device) for k in inits[0]}  # (P, ...)
    data, P = task.data(device=device), copies * len(seeds)
    if isinstance(optimizer, LO):
        if schedule:
            optimizer = optimizer.with_config(anneal=0.0)
        opt = Learned(optimizer.config, task, device)
        phi = {k: w.to(device) for k, w in mulo.stacked(optimizer).items()}
        state = opt.init(theta, phi, torch.full((P,), float(steps)))
        weights = opt.prepare(phi)
    else:
        opt = optimizer(task)
        state = opt.init(theta)
    history = torch.empty(steps, P, device=device)
    for t in range(steps):
        if callback:
            callback(t, theta)
        batch = batches(data, generators, task.batch_size, copies)
        losses, grads = gradients(task, theta, batch)
        history[t] = losses
        lr = schedule(t) if schedule else 1.0
        if isinstance(opt, Adam):
            opt.step(state, theta, grads, t, lr)
        else:
            opt.step(weights, state, theta, grads, losses, torch.full((P,), float(t)), lr)
    if callback:
        callback(steps, theta)
    return history.cpu()


def batches(data, generators: list[torch.Generator], size: int, copies: int = 1) -> Batch:
    """A batch per generator, repeated for every copy: (copies * len(generators), size, ...)."""
    return tuple(torch.cat([x] * copies) for x in data.batch(generators, size))


def probe(task: tasks.Task, steps: Sequence[int], device: str) -> tuple[Callable, dict]:
    """A callback for `train`, and its records by step and layer: the standard deviation of the
    change of the layer's pre-activations y on 64 inputs, and mean |y|. For MLPs."""
    x = task.data(device=device).batch([torch.Generator().manual_seed(123)], 64)[0][0]
    first, records = {}, {}

    def callback(t: int, theta: Theta) -> None:
        if t in (0, *steps):
            inputs = x.expand(len(next(iter(theta.values()))), *x.shape)
            for name, y in layer_outputs(task.skeleton(), inputs, theta).items():
                change = (y - first.setdefault(name, y)).flatten(1).std(1).mean()
                records[t, name] = [float(f"{v:.5g}") for v in (change, y.abs().mean())]

    return callback, records


def watch_test_loss(task: tasks.Task, steps: int, device: str) -> tuple[Callable, list[Tensor]]:
    """A callback for `train`, and the list of its records: the mean loss of each net on TEST_SIZE
    test examples, (P,), at up to TEST_TIMES evenly spaced steps and at the end."""
    test = dataclasses.replace(task, split="test").data(device=device)
    sample = datasets.fixed_sample(test, TEST_SIZE)
    chunks = list(zip(*(x.split(100) for x in sample), strict=True))
    times, records = {k * steps // TEST_TIMES for k in range(TEST_TIMES + 1)}, []

    def callback(t: int, theta: Theta) -> None:
        if t in times:
            P = len(next(iter(theta.values())))
            expanded = (tuple(x.expand(P, *x.shape) for x in chunk) for chunk in chunks)
            sums = [task.losses(theta, batch) * batch[0].shape[1] for batch in expanded]
            records.append(torch.stack(sums).sum(0).cpu() / len(sample[0]))

    return callback, records


def final_loss(losses: Tensor, share: float = 1.0) -> Tensor:
    """The final loss of each net: the mean over the last tenth of the first `share` of a run."""
    losses = losses[: max(1, round(share * len(losses)))]
    return losses[-max(1, len(losses) // 10) :].mean(0)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: with small nets, page faults cost more than the arithmetic."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # not glibc: only slower
