"""The Maximal Update Parametrization for learned optimizers: roles, and the rules that follow.

    roles = infer_roles(build, width)      # input, hidden or output: by what grows with width
    model = init_(build(width), roles)     # initial variance, output multiplier
    groups = param_groups(model, roles)    # update scale

Paper: section 4. The rules stand in one table, `RULES`, as powers of fan_in; standard
parametrization (SP) is the same code with the rules switched off. Re-exported by `mulo`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Rule(NamedTuple):
    """Powers of fan_in, the number of inputs one output sums (in * kh * kw for a convolution)."""

    init: int  # variance of the initial weights
    multiplier: int  # what the layer's output is multiplied by
    update: int  # what the optimizer's update is multiplied by


# Paper, section 4: "Initialization-μ", "Multipliers-μ" and "Update Scaling-μ" (eq. 3).
RULES = {
    "input": Rule(init=-1, multiplier=0, update=0),
    "hidden": Rule(init=-1, multiplier=0, update=-1),
    "output": Rule(init=0, multiplier=-1, update=0),
}
SP = Rule(init=-1, multiplier=0, update=0)  # what every role falls back to when a rule is off
ALL = Rule._fields  # rules=ALL is μP, rules=() is SP, rules=("init", "update") an ablation


def power(role: str, name: str, rules: Iterable[str]) -> int:
    """The power of fan_in that a rule gives a role, or SP's when that rule is off."""
    unknown = set(rules) - set(ALL)
    if unknown:
        raise ValueError(f"unknown rules {sorted(unknown)}: use any of {ALL}.")
    return getattr(RULES[role] if name in rules else SP, name)


LAYERS = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Bilinear,
)
TABLES = (nn.Embedding, nn.EmbeddingBag)
TRANSPOSED = nn.modules.conv._ConvTransposeNd
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Weight(NamedTuple):
    """One parameter of a model, with what μP needs to know of it."""

    name: str  # as in named_parameters(), without what torch.compile and DDP add
    param: nn.Parameter
    module: nn.Module  # its owner
    kind: str  # "layer" (multiplies its input), "table" (looked up), "vector", or "bare"

    @property
    def out_axis(self) -> int:
        """Which axis is fan_out: 0 in torch's (out, in, ...), 1 in tables and transposed convs."""
        return 1 if self.kind == "table" or isinstance(self.module, TRANSPOSED) else 0

    @property
    def fan_in(self) -> int:
        if self.kind in ("vector", "table"):
            return 1  # one weight per output
        groups = self.module.groups if self.out_axis else 1
        return math.prod(self.param.shape) // self.param.shape[self.out_axis] // groups


def weights_of(model: nn.Module) -> list[Weight]:
    """Every parameter once, under its first name; one tied across two kinds of use is an error."""
    found: dict[int, Weight] = {}
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod
    for prefix, module in model.named_modules():
        for leaf, p in module.named_parameters(recurse=False):
            name = ".".join(x for x in (*prefix.split("."), leaf) if x not in ("", "_orig_mod"))
            if leaf in ("weight_g", "original0"):
                raise ValueError(
                    f"{name!r} is half of a weight under weight_norm, whose init μP cannot set: "
                    "remove weight_norm."
                )
            if p.ndim < 2 or isinstance(module, NORMS):
                kind = "vector"
            elif isinstance(module, TABLES):
                kind = "table"
            else:
                kind = "layer" if isinstance(module, LAYERS) and "weight" in leaf else "bare"
            first = found.setdefault(id(p), Weight(name, p, module, kind))
            if first.kind != kind:
                raise ValueError(
                    f"{name!r} is tied to {first.name!r}, but μP scales a {kind} and a "
                    f"{first.kind} differently (a readout and its embedding, say): untie them."
                )
    return list(found.values())


def infer_roles(
    build: Callable[[int], nn.Module],
    width: int,
    device: str = "meta",
) -> dict[str, str]:
    """The role of each parameter, by which of its axes grow from build(width) to build(2 * width).

    Both fan_out and fan_in: hidden. Only fan_out: input. Only fan_in: output. Vectors (biases,
    norms), embeddings and weights that do not grow: input. A bare nn.Parameter may multiply or be
    added: it is hidden if its first two axes grow (torch's order, out then in), else input; edit
    the dict where that is wrong. The models are built on the meta device, where nothing is
    allocated; device="cpu" is for those whose constructor reads values.
    """
    if isinstance(build, nn.Module) or not callable(build):
        raise TypeError("build must be a function that makes your model, given a width.")
    if not isinstance(width, Integral) or width < 1:
        raise ValueError(f"width must be a positive integer, not {width!r}.")
    try:
        with torch.device(device):
            small, large = (weights_of(build(w)) for w in (width, 2 * width))
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if device != "meta":
            raise
        raise ValueError(
            f"build({width}) failed on the meta device ({error}): let build take a width, pass "
            "device='cpu', or write the roles by hand."
        ) from error
    odd = {w.name for w in small} ^ {w.name for w in large}
    if odd:
        raise ValueError(
            f"build({width}) and build({2 * width}) do not have the same parameters "
            f"({sorted(odd)[0]!r}): let only widths depend on the argument."
        )
    pairs = list(zip(small, large, strict=True))
    if all(a.param.shape == b.param.shape for a, b in pairs):
        raise ValueError(
            f"no parameter grows from build({width}) to build({2 * width}): use the width in build."
        )
    return {a.name: _role(a, b) for a, b in pairs}


def _role(a: Weight, b: Weight) -> str:
    grows = [m != n for m, n in zip(a.param.shape, b.param.shape, strict=True)]
    if a.kind in ("vector", "table") or not any(grows):
        return "input"
    fan_out, fan_in = grows[a.out_axis], grows[1 - a.out_axis]
    if fan_out and fan_in and not any(grows[2:]):
        return "hidden"
    if a.kind == "bare" and sum(grows) == 1:
        if a.param.ndim == 2 and 1 not in a.param.shape:
            warnings.warn(
                f"{a.name!r} {tuple(a.param.shape)}, a bare parameter with one axis that grows, is "
                "taken as a table (input): positions, say. If it is a readout, use mulo.Readout.",
                stacklevel=4,
            )
        return "input"
    if any(grows[2:]):
        axes = [k for k, x in enumerate(grows) if x]
        raise ValueError(
            f"{a.name!r} {tuple(a.param.shape)} grows along axes {axes}, which fits no role: "
            "write the roles by hand, and its scale into its param group."
        )
    return "output" if fan_in else "input"


def _with_roles(model: nn.Module, roles: dict[str, str]) -> list[tuple[Weight, str]]:
    weights = weights_of(model)
    for w in weights:
        if w.name not in roles:
            raise ValueError(
                f"parameter {w.name!r} has no role: give it one of {tuple(RULES)}, "
                "or infer the roles from this model."
            )
        if roles[w.name] not in RULES:
            raise ValueError(
                f"unknown role {roles[w.name]!r} of {w.name!r}: use one of {tuple(RULES)}."
            )
    unknown = roles.keys() - {w.name for w in weights}
    if unknown:
        raise ValueError(
            f"the model has no parameter {sorted(unknown)[0]!r}: infer the roles from this model."
        )
    return [(w, roles[w.name]) for w in weights]


class Readout(nn.Linear):
    """An output layer under μP: (W x + b) / fan_in, unless `init_` was told to leave that off."""

    divides = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.in_features if self.divides else 1)


def _divide_output(fan_in: int, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Forward hook that makes a user's own output layer a readout."""
    return output / fan_in


@torch.no_grad()
def init_(
    model: nn.Module,
    roles: dict[str, str],
    rules: Iterable[str] = ALL,
    zero_output: bool = True,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Initialise by role, in place, and have output layers multiply their output by 1/fan_in.

    Input and hidden weights get N(0, 1/fan_in), output weights N(0, 1), or zeros with zero_output
    (DIVERGES: N(0, 1) is the paper's rule, zeros are its experiments). An embedding's fan_in is 1:
    a row is picked, nothing summed. Biases of layers get N(0, 1), as input weights of fan_in 1,
    unless they are zero; those are left alone, and so are norms and bare input parameters. The
    multiplier is a forward hook, so the model's code and state_dict stay as they are; a Readout has
    it built in.
    """
    rules = tuple(rules)
    multiply_outputs_(model, roles, rules)
    for w, role in _with_roles(model, roles):
        if w.kind == "vector":
            if "init" in rules and isinstance(w.module, LAYERS) and w.param.any():
                w.param.normal_(generator=generator)
        elif role == "output" and zero_output:
            w.param.zero_()
        elif w.kind != "bare" or role != "input":
            std = w.fan_in ** (power(role, "init", rules) / 2)
            w.param.normal_(0, std, generator=generator)
    return model


def multiply_outputs_(
    model: nn.Module,
    roles: dict[str, str],
    rules: Iterable[str] = ALL,
) -> None:
    """Have output layers multiply their output by 1/fan_in, or not: part of `init_`."""
    outputs = [w for w, role in _with_roles(model, roles) if role == "output"]
    divides = power("output", "multiplier", rules) != 0
    for w in outputs:
        if divides and (w.kind != "layer" or not hasattr(w.module, "weight")):
            raise ValueError(
                f"{w.name!r} is an output but not the weight of a layer, so its 1/fan_in has no "
                "place: use mulo.Readout, or multiply by hand and leave 'multiplier' out of rules."
            )
    for module in model.modules():  # also those that were outputs before roles were edited
        hooks = module._forward_hooks
        for key in [k for k, h in hooks.items() if getattr(h, "func", None) is _divide_output]:
            del hooks[key]
        if isinstance(module, Readout):
            module.divides = divides and any(w.module is module for w in outputs)
    for w in outputs:
        if divides and not isinstance(w.module, Readout):
            w.module.register_forward_hook(partial(_divide_output, w.fan_in))


def param_groups(
    model: nn.Module,
    roles: dict[str, str],
    rules: Iterable[str] = ALL,
) -> list[dict]:
    """Groups for MuLO with `scale`, the μP factor of the update: 1/fan_in if hidden, else 1."""
    rules, groups = tuple(rules), {}
    for w, role in _with_roles(model, roles):
        fan_in = 1 if w.kind == "bare" and role == "input" else w.fan_in  # a table
        scale = float(fan_in) ** power(role, "update", rules)
        key = {"scale": scale, "fan_in": fan_in, "out_axis": w.out_axis}
        if w.param.requires_grad:
            groups.setdefault(tuple(key.values()), {"params": [], **key})["params"].append(w.param)
    return list(groups.values())


class CoordinateCheck(NamedTuple):
    """How far each layer's output moved from where it began, against width (log-log slopes)."""

    widths: list[int]
    drift: dict[str, Tensor]  # layer -> (steps, widths): mean |output_t - output_0| on the probe
    slopes: dict[str, Tensor]  # layer -> (steps,): 0 under μP; positive: it blows up with width


def coordinate_check(
    setup: Callable[[int], tuple[nn.Module, Callable[[], object]]],
    probe: Tensor,
    widths: list[int],
    steps: int = 5,
    repeats: int = 1,
) -> CoordinateCheck:
    """The ritual of μP: train nets of several widths, and see whether activations move alike.

    setup(width) gives a model and a function that trains it by one step; it is called `repeats`
    times a width, to average over what it draws. After each step `probe` is passed through the
    model, and the output of every layer that multiplies (its pre-activations; the logits) is
    compared with what it was before training, by the mean of |change|. (`evaluate.py coord` takes
    the standard deviation over coordinates as in the paper, which does not see a common shift.)
    """
    table: dict[str, Tensor] = {}
    for k, width in enumerate(widths):
        for _ in range(repeats):
            model, train = setup(width)
            first = _layer_outputs(model, probe)
            for t in range(steps):
                train()
                for name, x in _layer_outputs(model, probe).items():
                    zeros = torch.zeros(steps, len(widths), dtype=torch.float64)
                    drift = (x - first[name]).abs().mean().item()
                    table.setdefault(name, zeros)[t, k] += drift / repeats
    slopes = {name: slope(widths, x) for name, x in table.items()}
    return CoordinateCheck(list(widths), table, slopes)


def slope(widths: list[int], drift: Tensor) -> Tensor:
    """Of log drift (..., widths) over log width, by least squares."""
    log_width = torch.tensor(widths, dtype=torch.float64).log()
    log_width -= log_width.mean()
    log_drift = drift.double().clamp_min(1e-300).log()
    return (log_drift * log_width).sum(-1) / log_width.square().sum()


@torch.no_grad()
def _layer_outputs(model: nn.Module, probe: Tensor) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
            outputs[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    named = [(name, m) for name, m in model.named_modules() if isinstance(m, LAYERS)]
    handles = [m.register_forward_hook(keep(name)) for name, m in named]
    buffers = [
        (b, b.clone()) for b in model.buffers()
    ]  # running statistics: a look changes nothing
    try:
        model(probe)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return outputs
