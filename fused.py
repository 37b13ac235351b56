"""The step in place, compiled: the passes of `rule.py` over a whole tensor, a loop each.

    fused.step_(net, acc, p, g, scale, dims)        # as rule.step_, which it is when it must be

The same functions, compiled to C++ on the CPU and Triton on CUDA (`inductor.py`). Two graphs serve
all matrices, alone and stacked (a third, small one those that are higher than wide), two more all
vectors, and so on for convolutions (and for what has very long rows): sizes are symbols, times and
rates are tensors. They are compiled when first called and kept for all optimizers of a
configuration. What makes them good:

  - M comes as one tensor to a decay (`init_accumulators(..., apart=True)`), so that every loop
    runs over the same entries. Pass 2 only adds up squares; M and V are made anew in pass 3, which
    stores them: to compute is cheaper than to read.
  - The network is part of the loop of pass 3 (`Planes`), so that its activations stay in registers
    or in the first cache.
  - No pass looks for bad gradients. Pass 1 says how large an entry of g^2 can be; only if that is
    too large, or NaN, the gradient is cleaned, and pass 1 done again. (Off the CPU it is always
    cleaned: to ask would wait for the device.)

`traced_` is the same as part of a larger graph, such as a whole step of meta-training
(`stacked.Learned.advance`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from itertools import chain

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map_only

import features
import rule
from features import Accumulators, Dims, Eps, Scales, trailing
from lo import LOConfig
from rule import Folded, Net

# Hidden sizes up to which the network is compiled. A GPU's is written out, which takes long.
WIDEST, WIDEST_GPU = 128, 32
STACK = 1_000_000  # entries of small tensors to a call, which costs more than to copy them
LONG = 4096  # entries of a row from which on its sums, too, are done in float64, which takes time
FIELDS = [field.name for field in dataclasses.fields(Net) if field.name != "config"]
register_pytree_node(
    Net,
    lambda net: ([getattr(net, name) for name in FIELDS], net.config),
    lambda values, config: Net(config, *values),
)


class Planes(Folded):
    """The same network on a list of planes (S, *shape), one to a feature: one operation,
    `inductor.mlp`."""

    @staticmethod
    def join(X: list[Tensor]) -> list[Tensor]:
        return [x.squeeze(1) for x in X]

    def first(self, X: list[Tensor], row: Tensor, col: Tensor) -> tuple[list[Tensor], Tensor]:
        return X, row + col  # all layers are one operation, of `rest`

    def rest(self, x: tuple[list[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        X, b0 = x
        w, b = zip(*self.layers, strict=True)
        d, m = torch.ops.mulo.mlp([self.w0, *w], [b0, *(trailing(x, b0.ndim) for x in b)], X)
        return d, m.exp()


@torch.no_grad()
def step_(
    net: Net,
    acc: Accumulators,
    p: Tensor,
    g: Tensor,
    scale: Tensor,
    dims: Dims,
    decay: Tensor | float = 0.0,
    eps_scale: Tensor | float = 1.0,
) -> Tensor | None:
    """As `rule.step_`, to which those parameters go that are not contiguous, or have but one entry
    along an axis that is factored; and all, if the network is too wide or compiling fails."""
    eager = functools.partial(rule.step_, net, acc, p, g, scale, dims, decay, eps_scale)
    found = _plain(acc, p, dims)
    if found is None or not compiles(net.config, p.device.type):
        return eager()
    acc, p, dims = found
    g = g.reshape(p.shape).contiguous()
    decay = decay if isinstance(decay, Tensor) else torch.zeros_like(scale)
    if not isinstance(eps_scale, Tensor):
        eps_scale = None if eps_scale == 1 else torch.full_like(scale, eps_scale)
    rest = scale if net.t is not None else net.pace * scale, decay, eps_scale
    axes = dims and (min(dims), max(dims))
    rank = careful_rank(p)
    weights = _weights(net)
    shared = tuple([x.shape[0] == 1 for x in weights])
    kinds = p.device, p.dtype, g.dtype
    key = net.config, p.ndim, rank, axes, *kinds, shared, net.t is None, eps_scale is None
    try:
        if key not in _passes:
            _passes[key] = Passes(net, rank, axes, dims == axes, p, g, *rest)
        _passes[key].means(dims == axes)  # compiled before anything is changed
    except Exception as error:  # of a compiler, or of a torch whose insides are others
        _give_up(p.device.type, error)
        return eager()
    return _passes[key].run(net, weights, dims == axes, acc, p, g, *rest)


def _weights(net: Net) -> list[Tensor]:
    """All of a network but the time."""
    time = [] if net.t is None else [net.time]
    return [*net.rates, net.dense, net.row, net.col, *time, net.bias, *chain(*net.layers)]


def careful_rank(*params: Tensor) -> int:
    """The rank up to which sums are done in float64: not of features, (S, 1, *shape), if no
    parameter (S, *shape) has long rows."""
    return 5 if any(p.ndim > 2 and p.shape[-1] > LONG for p in params) else 3


def _plain(acc: Accumulators, p: Tensor, dims: Dims) -> tuple[Accumulators, Tensor, Dims] | None:
    """Views in which axes that are not factored are one, or gone if they have one entry; or None.

    A convolution (S, out, in, 3, 3) becomes (S, out, in, 9).
    """
    if (
        not p.is_contiguous()
        or not acc.M.transpose(0, 1).is_contiguous()
        or not 0 < p.numel() < 2**31
    ):
        return None
    if p.ndim <= 3 and 1 not in p.shape[1:]:
        return acc, p, dims
    if dims is None:
        return None
    runs: list[list[int]] = []  # axes that become one
    for axis in (k for k in range(1 - p.ndim, 0) if p.shape[k] > 1):
        if runs and axis not in dims and runs[-1][0] not in dims:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    where = {run[0]: k - len(runs) for k, run in enumerate(runs)}
    if not where.keys() >= {*dims} or len(runs) > 3:  # as of a convolution of 64 to 2, 3 x 3
        return None

    def view(x: Tensor) -> Tensor:
        sizes = (math.prod(x.shape[k] for k in run) for run in runs)
        return x.view(*x.shape[: x.ndim - p.ndim + 1], *sizes)

    return Accumulators(*map(view, acc)), view(p), (where[dims[0]], where[dims[1]])


_passes: dict[tuple, Passes] = {}  # for all optimizers


class Passes:
    """The compiled passes of one configuration, for tensors of one rank and any size.

    `axes` are the factored ones in their order. Where d0 is the first of them (`straight` is False)
    rows and columns change places after pass 1, and the other passes are the same.
    """

    def __init__(
        self, net: Net, rank: int, axes: Dims, straight: bool, p, g, scale, decay, eps_scale
    ):
        from inductor import Graph, Tracer  # now, as importing the compiler takes seconds

        tracer = Tracer(rank, quick=True)
        S, *shape = tracer.symbols(p.ndim)

        def fake(x: Tensor, *sizes) -> Tensor:
            return torch.empty(sizes, dtype=x.dtype, device=x.device)

        def vectors(axis: int) -> Tensor:  # r or c
            sizes = (1 if k - len(shape) == axis else n for k, n in enumerate(shape))
            return fake(scale, S, 3, *sizes)

        with tracer.mode:
            t = None if net.t is None else fake(scale, S)
            net = dataclasses.replace(
                net, t=None, time=net.time if t is not None else None, pace=1.0
            )
            net = tree_map_only(
                Tensor, lambda x: fake(x, S if len(x) > 1 else 1, *x.shape[1:]), net
            )
            net = dataclasses.replace(net, t=t)
            scale, decay, eps_scale = (
                x if x is None else fake(x, S) for x in (scale, decay, eps_scale)
            )
            p, g, V = fake(p, S, *shape), fake(g, S, *shape), fake(scale, S, *shape)
            M = [fake(scale, S, *shape) for _ in range(3)]
            c, r = map(vectors, axes or (0, 0))

        @functools.cache
        def means(straight: bool) -> Graph:
            def f(rates, V, r, c, g, eps_scale) -> tuple[Scales, Tensor, Tensor, Tensor]:
                now, acc = dataclasses.replace(net, rates=rates), Accumulators(None, V, r, c)
                dims = axes if straight else axes[::-1]
                row_mean, col_mean = rule.mean_squares(g, dims, g.shape)
                eps = _eps(net, eps_scale)
                r, c, s = rule.factor(now, acc, row_mean, col_mean, dims, eps)
                if not straight:
                    r, c, s = c, r, s._replace(grad=s.grad[::-1], mom=s.grad[::-1])
                largest = row_mean.amax() * (g.shape[dims[1]] if dims else 1)
                return s, r, c, largest  # no entry of g^2 is larger

            return tracer.compile(f, net.rates, V, *((r, c) if straight else (c, r)), g, eps_scale)

        def f(net, M, V, r, c, p, g, s, scale, decay, eps_scale) -> None:
            acc = Accumulators([x.unsqueeze(1) for x in M], V, r, c)
            _network(net, acc, p, g, s, scale, decay, _eps(net, eps_scale))

        self.means, (s, *_) = means, means(straight).out
        self.network = tracer.compile(f, net, M, V, r, c, p, g, s, scale, decay, eps_scale)

    def run(
        self, net: Net, weights, straight: bool, acc: Accumulators, p, g, scale, decay, eps_scale
    ) -> Tensor | None:
        """A step in place; how many entries of g are not finite, or None."""
        M, V, r, c = acc
        (*rates, dense, row, col), rest = weights[:6], weights[6:]
        t = [] if net.t is None else [net.t.to(scale).expand(len(p)).contiguous()]
        eps = [] if eps_scale is None else [eps_scale]
        clip, on_cpu, bad = rule.clip_of(net.config), p.device.type == "cpu", None

        def screen(g: Tensor) -> tuple[Tensor, Tensor | None]:
            clean, bad = rule.screen(g, clip)
            return clean.to(g.dtype), bad  # as compiled for

        if not on_cpu:
            g, bad = screen(g)
        *s, new_r, new_c, largest = self.means(straight).run(*rates, V, r, c, g, *eps)
        if on_cpu and not float(largest) <= clip**2:  # else no entry can be bad
            g, bad = screen(g)
            if bad is not None:
                *s, new_r, new_c, _ = self.means(straight).run(*rates, V, r, c, g, *eps)
        if not straight:
            r, c, row, col = c, r, col, row
        state = *M.unbind(1), V, new_r, new_c, p, g
        self.network.run(*rates, dense, row, col, *rest, *t, *state, *s, scale, decay, *eps)
        torch._foreach_copy_([r, c], [new_r, new_c])
        return bad


def _eps(net: Net, scale: Tensor | None) -> Eps:
    return Eps(net.config.eps, net.config.eps_rms, 1.0 if scale is None else scale)


def _network(
    net: Net, acc: Accumulators, p: Tensor, g: Tensor, s: Scales, scale: Tensor, decay, eps: Eps
) -> None:
    """Passes 2 and 3: M and V, sums of squares; the network, folded with them, and the update."""
    M, V, r, c = acc
    ms = rule.accumulate_(net, p, g, M, V, s) / p[0].numel()
    folded = rule.fold(net, ms, r, c, scale, eps)
    *hidden, last = folded.layers
    w0, row, col, *last = map(torch.ops.mulo.keep, (folded.w0, folded.row, folded.col, *last))
    folded = Planes(w0, row, col, [*hidden, last])
    rule.update_(folded, net.config.feature_set, p, g, M, V, s, row, col, decay)


def traced_(
    net: Net,
    acc: Accumulators,  # M in pieces
    p: Tensor,
    g: Tensor,
    scale: Tensor,
    dims: Dims,
    decay: Tensor | float = 0.0,
    eps_scale: Tensor | float = 1.0,
) -> None:
    """As `rule.step_`, to be traced as part of a larger graph."""
    eps = Eps(net.config.eps, net.config.eps_rms, eps_scale)
    g = features.clean(g, rule.clip_of(net.config))
    *new, s = rule.factor(net, acc, *rule.mean_squares(g, dims, g.shape), dims, eps)
    for x, y in zip(acc[2:], new, strict=True):
        x.copy_(y)
    grad = tuple(map(torch.ops.mulo.keep, s.grad))
    mom = grad if s.mom is s.grad else tuple(map(torch.ops.mulo.keep, s.mom))
    _network(net, acc, p, g, s._replace(grad=grad, mom=mom), scale, decay, eps)


def compiles(config: LOConfig, device: str) -> bool:
    """Whether a configuration is compiled."""
    return config.hidden_size <= (WIDEST if device == "cpu" else WIDEST_GPU) and available(device)


_available: dict[str, bool] = {}  # by device


def available(device: str) -> bool:
    """Whether there is a compiler for a device; a warning if not, once."""
    if device not in _available:
        _available[device] = device != "meta"
        try:
            if device != "meta":
                import inductor  # noqa: F401, which leans on torch's insides

                torch.compile(torch.neg, fullgraph=True)(torch.ones(3, device=device))
        except Exception as error:
            _give_up(device, error)
    return _available[device]


def _give_up(device: str, error: Exception) -> None:
    """Go on without a compiler, with a warning."""
    _available[device] = False
    warnings.warn(
        f"torch cannot compile for {device}, so MuLO goes on without: install a compiler (g++ for "
        f"CPUs) and the torch of requirements.txt, or leave out compile=True. ({why(error)})",
        stacklevel=2,
    )


def why(error: Exception) -> str:
    """An error in a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
