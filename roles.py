"""The Maximal Update Parametrization (μP) for learned optimizers: roles, and the rules per role.

    roles = infer_roles(build, width)      # "input", "hidden" or "output", by what grows with width
    model = init_(build(width), roles)     # initial weights and output multipliers
    groups = param_groups(model, roles)    # update scales

Paper: section 4. Standard parametrization (SP) is the same code with the rules switched off.
"""

from __future__ import annotations

import math
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from numbers import Integral, Real
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
    if unknown := sorted(set(rules) - set(ALL)):
        raise ValueError(f"unknown rules {unknown}: use any of {ALL}.")
    return getattr(RULES[role] if rule in rules else SP, rule)


CONV, TRANSPOSED = nn.modules.conv._ConvNd, nn.modules.conv._ConvTransposeNd
LAYERS = (nn.Linear, CONV, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
TABLES = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
PREFIXES = ("", "_orig_mod", "_checkpoint_wrapped_module")  # not part of a name


class Weight(NamedTuple):
    """One parameter of a model, and what μP needs: its module, kind and orientation."""

    name: str  # as in named_parameters(), without the prefixes of wrappers
    param: nn.Parameter
    module: nn.Module  # its owner
    kind: str  # "layer" (multiplies its input), "table" (is looked up), "vector" or "bare"
    out_axis: int  # of fan_out: 0 in (out, in, ...), 1 in (in, out, ...), -1 in (..., in, out)
    layers: list[nn.Module]  # those that multiply by it; of a table, the readouts tied to it

    @property
    def groups(self) -> int:
        """Number of matrices in it: the groups of a transposed conv, or a stack of experts."""
        if isinstance(self.module, TRANSPOSED):
            return self.module.groups  # (in, out/groups, ...)
        stack = self.kind == "layer" and not isinstance(self.module, LAYERS)
        return math.prod(self.param.shape[:-2]) if stack else 1

    @property
    def fan_in(self) -> int:
        if self.kind in ("vector", "table"):
            return 1  # each output depends on one weight
        return self.param.numel() // self.param.shape[self.out_axis] // self.groups


def is_layer(module: nn.Module) -> bool:
    """One of LAYERS, or the Conv1D of transformers: a linear layer that stores (in, out)."""
    name = type(module).__name__
    return isinstance(module, LAYERS) or (name == "Conv1D" and hasattr(module, "nf"))


def _kind_and_axis(module: nn.Module, leaf: str, p: nn.Parameter) -> tuple[str, int]:
    """(kind, out_axis). `out_axis = {name: axis}` on a module makes a bare matrix of it a layer."""
    if p.ndim < 2 or isinstance(module, NORMS):
        return "vector", 0
    if isinstance(module, TABLES):
        return "table", 1
    if is_layer(module):
        transposed = isinstance(module, TRANSPOSED) or not isinstance(module, LAYERS)
        return "layer" if "weight" in leaf else "bare", int(transposed)
    axis = getattr(module, "out_axis", None)
    if not isinstance(axis, dict) or (axis := axis.get(leaf)) is None:
        return "bare", 0
    if p.ndim > 3 or axis not in (-2, -1, p.ndim - 2, p.ndim - 1):
        raise ValueError(f"out_axis of {leaf!r} must be one of the last two of at most three axes.")
    return "layer", axis % p.ndim if axis % p.ndim < 2 else -1


def weights_of(model: nn.Module) -> list[Weight]:
    """List every parameter once, under its first name; a tied embedding in its readout's place."""
    weights: dict[int, Weight] = {}
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, not {type(model).__name__}.")
    for prefix, module in model.named_modules():
        for leaf, p in module.named_parameters(recurse=False):
            name = ".".join(x for x in (*prefix.split("."), leaf) if x not in PREFIXES)
            if "_fsdp_wrapped_module" in prefix or leaf == "_flat_param":
                raise ValueError(f"{name!r}: FSDP1 flattens parameters: use fully_shard (FSDP2).")
            if leaf in ("weight_g", "weight_orig", "original", "original0"):
                raise ValueError(f"{name!r} cannot be initialized: remove its parametrization.")
            kind, axis = _kind_and_axis(module, leaf, p)
            w = weights.get(id(p)) or Weight(name, p, module, kind, axis, [])
            if {w.kind, kind} == {"table", "layer"}:
                weights.pop(id(p))
                owner = module if kind == "table" else w.module
                w = w._replace(module=owner, kind="table", out_axis=1)
            elif w.kind != kind:
                raise ValueError(f"{name!r} is tied to {w.name!r}, a {w.kind}: untie them.")
            w.layers.extend([module] * (kind == "layer"))
            weights[id(p)] = w
    return list(weights.values())


def infer_roles(
    build: Callable[[int], nn.Module], width: int, device: str = "meta"
) -> dict[str, str]:
    """Infer each parameter's role from which axes grow from build(width) to build(2 * width).

    hidden: fan_out and fan_in grow. output: only fan_in grows; also a table that a readout is tied
    to. input: only fan_out grows; also all vectors (biases, norms), embeddings, and weights that do
    not grow. A bare nn.Parameter may be multiplied or added, so it is hidden if its first two axes
    (out and in, as in nn.Linear) grow, else input. Doubtful roles warn: edit the dict where they
    are wrong. Models are built on the meta device, which allocates nothing; pass device="cpu" if
    the constructor reads values of tensors.
    """
    if isinstance(build, nn.Module) or not callable(build):
        raise TypeError("build must be a function that makes your model, given a width.")
    if not isinstance(width, Integral) or width < 1:
        raise ValueError(f"width must be an integer of 1 or more, not {width!r}.")
    try:
        with torch.device(device):
            models = build(width), build(2 * width)
    except Exception as error:
        if device == "meta":
            error.add_note("build ran on the meta device: pass device='cpu' if it reads values.")
        raise
    small, large = map(weights_of, models)
    if differing := sorted({w.name for w in small} ^ {w.name for w in large}):
        raise ValueError(f"parameter {differing[0]!r} exists at one of two widths only.")
    pairs = list(zip(small, large, strict=True))
    growing = {a.name for a, b in pairs if a.param.shape != b.param.shape}
    if not growing:
        raise ValueError(f"no parameter grows from build({width}) to build({2 * width}).")
    roles = {a.name: _role(a, b) for a, b in pairs}
    _warn_of_doubts(small, roles, growing)
    return roles


def _role(small: Weight, large: Weight) -> str:
    """The role of a parameter, from its shapes at two widths."""
    shape = tuple(small.param.shape)
    grows = [m != n for m, n in zip(shape, large.param.shape, strict=True)]
    if small.kind == "table" and small.layers and grows[1]:
        return "output"  # a readout is tied to it
    if small.kind in ("vector", "table") or sum(grows) < 1 + (small.kind == "bare"):
        return "input"
    if any(grows[2:]) and small.groups == 1:
        raise ValueError(
            f"{small.name!r} {shape} grows along its third axis, which fits no role: if it is a "
            "stack of matrices W, set out_axis = {'W': -2} on its module; -1 if W is (in, out)."
        )
    if small.fan_in == large.fan_in:
        return "input"
    fan_outs = {w.param.shape[w.out_axis] * w.groups for w in (small, large)}
    return "output" if len(fan_outs) == 1 else "hidden"


def _warn_of_doubts(weights: list[Weight], roles: dict[str, str], growing: set[str]) -> None:
    """Warn, naming the parameters, where a role or an orientation is a guess."""
    bare = [(w.name, w.param.shape) for w in weights if w.kind == "bare" and w.name in growing]
    tables = [n for n, s in bare if roles[n] == "input" and len(s) == 2 and 1 not in s]
    matrices = [name for name, s in bare if roles[name] == "hidden" and s[0] != s[1]]
    layers = [w.name for w in weights if w.kind == "layer" or roles[w.name] != "input"]
    outputs = [name for name in layers if roles[name] == "output"]
    outputs = outputs if outputs != layers[-1:] else []  # no doubt: one output, the last layer
    doubts = {
        "tables (input): if they multiply, make them 'hidden' or use mulo.Readout": tables,
        "(out, in): if W is (in, out), set out_axis = {'W': 1} on its module, else 0": matrices,
        "outputs: if an inner layer is among them, make it 'hidden' or let its size grow": outputs,
    }
    for doubt, names in doubts.items():
        if names:
            shown = ", ".join(map(repr, names[:4])) + ", ..." * (len(names) > 4)
            warnings.warn(f"{shown} ({len(names)}) are taken as {doubt}.", stacklevel=3)


def _with_roles(model: nn.Module, roles: dict[str, str]) -> list[tuple[Weight, str]]:
    """List every weight with its role. The roles must be those of this model."""
    weights = weights_of(model)
    for w in weights:
        if (role := roles.get(w.name)) not in RULES:
            fix = f"infer the roles from it, or give one of {tuple(RULES)}"
            raise ValueError(f"the role of the model's {w.name!r} is {role!r}: {fix}.")
    if unknown := sorted(roles.keys() - {w.name for w in weights}):
        raise ValueError(f"the model has no parameter {unknown[0]!r}: infer the roles from it.")
    return [(w, roles[w.name]) for w in weights]


def divide_output(self, args: tuple[Tensor], output: Tensor) -> Tensor:
    """Forward hook: divide a layer's output by fan_in. A plain function, as torch.jit needs."""
    return output / self.output_divisor


def divisor_of(module: nn.Module) -> int:
    """The number that a layer's output is divided by, 1 if it is not."""
    return module.output_divisor if divide_output in module._forward_hooks.values() else 1


@torch.no_grad()
def _set_divisors(model: nn.Module, divisors: dict[nn.Module, int], rescale: bool) -> None:
    """Divide the outputs of these layers and no others. rescale: also multiply their weights and
    biases, so that the model computes the same."""
    factors = {m: divisors.get(m, 1) / divisor_of(m) for m in model.modules()}
    params = {p: k for m, k in factors.items() if k != 1 for p in m.parameters(recurse=False)}
    if rescale:
        for name, m in model.named_modules():
            if factors[m] == 1 and any(p in params for p in m.parameters(False) if p.ndim > 1):
                fix = "head.weight = nn.Parameter(head.weight.detach().clone())"
                raise ValueError(f"{name!r} is tied to an output layer: untie them first ({fix}).")
        for p, factor in params.items():
            p.mul_(factor)
    if params and "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # code that is compiled already would not call new hooks
    for m in factors:
        hooks = m._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is divide_output]:
            del hooks[key]
        if m in divisors:
            m.output_divisor = divisors[m]
            m.register_forward_hook(divide_output)


class Readout(nn.Linear):
    """An output layer under μP: (W x + b) / fan_in, unless `init_` switches the division off.

    Any readout can be tied to an embedding E: `head.weight = tokens.weight`. Both need entries of
    O(1) that move by O(1): the readout E x / N averages N products that a step moves in similar
    directions. A tied weight is therefore an output that starts as N(0, 1), not as zeros.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _set_divisors(self, {self: self.in_features}, rescale=False)


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
    zeros are in its experiments) or tied to an embedding. Biases of layers are input weights of
    fan_in 1: N(0, 1), but (DIVERGES) biases that are zero stay zero. Without the rule "init", as in
    SP, all biases become zero. Norms and bare input parameters keep their values; `padding_idx`
    rows are zero.
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
        if w.kind == "table" and w.module.padding_idx is not None:
            count = torch.ones_like(w.param[:, :1], dtype=torch.int64).cumsum(0)  # also of DTensors
            w.param.mul_(count != w.module.padding_idx + 1)
    return model


def initial_std(w: Weight, role: str, rules: Iterable[str], zero_output: bool) -> float | None:
    """The standard deviation of initial values; None for norms and bare input parameters."""
    if w.kind == "vector":  # biases are input weights of fan_in 1
        return float("init" in rules) if is_layer(w.module) else None
    if role == "output" and zero_output and w.kind != "table":
        return 0.0
    if w.kind == "bare" and role == "input":
        return None
    return w.fan_in ** (power(role, "init", rules) / 2)


def _divisors(model: nn.Module, roles: dict[str, str], rules: tuple) -> dict[nn.Module, int]:
    """The layers whose outputs the rules divide, and by what."""
    divisors = {}
    for w, role in _with_roles(model, roles):
        if role == "output" and power(role, "multiplier", rules):
            if not w.layers or not all(hasattr(layer, "weight") for layer in w.layers):
                problem = "is an output but not the weight of a layer: no hook can divide by fan_in"
                raise ValueError(f"{w.name!r} {problem}. Use mulo.Readout.")
            fan_in = w.param.shape[1] if w.kind == "table" else w.fan_in
            divisors |= dict.fromkeys(w.layers, fan_in)
    return divisors


def multiply_outputs_(
    model: nn.Module, roles: dict[str, str], rules: Iterable[str] = ALL, rescale: bool = False
) -> nn.Module:
    """Divide the outputs of output layers by fan_in; without the rule "multiplier", do not.

    `init_` calls it. The division is not part of the state_dict: when you load one into a new
    model, call this too. rescale=True, for pretrained weights, multiplies the weights and biases of
    these layers by fan_in, so that the model computes the same as before.
    """
    _set_divisors(model, _divisors(model, roles, tuple(rules)), rescale)
    return model


def fold_outputs_(model: nn.Module) -> nn.Module:
    """Fold the 1/fan_in of output layers into their weights and biases, in place, to serve a model.

    The model computes the same, and other programs can use its state_dict. To train it again, call
    `multiply_outputs_` with rescale=True and make new `param_groups`. Load the state_dict into a
    model that `build` has made, not one after `init_`, which would divide once more.
    """
    _set_divisors(model, {}, rescale=True)
    return model


def size_factor(kind: str, fan_in: int, area: int, config) -> float:
    """The factor on the update by two rules that the paper does not have (DIVERGES).

    Input rule: updates of input layers move the first pre-activations in proportion to fan_in, so
    multiply by input_base / fan_in (input_base: the input size in meta-training), at most by 4: a
    ViT with patches of a few pixels trained worse with more. Channel rule: multiply hidden
    convolutions by kh * kw, which with 1/fan_in is 1/channels.
    """
    if kind == "input" and config.input_base:
        return min(config.input_base / fan_in, 4.0)
    return float(area) if kind == "conv" and config.by_channels else 1.0


def group_options(w: Weight, role: str, rules: Iterable[str]) -> dict:
    """Options of a parameter's group; `kind` is bias, norm, table, conv (hidden) or the role."""
    area = math.prod(w.param.shape[2:]) if isinstance(w.module, CONV) else 1  # kh * kw
    fan_in, kind = w.fan_in, "conv" if role == "hidden" and area > 1 else role
    if w.kind == "vector":
        kind = "bias" if is_layer(w.module) else "norm"
    elif w.kind == "table" or (w.kind == "bare" and role == "input"):
        fan_in, kind = 1, "table"  # bare input parameters count as embeddings
    scale = float(fan_in) ** power(role, "update", rules)
    sizes = {"fan_in": fan_in, "area": area, "out_axis": w.out_axis}
    return {"role": role, "kind": kind, "scale": scale} | sizes


def param_groups(model: nn.Module, roles: dict[str, str], rules: Iterable[str] = ALL) -> list[dict]:
    """Groups for MuLO with `scale`, the μP factor on the update: 1/fan_in if hidden, else 1.

    Each group also has the `names` and `shapes` of its params, their `role` and `kind`. MuLO
    leaves frozen parameters alone while they have no gradient.
    """
    rules, groups = tuple(rules), {}
    divisors = _divisors(model, roles, rules)
    for name, module in model.named_modules():
        now, right = divisor_of(module), divisors.get(module, 1)
        if now != right:
            fix = "call mulo.multiply_outputs_(model, roles) if it was trained under μP, with "
            fix += "rescale=True if it was trained otherwise, mulo.init_ if it is new; "
            fix += f"with rules={rules}, if that is what you want"
            raise ValueError(f"layer {name!r} is divided by {now}, not by {right}: {fix}.")
    for w, role in _with_roles(model, roles):
        if w.param.requires_grad or w.param.is_floating_point():  # skip quantized (integer) weights
            options = group_options(w, role, rules)
            new = {"params": [], "names": [], "shapes": [], **options}
            group = groups.setdefault(tuple(options.values()), new)
            group["params"].append(w.param)
            group["names"].append(w.name)
            group["shapes"].append(tuple(w.param.shape))
    return list(groups.values())


def name_of(p: Tensor, group: dict) -> str:
    """A parameter's name for messages; its shape if names and params are not parallel."""
    names = group.get("names", ())
    if len(names) != len(group["params"]):  # split by the user or by ZeRO
        return f"of shape {tuple(p.shape)}"
    return next(repr(n) for n, q in zip(names, group["params"], strict=True) if q is p)


def warn(message: str) -> None:
    """Warn at the user's line: the innermost one outside of mulo and torch."""
    frames = [frame.f_globals for frame, _ in traceback.walk_stack(sys._getframe())]
    packages = [variables.get("__name__", "").partition(".")[0] for variables in frames]
    users = (k for k, name in enumerate(packages) if name not in ("mulo", "torch"))
    warnings.warn(message, stacklevel=1 + next(users, 0))


def doubts(group: dict, mup: bool | None, defaults: dict) -> Iterator[str]:
    """Yield warnings about a group. mup: whether lo was meta-trained under μP, None if unknown."""
    if mup and "scale" not in group:
        yield "this LO was meta-trained under μP: use mulo.init_ and mulo.param_groups."
    if mup is False and group.get("scale", 1) != 1:
        yield "this LO was meta-trained without μP: pass rules=() to mulo.param_groups and init_."
    lr, decay = (float((defaults | group)[key]) for key in ("lr", "weight_decay"))
    if 0 < lr < 0.01:
        yield f"lr={lr:g} is a factor on the update, not a learning rate like AdamW's: omit it."
    if lr * decay >= 0.01:
        yield f"weight_decay={decay:g} shrinks parameters by lr * weight_decay per step: try 1e-4."


def check_group(group: dict) -> None:
    """Raise unless a param group has options in their ranges and real parameters."""
    for name, least in {"lr": 0, "weight_decay": 0, "scale": 0, "step": 0, "fan_in": 1}.items():
        value = group[name]
        if not (isinstance(value, Real | Tensor) and value >= least):
            raise ValueError(f"{name} must be a number of {least} or more, not {value!r}.")
    if group["out_axis"] not in (0, 1, -1):
        raise ValueError(f"out_axis must be 0, 1 or -1, not {group['out_axis']!r}.")
    for p in group["params"]:
        if not p.is_floating_point():
            raise ValueError(f"parameters must be real floating point, not {p.dtype}.")


def check_shape(p: Tensor, group: dict) -> None:
    """Raise if `param_groups` saw no parameter of this shape (ZeRO may have reordered them)."""
    shape = tuple(p.shape)
    if shape not in map(tuple, group.get("shapes", [shape])):  # loaded shapes may be lists
        problem = f"a parameter of shape {shape} was not in param_groups"
        raise ValueError(f"{problem}: call it again, and use fully_shard (FSDP2), not FSDP1.")


def annealed_to(group: dict) -> int:
    """The time that annealing sees: t, but it stands still under a schedule or while lr != 1."""
    driven = "initial_lr" in group or group["lr"] != 1  # torch's schedulers set initial_lr
    return group.get("annealed_to", 0) if driven else group["step"]


def coordinate_check(
    setup: Callable[[int], tuple[nn.Module, Callable[[], object]]],
    probe: Tensor,
    widths: list[int],
    steps: int = 5,
    repeats: int = 1,
) -> dict[str, Tensor]:
    """Train nets of several widths and compare how far their layers' outputs for `probe` move.

    setup(width) returns a model and a function that trains it by one step. It is called `repeats`
    times per width, to average over its random numbers. Models must not use dropout. Returns, by
    layer, the slope of log drift against log width after each step, (steps,): 0 under μP, above 0
    if it grows with width. Drift is the mean |change| since the start. The paper's measure, the
    standard deviation of the change, ignores a shift common to all coordinates and is noisier for
    layers with few outputs.
    """
    if len(widths) < 2:
        raise ValueError(f"widths must be two or more, not {widths}.")
    shape = steps, len(widths)
    drift = defaultdict(lambda: torch.zeros(shape, dtype=torch.float64))
    for k, width in enumerate(widths):
        for _ in range(repeats):
            model, train = setup(width)
            start = layer_outputs(model, probe)
            for t in range(steps):
                train()
                for name, y in layer_outputs(model, probe).items():
                    drift[name][t, k] += (y - start[name]).abs().mean().item() / repeats
    return {name: slope(widths, x) for name, x in drift.items()}


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
    """The output of every layer (`is_layer`) for the input x, by name. Buffers do not change.

    theta replaces the model's parameters. For stacked nets, theta and x have a leading axis.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        outputs[name] = (output[0] if isinstance(output, tuple) else output).clone()

    layers = [(name, m) for name, m in model.named_modules() if is_layer(m)]
    handles = [m.register_forward_hook(partial(keep, name)) for name, m in layers]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    try:
        functional_call(model, buffers | (theta or {}), (x,))
    finally:
        for handle in handles:
            handle.remove()
    return outputs
