"""What a learned optimizer sees: accumulators, per-parameter features, per-tensor features.

Pure functions, tensors in and tensors out; no network, no μP, no Optimizer. Paper: appendix A.1
("input, output, update and scaling") and the three feature tables. Read this file first, then
`lo.py` (the networks), `rule.py` (the step), `roles.py` (the rules) and `mulo.py` (the Optimizer).

Symbols (paper -> code), with the shapes used throughout. `S` equal-shaped tensors are stacked in
front (the layers of a model, or the particles of meta-training); `shape` is one tensor's own shape.

    theta, nabla        p, g        (S, *shape)      parameter and gradient
    M_1..M_3            M           (S, 3, *shape)   momenta, one per decay beta_1..beta_3
    V                   V           (S, *shape)      second moment, decay beta_4
    r_5..r_7, c_5..c_7  r, c        (S, 3, *shape)   row and column means of g^2, beta_5..beta_7;
                                                     size 1 along the axis that was averaged away
    F^(nabla), F^(M)    F_grad, F_mom                adafactor-normalised g and M
    1 - beta            rates                        mixing rates; betas themselves are never needed

Rows and columns. The axis `d0` is a tensor's largest and `d1` its second largest; r is averaged
over d0 (so it is indexed by d1) and c over d1; all other axes are batch. Keeping the averaged axis
with size 1 lets every formula below broadcast, whatever the rank and layout: nothing is permuted or
tiled. Tensors of rank 0 and 1 are not factored: r = c = the accumulated g^2 itself ("diagonal").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TIMESCALES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
FRACTIONS = (0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1)
BETA_M, BETA_V, BETA_RC = (0.9, 0.99, 0.999), (0.999,), (0.9, 0.99, 0.999)

TINY = 1e-28  # a mean square (or mean of g^2) this small counts as zero
G_MAX = 1e15  # beyond this g^2 summed over a tensor could overflow float32

Dims = tuple[int, int] | None  # (d1, d0) as negative axes; None for rank 0 and 1
Momenta = Tensor | Sequence[Tensor]  # M, (S, 3, *shape), or its decays in pieces, (S, 1, *shape)


class Accumulators(NamedTuple):
    """The paper's U_t for a stack of S tensors of equal shape, all float32."""

    M: Tensor  # (S, 3, *shape)
    V: Tensor  # (S, *shape)
    r: Tensor  # (S, 3, *shape), size 1 along d0
    c: Tensor  # (S, 3, *shape), size 1 along d1


class Rates(NamedTuple):
    """1 - beta of each accumulator; the leading axis is S, or 1 when all tensors share them."""

    M: Tensor  # (S | 1, 3)
    V: Tensor  # (S | 1, 1)
    rc: Tensor  # (S | 1, 3)


class Eps(NamedTuple):
    """The epsilons of one run. The paper has none; these are the reference code's (DIVERGES)."""

    mode: str  # "reference", "relative" or "fan_in"
    rms: float  # in the RMS normaliser; 0 is allowed
    scale: Tensor | float = 1.0  # (S,), 1/fan_in under mode "fan_in": section 4's last remark


class Scales(NamedTuple):
    """Per-tensor quantities the dense features need, cheap to keep because they are vectors."""

    unit_V: Tensor | float  # what V is divided by before it is normalised
    eps_M: Tensor | float  # epsilon of M / sqrt(V)
    eps_V: Tensor | float  # epsilon of 1 / sqrt(V)
    grad: tuple[Tensor, Tensor]  # F_grad = g * grad[0] * grad[1]
    mom: tuple[Tensor, Tensor]  # F_mom = M * mom[0] * mom[1]

    def split(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> list[Scales]:
        """The same for each block of a tensor that `cut` cuts into blocks."""
        grad = list(zip(*map(cut, self.grad), strict=True))
        mom = grad if self.mom is self.grad else list(zip(*map(cut, self.mom), strict=True))
        return [self._replace(grad=a, mom=b) for a, b in zip(grad, mom, strict=True)]


def cut(x: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """x (S, 3, ...) cut along its decays like M; the same for all if it has only one of them."""
    if len(pieces) == 1 or x.shape[1] == 1:
        return [x] * len(pieces)
    return x.split([m.shape[1] for m in pieces], 1)


def trailing(x: Tensor | float, ndim: int) -> Tensor | float:
    """Append size-1 axes until x has `ndim`: a per-tensor value then broadcasts over the tensor."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim)) if isinstance(x, Tensor) else x


def factored_dims(shape: tuple[int, ...], out_axis: int = 0) -> Dims:
    """The axes (d1, d0): second largest and largest; None when the rank is below 2.

    DIVERGES: the paper has matrices only. Ties matter: the reference sorts the axes of
    (..., in, out) stably, so among equals `out` wins, then `in`. Torch stores (out, in, ...):
    out_axis=0, the default. out_axis=1 is for (in, out, ...): embeddings and transposed
    convolutions; out_axis=-1 takes the axes as JAX stores them.
    """
    n = len(shape)
    if n < 2:
        return None
    order = list(range(n)) if out_axis == -1 else [*range(2, n), 1 - out_axis, out_axis]
    order.sort(key=lambda axis: shape[axis])  # stable
    return order[-2] - n, order[-1] - n


def init_accumulators(p: Tensor, dims: Dims, apart: bool = False) -> Accumulators:
    """Zeros for a stack p of shape (S, *shape); `apart` if each decay of M is to be contiguous."""
    z = p.new_zeros((), dtype=torch.float32)
    M = z.new_zeros((p.shape[0], 3, *p.shape[1:]))
    if apart:
        M = z.new_zeros((3, *p.shape)).transpose(0, 1)
    r_shape, c_shape = list(M.shape), list(M.shape)
    if dims is not None:
        r_shape[dims[1]], c_shape[dims[0]] = 1, 1
    return Accumulators(M, z.new_zeros(p.shape), z.new_zeros(r_shape), z.new_zeros(c_shape))


def mixing_rate(offset: Tensor, beta0: tuple[float, ...], clip: bool) -> Tensor:
    """1 - beta, with beta = 1 - exp(10 (log(1 - beta0)/10 + o)) and the offset o learned.

    DIVERGES: the paper only says that the betas are learnable; this is the reference's form. Betas
    of V, r and c are clipped to [0, 1], those of M are not. The offset 0 gives beta0. The float32
    beta is formed and subtracted from 1, as the reference does: that keeps its rounding, 5e-5 of 1
    - 0.999.
    """
    beta0 = torch.tensor(beta0, dtype=offset.dtype, device=offset.device)
    beta = 1 - (10 * ((1 - beta0).log() / 10 + offset)).exp()
    return 1 - (beta.clamp(0, 1) if clip else beta)


def wide(x: Tensor) -> Tensor:
    """x itself if it is float32 or float64, else x as float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def clean(g: Tensor, clip: float = G_MAX) -> Tensor:
    """The gradient, at least float32, with NaN and infinities taken as 0, clipped to +-clip.

    DIVERGES: the paper does not say; one bad entry must not spread into the state.
    """
    return torch.nan_to_num(wide(g), nan=0.0, posinf=0.0, neginf=0.0).clamp(-clip, clip)


def is_clean(g: Tensor, clip: float = G_MAX) -> bool:
    """Whether `clean` would change nothing (for CPU tensors: it looks at the values)."""
    low, high = (float(x) for x in torch.aminmax(g))  # as floats: clip is infinite in float16
    return low >= -clip and high <= clip  # False for NaN


def accumulate(
    M: Momenta, V: Tensor, g: Tensor, q: Tensor, rates: Rates, in_place: bool = False
) -> tuple[Momenta, Tensor]:
    """M_i <- beta_i M_i + (1 - beta_i) g and V <- beta_4 V + (1 - beta_4) q, where q = g^2."""
    mix = Tensor.lerp_ if in_place else torch.lerp
    g1, V = g.unsqueeze(1), mix(V, q, trailing(rates.V[:, 0], V.ndim))
    if isinstance(M, Tensor):
        return mix(M, g1, trailing(rates.M, M.ndim)), V
    pieces = zip(M, cut(rates.M, M), strict=True)
    return [mix(m, g1, trailing(rate, m.ndim)) for m, rate in pieces], V


def accumulate_factored(
    r: Tensor,
    c: Tensor,
    row_mean: Tensor,  # (S, *shape), mean of g^2 over d0, kept with size 1
    col_mean: Tensor,  # (S, *shape), mean of g^2 over d1, kept with size 1
    rates: Rates,
    eps: Eps,
) -> tuple[Tensor, Tensor]:
    """r_i <- beta_i r_i + (1 - beta_i) row_mean(g^2), and c likewise."""
    rate = trailing(rates.rc, r.ndim)
    floor = 0.0 if eps.mode == "relative" else trailing(1e-30 * eps.scale, row_mean.ndim)
    r = torch.lerp(r, (row_mean + floor).unsqueeze(1), rate)
    return r, torch.lerp(c, (col_mean + floor).unsqueeze(1), rate)


def factored_means(q: Tensor, dims: Dims, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Row and column means of q = g^2; q itself, twice, when it is not factored.

    `shape` is the whole tensor's: for a block q of it this is the block's share of the means.
    """
    if dims is None:
        return q, q
    d1, d0 = dims
    return q.sum(d0, True) / shape[d0], q.sum(d1, True) / shape[d1]


def _over(x: Tensor, keep: int) -> Tensor:
    """Mean over all axes but the first `keep`, with the shape kept for broadcasting."""
    return x.flatten(keep).mean(-1).reshape(x.shape[:keep] + (1,) * (x.ndim - keep))


def _safe(x: Tensor, factor: float = 1.0) -> Tensor:
    """factor * x, or 1 where x is as good as zero."""
    return torch.where(x <= TINY, torch.ones_like(x), factor * x)


def scales(V_mean: Tensor, r: Tensor, c: Tensor, dims: Dims, eps: Eps, velo: bool) -> Scales:
    """The vectors of F_grad = g sqrt(mean(r) / (r c^T)), F_mom likewise, and the epsilons of V.

    V_mean is (S, 1, ...): the mean of V, used only by the relative epsilons, which tie every
    epsilon to the tensor's own gradient scale so that the features do not change when the loss is
    rescaled.
    """
    if eps.mode == "relative":
        R = _over(r, 2)  # one per tensor and decay
        col = torch.maximum(c, _safe(R, 1e-8)).rsqrt()
        row = (r / _safe(R)).clamp_min(1e-8).rsqrt()
        pair = (c.new_ones((1,) * c.ndim), col) if dims is None else (row, col)
        return Scales(_safe(V_mean), _safe(V_mean, 1e-8), _safe(V_mean, 1e-2), pair, pair)
    e6, e9 = (trailing(e * eps.scale, r.ndim) for e in (1e-6, 1e-9))
    eps_V = trailing(1e-6 * eps.scale, V_mean.ndim)
    if dims is not None:
        r_mean = r.mean(dims[0], True)  # over d1: one per decay and batch index
        pair = (r / (r_mean + e9)).clamp(min=e9).rsqrt(), c.clamp(min=e9).rsqrt()
        return Scales(1.0, eps_V, eps_V, pair, pair)
    one = c.new_ones((1,) * c.ndim)
    mom = (c if velo else c + e6).rsqrt()  # DIVERGES: the reference's VeLO has no epsilon here
    return Scales(1.0, eps_V, eps_V, (one, (c + e9).clamp(min=e9).rsqrt()), (one, mom))


def row_col_features(r: Tensor, c: Tensor, eps: Eps) -> tuple[Tensor, Tensor]:
    """[r, 1/sqrt(r)] and [c, 1/sqrt(c)], each (S, 6, *shape) and still of size 1 along one axis."""
    if eps.mode == "relative":
        R = _over(r, 2)  # (S, 3, 1, ...)
        unit, e = _safe(R), _safe(R, 1e-2)
    else:
        unit, e = 1.0, trailing(1e-8 * eps.scale, r.ndim)
    return tuple(torch.cat([x / unit, (x + e).rsqrt()], 1) for x in (r, c))


def dense_features(
    p: Tensor, g: Tensor, M: Momenta, V: Tensor, s: Scales, kind: str
) -> list[Tensor]:
    """The features that differ at every entry, as (S, 1 or 3, *shape) each: 16 in all, 18 for VeLO.

    With M in pieces each feature comes alone, as (S, 1, *shape): a compiler keeps it in registers.

    Order: g, [clip(g),] p, M, V, M/sqrt(V), 1/sqrt(V), F_grad, [g/sqrt(V),] F_mom.
    DIVERGES: g/sqrt(V) is in the reference's VeLO (30 features) but not in the paper's table (29).
    """
    inv_M = (V + s.eps_M).rsqrt_()
    inv_V = inv_M if s.eps_V is s.eps_M else (V + s.eps_V).rsqrt_()
    M = (M,) if isinstance(M, Tensor) else M

    def product(pair: tuple[Tensor, Tensor]) -> list[Tensor]:  # one to a piece of M
        return [a * b for a, b in zip(*(cut(x, M) for x in pair), strict=True)]

    rho = product(s.grad)
    rho_M = rho if s.mom[1] is s.grad[1] else product(s.mom)
    V = V if isinstance(s.unit_V, float) else V / s.unit_V
    g1, inv_M = g.unsqueeze(1), inv_M.unsqueeze(1)  # (S, 1, *shape)
    parts = [
        g1,
        p.unsqueeze(1),
        *M,
        V.unsqueeze(1),
        *(m * inv_M for m in M),
        inv_V.unsqueeze(1),
        *(g1 * x for x in rho),
        *(m * x for m, x in zip(M, rho_M, strict=True)),
    ]
    if kind != "small_fc":
        parts.insert(1, g1.clamp(-0.1, 0.1))
    if kind == "velo":
        parts.insert(-len(M), g1 * inv_M)
    return parts


def feature_index(kind: str) -> tuple[list[int], list[int], list[int]]:
    """Where the dense, row and column features stand in the network's input.

    The input is: dense but F_mom | r | c | 1/sqrt(r) | 1/sqrt(c) | F_mom | time (small_fc only).
    """
    d = {"small_fc": 13, "velo": 15, "velo_paper": 14}[kind]
    dense = [*range(d), *range(d + 12, d + 15)]
    row = [*range(d, d + 3), *range(d + 6, d + 9)]
    return dense, row, [i + 3 for i in row]


def mean_square(x: Tensor) -> Tensor:
    """Mean of x^2 per tensor and feature, (S, F); size-1 axes need no tiling for that."""
    return x.square().flatten(2).mean(-1)


def inverse_rms(ms: Tensor, eps: Eps) -> Tensor:
    """1 / RMS from the mean square (S, F); 0 for a feature that is zero everywhere."""
    if eps.mode == "relative" or eps.rms == 0:
        return torch.where(ms <= TINY, torch.zeros_like(ms), ms.rsqrt())
    return (ms + trailing(eps.rms * eps.scale, 2)).rsqrt()


def time_features(
    t: Tensor, t_max: float | None, spec: str, timescales: Tensor | None = None
) -> Tensor:
    """tanh(t/x - 1) for the 11 timescales x, (..., 11); t = 0 at the first step.

    DIVERGES: the paper writes tanh(t/x). `t_max` holds t at the longest horizon seen in
    meta-training. An exported graph brings its timescales: they must move with it to a device.
    """
    t = wide(t) if t_max is None else wide(t).clamp_max(t_max)
    if timescales is None:
        timescales = torch.tensor(TIMESCALES, dtype=t.dtype, device=t.device)
    x = t.unsqueeze(-1) / timescales
    return torch.tanh(x if spec == "paper" else x - 1)


def pace(t: Tensor, t_max: float | None, power: float) -> Tensor | float:
    """The factor on updates after the meta-trained horizon, (t_max / t)^power; 1 up to it.

    DIVERGES: in the reference an optimizer knows no horizon. At the rate that was best for t_max
    steps the loss stops falling some time after it, as it would under Adam.
    """
    if t_max is None or not power:
        return 1.0
    return (t_max / wide(t).clamp_min(t_max)) ** power


def fraction_features(
    t: Tensor, num_steps: Tensor, spec: str, fractions: Tensor | None = None
) -> Tensor:
    """VeLO's time features, tanh(10 (t/T - x)) for the 9 fractions x, (..., 9).

    DIVERGES: the paper writes tanh(t/T - 10x), which is saturated at almost every t.
    """
    f = (wide(t) / num_steps).unsqueeze(-1)
    x = torch.tensor(FRACTIONS, dtype=f.dtype, device=f.device) if fractions is None else fractions
    return torch.tanh(f - 10 * x if spec == "paper" else 10 * (f - x))


class LossBuffer(NamedTuple):
    """VeLO's memory of the loss: 10 exponential means, their minima, and the count of updates."""

    means: Tensor  # (..., 10)
    low: Tensor  # (..., 10)
    count: Tensor  # (...)


def init_loss_buffer(*batch: int, device: torch.device | str | None = None) -> LossBuffer:
    z = torch.zeros(*batch, 10, device=device)
    return LossBuffer(z, z + 999999999999.0, torch.zeros(batch, device=device))


def loss_decays(num_steps: int, bugged: bool, device: torch.device | str | None = None) -> Tensor:
    """The decays of the 10 means: half-lives from 10 steps to num_steps (all 10 if "bugged")."""
    top = 1.0 if bugged else math.log10(num_steps)
    return torch.exp(-1 / 10 ** torch.linspace(1, top, 10, device=device))


def loss_features(
    buffer: LossBuffer,
    loss: Tensor,  # (...)
    decay: Tensor,  # (..., 10) or (10,), from `loss_decays`
) -> tuple[LossBuffer, Tensor]:
    """Update the buffer with this step's loss; return it and the 9 EMA loss features of the LSTM.

    Each mean is compared with its own running minimum, the next longer mean acting as the maximum.
    A loss above twice the largest mean so far is capped, and one that is not finite is left out;
    the features are 0 for the first two steps. All in float32 like the reference: 1 - decay^n loses
    digits.
    """
    counts = loss.isfinite().unsqueeze(-1)
    n, loss = buffer.count.unsqueeze(-1) + 1, loss.unsqueeze(-1)
    largest = torch.where(n == 1, loss, (buffer.means / (1 - decay**n)).amax(-1, True))
    loss = torch.minimum(2 * largest.abs(), loss)
    means = torch.where(counts, buffer.means * decay + loss * (1 - decay), buffer.means)
    n = torch.where(counts, n, n - 1)
    ema = means / (1 - decay**n)
    low = torch.where(counts, torch.minimum(buffer.low, ema), buffer.low)
    x = (ema - low)[..., :-1] / (ema[..., 1:] - low[..., :-1]).clamp_min(1e-8) - 1
    x = torch.where(n <= 2, torch.zeros_like(x), x.clamp(-1, 1))
    return LossBuffer(means, low, n.squeeze(-1)), x


def squash(x: Tensor) -> Tensor:
    """c_1 clip(log(c_2 x), -tau, tau) with c_1 = 1/2, c_2 = 10, tau = 5, as the paper sets them."""
    return 0.5 * (1e-8 + (10 * x).abs()).log().clamp(-5, 5)


def mean_squared(p: Tensor) -> Tensor:
    """Mean of p^2 of each tensor, (S,)."""
    return wide(p).flatten(1).square().mean(-1)


def param_scale(p: Tensor) -> Tensor:
    """RMS of each tensor, (S,), by which VeLO multiplies its updates."""
    return (mean_squared(p) + 1e-9).sqrt()


def var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean of each row of (S, n): torch.var_mean takes ten times longer."""
    mean = x.mean(-1, keepdim=True)
    return (x - mean).square_().mean(-1), mean.squeeze(-1)


def tensor_features(p: Tensor, M: Tensor, V: Tensor, rank: Tensor | None = None) -> Tensor:
    """mean_rms (1), rank one-hot (5), var_mom (3) and var_rms (3) of each tensor: (S, 12).

    They see the accumulators of the step before. The paper's var_rms subtracts the mean of the
    *momentum* from V, and so does the reference; with variances about the mean that is
    mean((V - m)^2) = var(V) + (mean(V) - m)^2.
    """
    k = mean_squared(p).clamp_min(1e-9).rsqrt().unsqueeze(-1)  # 1 / RMS(W), (S, 1)
    parts = [var_mean(x) for x in M.flatten(2).unbind(1)]  # one by one: less memory
    var_M, mean_M = (torch.stack(x, -1) for x in zip(*parts, strict=True))  # (S, 3)
    var_V, mean_V = (x.unsqueeze(-1) for x in var_mean(V.flatten(1)))
    var_rms = (var_V + (mean_V - mean_M).square()) * k.square()
    if rank is None:  # axes longer than 1; given when p comes flattened
        rank = sum(n > 1 for n in p.shape[1:])
    rank = (torch.arange(5, device=p.device) == rank).to(k.dtype)  # none for rank 5
    var_mom = squash(var_M * k.square())
    return torch.cat([squash(mean_V * k), rank.expand(p.shape[0], 5), var_mom, squash(var_rms)], -1)
