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
import operator
import os
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral

import numpy as np
import torch
from torch import Tensor, nn

__version__ = "0.2.0"
__path__ = [os.path.dirname(os.path.abspath(__file__))]  # files beside this one are submodules

from mulo import features, kernels, roles
from mulo.checkpoints import from_pylo, from_reference, load, save
from mulo.features import Accumulators, Dims, Eps, LossBuffer, Phi, trailing
from mulo.kernels import folded
from mulo.nets import LO, LOConfig, SmallFC, VeLO, generate, mlp, stacked
from mulo.nets import NETS as NETS  # not public, but used by other modules
from mulo.roles import RULES, Readout, infer_roles, init_, multiply_outputs_, param_groups

__all__ = ["LO", "RULES", "LOConfig", "MuLO", "Readout", "SmallFC", "VeLO", "from_pylo"]
__all__ += ["from_reference", "infer_roles", "init_", "load", "multiply_outputs_", "param_groups"]
__all__ += ["save"]


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

    def _match_state(self, state_dict: dict) -> list[tuple[nn.Parameter, dict]]:
        """Return each parameter with its saved state; raise if they do not fit."""
        groups, state = ((state_dict or {}).get(k) for k in ("param_groups", "state"))
        if groups is None or state is None or not all("scale" in group for group in groups):
            raise ValueError("this is not what MuLO.state_dict() returned: load that.")
        fix = "build the model, param groups and learned optimizer of the run that saved it."
        ours, theirs = ([len(g["params"]) for g in x] for x in (self.param_groups, groups))
        if ours != theirs:
            raise ValueError(
                f"the state_dict has groups of {theirs} parameters, not of {ours}: {fix}"
            )
        ids = [k for group in groups for k in group["params"]]
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        saved = []
        for k, (p, group) in zip(ids, params, strict=True):
            if state.get(k):
                new = self.new_state(torch.empty_like(p, device="meta"), group["out_axis"])
                shapes = {name: getattr(x, "shape", None) for name, x in state[k].items()}
                if shapes != {name: x.shape for name, x in new.items()}:
                    name = roles.name_of(p, group)
                    raise ValueError(f"the saved state of parameter {name} does not fit it: {fix}")
                saved.append((p, state[k]))
        velo = self.lo.config.net == "velo"
        if velo and saved and set(state.get("loss", ())) != {*LossBuffer._fields}:
            raise ValueError(f"the state_dict has no memory of VeLO's losses: {fix}")
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue bit for bit. The dict is copied; state stays float32 for bf16 parameters too."""
        saved = self._match_state(state_dict)
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
