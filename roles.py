"""The Maximal Update Parametrization (μP) for learned optimizers: roles, and the rules by role.

    roles = infer_roles(build, width)      # "input", "hidden" or "output", by what grows with width
    model = init_(build(width), roles)     # initial weights and output multipliers
    groups = param_groups(model, roles)    # update scales

Paper: section 4. The rules are one table, `RULES`, of powers of fan_in. Standard parametrization
(SP) is the same code with the rules switched off. `mulo` re-exports these functions.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Rule(NamedTuple):
    """Exponents of fan_in, the number of inputs that one output sums (conv: in * kh * kw)."""

    init: int  # of the variance of the initial weights
    multiplier: int  # of the factor on the layer's output
    update: int  # of the factor on the optimizer's update


# Paper, section 4: "Initialization-μ", "Multipliers-μ" and "Update Scaling-μ" (eq. 3).
RULES = {
    "input": Rule(init=-1, multiplier=0, update=0),
    "hidden": Rule(init=-1, multiplier=0, update=-1),
    "output": Rule(init=0, multiplier=-1, update=0),
}
SP = Rule(init=-1, multiplier=0, update=0)  # applies to every role where a rule is off
ALL = Rule._fields  # rules=ALL is μP, rules=() is SP, rules=("init", "update") is an ablation


def power(role: str, rule: str, rules: Iterable[str]) -> int:
    """The power of fan_in that a rule has for a role, or SP's if the rule is not among `rules`."""
    unknown = set(rules) - set(ALL)
    if unknown:
        raise ValueError(f"unknown rules {sorted(unknown)}: use any of {ALL}.")
    return getattr(RULES[role] if rule in rules else SP, rule)


TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
LAYERS += (nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
TABLES = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS += (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS += (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class Weight(NamedTuple):
    """One parameter of a model, with what μP needs to know about it."""

    name: str  # as in named_parameters(), without the prefixes of torch.compile and DDP
    param: nn.Parameter
    module: nn.Module  # its owner
    kind: str  # "layer" (multiplies its input), "table" (is looked up), "vector" or "bare"

    @property
    def out_axis(self) -> int:
        """The fan_out axis: 0 in torch's (out, in, ...), 1 in tables and transposed convs."""
        return 1 if self.kind == "table" or isinstance(self.module, TRANSPOSED) else 0

    @property
    def fan_in(self) -> int:
        if self.kind in ("vector", "table"):
            return 1  # each output depends on one weight
        groups = self.module.groups if self.out_axis else 1  # transposed: (in, out/groups, ...)
        return math.prod(self.param.shape) // self.param.shape[self.out_axis] // groups


def weights_of(model: nn.Module) -> list[Weight]:
    """Every parameter once, under its first name. Ties between different kinds are an error."""
    weights: dict[int, Weight] = {}
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod
    for prefix, module in model.named_modules():
        for leaf, p in module.named_parameters(recurse=False):
            name = ".".join(x for x in (*prefix.split("."), leaf) if x not in ("", "_orig_mod"))
            if leaf in ("weight_g", "original0"):
                why = "is half of a weight under weight_norm, whose init μP cannot set"
                raise ValueError(f"{name!r} {why}: remove weight_norm.")
            if p.ndim < 2 or isinstance(module, NORMS):
                kind = "vector"
            elif isinstance(module, TABLES):
                kind = "table"
            else:
                kind = "layer" if isinstance(module, LAYERS) and "weight" in leaf else "bare"
            first = weights.setdefault(id(p), Weight(name, p, module, kind))
            if first.kind != kind:
                raise ValueError(
                    f"{name!r} is tied to {first.name!r}, but μP scales a {kind} and a "
                    f"{first.kind} differently (like a readout and an embedding): untie them."
                )
    return list(weights.values())


def infer_roles(
    build: Callable[[int], nn.Module], width: int, device: str = "meta"
) -> dict[str, str]:
    """The role of each parameter, by which of its axes grow from build(width) to build(2 * width).

    hidden: fan_out and fan_in grow. output: only fan_in grows. input: only fan_out grows; also all
    vectors (biases, norms), embeddings, and weights that do not grow. A bare nn.Parameter may be
    multiplied or added, so it is hidden if its first two axes (out and in, as in nn.Linear) grow,
    else input; edit the dict where that is wrong. Models are built on the meta device, which
    allocates nothing; pass device="cpu" if the constructor reads values of tensors.
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
    differing = {w.name for w in small} ^ {w.name for w in large}
    if differing:
        raise ValueError(
            f"build({width}) and build({2 * width}) do not have the same parameters "
            f"({sorted(differing)[0]!r}): let only widths depend on the argument."
        )
    pairs = list(zip(small, large, strict=True))
    if all(a.param.shape == b.param.shape for a, b in pairs):
        raise ValueError(
            f"no parameter grows from build({width}) to build({2 * width}): use the width in build."
        )
    return {a.name: _role(a, b) for a, b in pairs}


def _role(small: Weight, large: Weight) -> str:
    """The role of one parameter, seen at two widths."""
    shape = tuple(small.param.shape)
    grows = [m != n for m, n in zip(shape, large.param.shape, strict=True)]
    if small.kind in ("vector", "table") or not any(grows):
        return "input"
    if small.kind == "bare" and sum(grows) == 1:
        if len(shape) == 2 and 1 not in shape:
            warnings.warn(
                f"{small.name!r} {shape}, a bare parameter with one growing axis, is taken as a "
                "table (input), such as positions. If it is a readout, use mulo.Readout.",
                stacklevel=4,
            )
        return "input"
    if any(grows[2:]):
        axes = [axis for axis, g in enumerate(grows) if g]
        raise ValueError(
            f"{small.name!r} {shape} grows along axes {axes}, which fits no role: write the roles "
            "by hand, and its scale into its param group."
        )
    if not grows[1 - small.out_axis]:  # fan_in
        return "input"
    return "hidden" if grows[small.out_axis] else "output"


def _with_roles(model: nn.Module, roles: dict[str, str]) -> list[tuple[Weight, str]]:
    """Every weight with its role. The roles must be those of this model."""
    weights = weights_of(model)
    for w in weights:
        if (role := roles.get(w.name, "none")) not in RULES:
            fix = f"give it one of {tuple(RULES)}, or infer the roles from this model"
            raise ValueError(f"the role of parameter {w.name!r} is {role!r}: {fix}.")
    unknown = sorted(roles.keys() - {w.name for w in weights})
    if unknown:
        raise ValueError(f"the model has no parameter {unknown[0]!r}: infer the roles from it.")
    return [(w, roles[w.name]) for w in weights]


def _divide_output(fan_in: int, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Forward hook that gives any output layer its 1/fan_in."""
    return output / fan_in


class Readout(nn.Linear):
    """An output layer under μP: (W x + b) / fan_in, unless `init_` switches the division off."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_forward_hook(partial(_divide_output, self.in_features))


@torch.no_grad()
def init_(
    model: nn.Module,
    roles: dict[str, str],
    rules: Iterable[str] = ALL,
    zero_output: bool = True,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Initialize by role, in place, and divide the outputs of output layers by fan_in.

    Input and hidden weights: N(0, 1/fan_in). An embedding has fan_in 1, for a lookup sums nothing.
    Output weights: zeros, or N(0, 1) if not zero_output (DIVERGES: N(0, 1) is the paper's rule,
    zeros are in its experiments). Biases of layers are input weights of fan_in 1: N(0, 1), but
    (DIVERGES) biases that are zero stay zero. Without the rule "init", as in SP, all biases become
    zero, as in `Task.init`. Norms and bare input parameters: unchanged.

    The division is a forward hook; code and state_dict stay as they are.
    """
    rules = tuple(rules)
    multiply_outputs_(model, roles, rules)
    for w, role in _with_roles(model, roles):
        std = initial_std(w, role, rules, zero_output)
        if std == 0:
            w.param.zero_()
        elif std is not None and (w.kind != "vector" or w.param.any()):
            w.param.normal_(0, std, generator=generator)
    return model


def initial_std(w: Weight, role: str, rules: Iterable[str], zero_output: bool) -> float | None:
    """Standard deviation of initial values; None for norms and bare input parameters."""
    if w.kind == "vector":  # biases are input weights of fan_in 1
        return float("init" in rules) if isinstance(w.module, LAYERS) else None
    if role == "output" and zero_output:
        return 0.0
    if w.kind == "bare" and role == "input":
        return None
    return w.fan_in ** (power(role, "init", rules) / 2)


def multiply_outputs_(model: nn.Module, roles: dict[str, str], rules: Iterable[str] = ALL) -> None:
    """Divide the outputs of output layers by fan_in, or stop doing so; part of `init_`.

    The state_dict does not hold this: call it before you load one into a new model.
    """
    divides = power("output", "multiplier", tuple(rules)) != 0
    outputs = [w for w, role in _with_roles(model, roles) if divides and role == "output"]
    for w in outputs:
        if w.kind != "layer" or not hasattr(w.module, "weight"):
            raise ValueError(
                f"{w.name!r} is an output but not the weight of a layer, so its 1/fan_in has no "
                "place: use mulo.Readout, or multiply by hand and leave 'multiplier' out of rules."
            )
    for module in model.modules():  # also those that were outputs before the roles were edited
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "func", None) is _divide_output:
                del module._forward_hooks[key]
    for w in outputs:
        w.module.register_forward_hook(partial(_divide_output, w.fan_in))


def fan_in_of(w: Weight, role: str) -> int:
    """The fan_in of updates and epsilons: 1 for bare inputs, which are taken as tables."""
    return 1 if w.kind == "bare" and role == "input" else w.fan_in


UNSCALED = {"kind": "hidden", "area": 1}  # for groups that param_groups did not make


def area_of(w: Weight) -> int:
    """The kernel area of a convolution, 1 for other weights."""
    return math.prod(w.param.shape[2:]) if w.kind == "layer" else 1


def kind_of(w: Weight, role: str) -> str:
    """The "kind" of a param group: a layer's role, or "conv" (hidden), "table", "norm", "bias"."""
    if w.kind == "vector":
        return "bias" if isinstance(w.module, LAYERS) else "norm"
    if w.kind == "table" or (w.kind == "bare" and role == "input"):
        return "table"
    return "conv" if role == "hidden" and area_of(w) > 1 else role


@cache
def size_factor(kind: str, fan_in: int, area: int, config) -> float:
    """The factor on the update by two rules beyond the paper. A learned optimizer's config
    (mulo.LOConfig) switches them on, as they must be on or off as in its meta-training.

    DIVERGES: the paper has neither. Input rule: input layers are multiplied by input_base / fan_in,
    where input_base is the size of the inputs in meta-training, which the paper keeps fixed. An
    update moves the first pre-activations in proportion to fan_in, as it does in a hidden layer.
    The factor is at most 4: a ViT with patches of a few pixels trained worse with larger ones.
    Channel rule: hidden convolutions get kh * kw, so 1/channels in all, not 1/fan_in.
    """
    if kind == "input" and config.input_base:
        return min(config.input_base / fan_in, 4.0)
    return float(area) if kind == "conv" and config.by_channels else 1.0


def param_groups(model: nn.Module, roles: dict[str, str], rules: Iterable[str] = ALL) -> list[dict]:
    """Groups for MuLO with `scale`, the μP factor on the update: 1/fan_in if hidden, else 1.

    Each group also has the `names` of its params, their `role` and their `kind`.
    """
    rules, groups = tuple(rules), {}
    for w, role in _with_roles(model, roles):
        fan_in = fan_in_of(w, role)
        scale = float(fan_in) ** power(role, "update", rules)
        key = {"role": role, "kind": kind_of(w, role), "scale": scale, "fan_in": fan_in}
        key |= {"area": area_of(w), "out_axis": w.out_axis}
        if w.param.requires_grad:
            group = groups.setdefault(tuple(key.values()), {"params": [], "names": [], **key})
            group["params"].append(w.param)
            group["names"].append(w.name)
    return list(groups.values())


def mismatch(mup: bool | None, params: Iterable) -> str | None:
    """What is wrong between an optimizer's parametrization (None: not known) and its groups."""
    scales = [g["scale"] for g in params if isinstance(g, dict) and "scale" in g]
    if mup and not scales:
        return (
            "under μP, and these parameters have no roles, so wide nets will not train: use "
            "mulo.param_groups(model, roles), and mulo.init_ before it."
        )
    if mup is False and any(scale != 1 for scale in scales):
        return (
            "without μP, and these parameters are scaled by it: pass rules=() to "
            "mulo.param_groups and mulo.init_."
        )
    return None


def name_of(p: Tensor, group: dict) -> str:
    """A parameter as messages call it: by its name if the group has names, else by its shape."""
    where = next(k for k, other in enumerate(group["params"]) if other is p)
    return repr(group["names"][where]) if "names" in group else f"of shape {tuple(p.shape)}"


def group_table(groups: list[dict]) -> str:
    """Param groups as a table: kind, number of tensors, scale, lr and the commonest shapes."""
    rows = [("kind", "tensors", "scale", "lr", "shapes")]
    for g in groups:
        shapes = Counter("x".join(map(str, p.shape)) or "scalar" for p in g["params"])
        shown = [s if n == 1 else f"{s} ({n})" for s, n in shapes.most_common(4)]
        shown += ["..."] * (len(shapes) > 4)
        numbers = (f"{float(g[k]):.4g}" for k in ("scale", "lr"))
        kind = g["kind"] if "role" in g else "none"
        rows.append((kind, str(len(g["params"])), *numbers, ", ".join(shown)))
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, sizes)).rstrip() for row in rows)


def check_group(group: dict) -> None:
    """Raise unless a param group of MuLO has numbers in their ranges and real parameters."""
    for name, least in {"lr": 0, "weight_decay": 0, "scale": 0, "step": 0, "fan_in": 1}.items():
        value = group[name]
        if not (isinstance(value, Real | Tensor) and value >= least):
            raise ValueError(f"{name} must be a number of {least} or more, not {value!r}.")
    for p in group["params"]:
        if not p.is_floating_point():
            raise ValueError(f"parameters must be real floating point, not {p.dtype}.")
    if group["out_axis"] not in (0, 1, -1):
        raise ValueError(f"out_axis must be 0, 1 or -1, not {group['out_axis']!r}.")


class CoordinateCheck(NamedTuple):
    """How far training moves the outputs of each layer, and how that grows with width."""

    widths: list[int]
    drift: dict[str, Tensor]  # layer -> (steps, widths): mean |output_t - output_0| on the probe
    slopes: dict[str, Tensor]  # layer -> (steps,), log-log: 0 under μP, > 0 if it grows with width


def coordinate_check(
    setup: Callable[[int], tuple[nn.Module, Callable[[], object]]],
    probe: Tensor,
    widths: list[int],
    steps: int = 5,
    repeats: int = 1,
) -> CoordinateCheck:
    """Train nets of several widths and compare how far their activations move.

    setup(width) returns a model and a function that trains it by one step; it is called `repeats`
    times per width, to average over its random numbers. After each step, `probe` goes through the
    model, and the output of every layer in LAYERS (pre-activations and logits) is compared with
    its output before training, by mean |change|. (`evaluate.py coord` has the paper's measure, the
    standard deviation over coordinates, which does not see a shift common to all.)
    """
    drift: dict[str, Tensor] = {}
    for k, width in enumerate(widths):
        for _ in range(repeats):
            model, train = setup(width)
            before = _layer_outputs(model, probe)
            for t in range(steps):
                train()
                for name, x in _layer_outputs(model, probe).items():
                    zeros = torch.zeros(steps, len(widths), dtype=torch.float64)
                    change = (x - before[name]).abs().mean().item()
                    drift.setdefault(name, zeros)[t, k] += change / repeats
    return CoordinateCheck(list(widths), drift, {k: slope(widths, x) for k, x in drift.items()})


def slope(widths: list[int], drift: Tensor) -> Tensor:
    """Least-squares slope of log drift (..., widths) against log width."""
    log_width = torch.tensor(widths, dtype=torch.float64).log()
    log_width -= log_width.mean()
    log_drift = drift.double().clamp_min(1e-300).log()
    return (log_drift * log_width).sum(-1) / log_width.square().sum()


@torch.no_grad()
def _layer_outputs(model: nn.Module, probe: Tensor) -> dict[str, Tensor]:
    """The output of every layer for this input; buffers (running statistics) are restored."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        outputs[name] = (output[0] if isinstance(output, tuple) else output).clone()

    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, LAYERS)]
    handles = [m.register_forward_hook(partial(keep, name)) for name, m in layers]
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        model(probe)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return outputs


if __name__ == "__main__":
    raise SystemExit("roles.py is a module, not a command: use `from mulo import roles`.")
