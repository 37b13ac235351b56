"""The step in place, compiled: each pass of `rule.py` over a whole tensor in one loop.

    fused.step_(net, acc, p, g, scale, dims)        # as rule.step_, which it is when it must be

`torch.compile` of the same functions, on the CPU (C++) and on CUDA (Triton). Three graphs serve all
matrices, and three more all stacks of them: sizes are symbols, times and rates are tensors. They
are compiled when first called and kept for all optimizers of a configuration.

What makes the graphs good: M comes as one tensor to a decay (`init_accumulators(..., apart=True)`:
torch traces tensors that interleave as one), so that every loop runs over the same entries; a small
network is written out plane by plane (`Unrolled`), so that its activations stay in registers. That
takes long to compile, and spills, beyond a hidden size of 8; for wider networks pass 3 is the eager
one, whose time is in matrix products.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import features
import rule
from features import Accumulators, Dims, Eps, Scales, trailing
from lo import LOConfig
from rule import Folded, Net

WIDEST = 8  # hidden size up to which the network is unrolled
STACK = 1_000_000  # entries of small tensors to a call, which costs more than to copy them
EXAMPLE = 96, 160  # rows and columns of the tensor on which the passes are traced

# A fused multiply-add rounds once instead of twice, and takes half the time.
# The network's planes are not to be stored, however often they are read.
OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",
    "realize_opcount_threshold": 10**6,
    "realize_reads_threshold": 10**6,
    "realize_acc_reads_threshold": 10**6,
}


class Unrolled(Folded):
    """The same network on a list of planes (S, *shape), one to a feature, without its products."""

    @staticmethod
    def join(X: list[Tensor]) -> list[Tensor]:
        return [x.squeeze(1) for x in X]

    def first(self, X: list[Tensor], row: Tensor, col: Tensor) -> list[Tensor]:
        return _layer(
            self.w0, [a + b for a, b in zip(row.unbind(1), col.unbind(1), strict=True)], X
        )

    def rest(self, x: list[Tensor]) -> tuple[Tensor, Tensor]:
        for w, b in self.layers:
            x = _layer(w, trailing(b, x[0].ndim + 1).unbind(1), [plane.relu() for plane in x])
        d, m = x
        return d, m.exp()


def _layer(w: Tensor, b: Sequence[Tensor], x: list[Tensor]) -> list[Tensor]:
    """b + w x for w (S, m, n), by planes."""
    out = []
    for plane, row in zip(b, trailing(w, x[0].ndim + 2).unbind(1), strict=True):
        for w_k, x_k in zip(row.unbind(1), x, strict=True):
            plane = plane + w_k * x_k
        out.append(plane)
    return out


@torch.no_grad()  # views of M are traced as what they are only without gradients
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
    """As `rule.step_`. Vectors, batches of matrices (convolutions) and parameters that are not
    contiguous go there: they are small, or their rows too short for a vectorised loop."""
    found = _matrices(acc, p, dims)
    if found is None or not available(p.device.type):
        return rule.step_(net, acc, p, g, scale, dims, decay, eps_scale)
    acc, p, wide = found
    g, bad = rule.screen(g.reshape(p.shape).contiguous(), rule.clip_of(net.config))
    if not isinstance(decay, Tensor):
        decay = torch.zeros_like(scale)
    if not isinstance(eps_scale, Tensor):
        eps_scale = None if eps_scale == 1 else torch.full_like(scale, eps_scale)
    first = (x.contiguous() for x in (net.dense, net.row, net.col))  # strides are fixed too
    layers = [(w.contiguous(), b.contiguous()) for w, b in net.layers]
    weights, scale = (net.rates, *first, None, net.bias, layers), net.pace * scale
    shared = [x.shape[0] == 1 for x in (p, *net.rates, net.dense, net.bias)]  # a size 1 is fixed
    passes = Passes.of(net.config, eps_scale is None, p.device, p.dtype, g.dtype, *shared)
    if wide not in passes.traced:
        passes.trace(wide, weights, p, g, scale, decay, eps_scale)
    passes.run(wide, weights, acc, p, g, scale, decay, eps_scale)
    return bad


def _matrices(acc: Accumulators, p: Tensor, dims: Dims) -> tuple[Accumulators, Tensor, bool] | None:
    """Views (S, R, C) of a stack with two axes longer than 1, and if the last is d0; or None."""
    axes = [k - p.ndim for k, n in enumerate(p.shape) if k and n != 1]
    if dims is None or axes != sorted(dims) or not p.numel():
        return None
    if not p.is_contiguous() or not acc.M[:, 0].is_contiguous():
        return None
    views = (x.view(*x.shape[: x.ndim - p.ndim + 1], *(x.shape[k] for k in axes)) for x in acc)
    acc = Accumulators(*views)
    return acc, p.view(acc.V.shape), dims[0] < dims[1]


class Passes:
    """The three compiled passes of one configuration, for matrices (S, R, C) of any size."""

    of = functools.cache(lambda config, *key: Passes(config))  # one for all optimizers

    def __init__(self, config: LOConfig):
        self.config, self.traced = config, set()
        compile_ = functools.partial(
            torch.compile, fullgraph=True, dynamic=False, isolate_recompiles=True, options=OPTIONS
        )
        self.means = {True: compile_(self._wide_means), False: compile_(self._tall_means)}
        self.accumulators, self.network = compile_(self._accumulators), compile_(self._network)

    def run(
        self, wide, weights, acc, p, g, scale, decay, eps_scale, mark=lambda *tensors, axes=(): None
    ) -> None:
        """A step in place of matrices, `wide` if d0 is their last axis."""
        M, V, r, c = acc
        M = [x.view(V.shape).unsqueeze(1) for x in M.unbind(1)]  # with the same strides always
        mark(p, g, *M, V, r, c)
        s = self.means[wide](weights[0], V, r, c, g, eps_scale)
        pair = s.grad
        if not wide:  # from here on a matrix and its transpose are alike
            r, c, pair = c, r, pair[::-1]
            weights = (*weights[:2], weights[3], weights[2], *weights[4:])
        mark(*pair)
        s = s._replace(grad=pair, mom=pair)
        w0, row, col, layers = self.accumulators(weights, p, g, M, V, r, c, s, scale, eps_scale)
        mark(row, col)
        mark(w0, *chain(*layers), axes=(0,))
        if self.config.hidden_size <= WIDEST:
            self.network(w0, row, col, layers, p, g, M, V, s, decay)
        else:
            self._products(Folded(w0, row, col, layers), p, g, acc.M, V, s, decay)

    def _means(self, dims, rates, V, r, c, g, eps_scale) -> Scales:
        """Pass 1: row and column means, r and c."""
        net = Net(self.config, rates, *[None] * 6)
        means = rule.mean_squares(g, dims, g.shape)
        acc = Accumulators(None, V, r, c)
        return rule.factor_(net, acc, *means, dims, self._eps(eps_scale))

    def _wide_means(self, *args) -> Scales:
        return self._means((-2, -1), *args)

    def _tall_means(self, *args) -> Scales:
        return self._means((-1, -2), *args)

    def _accumulators(self, weights, p, g, M, V, r, c, s, scale, eps_scale) -> tuple:
        """Pass 2: M and V, sums of squares; the network, folded with them."""
        net = Net(self.config, *weights)
        ms = rule.accumulate_(net, p, g, M, V, s) / (p.shape[1] * p.shape[2])
        folded = rule.fold(net, ms, r, c, scale, self._eps(eps_scale))
        return folded.w0, folded.row, folded.col, folded.layers

    def _network(self, w0, row, col, layers, p, g, M, V, s, decay) -> None:
        """Pass 3: the network and the update."""
        net = Unrolled(w0, row, col, layers)
        rule.update_(net, self.config.feature_set, p, g, M, V, s, row, col, decay)

    def _products(self, net: Folded, p, g, M, V, s, decay) -> None:
        """Pass 3 with matrix products, not compiled: of blocks that fit the cache, and that take
        less than 4 bytes per parameter of a million."""
        split = rule.splitter(p.shape, rule.block_entries(self.config) * 7 // 10)
        blocks = zip(*map(split, (p, g, M, V)), s.split(split), strict=True)
        for block, row, col in zip(blocks, split(net.row), split(net.col), strict=True):
            rule.update_(net, self.config.feature_set, *block, row, col, decay)

    def _eps(self, scale: Tensor | None) -> Eps:
        return Eps(self.config.eps, self.config.eps_rms, 1.0 if scale is None else scale)

    def trace(self, wide, weights, p, g, scale, decay, eps_scale) -> None:
        """Compile, with sizes as symbols: on an example in which no two are equal by chance."""
        S, (R, C) = min(len(p), 2), EXAMPLE
        weights, scale, decay, eps_scale = tree_map(
            lambda x: None if x is None else x[:S].clone(memory_format=torch.contiguous_format),
            (weights, scale, decay, eps_scale),
        )
        p, g = p.new_zeros(S, R, C), g.new_zeros(S, R, C)

        def mark(*tensors: Tensor, axes: Sequence[int] = (0, -2, -1)) -> None:
            for x in tensors:
                for axis in axes:
                    if x.shape[axis] > 1:
                        torch._dynamo.mark_dynamic(x, axis % x.ndim)

        own = tree_leaves((weights, scale, decay, eps_scale))
        mark(*(x for x in own if x is not None), axes=(0,))
        acc = features.init_accumulators(p, (-2, -1) if wide else (-1, -2), apart=True)
        self.run(wide, weights, acc, p, g, scale, decay, eps_scale, mark)
        self.traced.add(wide)


@functools.cache
def available(device: str) -> bool:
    """Whether there is a compiler for a device; a warning if not."""
    if device == "meta":
        return False
    try:
        torch.compile(torch.neg, fullgraph=True)(torch.ones(3, device=device))
    except Exception as error:
        warnings.warn(
            f"torch.compile finds no compiler for {device}, so MuLO is not compiled: install one "
            f"(g++ for CPUs) or leave out compile=True. ({str(error).strip().splitlines()[0]})",
            stacklevel=2,
        )
        return False
    return True
