"""The Maximal Update Parametrization (μP) for learned optimizers: roles, and the rules per role.

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
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call


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
    """A rule's power of fan_in for a role; SP's if the rule is not among `rules`."""
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
    """One parameter of a model, and what μP needs: its module and kind."""

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

    @property
    def area(self) -> int:
        """The kernel area of a convolution, 1 for other weights."""
        return math.prod(self.param.shape[2:]) if self.kind == "layer" else 1


def weights_of(model: nn.Module) -> list[Weight]:
    """List every parameter once, under its first name. Ties between kinds are an error."""
    weights: dict[int, Weight] = {}
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod
    for prefix, module in model.named_modules():
        for leaf, p in module.named_parameters(recurse=False):
            name = ".".join(x for x in (*prefix.split("."), leaf) if x not in ("", "_orig_mod"))
            if "_fsdp_wrapped_module" in prefix or leaf == "_flat_param":
                fix = "use fully_shard (FSDP2)"
                raise ValueError(f"{name!r}: FSDP1 flattens parameters, so μP cannot apply: {fix}.")
            if leaf in ("weight_g", "original0"):
                raise ValueError(
                    f"{name!r}: μP cannot set its initial values, so remove weight_norm."
                )
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
                    f"{first.kind} differently (as a readout and an embedding): untie them."
                )
    return list(weights.values())


def infer_roles(
    build: Callable[[int], nn.Module], width: int, device: str = "meta"
) -> dict[str, str]:
    """Infer each parameter's role from which axes grow from build(width) to build(2 * width).

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
    models = f"build({width}) and build({2 * width})"
    if differing := sorted({w.name for w in small} ^ {w.name for w in large}):
        fix = "let only widths depend on the argument"
        raise ValueError(f"{models} do not have the same parameters ({differing[0]!r}): {fix}.")
    pairs = list(zip(small, large, strict=True))
    if all(a.param.shape == b.param.shape for a, b in pairs):
        raise ValueError(f"no parameter grows between {models}: use the width in build.")
    return {a.name: _role(a, b) for a, b in pairs}


def _role(small: Weight, large: Weight) -> str:
    """The role of a parameter, from its shapes at two widths."""
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
        raise ValueError(
            f"{small.name!r} {shape} grows along an axis after the second, which fits no role: "
            "write the roles by hand, and its scale into its param group."
        )
    if not grows[1 - small.out_axis]:  # fan_in
        return "input"
    return "hidden" if grows[small.out_axis] else "output"


def _with_roles(model: nn.Module, roles: dict[str, str]) -> list[tuple[Weight, str]]:
    """List every weight with its role. The roles must be those of this model."""
    weights = weights_of(model)
    for w in weights:
        if (role := roles.get(w.name, "none")) not in RULES:
            fix = f"give it one of {tuple(RULES)}, or infer the roles from this model"
            raise ValueError(f"the role of parameter {w.name!r} is {role!r}: {fix}.")
    if unknown := sorted(roles.keys() - {w.name for w in weights}):
        raise ValueError(f"the model has no parameter {unknown[0]!r}: infer the roles from it.")
    return [(w, roles[w.name]) for w in weights]


def _divide_output(fan_in: int, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """Forward hook: divide the output of a layer by fan_in."""
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

    Input and hidden weights: N(0, 1/fan_in). An embedding has fan_in 1: a lookup sums nothing.
    Output weights: zeros, or N(0, 1) if not zero_output (DIVERGES: N(0, 1) is the paper's rule,
    zeros are in its experiments). Biases of layers are input weights of fan_in 1: N(0, 1), but
    (DIVERGES) biases that are zero stay zero. Without the rule "init", as in SP, all biases become
    zero. Norms and bare input parameters are unchanged.

    The division is a forward hook; the model's code and state_dict do not change.
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
    """The standard deviation of initial values; None for norms and bare input parameters."""
    if w.kind == "vector":  # biases are input weights of fan_in 1
        return float("init" in rules) if isinstance(w.module, LAYERS) else None
    if role == "output" and zero_output:
        return 0.0
    if w.kind == "bare" and role == "input":
        return None
    return w.fan_in ** (power(role, "init", rules) / 2)


def multiply_outputs_(model: nn.Module, roles: dict[str, str], rules: Iterable[str] = ALL) -> None:
    """Divide the outputs of output layers by fan_in; without the rule, remove the division.

    `init_` calls it. The division is not part of the state_dict: when you load one into a new
    model, call this too.
    """
    divides = power("output", "multiplier", tuple(rules)) != 0
    outputs = [w for w, role in _with_roles(model, roles) if divides and role == "output"]
    for w in outputs:
        if w.kind != "layer" or not hasattr(w.module, "weight"):
            raise ValueError(
                f"{w.name!r} is an output but not the weight of a layer, so no hook can divide by "
                "fan_in: use mulo.Readout, or divide by hand and leave 'multiplier' out of rules."
            )
    for module in model.modules():  # any of them may have been an output under other roles
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "func", None) is _divide_output:
                del module._forward_hooks[key]
    for w in outputs:
        w.module.register_forward_hook(partial(_divide_output, w.fan_in))


UNSCALED = {"kind": "hidden", "area": 1}  # for groups that param_groups did not make


def kind_of(w: Weight, role: str) -> str:
    """The "kind" of a param group: a layer's role, or "conv" (hidden), "table", "norm", "bias"."""
    if w.kind == "vector":
        return "bias" if isinstance(w.module, LAYERS) else "norm"
    if w.kind == "table" or (w.kind == "bare" and role == "input"):
        return "table"
    return "conv" if role == "hidden" and w.area > 1 else role


@cache
def size_factor(kind: str, fan_in: int, area: int, config) -> float:
    """The factor on the update by two rules that the paper does not have (DIVERGES).

    `config` (mulo.LOConfig) switches them on or off, as in meta-training. Input rule: updates of
    input layers are multiplied by input_base / fan_in, where input_base is the input size in
    meta-training, because they move the first pre-activations in proportion to fan_in. The factor
    is at most 4: a ViT with patches of a few pixels trained worse with larger ones. Channel rule:
    hidden convolutions are multiplied by kh * kw, which makes 1/fan_in 1/channels.
    """
    if kind == "input" and config.input_base:
        return min(config.input_base / fan_in, 4.0)
    return float(area) if kind == "conv" and config.by_channels else 1.0


def group_options(w: Weight, role: str, rules: Iterable[str]) -> dict:
    """The options of a parameter's group: role, kind, μP factor, fan_in, area and out_axis."""
    kind = kind_of(w, role)
    fan_in = 1 if kind == "table" else w.fan_in  # bare input parameters count as embeddings
    scale = float(fan_in) ** power(role, "update", rules)
    options = {"role": role, "kind": kind, "scale": scale, "fan_in": fan_in}
    return options | {"area": w.area, "out_axis": w.out_axis}


def param_groups(model: nn.Module, roles: dict[str, str], rules: Iterable[str] = ALL) -> list[dict]:
    """Groups for MuLO with `scale`, the μP factor on the update: 1/fan_in if hidden, else 1.

    Each group also has the `names` and `shapes` of its params, their `role` and their `kind`.
    """
    rules, groups = tuple(rules), {}
    for w, role in _with_roles(model, roles):
        options = group_options(w, role, rules)
        if w.param.requires_grad:
            new = {"params": [], "names": [], "shapes": [], **options}
            group = groups.setdefault(tuple(options.values()), new)
            group["params"].append(w.param)
            group["names"].append(w.name)
            group["shapes"].append(tuple(w.param.shape))
    return list(groups.values())


def name_of(p: Tensor, group: dict) -> str:
    """A parameter's name for messages; its shape if the group has no names."""
    k = next(k for k, other in enumerate(group["params"]) if other is p)
    return repr(group["names"][k]) if "names" in group else f"of shape {tuple(p.shape)}"


def group_table(groups: list[dict]) -> str:
    """Format param groups as a table: kind, tensors, scale, lr and the most common shapes."""
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
    model, and the outputs of each layer (pre-activations and logits) are compared with those before
    training, by mean |change|. The paper's measure, the standard deviation of the change, ignores a
    shift common to all coordinates and is noisier for layers with few outputs.
    """
    drift: dict[str, Tensor] = {}
    for k, width in enumerate(widths):
        for _ in range(repeats):
            model, train = setup(width)
            start = layer_outputs(model, probe)
            for t in range(steps):
                train()
                for name, y in layer_outputs(model, probe).items():
                    zeros = torch.zeros(steps, len(widths), dtype=torch.float64)
                    change = (y - start[name]).abs().mean().item()
                    drift.setdefault(name, zeros)[t, k] += change / repeats
    return CoordinateCheck(list(widths), drift, {k: slope(widths, x) for k, x in drift.items()})


def slope(widths: list[int], drift: Tensor) -> Tensor:
    """Least-squares slope of log drift (..., widths) against log width."""
    log_width = torch.tensor(widths, dtype=torch.float64).log()
    log_width -= log_width.mean()
    log_drift = drift.double().clamp_min(1e-300).log()
    return (log_drift * log_width).sum(-1) / log_width.square().sum()


@torch.no_grad()
def layer_outputs(
    model: nn.Module, x: Tensor, theta: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The output of every layer in LAYERS for the input x, by name. Buffers are restored.

    theta replaces the model's parameters. For stacked nets, theta and x have a leading axis.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        outputs[name] = (output[0] if isinstance(output, tuple) else output).clone()

    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, LAYERS)]
    handles = [m.register_forward_hook(partial(keep, name)) for name, m in layers]
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        functional_call(model, theta or {}, (x,))
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in buffers:
            buffer.copy_(value)
    return outputs


if __name__ == "__main__":
    raise SystemExit("roles.py is a module, not a command: use `from mulo import roles`.")
