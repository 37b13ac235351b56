"""The step in place, compiled: each pass of `rule.py` over a whole tensor in one loop.

    fused.step_(net, acc, p, g, scale, dims)        # as rule.step_, which it is when it must be

The same functions, compiled to C++ on the CPU and Triton on CUDA (`inductor.py`). Three graphs
serve all matrices, alone and stacked, three more all vectors, and so on for convolutions (and for
what has very long rows): sizes are symbols, times and rates are tensors. They are compiled when
first called and kept for all optimizers of a configuration. What makes them good:

  - M comes as one tensor to a decay (`init_accumulators(..., apart=True)`), so that every loop
    runs over the same entries.
  - A small network is written out plane by plane (`Unrolled`): its activations stay in registers.
    Beyond a hidden size of 8 they would not; pass 3 then takes matrix products over blocks that fit
    the cache (`Products`), which is where its time is.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

import rule
from features import Accumulators, Dims, Eps, Rates, Scales, trailing
from lo import LOConfig
from rule import Folded, Net

WIDEST = 8  # hidden size up to which the network is unrolled
STACK = 1_000_000  # entries of small tensors to a call, which costs more than to copy them
LONG = 4096  # entries of a row from which on its sums, too, are done in float64, which takes time
CHAINS = 4  # sums that a processor can add to at a time


class Unrolled(Folded):
    """The same network on a list of planes (S, *shape), one to a feature, without its products."""

    @staticmethod
    def join(X: list[Tensor]) -> list[Tensor]:
        return [x.squeeze(1) for x in X]

    def first(self, X: list[Tensor], row: Tensor, col: Tensor) -> list[Tensor]:
        b = [x + y for x, y in zip(row.unbind(1), col.unbind(1), strict=True)]
        return _layer(self.w0, b, X)

    def rest(self, x: list[Tensor]) -> tuple[Tensor, Tensor]:
        for w, b in self.layers:
            x = _layer(w, trailing(b, x[0].ndim + 1).unbind(1), [plane.relu() for plane in x])
        d, m = x
        return d, m.exp()


class Products(Folded):
    """The same network with matrix products, but for its last layer, which is thin; sums and ReLUs
    between them become one loop."""

    def first(self, X: Tensor, row: Tensor, col: Tensor) -> Tensor:
        x = torch.bmm(self.w0, X.flatten(2)).unflatten(2, X.shape[2:])
        return (x + (row + col)).relu()  # here, where rows and columns are known

    def rest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        *hidden, (w, b) = self.layers
        block, x = x.shape[2:], x.flatten(2)
        for w_k, b_k in hidden:
            x = (torch.bmm(w_k, x) + b_k).relu()
        x = list(x.unflatten(2, block).unbind(1))
        d, m = _layer(w, trailing(b, x[0].ndim + 1).unbind(1), x)
        return d, m.exp()


def _layer(w: Tensor, b: Sequence[Tensor], x: list[Tensor]) -> list[Tensor]:
    """b + w x for w (S, m, n), by planes. Each is summed in a few chains, as an addition waits for
    the one before."""
    planes = []
    for bias, row in zip(b, trailing(w, x[0].ndim + 2).unbind(1), strict=True):
        terms = [w_k * x_k for w_k, x_k in zip(row.unbind(1), x, strict=True)]
        terms[0] = bias + terms[0]
        chains = [sum(terms[k + CHAINS :: CHAINS], terms[k]) for k in range(min(CHAINS, len(x)))]
        planes.append(sum(chains[1:], chains[0]))
    return planes


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
    along an axis that is factored; and all, if compiling fails."""
    eager = functools.partial(rule.step_, net, acc, p, g, scale, dims, decay, eps_scale)
    found = _plain(acc, p, dims)
    if found is None or not available(p.device.type):
        return eager()
    acc, p, dims = found
    g, bad = rule.screen(g.reshape(p.shape).contiguous(), rule.clip_of(net.config))
    decay = decay if isinstance(decay, Tensor) else torch.zeros_like(scale)
    if not isinstance(eps_scale, Tensor):
        eps_scale = None if eps_scale == 1 else torch.full_like(scale, eps_scale)
    bias = net.bias.expand(len(p), -1).contiguous()
    weights = [*net.rates, net.dense, net.row, net.col, bias, *chain(*net.layers)]
    rest = net.pace * scale, decay, eps_scale
    axes = dims and (min(dims), max(dims))
    long = p.ndim > 2 and p.shape[-1] > LONG
    shared = tuple([x.shape[0] == 1 for x in weights if x is not bias])
    key = net.config, p.ndim, long, axes, p.device, p.dtype, g.dtype, shared, eps_scale is None
    try:
        if key not in _passes:
            _passes[key] = Passes(net.config, long, axes, dims == axes, weights, p, g, *rest)
        _passes[key].pass_1(dims == axes)  # compiled before anything is changed
    except Exception as error:  # of a compiler, or of a torch whose insides are others
        _give_up(p.device.type, error)
        return eager()
    _passes[key].run(dims == axes, weights, acc, p, g, *rest)
    return bad


def _plain(acc: Accumulators, p: Tensor, dims: Dims) -> tuple[Accumulators, Tensor, Dims] | None:
    """Views in which axes that are not factored are one, or gone if they have one entry; or None.

    A convolution (S, out, in, 3, 3) becomes (S, out, in, 9).
    """
    if not p.is_contiguous() or not acc.M[:, 0].is_contiguous() or not 0 < p.numel() < 2**31:
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
        self, config: LOConfig, long: bool, axes: Dims, straight: bool, weights, p, g, *rest
    ):
        from inductor import Graph, Tracer  # now, as importing the compiler takes seconds

        self.config, self.axes, self.unrolled = config, axes, config.hidden_size <= WIDEST
        tracer = Tracer(rank=5 if long else 3)  # of the features' planes, and of all other sums
        S, *shape = tracer.symbols("size", p.ndim)

        def fake(x: Tensor, *sizes) -> Tensor:
            return torch.empty(sizes, dtype=x.dtype, device=x.device)

        def vectors(axis: int) -> Tensor:  # r or c
            sizes = (1 if k - len(shape) == axis else n for k, n in enumerate(shape))
            return fake(rest[0], S, 3, *sizes)

        with tracer.mode:
            weights = [fake(x, S if len(x) > 1 else 1, *x.shape[1:]) for x in weights]
            weights[6] = fake(rest[0], S, config.hidden_size)  # the bias, of its own time
            scale, decay, eps_scale = (x if x is None else fake(x, S) for x in rest)
            p, g, V = fake(p, S, *shape), fake(g, S, *shape), fake(scale, S, *shape)
            M = [fake(scale, S, 1, *shape) for _ in range(3)]
            c, r = map(vectors, axes or (0, 0))

        @functools.cache
        def pass_1(straight: bool) -> Graph:
            f, rates = functools.partial(self._means, straight), Rates(*weights[:3])
            return tracer.compile(f, rates, V, *((r, c) if straight else (c, r)), g, eps_scale)

        self.pass_1, s = pass_1, pass_1(straight).out
        self.pass_2 = tracer.compile(self._sums, weights, p, g, M, V, r, c, s, scale, eps_scale)
        *folded, row, col = self.pass_2.out
        thin, thick = (row, col, s), (p, g, M, V)
        if not self.unrolled:
            thin, thick = tracer.block(thin, thick, p.ndim - 1)
        self.pass_3 = tracer.compile(self._network, weights[7:-2], folded, *thin, *thick, decay)

    def run(self, straight: bool, weights, acc, p, g, scale, decay, eps_scale) -> None:
        """A step in place."""
        M, V, r, c = acc
        rates, (dense, row, col, bias, *layers) = weights[:3], weights[3:]
        M = [x.unsqueeze(1) for x in M.unbind(1)]
        eps = () if eps_scale is None else (eps_scale,)
        s = self.pass_1(straight).run(*rates, V, r, c, g, *eps)
        if not straight:
            r, c, row, col = c, r, col, row
        weights = (*rates, dense, row, col, bias, *layers)
        *folded, row, col = self.pass_2.run(*weights, p, g, *M, V, r, c, *s, scale, *eps)
        thin, thick = (row, col, *s), (p, g, *M, V)
        if self.unrolled:
            self.pass_3.run(*layers[:-2], *folded, *thin, *thick, decay)
            return
        split = rule.splitter(p.shape, rule.block_entries(self.config) * 7 // 10)  # 4 bytes/entry
        for parts in zip(*map(split, (*thin, *thick)), strict=True):
            thin_b = (x.contiguous() for x in parts[: len(thin)])
            self.pass_3.run(*layers[:-2], *folded, *thin_b, *parts[len(thin) :], decay)

    def _means(self, straight: bool, rates, V, r, c, g, eps_scale) -> Scales:
        """Pass 1: row and column means, r and c."""
        dims = self.axes if straight else self.axes[::-1]
        net, acc = Net(self.config, rates, *[None] * 6), Accumulators(None, V, r, c)
        means = rule.mean_squares(g, dims, g.shape)
        s = rule.factor_(net, acc, *means, dims, self._eps(eps_scale))
        return s if straight else s._replace(grad=s.grad[::-1], mom=s.grad[::-1])

    def _sums(self, weights, p, g, M, V, r, c, s, scale, eps_scale) -> tuple[Tensor, ...]:
        """Pass 2: M and V, sums of squares; the network, folded with them."""
        rates, (*first, bias), layers = Rates(*weights[:3]), weights[3:7], weights[7:]
        layers = list(zip(layers[::2], layers[1::2], strict=True))
        net = Net(self.config, rates, *first, None, bias, layers)
        ms = rule.accumulate_(net, p, g, M, V, s) / p[0].numel()
        folded = rule.fold(net, ms, r, c, scale, self._eps(eps_scale))
        return folded.w0, *folded.layers[-1], folded.row, folded.col

    def _network(self, hidden, folded, row, col, s, p, g, M, V, decay) -> None:
        """Pass 3: the network and the update."""
        w0, *last = folded
        weights, biases = [*hidden, *last][::2], [*hidden, *last][1::2]
        weights = [w.expand(w0.shape[0], -1, -1) for w in weights]  # (1, ...) if they share them
        kind = Unrolled if self.unrolled else Products
        net = kind(w0, row, col, list(zip(weights, biases, strict=True)))
        rule.update_(net, self.config.feature_set, p, g, M, V, s, row, col, decay)

    def _eps(self, scale: Tensor | None) -> Eps:
        return Eps(self.config.eps, self.config.eps_rms, 1.0 if scale is None else scale)


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
    _available[device] = False
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    warnings.warn(
        f"torch cannot compile for {device}, so MuLO goes on without: install a compiler (g++ for "
        f"CPUs) and the torch of requirements.txt, or leave out compile=True. ({why})",
        stacklevel=2,
    )
