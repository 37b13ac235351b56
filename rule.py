"""The update rule of a learned optimizer: one pure step, in two forms.

    net = prepare(lo.config, stacked(lo))
    acc, p = step(net.at(t), acc, p, g, scale, dims)

Paper: eq. 2 and 3. The forms are equal to float32 rounding and tested so. `literal_step` builds
every feature, normalises, runs the MLP: read that one. `step` is what runs, folded so that little
memory moves:

  - time features are the same for every parameter: their product with W0 joins the first bias;
  - row and column features are vectors: their products with W0 are added by broadcasting;
  - RMS normalisers are scalars per tensor: they scale the rows of W0, not the features.

`step_` is `step` in place and in blocks that fit the cache, for the Optimizer: same formulas, no
copies. All take a stack of S equal-shaped tensors and weights phi with a leading axis of 1 (shared)
or S (one set per tensor: VeLO's generated weights, or the particles of meta-training).
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

import features
from features import Accumulators, Dims, Eps, Momenta, Rates, Scales, trailing
from lo import LOConfig, Phi, mlp

BLOCK = 1_024_000  # floats per block of `step_`: amortises Python, yet fits the cache


def rates_of(phi: Phi) -> Rates:
    """1 - beta of every accumulator: learned offsets in small_fc, fixed in VeLO."""
    zero = phi["w0"].new_zeros(1, 1)
    return Rates(
        features.mixing_rate(phi.get("momentum_decays", zero), features.BETA_M, clip=False),
        features.mixing_rate(phi.get("rms_decays", zero), features.BETA_V, clip=True),
        features.mixing_rate(phi.get("adafactor_decays", zero), features.BETA_RC, clip=True),
    )


def clip_of(config: LOConfig) -> float:
    """Where gradients are clipped."""
    return 1000.0 if config.net == "velo" else features.G_MAX


def _setting(config: LOConfig, eps_scale: Tensor | float) -> tuple[Eps, float]:
    """The epsilons, and where gradients are clipped."""
    return Eps(config.eps, config.eps_rms, eps_scale), clip_of(config)


def literal_step(
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
    """The step as the paper tells it: accumulate, build the features, normalise, MLP, update."""
    eps, clip = _setting(config, eps_scale)
    velo = config.net == "velo"
    rates = rates_of(phi)
    g, p = features.clean(g, clip), features.wide(p)
    S, shape = len(p), p.shape[1:]

    q = g.square()
    M, V = features.accumulate(acc.M, acc.V, g, q, rates)
    means = features.factored_means(q, dims, p.shape)
    r, c = features.accumulate_factored(acc.r, acc.c, *means, rates, eps)

    s = features.scales(trailing(V.flatten(1).mean(-1), V.ndim), r, c, dims, eps, velo)
    parts = features.dense_features(p, g, M, V, s, config.feature_set)
    parts += features.row_col_features(r, c, eps)
    A_hat = torch.cat([x.expand(-1, -1, *shape).flatten(2).mT for x in parts], -1)
    order = torch.tensor(list(chain(*features.feature_index(config.feature_set)))).argsort()
    A_hat = A_hat[..., order]  # (S, n, 28), n = mn the entries of a tensor: the paper's A-hat
    ms = A_hat.square().mean(1)  # (S, 28)
    A = A_hat * features.inverse_rms(ms, eps).unsqueeze(1)
    if not velo:
        T = features.time_features(t.reshape(-1, 1), config.t_max, config.spec)  # (S | 1, 1, 11)
        A = torch.cat([A, T.expand(S, A.shape[1], -1)], -1)  # (S, n, 39)

    d, m = mlp(phi, A, config.hidden_layers).unflatten(1, shape).unbind(-1)  # (S, *shape) each
    update = config.lam1 * d * (config.lam2 * m).exp()  # eq. 2
    scale = scale * features.pace(t, config.t_max, config.anneal)
    new_p = p - trailing(scale, p.ndim) * update - trailing(decay, p.ndim) * p  # eq. 3
    return Accumulators(M, V, r, c), new_p


@dataclasses.dataclass(frozen=True)
class Net:
    """phi cut into the parts that the folded step needs: the same for every tensor of a model."""

    config: LOConfig
    rates: Rates
    dense: Tensor  # (S | 1, h, D): the columns of W0 for the dense features
    row: Tensor  # (S | 1, h, 6)
    col: Tensor  # (S | 1, h, 6)
    time: Tensor  # (S | 1, h, 11), or 0 wide for VeLO
    bias: Tensor  # (S | 1, h): b0, and the time features once `settled` has added them
    layers: list[tuple[Tensor, Tensor]]  # w (S | 1, m, n), b (S | 1, m, 1)
    t: Tensor | None = None  # (S | 1,)
    pace: Tensor | float = 1.0  # (S | 1,): below 1 after the meta-trained horizon

    def at(self, t: Tensor) -> Net:
        """The network at time t, () or (S,): 0 at the first step."""
        if self.config.net == "velo":  # its time features go into the LSTM
            return self
        return dataclasses.replace(self, t=t.reshape(-1))

    def settled(self, timescales: Tensor | None = None) -> Net:
        """With all that depends on t computed: once for many tensors, or as part of a graph."""
        if self.t is None:
            return self
        config, t = self.config, self.t
        T = features.time_features(t, config.t_max, config.spec, timescales)
        bias = self.bias + (self.time @ T.unsqueeze(-1)).squeeze(-1)
        pace = features.pace(t, config.t_max, config.anneal)
        return dataclasses.replace(self, bias=bias, pace=pace, t=None)


def prepare(config: LOConfig, phi: Phi) -> Net:
    """Cut phi into a Net; `.at(t)` gives it a time."""
    dense, row, col = features.feature_index(config.feature_set)
    w0 = phi["w0"].mT  # (S | 1, h, 39)
    hidden = range(1, config.hidden_layers + 1)
    return Net(
        config,
        rates_of(phi),
        *(w0[..., where].contiguous() for where in (dense, row, col)),
        w0[..., config.num_features - (11 if config.net == "small_fc" else 0) :].contiguous(),
        phi["b0"].contiguous(),
        [(phi[f"w{k}"].mT.contiguous(), phi[f"b{k}"].unsqueeze(-1).contiguous()) for k in hidden],
    )


@dataclasses.dataclass
class Folded:
    """The network with all that is not dense folded into its weights."""

    w0: Tensor  # (S, h, D): dense features only
    row: Tensor  # (S, h, *shape), size 1 along d0; the bias and time features are in here
    col: Tensor  # (S, h, *shape), size 1 along d1
    layers: list[tuple[Tensor, Tensor]]  # w (S, m, n), b (S, m, 1)

    @staticmethod
    def join(X: list[Tensor]) -> Tensor:
        """The dense features in the form that `first` takes."""
        return torch.cat(X, 1)

    def first(self, X: Tensor, row: Tensor, col: Tensor) -> Tensor:
        """The first layer for a block: its dense features X (S, D, *block), its row and col."""
        x = (row + col).flatten(2).baddbmm_(self.w0, X.flatten(2))
        return x.unflatten(2, X.shape[2:])  # (S, h, *block)

    def rest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """scale lam1 d and exp(lam2 m), (S, *block) each; X need not be kept for this."""
        block, x = x.shape[2:], x.flatten(2)
        for w, b in self.layers:
            x = torch.baddbmm(b, w, x.relu_())
        d, m = x.unflatten(2, block).unbind(1)
        return d, m.exp()


def fold(net: Net, ms: Tensor, r: Tensor, c: Tensor, scale: Tensor, eps: Eps) -> Folded:
    """Fold mean squares of the dense features ms (S, D), r, c, lambdas and scale into the net."""

    def first_layer(x: Tensor, w0: Tensor) -> Tensor:  # x (S, 6, *vector) -> (S, h, *vector)
        norm = features.inverse_rms(features.mean_square(x), eps).unsqueeze(1)
        return torch.matmul(w0 * norm, x.flatten(2)).unflatten(-1, x.shape[2:])

    net = net.settled()
    x_row, x_col = features.row_col_features(r, c, eps)
    lam1, lam2 = net.config.lam1, net.config.lam2
    scale = net.pace * scale
    out = torch.stack([lam1 * scale, torch.full_like(scale, lam2)], -1).unsqueeze(-1)  # (S, 2, 1)
    *hidden, last = net.layers
    return Folded(
        net.dense * features.inverse_rms(ms, eps).unsqueeze(1),
        first_layer(x_row, net.row) + trailing(net.bias, x_row.ndim),
        first_layer(x_col, net.col),
        [(w.expand(r.shape[0], -1, -1), b) for w, b in (*hidden, (last[0] * out, last[1] * out))],
    )


def accumulate(
    net: Net, acc: Accumulators, p: Tensor, g: Tensor, dims: Dims, eps_scale: Tensor | float
) -> tuple[Eps, Accumulators, Tensor, Tensor, Scales]:
    """The new accumulators, p and g as float32 and clean, and what the dense features need."""
    eps, clip = _setting(net.config, eps_scale)
    g, p = features.clean(g, clip), features.wide(p)
    q = g.square()
    M, V = features.accumulate(acc.M, acc.V, g, q, net.rates)
    means = features.factored_means(q, dims, p.shape)
    r, c = features.accumulate_factored(acc.r, acc.c, *means, net.rates, eps)
    V_mean = trailing(V.flatten(1).mean(-1), V.ndim) if eps.mode == "relative" else V
    s = features.scales(V_mean, r, c, dims, eps, net.config.net == "velo")
    return eps, Accumulators(M, V, r, c), p, g, s


def step(
    net: Net,  # prepare(config, phi).at(t)
    acc: Accumulators,
    p: Tensor,
    g: Tensor,
    scale: Tensor,
    dims: Dims,
    decay: Tensor | float = 0.0,
    eps_scale: Tensor | float = 1.0,
) -> tuple[Accumulators, Tensor]:
    """The folded step, pure: arguments after `net` and result as in `literal_step`."""
    eps, acc, p, g, s = accumulate(net, acc, p, g, dims, eps_scale)
    X = torch.cat(features.dense_features(p, g, acc.M, acc.V, s, net.config.feature_set), 1)
    net = fold(net, features.mean_square(X), acc.r, acc.c, scale, eps)  # X is (S, D, *shape)
    d, e_m = net.rest(net.first(X, net.row, net.col))
    if isinstance(decay, Tensor):
        p = p - trailing(decay, p.ndim) * p
    return acc, torch.addcmul(p, d, e_m, value=-1)  # eq. 3


# The step in place: three passes over a tensor, each given for a block of it or for the whole.


def screen(g: Tensor, clip: float) -> tuple[Tensor, Tensor | None]:
    """The gradient, cleaned if it must be, and how many of its entries are not finite (or None)."""
    if g.device.type == "cpu" and features.is_clean(g, clip):  # elsewhere a look would sync
        return g, None
    return features.clean(g, clip), (~g.isfinite()).sum()


def mean_squares(g: Tensor, dims: Dims, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Pass 1: a block's share of the row and column means of g^2."""
    return features.factored_means(g.float().square(), dims, shape)


def factor(
    net: Net,
    acc: Accumulators,
    row_mean: Tensor,
    col_mean: Tensor,
    dims: Dims,
    eps: Eps,
) -> tuple[Tensor, Tensor, Scales]:
    """After pass 1: the new r and c, and what the dense features need of them."""
    _, V, r, c = acc
    r, c = features.accumulate_factored(r, c, row_mean, col_mean, net.rates, eps)
    V_mean = V
    if eps.mode == "relative":  # the mean of V after its update
        q_mean = row_mean.flatten(1).mean(-1)
        V_mean = torch.lerp(V.flatten(1).mean(-1), q_mean, net.rates.V[:, 0])
    velo = net.config.net == "velo"
    return r, c, features.scales(trailing(V_mean, V.ndim), r, c, dims, eps, velo)


def accumulate_(net: Net, p: Tensor, g: Tensor, M: Momenta, V: Tensor, s: Scales) -> Tensor:
    """Pass 2: M and V of a block in place; sums of squares of its dense features, (S, D)."""
    g = g.float()
    features.accumulate(M, V, g, g.square(), net.rates, in_place=True)
    X = features.dense_features(p.float(), g, M, V, s, net.config.feature_set)
    sums = torch.cat([x.square().sum(-1) for x in X], 1)  # (S, D, ...)
    return sums.flatten(2).sum(-1) if sums.ndim > 2 else sums  # sums of sums are more exact


def update_(
    net: Folded,
    kind: str,
    p: Tensor,
    g: Tensor,
    M: Momenta,
    V: Tensor,
    s: Scales,
    row: Tensor,
    col: Tensor,
    decay: Tensor | float,
) -> None:
    """Pass 3: the network on the dense features of a block, and the update of p in place."""
    X = net.join(features.dense_features(p.float(), g.float(), M, V, s, kind))
    x = net.first(X, row, col)
    del X
    d, e_m = net.rest(x)
    new_p = features.wide(p)  # p itself, unless it is of low precision
    if isinstance(decay, Tensor):
        new_p.mul_(1 - trailing(decay, p.ndim))
    new_p.addcmul_(d, e_m, value=-1)  # eq. 3
    if new_p is not p:
        p.copy_(new_p)


def block_entries(config: LOConfig) -> int:
    """How many entries of a tensor make a block: as many as BLOCK floats are for."""
    return BLOCK // (16 + config.hidden_size)


def block_axis(shape: tuple[int, ...], entries: int) -> tuple[int, int]:
    """Along which (negative) axis, and how long, to cut blocks of about `entries` from a tensor.

    The first axis of which one slice is small enough, so that blocks are contiguous where they can
    be.
    """
    slices = [math.prod(shape) // max(n, 1) for n in shape]
    axis = next((k for k, n in enumerate(slices) if n <= entries), slices.index(min(slices)))
    return axis - len(shape), max(1, entries // max(slices[axis], 1))


def splitter(shape: tuple[int, ...], entries: int) -> Callable[[Tensor], Sequence[Tensor]]:
    """What cuts a stack (S, *shape), and all that goes with it, into blocks."""
    axis, length = block_axis(shape[1:], entries // shape[0])
    count = -(-shape[axis] // length)
    return lambda x: x.split(length, axis) if x.shape[axis] > 1 else [x] * count


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
    """`step`, in place on acc and p (p of any float dtype): the passes over cache-sized blocks.

    Extra memory is one block's features and the first layer's products of rows and columns: a few
    bytes per entry of a matrix, more for vectors, which are their own rows. Returns how many
    entries of g are not finite, or None if the gradient was clean.
    """
    eps, clip = _setting(net.config, eps_scale)
    g, bad = screen(g, clip)
    M, V, r, c = acc
    split = splitter(p.shape, block_entries(net.config))
    row_mean, col_mean = torch.zeros_like(r[:, 0]), torch.zeros_like(c[:, 0])
    for g_b, *means in zip(*map(split, (g, row_mean, col_mean)), strict=True):
        for mean, share in zip(means, mean_squares(g_b, dims, p.shape), strict=True):
            mean.add_(share)
    *new, s = factor(net, acc, row_mean, col_mean, dims, eps)
    torch._foreach_copy_([r, c], new)
    blocks = list(zip(*map(split, (p, g, M, V)), s.split(split), strict=True))
    ms = sum(accumulate_(net, *block) for block in blocks) / p[0].numel()
    folded = fold(net, ms, r, c, scale, eps)
    for block, *first in zip(blocks, split(folded.row), split(folded.col), strict=True):
        update_(folded, net.config.feature_set, *block, *first, decay)
    return bad


def keep_freed_memory() -> None:
    """Have glibc keep freed memory, for programs that step all the time on a CPU: fresh pages cost
    more than the arithmetic of a small net."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass  # not glibc: only slower
