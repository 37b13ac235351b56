"""μLO: train any PyTorch model with a learned optimizer under the Maximal Update Parametrization.

    roles = mulo.infer_roles(build, width)      # build(width) makes your model
    model = mulo.init_(build(width), roles)
    opt = mulo.MuLO(mulo.param_groups(model, roles), mulo.load("mulo_m"))
    ...; loss.backward(); opt.step(); opt.zero_grad()

In this order: the configuration, the networks `SmallFC` and `VeLO`, the step as the paper tells it
(eq. 2 and 3), and the Optimizer. `features.py` has what the networks see, `roles.py` the rules of
μP, `checkpoints.py` the files; all public names are here. `kernels/` has the same step made fast.

Weights phi are dicts of tensors with leading axes, 1 where shared: (S | 1, ...) in `step`, and
(P | 1, T | 1, ...) in `Weights`, for P nets (particles of meta-training; 1 in MuLO) of T tensors.
The paper's T, the length of a run, is `num_steps` here.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from numbers import Integral

import numpy as np
import torch
from torch import Tensor, nn

__version__ = "0.2.0"
__path__ = [os.path.dirname(os.path.abspath(__file__))]  # files beside this one are submodules

from mulo import features, kernels, roles
from mulo.features import Accumulators, Dims, Eps, LossBuffer, Phi, trailing
from mulo.kernels import folded
from mulo.roles import RULES, Readout, infer_roles, init_, multiply_outputs_, param_groups

CHECKPOINT_NAMES = ("from_pylo", "from_reference", "load", "save")  # of checkpoints.py
__all__ = ["LO", "RULES", "LOConfig", "MuLO", "Readout", "SmallFC", "VeLO", "infer_roles", "init_"]
__all__ += ["multiply_outputs_", "param_groups", *CHECKPOINT_NAMES]


def __getattr__(name: str):
    """Import `CHECKPOINT_NAMES` on first use, as checkpoints.py imports this module."""
    if name in CHECKPOINT_NAMES:
        from mulo import checkpoints

        return getattr(checkpoints, name)
    raise AttributeError(f"module 'mulo' has no attribute {name!r}")


# ---------------------------------------------------------------- configuration and networks


@dataclasses.dataclass(frozen=True)
class LOConfig:
    """Everything about a learned optimizer that is not a weight; stored in its checkpoint."""

    net: str = "small_fc"  # or "velo"
    hidden_size: int = 32  # the authors' configuration; 4 in the paper's text
    hidden_layers: int = 2  # paper, appendix A.1.1
    lam1: float = 0.001  # lambda_1 of eq. 2; 0.01 for the small_fc μLOs (paper, appendix C)
    lam2: float = 0.001  # lambda_2 of eq. 2
    spec: str = "reference"  # or "paper": the paper's literal time features, 29 VeLO features
    eps: str = "reference"  # or "relative" (to a tensor's gradients), "fan_in" (times 1/fan_in)
    eps_rms: float = 1e-5  # of the RMS normaliser; the reference's, 0 in the paper
    t_max: float | None = None  # time features see min(t, t_max): the meta-trained horizon
    anneal: float = 0.0  # small_fc: beyond t_max updates shrink as (t_max / t)^anneal
    input_base: float | None = None  # inputs in meta-training: see roles.size_factor
    by_channels: bool = False  # hidden convolutions by 1/channels: see roles.size_factor
    multipliers: bool = False  # small_fc: a learned factor for each of roles.TENSOR_KINDS
    lstm_hidden: int = 128  # VeLO: the reference's class defaults (512 and 256 in released VeLO)
    param_inits: int = 64  # VeLO: size of the bank of per-parameter MLPs
    param_scale_mult: bool = False  # VeLO: multiply the update by RMS(W); off for μVeLO
    use_bugged_loss_features: bool = False  # VeLO: all loss means over 10 steps (old checkpoints)

    def __post_init__(self):
        choices = {"net": ("small_fc", "velo"), "spec": ("reference", "paper")}
        choices["eps"] = ("reference", "relative", "fan_in")
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} is unknown: use one of {allowed}.")
        for name in ("hidden_size", "hidden_layers", "lstm_hidden", "param_inits"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, not {getattr(self, name)!r}.")
        for name in ("lam1", "lam2", "eps_rms", "anneal"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number of 0 or more, not {value!r}.")
        for name, value in (("t_max", self.t_max), ("input_base", self.input_base)):
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} must be None or a number above 0, not {value!r}.")
        if self.multipliers and self.net == "velo":
            raise ValueError("VeLO scales each tensor by its alpha: leave multipliers off.")

    @property
    def feature_set(self) -> str:
        """Which feature set: "small_fc", "velo" or "velo_paper"."""
        return "velo_paper" if (self.net, self.spec) == ("velo", "paper") else self.net

    @property
    def num_features(self) -> int:
        return len(features.feature_names(self.feature_set))

    def layer_sizes(self) -> list[int]:
        return [self.num_features, *[self.hidden_size] * self.hidden_layers, 2]


def _truncated_normal(*shape: int, fan_in: int, generator: torch.Generator | None) -> Tensor:
    """N(0, 1/fan_in) truncated at two standard deviations: the reference's init."""
    return nn.init.trunc_normal_(torch.empty(shape), generator=generator).mul_(fan_in**-0.5)


class LO(nn.Module):
    """Weights phi with their config. Subclasses say which weights there are and how they start."""

    default: LOConfig
    mup: bool | None = None  # whether it was meta-trained under μP, if that is known

    def __init__(self, config: LOConfig | None = None, generator: torch.Generator | None = None):
        super().__init__()
        self.config = dataclasses.replace(config or self.default, net=self.default.net)
        for name, value in self.initial_weights(self.config, generator).items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def with_config(self, **fields) -> LO:
        """A copy with the same weights under another config."""
        new = type(self)(dataclasses.replace(self.config, **fields), torch.Generator())
        new.load_state_dict(self.state_dict())
        new.mup = self.mup
        return new.to(next(self.parameters()).device)

    def __repr__(self):
        return f"{type(self).__name__}({self.config})"


class SmallFC(LO):
    """small_fc_lopt: one MLP for every parameter; its decays are weights too, as offsets."""

    default = LOConfig()

    @staticmethod
    def initial_weights(config: LOConfig, generator: torch.Generator | None) -> Phi:
        phi = {}
        for k, (n, m) in enumerate(pairwise(config.layer_sizes())):
            phi[f"w{k}"] = _truncated_normal(n, m, fan_in=n, generator=generator)
            phi[f"b{k}"] = torch.zeros(m)
        vectors = {"momentum_decays": 3, "rms_decays": 1, "adafactor_decays": 3}
        vectors |= {"multipliers": len(roles.TENSOR_KINDS)} if config.multipliers else {}
        return phi | {name: torch.zeros(n) for name, n in vectors.items()}


class VeLO(LO):
    """An LSTM that generates, at each step, an MLP and a learning rate alpha for every tensor."""

    default = LOConfig(net="velo", hidden_size=4)

    @staticmethod
    def initial_weights(config: LOConfig, generator: torch.Generator | None) -> Phi:
        H, K = config.lstm_hidden, config.param_inits
        phi = {}
        for name, n, m in (
            ("mix", 30, H),  # linear_1 of the reference: its maximum over tensors is shared by all
            ("embed", 30, H),  # linear_2
            ("lstm", 2 * H, 4 * H),
            ("controls", H, K),
            ("alpha", H, 1),  # step_size
        ):
            phi[f"{name}_w"] = _truncated_normal(n, m, fan_in=n, generator=generator)
            phi[f"{name}_b"] = torch.zeros(m)
        phi |= {"hidden0": torch.zeros(1, H), "cell0": torch.zeros(1, H)}
        for k, (n, m) in enumerate(pairwise(config.layer_sizes())):
            phi[f"bank_w{k}"] = _truncated_normal(K, n, m, fan_in=n, generator=generator)
            phi[f"bank_b{k}"] = torch.zeros(K, m)
        return phi


NETS = {"small_fc": SmallFC, "velo": VeLO}


def stacked(lo: LO) -> Phi:
    """The weights of an LO with a leading axis of 1, as `step` takes them."""
    return {name: w.unsqueeze(0) for name, w in lo.named_parameters(recurse=False)}


def mlp(phi: Phi, x: Tensor, hidden_layers: int) -> Tensor:
    """f_phi(A) = W2 relu(W1 relu(W0 A + b0) + b1) + b2, for x (S, ..., F) -> (S, ..., 2)."""
    shape = x.shape
    x = x.reshape(shape[0], -1, shape[-1])
    for k in range(hidden_layers + 1):
        x = x @ phi[f"w{k}"] + phi[f"b{k}"].unsqueeze(1)
        x = x.relu() if k < hidden_layers else x
    return x.reshape(*shape[:-1], 2)


def lstm_step(
    phi: Phi,  # (P | 1, ...) each
    x: Tensor,  # (P, T, 30): features of the T tensors of P nets
    h: Tensor,  # (P, T, H)
    cell: Tensor,  # (P, T, H)
) -> tuple[Tensor, Tensor]:
    """One LSTM step for every tensor, fed with its own features and a maximum over all tensors."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ phi[f"{name}_w"] + phi[f"{name}_b"].unsqueeze(-2)

    y = linear("embed", x) + linear("mix", x).relu().amax(-2, keepdim=True)
    i, g, f, o = linear("lstm", torch.cat([y, h], -1)).chunk(4, -1)
    cell = torch.sigmoid(f + 1) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def hypernetwork(config: LOConfig, phi: Phi, h: Tensor) -> tuple[Phi, Tensor]:
    """From the LSTM's output h (P, T, H): MLP weights (P, T, ...) and the rate alpha (P, T).

    phi_W = 100 mean_k(control_k bank_k). DIVERGES: alpha is the raw linear output, which may be
    negative; the paper only calls it a learning-rate multiplier.
    """
    control = h @ phi["controls_w"] + phi["controls_b"].unsqueeze(-2)  # (P, T, K)
    control = control * (100 / config.param_inits)
    weights = {}
    for k in range(config.hidden_layers + 1):
        for n in "wb":
            bank = phi[f"bank_{n}{k}"]  # (P | 1, K, ...)
            weights[f"{n}{k}"] = (control @ bank.flatten(2)).unflatten(-1, bank.shape[2:])
    return weights, (h @ phi["alpha_w"] + phi["alpha_b"].unsqueeze(-2)).squeeze(-1)


def generate(
    config: LOConfig,
    phi: Phi,
    memory: LossBuffer,  # of P nets
    loss: Tensor,  # (P,)
    decays: Tensor,  # (10,) or (P, 10), from features.loss_decays
    t: Tensor,  # (P, T)
    num_steps: Tensor | int,  # the length of the run; (P, 1) if nets differ
    x_tensor: Tensor,  # (P, T, 12), from features.tensor_features
    h: Tensor,  # (P, T, H)
    cell: Tensor,  # (P, T, H)
    fractions: Tensor | None = None,  # an exported graph passes its own, as for `timescales`
) -> tuple[LossBuffer, Tensor, Tensor, Phi, Tensor]:
    """VeLO before each step: advance the LSTM. Returns memory, h, cell, MLP weights and alpha.

    P nets of T tensors each; the weights are (P, T, ...), alpha is (P, T).
    """
    memory, x_loss = features.loss_features(memory, loss, decays)
    x_time = features.fraction_features(t, num_steps, config.spec, fractions)
    x_loss = x_loss.unsqueeze(1).expand(-1, t.shape[1], -1)
    x = torch.cat([x_time, x_loss, x_tensor], -1)  # (P, T, 30)
    h, cell = lstm_step(phi, x, h, cell)
    return memory, h, cell, *hypernetwork(config, phi, h)


# ---------------------------------------------------------------- the step


def step(
    config: LOConfig,
    phi: Phi,  # w0 (S | 1, 39, h), b0 (S | 1, h), ...
    acc: Accumulators,
    p: Tensor,  # (S, *shape)
    g: Tensor,  # (S, *shape)
    t: Tensor,  # () or (S,), 0 at the first step
    scale: Tensor,  # (S,): lr times the μP factor, times alpha for VeLO
    dims: Dims,
    decay: Tensor | float = 0.0,  # (S,): lr times weight decay
    eps_scale: Tensor | float = 1.0,  # (S,): 1/fan_in with eps="fan_in", else 1
) -> tuple[Accumulators, Tensor]:
    """One step of S equal-shaped tensors: accumulate, build the features, normalise, MLP, update.

    A pure function, written to be read. The other backends compute the same and are tested
    against it.
    """
    eps, rates = Eps(config.eps, config.eps_rms, eps_scale), features.rates_of(phi)
    p, g = features.wide(p), features.clean(g, features.CLIP[config.net]).to(acc.V)
    shape = p.shape[1:]
    acc = features.accumulate(acc, g, dims, rates, eps)
    x = features.parameter_features(p.to(acc.V), g, acc, dims, eps, config.feature_set)
    A_hat = torch.cat([x_k.expand(-1, -1, *shape).flatten(2).mT for x_k in x.values()], -1)
    A = A_hat * features.inverse_rms(A_hat.square().mean(1), eps).unsqueeze(1)  # A_bar, (S, n, 28)
    if config.net == "small_fc":
        x_time = features.time_features(t.reshape(-1, 1), config.t_max, config.spec)
        A = torch.cat([A, x_time.expand(len(p), A.shape[1], -1)], -1)  # (S, n, 39)
        scale = scale * features.annealing(t, config.t_max, config.anneal)
    d, m = mlp(phi, A, config.hidden_layers).unflatten(1, shape).unbind(-1)  # (S, *shape) each
    update = config.lam1 * d * (config.lam2 * m).exp()  # eq. 2; alpha is in `scale`
    new_p = p - trailing(scale, p.ndim) * update - trailing(decay, p.ndim) * p  # eq. 3, and decay
    return acc, new_p


@dataclasses.dataclass
class Stack:
    """P tensors of one shape (the S of `step`) and their accumulators; `advance_` updates them."""

    p: Tensor  # (P, *shape)
    acc: Accumulators
    dims: Dims
    rows: np.ndarray | None = None  # addresses, by kernels.rows; None: no kernel


class Weights:
    """The weights of the step for P nets of T tensors, and what can be computed once from them."""

    def __init__(self, config: LOConfig, phi: Phi, backend: str):
        self.phi, self.packed = phi, None  # (P | 1, T | 1, ...) each
        if "w0" in phi:  # not in VeLO's own weights, which generate w0 at each step
            rates = features.rates_of(phi)._asdict()
            self.phi = phi | {f"rate_{k}": x for k, x in rates.items()}
            self.packed = kernels.pack(config, self.phi) if backend == "kernel" else None


def advance_(
    config: LOConfig,
    backend: str,  # "kernel", "folded" or "literal"
    weights: Weights,
    stacks: list[Stack],  # T of them, of P tensors each
    grads: list[Tensor],  # (P, *shape) each
    values: Tensor,  # (4, P, T): t, scale, decay, eps_scale, as in `step`
    count: bool = False,
) -> Tensor | int:
    """Step the stacks in place; with `count`, return how many entries of g are NaN or infinite."""
    bad, slow = 0, range(len(stacks))
    if backend == "kernel":
        fast = [n for n in slow if stacks[n].rows is not None]
        slow = [n for n in slow if stacks[n].rows is None]
        if fast:
            rows, params = [stacks[n].rows for n in fast], [stacks[n].p for n in fast]
            fast_grads = [grads[n] for n in fast]
            bad = kernels.step_(config, rows, params, fast_grads, weights.packed, values, fast)
    pure_step = step if backend == "literal" else folded.step
    for n in slow:
        x, g = stacks[n], grads[n]
        phi = {k: w[:, n if w.shape[1] > 1 else 0] for k, w in weights.phi.items()}
        t, scale, decay, eps_scale = values[..., n]
        eps_scale = eps_scale if config.eps == "fan_in" else 1.0
        acc, p = pure_step(config, phi, x.acc, x.p, g, t, scale, x.dims, decay, eps_scale)
        bad = bad + (~g.isfinite()).sum() if count else bad
        torch._foreach_copy_([x.p, *x.acc], [p, *acc])
    return bad


# ---------------------------------------------------------------- the Optimizer


class MuLO(torch.optim.Optimizer):
    """Trains a model with a learned optimizer, SmallFC or VeLO.

    A torch optimizer like any other, with these keys in its param groups:

    lr            a plain factor on the update, 1 by default, for schedulers to drive; with a
                  scheduler of torch's, updates do not anneal by themselves (LOConfig.anneal)
    weight_decay  decoupled: a parameter shrinks by lr * weight_decay per step
    scale         the μP factor on the update, from `param_groups`, apart from lr so that no
                  scheduler overwrites it (with it come fan_in, out_axis, names, role, kind, area)
    step          t, the time that the learned optimizer sees: 0 at first, and settable

    VeLO needs num_steps, the length of the run, and the loss: `step(loss=loss)` or a closure. State
    is float32 for parameters of any dtype. Gradient entries that are NaN or infinite count as 0 and
    are counted in `nonfinite`. `backend`: "literal" runs the step of this file, "folded" the same
    with less memory moved, "kernel" C++ on CPUs and Triton on CUDA. "auto" takes the kernel if it
    can be built and, in a check at first use, agrees with "folded".
    """

    def __init__(
        self,
        params: Iterable,
        lo: LO,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        num_steps: int | None = None,
        backend: str = "auto",
    ):
        if not isinstance(lo, LO):
            raise TypeError(f"lo must be a learned optimizer, as mulo.load gives, not {lo!r}.")
        if isinstance(lo, VeLO) and not (isinstance(num_steps, Integral) and num_steps > 0):
            raise ValueError(f"VeLO needs num_steps, the length of the run, not {num_steps!r}.")
        if isinstance(params, nn.Module):
            raise TypeError("params are not a model: use mulo.param_groups(model, roles).")
        if backend not in kernels.BACKENDS:
            choices = ", ".join(kernels.BACKENDS)
            raise ValueError(f"unknown backend {backend!r}: use one of {choices}.")
        params = params if isinstance(params, Tensor) else list(params)
        if problem := roles.mismatch(lo.mup, params):
            warnings.warn(f"this learned optimizer was meta-trained {problem}", stacklevel=2)
        self.lo, self.num_steps, self.backend = lo, num_steps, backend
        self._nonfinite: dict[torch.device, Tensor] = {}
        self._forget()
        defaults = {"lr": lr, "weight_decay": weight_decay, "scale": 1.0, "step": 0}
        super().__init__(params, defaults | {"fan_in": 1, "out_axis": 0} | roles.UNSCALED)

    def __repr__(self) -> str:
        head = f"{type(self).__name__} ({self.lo.config.net})"
        return f"{head}\n{roles.group_table(self.param_groups)}"

    def _forget(self) -> None:
        """Empty the caches of what is derived from parameters, state and weights."""
        self._stacks: dict[nn.Parameter, tuple[tuple, list[Tensor], Stack]] = {}
        self._shared: dict[torch.device, tuple[LOConfig, bytes | list, Weights]] = {}

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        try:
            roles.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | float | None = None
    ) -> Tensor | float | None:
        """Update every parameter that has a gradient; returns the loss it was given, if any."""
        if closure is not None:
            if loss is not None or not callable(closure):
                raise TypeError("step takes a closure or the loss: write step(loss=loss).")
            with torch.enable_grad():
                loss = closure()
        velo = self.lo.config.net == "velo"
        if velo and loss is None:
            raise RuntimeError("VeLO needs the loss: call step(loss=loss), or pass a closure.")
        params = self._with_gradients()
        stacks = [self._stack(p, group) for p, group in params]
        phi, alpha = self._generate(params, stacks, loss) if velo and params else ({}, None)
        for device in dict.fromkeys(p.device for p, _ in params):
            here = [k for k, (p, _) in enumerate(params) if p.device == device]
            part = slice(None) if len(here) == len(params) else here
            backend = kernels.choose(self.backend, self.lo.config, device)
            values = self._values([params[k][1] for k in here], device)
            if velo:
                phi_here = {name: w[:, part].to(device) for name, w in phi.items()}
                weights = Weights(self.lo.config, phi_here, backend)
                values[1] *= alpha[:, part].to(device)
            else:
                weights = self._weights_on(device)
                if self.lo.config.multipliers:
                    kinds = roles.kind_indices([params[k][1]["kind"] for k in here], device)
                    values[1] *= roles.learned_factors(weights.phi["multipliers"], kinds)
            grads = [params[k][0].grad.view_as(stacks[k].p) for k in here]
            bad = self._advance(backend, weights, [stacks[k] for k in here], grads, values)
            self._nonfinite[device] = self._nonfinite.get(device, 0) + bad
        for group in self.param_groups:
            group["step"] = group["step"] + 1
        self._warn_nonfinite()
        return loss

    def _advance(self, *args) -> Tensor | int:
        """`advance_`, which a subclass may run elsewhere."""
        return advance_(self.lo.config, *args, count=True)

    def _with_gradients(self) -> list[tuple[nn.Parameter, dict]]:
        members = ((p, group) for group in self.param_groups for p in group["params"])
        params = [(p, group) for p, group in members if p.grad is not None and p.numel()]
        if sparse := [roles.name_of(*x) for x in params if x[0].grad.layout != torch.strided]:
            fix = f"build the layer of parameter {sparse[0]} with sparse=False"
            raise RuntimeError(f"MuLO takes dense gradients only: {fix}.")
        return params

    def _values(self, groups: list[dict], device: torch.device) -> Tensor:
        """t, scale, decay and eps_scale of each tensor, (4, 1, T), in one copy to the device."""
        config, rows = self.lo.config, []
        for g in groups:
            scale = g["scale"] * roles.size_factor(g["kind"], g["fan_in"], g["area"], config)
            if "initial_lr" in g and config.t_max:  # a torch scheduler drives lr: undo `annealing`
                scale = scale * max(1.0, g["step"] / config.t_max) ** config.anneal
            eps_scale = 1 / g["fan_in"] if config.eps == "fan_in" else 1.0
            rows.append((g["step"], g["lr"] * scale, g["lr"] * g["weight_decay"], eps_scale))
        values = torch.tensor(rows, dtype=torch.float32).T.unsqueeze(1)
        return features.send(values, device)

    def _weights_on(self, device: torch.device) -> Weights:
        """The learned optimizer's weights on a device, cached until they change."""
        config, weights = self.lo.config, list(self.lo._parameters.values())
        if weights[0].device.type == "cpu":
            key = torch.cat([w.detach().flatten() for w in weights]).float().numpy().tobytes()
        else:  # reading values would sync a GPU
            key = [(w.data_ptr(), w._version) for w in weights]
        if device not in self._shared or self._shared[device][:2] != (config, key):
            phi = {k: w.to(device, torch.float32).unsqueeze(0) for k, w in stacked(self.lo).items()}
            backend = kernels.choose(self.backend, config, device)
            self._shared[device] = config, key, Weights(config, phi, backend)
        return self._shared[device][2]

    def _stack(self, p: nn.Parameter, group: dict) -> Stack:
        """A parameter with its state, as a stack of one; cached until either is replaced."""
        state = self.state[p]
        if "M" not in state:
            state |= self.new_state(p, group["out_axis"])
        tensors = [state[k] for k in Accumulators._fields]
        layout = p.data_ptr(), p.shape, p.stride()
        cached = self._stacks.get(p)
        if cached is None or cached[0] != layout or not all(map(operator.is_, tensors, cached[1])):
            shape = tuple(p.shape) or (1,)  # a scalar is a vector of one
            one, acc = p.detach().view(1, *shape), Accumulators(*(x.unsqueeze(0) for x in tensors))
            dims = features.factored_dims(shape, group["out_axis"])
            stack = Stack(one, acc, dims, kernels.rows(one, acc, dims))
            cached = self._stacks[p] = layout, tensors, stack
        return cached[2]

    def new_state(self, p: Tensor, out_axis: int) -> dict[str, Tensor]:
        """Zero accumulators of one parameter; for VeLO also the LSTM's first state."""
        one = p.new_empty((1, *(tuple(p.shape) or (1,))))
        acc = features.init_accumulators(one, features.factored_dims(one.shape[1:], out_axis))
        state = {k: x[0] for k, x in acc._asdict().items()}
        if isinstance(self.lo, VeLO):
            first = {"h": self.lo.hidden0[0], "cell": self.lo.cell0[0]}
            how = {"device": p.device, "dtype": torch.float32, "copy": True}
            state |= {k: x.detach().to(**how) for k, x in first.items()}
        return state

    def _generate(
        self, params: list[tuple[nn.Parameter, dict]], stacks: list[Stack], loss: Tensor | float
    ) -> tuple[Phi, Tensor]:
        """VeLO: step the LSTM of all T tensors; their MLPs, (1, T, ...), and alphas, (1, T)."""
        config, device = self.lo.config, params[0][0].device
        loss = features.send(torch.as_tensor(loss, dtype=torch.float32).detach(), device)
        if loss.numel() != 1:
            raise ValueError(f"VeLO needs one loss, not {tuple(loss.shape)}: take its mean.")
        memory = self.state.get("loss")
        memory = LossBuffer(**memory) if memory else features.init_loss_buffer(device=device)
        memory = LossBuffer(*(x[None].to(device) for x in memory))
        states = [self.state[p] for p, _ in params]
        x_tensor = [features.tensor_features(x.p, x.acc.M, x.acc.V).float() for x in stacks]
        x_tensor = torch.cat([x.to(device) for x in x_tensor])
        h, cell = (torch.stack([s[k].to(device) for s in states]) for k in ("h", "cell"))
        lo_phi = {k: w[0] for k, w in self._weights_on(device).phi.items()}
        decays = features.loss_decays(self.num_steps, config.use_bugged_loss_features, device)
        t = self._values([group for _, group in params], device)[0]
        per_tensor = (x[None] for x in (x_tensor, h, cell))
        memory, h, cell, phi, alpha = generate(
            config, lo_phi, memory, loss.reshape(1), decays, t, self.num_steps, *per_tensor
        )
        self.state["loss"] = {k: x[0] for k, x in memory._asdict().items()}
        for s, h_k, cell_k in zip(states, h[0], cell[0], strict=True):
            s["h"], s["cell"] = h_k, cell_k
        if config.param_scale_mult:
            scales = [self._param_scale(x).to(device, alpha.dtype) for x in stacks]
            alpha = alpha * torch.stack(scales, 1)
        return phi, alpha

    def _param_scale(self, x: Stack) -> Tensor:
        return features.param_scale(x.p)

    @property
    def nonfinite(self) -> int:
        """How many gradient entries were NaN or infinite so far, and were taken as 0."""
        return sum(int(n) for n in self._nonfinite.values())

    def _warn_nonfinite(self) -> None:
        """Warn once. Reading the counter syncs a GPU, so check every 100 steps there."""
        if not self._nonfinite or getattr(self, "_warned", False):
            return
        on_cpu = all(device.type == "cpu" for device in self._nonfinite)
        if (on_cpu or self.param_groups[0]["step"] % 100 == 0) and self.nonfinite:
            self._warned = True
            warnings.warn(
                f"{self.nonfinite} gradient entries were NaN or infinite and were taken as 0: look "
                "for an overflow in the loss, or skip such steps (MuLO.nonfinite keeps the count).",
                stacklevel=5,  # the line that called step(), past torch's wrappers
            )

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue bit for bit. The dict is copied; state stays float32 for bf16 parameters too."""
        from mulo import checkpoints  # here, as it imports this module

        saved = checkpoints.check_optimizer_state(self, state_dict)
        pairs = zip(self.param_groups, state_dict["param_groups"], strict=True)
        new_keys = ("names", "role", *roles.UNSCALED)  # missing in older files
        groups = [{k: g[k] for k in new_keys if k in g} | old for g, old in pairs]
        super().load_state_dict(state_dict | {"param_groups": groups})  # casts to the p's dtype
        for p, state in saved:
            how = {"device": p.device, "dtype": torch.float32, "copy": True}
            self.state[p] = {k: x.detach().to(**how).contiguous() for k, x in state.items()}
        if "loss" in self.state:
            memory, device = self.state["loss"], self.param_groups[0]["params"][0].device
            self.state["loss"] = {k: x.detach().to(device, copy=True) for k, x in memory.items()}

    def __getstate__(self) -> dict:
        mine = {k: self.__dict__[k] for k in ("lo", "num_steps", "backend", "_nonfinite")}
        return super().__getstate__() | mine

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._forget()


if __name__ == "__main__":
    raise SystemExit("mulo.py is a module, not a command: use `import mulo`.")
