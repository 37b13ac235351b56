"""μLO: train any PyTorch model with a learned optimizer under the Maximal Update Parametrization.

    import mulo

    roles = mulo.infer_roles(build, width)      # build(width) makes your model
    model = mulo.init_(build(width), roles)
    opt = mulo.MuLO(mulo.param_groups(model, roles), mulo.load("mulo_m"))
    ...; loss.backward(); opt.step(); opt.zero_grad()

This file is the Optimizer and the public names. The order to read: `features.py` (what the
optimizer sees), `lo.py` (the networks), `rule.py` (the step), `roles.py` (the rules of section 4),
then this file; `checkpoints.py` has the files.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral, Real

import torch
from torch import Tensor, nn

import features
import fused
import lo as lo_module
import rule
from checkpoints import from_pylo, from_reference, load, save
from features import Accumulators, Dims, LossBuffer
from lo import LO, LOConfig, Phi, SmallFC, VeLO
from roles import RULES, Readout, infer_roles, init_, multiply_outputs_, param_groups
from rule import Net

__all__ = [
    "LO",
    "RULES",
    "LOConfig",
    "MuLO",
    "Readout",
    "SmallFC",
    "VeLO",
    "from_pylo",
    "from_reference",
    "infer_roles",
    "init_",
    "load",
    "multiply_outputs_",
    "param_groups",
    "save",
]


@dataclasses.dataclass
class Bucket:
    """Equal-shaped parameters that take their step together."""

    params: list[nn.Parameter]
    groups: list[dict]  # the param group of each
    dims: Dims
    p: Tensor  # (S, *shape): a view of the one parameter, or a float32 copy of several
    g: Tensor  # (S, *shape)
    acc: Accumulators

    def per_tensor(self, value: Callable[[dict], float]) -> Tensor:
        """value(group) of each tensor, (S,)."""
        values = [float(value(group)) for group in self.groups]
        return torch.tensor(values, dtype=torch.float32, device=self.p.device)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)


class MuLO(torch.optim.Optimizer):
    """Trains a model with a learned optimizer, SmallFC or VeLO.

    A torch optimizer like any other, with these keys in its param groups:

    lr            a plain factor on the update, 1 by default, for schedulers to drive
    weight_decay  decoupled: a parameter shrinks by lr * weight_decay a step
    scale         the μP factor on the update, from `param_groups`, apart from lr so that no
                  scheduler overwrites it (with it come `fan_in` and `out_axis`)
    step          t, the time that the learned optimizer sees: 0 at first, and settable

    VeLO needs num_steps, the length of the run, and the loss: `step(loss=loss)` or a closure. State
    is float32 whatever the parameters are. Gradient entries that are NaN or infinite are taken as 0
    and counted in `nonfinite`. compile=True steps with `fused.py`: up to six times faster, but
    off by default, because the first step then waits for a compiler, half a minute for each kind of
    tensor (matrices, vectors, ...); a network with a hidden size above 128 (32 on a GPU) is not
    compiled.
    """

    def __init__(
        self,
        params: Iterable,
        lo: LO,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        num_steps: int | None = None,
        compile: bool = False,
    ):
        if not isinstance(lo, LO):
            raise TypeError(f"lo must be a learned optimizer, as mulo.load gives, not {lo!r}.")
        if isinstance(lo, VeLO) and not (isinstance(num_steps, Integral) and num_steps > 0):
            raise ValueError(
                f"VeLO needs num_steps, the length of the run in steps, not {num_steps!r}."
            )
        if isinstance(params, nn.Module):
            raise TypeError("params are not a model: use mulo.param_groups(model, roles).")
        params = params if isinstance(params, Tensor) else list(params)
        if lo.mup and not any(isinstance(x, dict) and "scale" in x for x in params):
            warnings.warn(
                "this learned optimizer was meta-trained under μP, and these parameters have no "
                "roles, so wide nets will not train: use mulo.param_groups(model, roles), and "
                "mulo.init_ before it.",
                stacklevel=2,
            )
        self.lo, self.num_steps, self.compile = lo, num_steps, compile
        self._nonfinite: dict[torch.device, Tensor] = {}
        self._forget()
        defaults = {"lr": lr, "weight_decay": weight_decay, "scale": 1.0, "step": 0}
        super().__init__(params, defaults | {"fan_in": 1, "out_axis": 0})

    def _forget(self) -> None:
        """Drop what is derived: copies of the weights, and the stacks of accumulators."""
        self._phi: dict[torch.device, tuple[list, Phi]] = {}
        self._cut: tuple[LOConfig, list[Tensor], Net] | None = None
        self._stacks: dict[tuple, tuple[Accumulators, list[dict[str, Tensor]]]] = {}

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        least = {"lr": 0, "weight_decay": 0, "scale": 0, "step": 0, "fan_in": 1}
        given = [(k, group[k], n) for k, n in least.items()]
        wrong = [k for k, x, n in given if not (isinstance(x, Real | Tensor) and x >= n)]
        dtypes = {p.dtype for p in group["params"] if not p.is_floating_point()}
        if not wrong and not dtypes and group["out_axis"] in (0, 1, -1):
            return
        self.param_groups.pop()
        if wrong:
            k = wrong[0]
            raise ValueError(f"{k} must be a number of {least[k]} or more, not {group[k]!r}.")
        if dtypes:
            raise ValueError(f"parameters must be real floating point, not {dtypes.pop()}.")
        raise ValueError(f"out_axis must be 0, 1 or -1, not {group['out_axis']!r}.")

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        loss: Tensor | float | None = None,
    ) -> Tensor | float | None:
        """Update every parameter that has a gradient; returns the loss it was given, if any."""
        if closure is not None:
            if loss is not None or not callable(closure):
                raise TypeError("step takes a closure or the loss: write step(loss=loss).")
            with torch.enable_grad():
                loss = closure()
        config = self.lo.config
        if config.net == "velo" and loss is None:
            raise RuntimeError("VeLO needs the loss: call step(loss=loss), or pass a closure.")
        buckets = self._buckets()
        for b, (net, alpha) in zip(buckets, self._nets(buckets, loss), strict=True):
            bad = self._advance(b, net, alpha)
            if bad is not None:
                self._nonfinite[b.p.device] = self._nonfinite.get(b.p.device, 0) + bad
            if len(b.params) > 1:
                torch._foreach_copy_(
                    b.params, [x.view(q.shape) for x, q in zip(b.p, b.params, strict=True)]
                )
        for group in self.param_groups:
            group["step"] += 1
        self._warn_nonfinite()
        return loss

    def _nets(self, buckets: list[Bucket], loss: Tensor | None) -> list[tuple[Net, Tensor | None]]:
        """The network and, for VeLO, the alpha of each bucket."""
        if self.lo.config.net == "velo":
            return self._generate(buckets, loss)
        shared = {device: self._shared(device) for device in {b.p.device for b in buckets}}
        return [(shared[b.p.device], None) for b in buckets]

    def _shared(self, device: torch.device) -> Net:
        """The network of all tensors on a device. On the CPU it is cut up once for as long as its
        weights are as they were; elsewhere to look at them would wait for the device."""
        config = self.lo.config
        if device.type != "cpu":
            return rule.prepare(config, self._weights(device))
        now = self.lo._parameters.values()
        if self._cut and self._cut[0] == config and all(map(_same, self._cut[1], now)):
            return self._cut[2]
        net = rule.prepare(config, {k: w.clone() for k, w in self._weights(device).items()})
        self._cut = config, [w.detach().clone() for w in now], net
        return net

    def _advance(self, b: Bucket, net: Net, alpha: Tensor | None) -> Tensor | None:
        """Step a bucket in place; how many gradient entries were not finite, None if all were."""
        decayed = any(group["weight_decay"] for group in b.groups)
        fan_in = self.lo.config.eps == "fan_in"
        step_ = fused.step_ if self.compile else rule.step_
        scale = b.per_tensor(lambda group: group["lr"] * group["scale"])
        return step_(
            net.at(b.per_tensor(lambda group: group["step"])),
            b.acc,
            b.p,
            b.g,
            scale if alpha is None else scale * alpha,
            b.dims,
            b.per_tensor(lambda group: group["lr"] * group["weight_decay"]) if decayed else 0.0,
            b.per_tensor(lambda group: 1 / group["fan_in"]) if fan_in else 1.0,
        )

    def _weights(self, device: torch.device) -> Phi:
        """The learned optimizer's weights as they are now; copied only where they must be."""
        weights = self.lo._parameters.values()
        if all(w.device == device and w.dtype == torch.float32 for w in weights):
            return lo_module.stacked(self.lo)
        version = [(w.data_ptr(), w._version) for w in weights]
        if device not in self._phi or self._phi[device][0] != version:
            stacked = lo_module.stacked(self.lo)
            copies = {k: w.to(device, torch.float32) for k, w in stacked.items()}
            self._phi[device] = version, copies
        return self._phi[device][1]

    def _buckets(self) -> list[Bucket]:
        """The parameters with gradients, small ones of a shape together."""
        alike: dict[tuple, list[tuple[nn.Parameter, dict]]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                if p.grad.layout != torch.strided:
                    raise RuntimeError(
                        "MuLO takes dense gradients only: build the layer with sparse=False."
                    )
                key = (p.shape, p.dtype, p.device, p.grad.dtype, group["out_axis"])
                alike.setdefault(key, []).append((p, group))
        buckets = []
        entries = fused.STACK if self.compile else rule.block_entries(self.lo.config)
        for key, members in alike.items():
            size = max(1, entries // members[0][0].numel())
            for k in range(0, len(members), size):
                buckets.append(self._bucket((key, k), *zip(*members[k : k + size], strict=True)))
        return buckets

    def _bucket(self, key: tuple, params: tuple[nn.Parameter], groups: tuple[dict]) -> Bucket:
        shape = tuple(params[0].shape) or (1,)  # a scalar is a vector of one
        dims = features.factored_dims(shape, groups[0]["out_axis"])
        p, g = params[0].detach(), params[0].grad
        if len(params) > 1:
            p, g = features.wide(torch.stack(params)), torch.stack([q.grad for q in params])
        p, g = p.reshape(-1, *shape), g.reshape(-1, *shape)
        return Bucket(params, groups, dims, p, g, self._accumulators(key, params, p, dims))

    def _accumulators(self, key: tuple, params: tuple, p: Tensor, dims: Dims) -> Accumulators:
        """The stacked state of a bucket, of which each parameter's own state is a view.

        Built anew when its members have changed, or their state was replaced, as loading does.
        """
        states = [self.state[q] for q in params]
        acc, views = self._stacks.get(key, (None, []))
        if len(views) == len(states) and all(
            s.get(k) is x for s, view in zip(states, views, strict=True) for k, x in view.items()
        ):
            return acc
        acc = features.init_accumulators(p, dims, apart=self.compile)
        views = [{k: x[n] for k, x in acc._asdict().items()} for n in range(len(states))]
        for s, view in zip(states, views, strict=True):
            for k in view.keys() & s.keys():
                view[k].copy_(s[k])
            s.update(view)
        self._stacks[key] = acc, views
        return acc

    def _generate(self, buckets: list[Bucket], loss: Tensor | float) -> list[tuple[Net, Tensor]]:
        """VeLO: run the LSTM over all tensors; each bucket gets its MLPs and alphas."""
        if not buckets:
            return []
        device = buckets[0].p.device
        loss = torch.as_tensor(loss, dtype=torch.float32, device=device).detach()
        if loss.numel() != 1:
            raise ValueError(f"VeLO needs one loss, not {tuple(loss.shape)}: take its mean.")
        loss = loss.reshape(())
        memory = self.state["loss"] if "loss" in self.state else None
        memory = LossBuffer(**memory) if memory else features.init_loss_buffer(device=device)

        t = torch.cat([b.per_tensor(lambda group: group["step"]).to(device) for b in buckets])
        x_tensor = torch.cat([self._tensor_features(b).to(device) for b in buckets])
        phi = self._weights(device)
        states = [self.state[p] for b in buckets for p in b.params]
        h = torch.stack([s["h"].to(device) if "h" in s else phi["hidden0"][0, 0] for s in states])
        cell = torch.stack(
            [s["cell"].to(device) if "cell" in s else phi["cell0"][0, 0] for s in states]
        )
        memory, h, cell, weights, alpha = self._hyper(phi, memory, loss, t, x_tensor, h, cell)
        self.state["loss"] = memory._asdict()
        for s, h_k, cell_k in zip(states, h, cell, strict=True):
            s["h"], s["cell"] = h_k, cell_k

        sizes = [len(b.p) for b in buckets]
        cut = {k: w.split(sizes) for k, w in weights.items()}
        nets = []
        for n, (b, a) in enumerate(zip(buckets, alpha.split(sizes), strict=True)):
            phi = {k: w[n].to(b.p.device) for k, w in cut.items()}
            nets.append(self._net(b, phi, a.to(b.p.device)))
        return nets

    def _net(self, b: Bucket, phi: Phi, alpha: Tensor) -> tuple[Net, Tensor]:
        """A bucket's generated weights, ready for the step, and the rates of its tensors."""
        if self.lo.config.param_scale_mult:
            alpha = alpha * features.param_scale(b.p).to(alpha.dtype)
        return rule.prepare(self.lo.config, phi), alpha

    def _tensor_features(self, b: Bucket) -> Tensor:
        """What the LSTM sees of each tensor, (S, 12)."""
        return features.tensor_features(b.p, b.acc.M, b.acc.V).float()

    def _hyper(
        self,
        phi: Phi,
        memory: LossBuffer,
        loss: Tensor,  # ()
        t: Tensor,  # (T,)
        x_tensor: Tensor,  # (T, 12)
        h: Tensor,  # (T, H)
        cell: Tensor,  # (T, H)
    ) -> tuple[LossBuffer, Tensor, Tensor, Phi, Tensor]:
        """The LSTM's step: its memory and state, and the weights and alpha of each tensor."""
        config = self.lo.config
        decays = features.loss_decays(self.num_steps, config.use_bugged_loss_features, t.device)
        memory, x_loss = features.loss_features(memory, loss, decays)
        x_time = features.fraction_features(t, self.num_steps, config.spec)
        x = torch.cat([x_time, x_loss.expand(len(t), -1), x_tensor], -1)  # (T, 30)
        h, cell = lo_module.lstm_step(phi, x[None], h[None], cell[None])  # one net: P = 1
        weights, alpha = lo_module.hypernetwork(config, phi, h)
        return memory, h[0], cell[0], {k: w[0] for k, w in weights.items()}, alpha[0]

    @property
    def nonfinite(self) -> int:
        """How many gradient entries were NaN or infinite so far, and were taken as 0."""
        return sum(int(n) for n in self._nonfinite.values())

    def _warn_nonfinite(self) -> None:
        """Say so once. Off the CPU a look at the count waits for the device, so it is rare."""
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
        saved = self._check_state_dict(state_dict)
        super().load_state_dict(state_dict)  # which casts the state to the parameters' dtype
        for p, state in saved:
            self.state[p] = {k: x.detach().to(p.device, copy=True) for k, x in state.items()}
        if "loss" in self.state:
            memory, device = self.state["loss"], self.param_groups[0]["params"][0].device
            self.state["loss"] = {k: x.detach().to(device, copy=True) for k, x in memory.items()}

    def _check_state_dict(self, state_dict: dict) -> list[tuple[nn.Parameter, dict]]:
        """Each parameter with its saved state; an error before anything is changed."""
        try:
            groups, state = state_dict["param_groups"], state_dict["state"]
            saved_sizes = [len(group["params"]) for group in groups]
            ours = all(
                self.defaults.keys() - {"differentiable"} <= group.keys() for group in groups
            )
        except (AttributeError, KeyError, TypeError):
            ours = False
        if not ours:
            raise ValueError("this is not what MuLO.state_dict() returned: load that.")
        fix = (
            "build the same model, param groups and learned optimizer as in the run that saved it."
        )
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_sizes != sizes:
            raise ValueError(
                f"the state_dict has groups of {saved_sizes} parameters, not of {sizes}: {fix}"
            )
        ids = [k for group in groups for k in group["params"]]
        mine = [(p, group) for group in self.param_groups for p in group["params"]]
        found = [(k, *owner) for k, owner in zip(ids, mine, strict=True) if state.get(k)]
        for k, p, group in found:
            shapes = {name: getattr(x, "shape", None) for name, x in state[k].items()}
            if shapes != self._state_shapes(p, group["out_axis"]):
                raise ValueError(f"the saved state of parameter {k} does not fit this one: {fix}")
        forgot = set(state.get("loss", ())) != set(LossBuffer._fields)
        if isinstance(self.lo, VeLO) and found and forgot:
            raise ValueError(f"the state_dict has no memory of VeLO's losses: {fix}")
        return [(p, state[k]) for k, p, _ in found]

    def _state_shapes(self, p: Tensor, out_axis: int) -> dict[str, torch.Size]:
        one = torch.empty(1, *(tuple(p.shape) or (1,)), device="meta")
        acc = features.init_accumulators(one, features.factored_dims(one.shape[1:], out_axis))
        shapes = {name: x.shape[1:] for name, x in acc._asdict().items()}
        if isinstance(self.lo, VeLO):
            shapes |= dict.fromkeys(("h", "cell"), self.lo.hidden0.shape[1:])
        return shapes

    def __getstate__(self) -> dict:
        mine = {k: self.__dict__[k] for k in ("lo", "num_steps", "compile", "_nonfinite")}
        return super().__getstate__() | mine

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._forget()
