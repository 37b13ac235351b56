"""μLO: train any PyTorch model with a learned optimizer under the Maximal Update Parametrization.

    roles = mulo.infer_roles(build, width)      # build(width) makes your model
    model = mulo.init_(build(width), roles)
    opt = mulo.MuLO(mulo.param_groups(model, roles), mulo.load("mulo_m"))
    ...; loss.backward(); opt.step(); opt.zero_grad()

This file has the step as in the paper (eq. 2 and 3), the Optimizer, and all public names;
`kernels/` has the same step made fast.

Shapes: a step works on S tensors of equal shape, stacked. `advance_` steps P nets (the particles of
meta-training; 1 in MuLO) of T tensors each: T stacks with S = P.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Iterable
from functools import partial
from numbers import Integral

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

__version__ = "0.2.0"
__path__ = [os.path.dirname(os.path.abspath(__file__))]  # files beside this one are submodules

from mulo import features, kernels, nets, roles
from mulo.checkpoints import from_pylo, from_reference, load, save
from mulo.features import Accumulators, Dims, Eps, Numbers, Phi, Rates, trailing
from mulo.kernels import folded, sharded
from mulo.nets import LO, LOConfig, SmallFC, VeLO, generate, mlp, stacked
from mulo.nets import NETS as NETS  # not public, but used by other modules
from mulo.roles import RULES, Readout, fold_outputs_, infer_roles, init_, multiply_outputs_
from mulo.roles import param_groups as param_groups

__all__ = ["LO", "RULES", "LOConfig", "MuLO", "Readout", "SmallFC", "VeLO", "fold_outputs_"]
__all__ += ["from_pylo", "from_reference", "infer_roles", "init_", "load", "multiply_outputs_"]
__all__ += ["param_groups", "save"]


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
    rates: Rates | None = None,  # features.rates_of(phi), if it was computed before
) -> tuple[Accumulators, Tensor]:
    """One step of S equal-shaped tensors: accumulate, build the features, normalise, MLP, update.

    A pure function, written to be read. The other backends are tested against it.
    """
    eps, rates = Eps(config.eps, config.eps_rms, eps_scale), rates or features.rates_of(phi)
    p, g = features.wide(p), features.clean(g, features.CLIP[config.net]).to(acc.V)
    shape = p.shape[1:]
    acc = features.accumulate(acc, g, dims, rates, eps)
    x = features.parameter_features(p.to(acc.V), g, acc, dims, eps, config.feature_set)
    A_hat = torch.cat([x_k.expand(-1, -1, *shape).flatten(2).mT for x_k in x.values()], -1)
    inverse_rms = features.inverse_rms(features.mean_all(A_hat.square(), 1), eps)
    A = A_hat * inverse_rms.unsqueeze(1)  # A_bar, (S, n, 28); VeLO: 30 or 29
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
    """One tensor of each of P nets, with its accumulators; `advance_` updates them in place."""

    p: Tensor  # (P, *shape)
    acc: Accumulators
    dims: Dims
    rows: np.ndarray | None = None  # from kernels.rows; None if the kernel cannot take it
    shards: sharded.Shards | None = None  # if p is one shard of a tensor


class Weights:
    """The MLPs of P nets of T tensors. small_fc: one per net, phi (P | 1, ...). VeLO: one per
    tensor, packed (P, T, N), and alpha (P, T), from `generate`."""

    def __init__(self, config: LOConfig, phi: Phi | Tensor, backend: str, alpha=None):
        self.packed = phi if isinstance(phi, Tensor) else None
        self.phi = phi if self.packed is None else nets.unpack(config, phi)
        self.alpha, self.rates = alpha, features.rates_of(self.phi)
        if self.packed is None and backend == "kernel":
            self.packed = kernels.pack(config, phi, self.rates)

    def scaled(self, numbers: Numbers) -> Numbers:
        """The numbers on the weights' device, with alpha in the scale."""
        columns = torch.from_numpy(np.stack(numbers))  # (4, P, T)
        numbers = Numbers(*features.send(columns, self.phi["w0"].device))
        return numbers._replace(scale=numbers.scale * (1.0 if self.alpha is None else self.alpha))


def advance_(
    config: LOConfig,
    backend: str,  # "kernel", "folded" or "literal"
    weights: Weights,
    stacks: list[Stack],  # T of them, of P tensors each
    grads: list[Tensor],  # (P, *shape) each, or (*shape) if P is 1
    numbers: Numbers,  # (P, T) each
    bad: Tensor | None = None,  # (): the number of NaN or infinite entries of g is added to it
) -> None:
    """Step the stacks in place."""
    fast = [n for n, x in enumerate(stacks) if backend == "kernel" and x.rows is not None]
    slow = [n for n, x in enumerate(stacks) if backend != "kernel" or x.rows is None]
    if fast:
        rows, params = [stacks[n].rows for n in fast], [stacks[n].p for n in fast]
        args = rows, params, [grads[n] for n in fast], weights.packed, numbers, fast
        kernels.step_(config, *args, weights.alpha, bad)
    if not slow:
        return
    numbers = weights.scaled(numbers)
    pure_step = step if backend == "literal" else folded.step

    @features.float32_products()
    def step_one(n: int) -> tuple[Accumulators, Tensor]:
        x, phi = stacks[n], weights.phi
        phi = {k: w[:, n] for k, w in phi.items()} if config.net == "velo" else phi
        t, scale, decay, eps_scale = (number[:, n] for number in numbers)
        eps_scale = eps_scale if config.eps == "fan_in" else 1.0
        args = phi, x.acc, x.p, grads[n].view_as(x.p), t, scale, x.dims, decay, eps_scale
        return pure_step(config, *args, rates=weights.rates)

    steps = {n: (partial(step_one, n), stacks[n].shards) for n in slow}
    for n, (acc, p) in sharded.replay(steps):
        if bad is not None:
            bad += (~grads[n].isfinite()).sum()
        torch._foreach_copy_([stacks[n].p, *stacks[n].acc], [p, *acc])


def statistics_of(config: LOConfig, backend: str, stacks: list[Stack]) -> Tensor:
    """features.tensor_statistics of T stacks, (P, T, 8), on the first one's device: by a kernel if
    it can take them all, else stack by stack."""
    device = stacks[0].p.device
    fast = all(x.rows is not None and x.p.device == device for x in stacks)
    if fast and kernels.choose(backend, config, device) == "kernel":
        return kernels.statistics(config, [x.rows for x in stacks], [x.p for x in stacks])
    pure = features.tensor_statistics
    functions = {n: (partial(pure, x.p, *x.acc[:2]), x.shards) for n, x in enumerate(stacks)}
    by_index = dict(sharded.replay(functions))
    return torch.stack([by_index[n].to(device, torch.float32) for n in range(len(stacks))], 1)


# ---------------------------------------------------------------- the Optimizer


class MuLO(torch.optim.Optimizer):
    """Trains a model with a learned optimizer, SmallFC or VeLO.

    A torch optimizer like any other, with these keys in its param groups:

    lr            a factor on the update, 1 by default. The built-in annealing (LOConfig.anneal) is
                  (t_max / step)^anneal in steps with lr = 1 and without a torch LR scheduler; in
                  other steps the last such factor stays
    weight_decay  decoupled: a parameter shrinks by lr * weight_decay per step
    freeze_zero_grad  leave entries whose gradient is exactly 0 as they are, such as unused rows of
                  an embedding; off by default, so they move. Accumulators decay either way
    scale         the μP factor on the update, from `param_groups`; not part of lr, which schedulers
                  overwrite (`param_groups` also sets role, kind, fan_in, area, out_axis, names,
                  shapes)
    step          t, the time that the learned optimizer sees: starts at 0, can be set

    VeLO needs num_steps, the length of the run, and the loss: `step(loss=loss)` or a closure. State
    is float32 for parameters of any dtype. NaN and infinite gradient entries are replaced by 0 and
    counted in `nonfinite`. `backend`: "literal" runs the step of this file, "folded" the same with
    fewer memory accesses, "kernel" C++ on CPUs and Triton on CUDA. "auto" uses the kernel if it can
    be built and, in a check at first use, agrees with "folded".

    DTensor parameters (FSDP2's `fully_shard`, tensor parallelism) are stepped shard by shard by
    "folded" or "literal", and their state is sharded like them. Under torch.distributed, VeLO
    averages the loss over all processes, and the max in its LSTM is over the tensors of all
    processes; pass distributed=False if each process trains a separate net.
    """

    def __init__(
        self,
        params: Iterable,
        lo: LO,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        num_steps: int | None = None,
        backend: str = "auto",
        distributed: bool = True,
    ):
        if not isinstance(lo, LO):
            raise TypeError(f"lo must be a learned optimizer, as mulo.load returns, not {lo!r}.")
        if isinstance(lo, VeLO) and not (isinstance(num_steps, Integral) and num_steps > 0):
            raise ValueError(f"VeLO needs num_steps, the length of the run, not {num_steps!r}.")
        if isinstance(params, nn.Module):
            raise TypeError("params must not be a model: use mulo.param_groups(model, roles).")
        if backend not in kernels.BACKENDS:
            raise ValueError(f"unknown backend {backend!r}: use {kernels.CHOICES}.")
        self.lo, self.num_steps, self.backend = lo, num_steps, backend
        self.distributed = distributed
        self._nonfinite: dict[torch.device, Tensor] = {}
        self._forget()
        defaults = {"lr": lr, "weight_decay": weight_decay, "scale": 1.0, "step": 0}
        defaults |= {"fan_in": 1, "out_axis": 0, "freeze_zero_grad": False, "annealed_to": 0}
        defaults |= {"kind": "hidden", "area": 1}
        if backend in ("auto", "kernel") and not torch.cuda.is_available():
            kernels.start_build(lo.config)  # compiles while torch's lazy imports run
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Clear the caches of `_stack` and `_weights_on`, and which warnings were given."""
        self._warned: set[str] = set()
        self._stacks: dict[nn.Parameter, tuple[tuple, list[Tensor], Stack]] = {}
        self._weights: dict[torch.device, tuple[tuple, Phi, Weights | Phi]] = {}
        self._lstm: tuple[list[Tensor], tuple] = [], ()

    def add_param_group(self, param_group: dict) -> None:
        given = dict(param_group)
        super().add_param_group(param_group)
        try:
            roles.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        for doubt in roles.doubts(given, self.lo.mup, self.defaults):
            self._warn_once(doubt)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            roles.warn(message)

    @torch._disable_dynamo  # torch.compiler.disable imports dynamo, which takes seconds
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Tensor] | None = None, *, loss: Tensor | float | None = None
    ) -> Tensor | float | None:
        """Update every parameter that has a gradient; return the loss, or the closure's result."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("MuLO.step cannot be captured: capture forward and backward only.")
        if closure is not None:
            if loss is not None or not callable(closure):
                raise TypeError("step takes a closure or the loss: write step(loss=loss).")
            with torch.enable_grad():
                loss = closure()
        velo, params = self.lo.config.net == "velo", self._with_gradients()
        if loss is None and not self.state and self._only_creates_state(params):
            return None
        if not params and any(group["params"] for group in self.param_groups):
            fix = "call loss.backward() before it (FSDP1 hides gradients: use fully_shard)"
            self._warn_once(f"step() found no gradient: {fix}.")
        if velo and loss is None:
            raise RuntimeError("VeLO needs the loss: call step(loss=loss), or pass a closure.")
        stacks = [self._stack(p, group) for p, group in params]
        packed, alpha = self._generate(params, stacks, loss) if velo else (None, None)
        for device in dict.fromkeys(p.device for p, _ in params):
            here = [k for k, (p, _) in enumerate(params) if p.device == device]
            backend = kernels.choose(self.backend, self.lo.config, device)
            numbers = self._numbers([params[k][1] for k in here])
            if velo:
                index = slice(None) if len(here) == len(params) else here  # a list would sync
                packed_here, alpha_here = (x[:, index].to(device) for x in (packed, alpha))
                weights = Weights(self.lo.config, packed_here, backend, alpha_here)
            else:
                weights = self._weights_on(device)
            grads = {k: sharded.local_grad(params[k][0]) for k in here}
            before = {k: stacks[k].p.clone() for k in here if params[k][1]["freeze_zero_grad"]}
            if device not in self._nonfinite:
                self._nonfinite[device] = torch.zeros((), dtype=torch.int64, device=device)
            args = [stacks[k] for k in here], list(grads.values()), numbers, self._nonfinite[device]
            self._advance(backend, weights, *args)
            for k, p in before.items():
                stacks[k].p.copy_(torch.where(grads[k] == 0, p, stacks[k].p))
        for group in self.param_groups:
            group["annealed_to"] = roles.annealed_to(group)
            group["step"] = group["step"] + 1
        self._warn_nonfinite()
        return loss

    def _advance(self, *args) -> None:
        """Call `advance_`; a subclass may run the step elsewhere."""
        advance_(self.lo.config, *args)

    def _with_gradients(self) -> list[tuple[nn.Parameter, dict]]:
        members = ((p, group) for group in self.param_groups for p in group["params"])
        params = [(p, group) for p, group in members if p.grad is not None and p.numel()]
        if sparse := [roles.name_of(*x) for x in params if x[0].grad.layout != torch.strided]:
            fix = "make its nn.Embedding with sparse=False"
            raise RuntimeError(f"parameter {sparse[0]} has sparse gradients: {fix}.")
        return params

    def _only_creates_state(self, params: list[tuple[nn.Parameter, dict]]) -> bool:
        """Detect torch.distributed.checkpoint's way to create the state that it will load: a step
        with lr 0 and zero gradients. If so, create the state without counting a step."""
        if any(group["lr"] != 0 or sharded.any_nonzero(p.grad) for p, group in params):
            return False
        for p, group in params:
            self._stack(p, group)
        return bool(params)

    def _numbers(self, groups: list[dict]) -> Numbers:
        """The numbers of each tensor, (1, T)."""
        config, rows = self.lo.config, {}
        for g in {id(g): g for g in groups}.values():
            scale = g["scale"] * roles.size_factor(g["kind"], g["fan_in"], g["area"], config)
            if t_max := config.t_max:  # small_fc's step anneals to g["step"] by itself
                annealed = t_max if config.net == "velo" else max(g["step"], t_max)
                scale = scale * (annealed / max(roles.annealed_to(g), t_max)) ** config.anneal
            eps_scale = 1 / g["fan_in"] if config.eps == "fan_in" else 1.0
            rows[id(g)] = g["step"], g["lr"] * scale, g["lr"] * g["weight_decay"], eps_scale
        rows = [rows[id(g)] for g in groups]
        return Numbers(*np.array(rows, np.float32).T[:, None])

    def _weights_on(self, device: torch.device) -> Weights | Phi:
        """The learned optimizer's weights on a device, cached until they change: for `advance_`,
        or for VeLO's `generate`. Changes through `.data` are not detected."""
        config, weights = self.lo.config, self.lo._parameters.values()
        key = config, [(w.data_ptr(), w.is_inference() or w._version) for w in weights]
        cached = self._weights.get(device)
        if cached is None or cached[0] != key:
            source = stacked(self.lo)
            phi = {k: w.to(device, torch.float32) for k, w in source.items()}
            if config.net == "small_fc":
                phi = Weights(config, phi, kernels.choose(self.backend, config, device))
            else:
                phi = nets.fused(config, phi)
            cached = self._weights[device] = key, source, phi  # keeps the addresses in `key` in use
        return cached[2]

    def _stack(self, p: nn.Parameter, group: dict) -> Stack:
        """A parameter and its state as a Stack of one net, cached until either is replaced."""
        state = self.state[p]
        if "M" not in state:
            state |= self.new_state(p, group["out_axis"])
        tensors = [state[k] for k in Accumulators._fields]
        part = sharded.local(p)
        parts = tensors if part is p else [sharded.local(x) for x in tensors]
        layout = part.data_ptr(), part.shape, part.stride(), [x.data_ptr() for x in parts]
        cached = self._stacks.get(p)
        if cached is None or cached[0] != layout or not all(map(operator.is_, tensors, cached[1])):
            one = part.detach().view(1, *(part.shape or (1,)))  # a scalar is a vector of one
            acc = Accumulators(*(x.unsqueeze(0) for x in parts))
            dims = features.factored_dims(tuple(p.shape), group["out_axis"])
            roles.check_shape(p, group)
            shards = sharded.shards_of(p, roles.name_of(p, group))
            rows = None if shards else kernels.rows(one, acc, dims)
            if rows is None and self.backend in ("auto", "kernel"):
                self._warn_once(
                    "MuLO steps parameters that are sharded, float64 or not contiguous without a "
                    'kernel, several times slower: pass backend="folded" to silence this warning.'
                )
            stack = Stack(one, acc, dims, rows, shards)
            cached = self._stacks[p] = layout, tensors, stack
        return cached[2]

    def new_state(self, p: Tensor, out_axis: int) -> dict[str, Tensor]:
        """The initial state of a parameter: zero accumulators, and for VeLO the LSTM's state."""
        dims = features.factored_dims(tuple(p.shape), out_axis)
        shapes = features.accumulator_shapes((1, *(p.shape or (1,))), dims)
        d1, d0 = dims or (None, None)
        named = zip(Accumulators._fields, shapes, (None, None, d0, d1), strict=True)
        state = {k: sharded.zeros(p, shape[1:], averaged) for k, shape, averaged in named}
        state["c"] = state["r" if dims is None else "c"]  # equal in vectors: one array
        if isinstance(self.lo, VeLO):
            for k, x in (("h", self.lo.hidden0[0]), ("cell", self.lo.cell0[0])):
                state[k] = x.detach().to(p.device, torch.float32, copy=True)
            state["loss"] = features.pack_loss_buffer(features.init_loss_buffer(device=p.device))
        return state

    def _generate(
        self, params: list[tuple[nn.Parameter, dict]], stacks: list[Stack], loss: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        """VeLO: step the LSTM of all T tensors; return packed MLPs (1, T, N) and alphas (1, T)."""
        config, loss = self.lo.config, torch.as_tensor(loss, dtype=torch.float32).detach()
        if loss.numel() != 1:
            raise ValueError(f"VeLO needs one loss, not {tuple(loss.shape)}: take its mean.")
        device = params[0][0].device if params else loss.device
        loss, share = features.send(loss, device).reshape(1), None
        if self.distributed and dist.is_available() and dist.is_initialized():
            loss = sharded.all_reduce(loss / dist.get_world_size(), dist.ReduceOp.SUM)
            share = partial(sharded.all_reduce, op=dist.ReduceOp.MAX)
            if not params:  # a process without tensors, as in ZeRO, takes part in the max
                share(torch.zeros(1, 1, config.lstm_hidden, device=device))
        if not params:
            return None, None
        states = [self.state[p] for p, _ in params]
        memory = next(s["loss"].to(device) for s in self.state.values() if "loss" in s)
        memory = features.unpack_loss_buffer(memory[None])
        statistics = statistics_of(config, self.backend, stacks)
        ranks = features.rank_one_hot([p.shape for p, _ in params], device)
        x_tensor = features.tensor_features(statistics, ranks)
        h, cell = self._lstm_state(states, device)
        decays = features.loss_decays(self.num_steps, config.use_bugged_loss_features, device)
        t = torch.tensor([[group["step"] for _, group in params]])
        x_time = features.fraction_features(t, self.num_steps, config.spec)
        inputs = decays, features.send(x_time, device), x_tensor, h, cell
        phi = self._weights_on(device)
        memory, h, cell, packed, alpha = generate(phi, memory, loss, *inputs, share=share)
        memory = features.pack_loss_buffer(memory)[0]
        for s, h_k, cell_k in zip(states, h[0], cell[0], strict=True):
            s["h"], s["cell"] = h_k, cell_k
        self._lstm = [s[k] for k in ("h", "cell") for s in states], (h, cell)
        for s in self.state.values():
            if "M" in s:  # also parameters without a gradient
                s["loss"] = memory
        if config.param_scale_mult:
            alpha = alpha * self._param_scale(statistics[..., 0])
        return packed, alpha

    def _lstm_state(self, states: list[dict], device: torch.device) -> list[Tensor]:
        """h and cell of all tensors, (1, T, H): those of the last step, unless one was replaced."""
        views, last = self._lstm
        tensors = [s[k] for k in ("h", "cell") for s in states]
        if len(tensors) == len(views) and all(map(operator.is_, tensors, views)):
            return last
        return torch.stack([x.to(device) for x in tensors]).unflatten(0, (2, 1, -1)).unbind()

    def _param_scale(self, mean_square: Tensor) -> Tensor:
        return features.param_scale(mean_square)

    @property
    def nonfinite(self) -> int:
        """Number of gradient entries that were NaN or infinite so far."""
        return sum(int(n) for n in self._nonfinite.values())

    def _warn_nonfinite(self) -> None:
        """Reading the counter syncs a GPU, so check every 100 steps there."""
        on_cpu = all(device.type == "cpu" for device in self._nonfinite)
        if (on_cpu or self.param_groups[0]["step"] % 100 == 0) and self.nonfinite:
            self._warn_once(
                "NaN or infinite gradient entries were replaced by 0 (opt.nonfinite counts them): "
                "look for an overflow in the loss, or skip such steps."
            )

    def _match_state(self, state_dict: dict) -> list[tuple[nn.Parameter, dict]]:
        """Return each parameter with its saved state; raise if they do not fit."""
        groups, state = ((state_dict or {}).get(k) for k in ("param_groups", "state"))
        if groups is None or state is None or not all("scale" in group for group in groups):
            raise ValueError("this is not a state_dict of MuLO: load one that MuLO returned.")
        ours, theirs = ([len(g["params"]) for g in x] for x in (self.param_groups, groups))
        if ours != theirs:
            raise ValueError(f"the state_dict has groups of {theirs} parameters, not of {ours}.")
        ids = [k for group in groups for k in group["params"]]
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        saved = []
        for k, (p, group) in zip(ids, params, strict=True):
            if state.get(k):
                new = self.new_state(torch.empty_like(p, device="meta"), group["out_axis"])
                shapes = {name: getattr(x, "shape", None) for name, x in state[k].items()}
                if shapes != {name: x.shape for name, x in new.items()}:
                    name = roles.name_of(p, group)
                    raise ValueError(f"the saved state of parameter {name} does not fit it.")
                saved.append((p, state[k]))
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state_dict to continue bit for bit. State stays float32 for bf16 parameters."""
        saved = self._match_state(state_dict)
        pairs = zip(self.param_groups, state_dict["param_groups"], strict=True)
        state_dict = state_dict | {"param_groups": [ours | theirs for ours, theirs in pairs]}
        super().load_state_dict(state_dict)  # casts state to p's dtype; the loop restores float32
        for p, state in saved:
            for k, x in state.items():
                x = x.detach().to(p.device, torch.float32, copy=True)
                self.state[p][k] = x.contiguous()
            if p.ndim < 2:
                self.state[p]["c"] = self.state[p]["r"]  # as in new_state

    def __getstate__(self) -> dict:
        names = ("lo", "num_steps", "backend", "distributed", "_nonfinite")
        return super().__getstate__() | {k: self.__dict__[k] for k in names}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._forget()
