"""The inputs of a learned optimizer: accumulators, per-parameter and per-tensor features.

Pure functions of tensors; no network, no μP, no Optimizer. Paper: appendix A.1 ("input, output,
update and scaling") and the three feature tables.

Symbols (paper -> code) and shapes. S tensors of equal shape are stacked along the first axis: the
particles of meta-training, or one tensor of a model (S = 1). `shape` is one tensor's own shape.

    theta, nabla        p, g        (S, *shape)      parameter and gradient
    M_1..M_3            M           (S, 3, *shape)   momenta, one per decay beta_1..beta_3
    V                   V           (S, *shape)      second moment, decay beta_4
    r_5..r_7, c_5..c_7  r, c        (S, 3, *shape)   row and column means of g^2, beta_5..beta_7;
                                                     size 1 along the axis that was averaged
    F^(nabla), F^(M)    g * F_g, M * F_m             adafactor-normalised g and M
    1 - beta            rates                        weight of the new value in a moving average

Rows and columns. `d0` is a tensor's largest axis and `d1` its second largest. r is the mean over
d0 (so it is indexed by d1), c the mean over d1; all other axes are batch axes. The averaged axis is
kept with size 1, so every formula broadcasts, for any rank and layout. Tensors of rank 0 and
1 ("vectors") are not factored: r = c = the accumulated g^2 itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TIMESCALES = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
FRACTIONS = (0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1)
BETA_M, BETA_V, BETA_RC = (0.9, 0.99, 0.999), (0.999,), (0.9, 0.99, 0.999)

TINY = 1e-28  # a mean square (or mean of g^2) this small counts as zero
CLIP = {"small_fc": 1e15, "velo": 1000.0}  # bound on |g|; 1000 is the reference's

Phi = dict[str, Tensor]  # weights of a learned optimizer, with a leading axis: S, or 1 if shared
Dims = tuple[int, int] | None  # (d1, d0) as negative axes; None for rank 0 and 1


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


class Numbers(NamedTuple):
    """Scalars of a step for T tensors of P nets, (P, T) each: arrays on the CPU, or tensors."""

    t: np.ndarray  # 0 at the first step
    scale: np.ndarray  # lr times the μP factor; VeLO's alpha, which is on the device, is not in it
    decay: np.ndarray  # lr times weight decay
    eps_scale: np.ndarray  # 1/fan_in with eps="fan_in", else 1


class Eps(NamedTuple):
    """The epsilons of one run. The paper has none; these are the reference code's (DIVERGES)."""

    mode: str  # "reference": constants; "fan_in": times scale; "relative": to mean V and r
    rms: float  # in the RMS normaliser; 0 is allowed
    scale: Tensor | float = 1.0  # (S,): 1/fan_in for "fan_in" (the end of section 4), else 1


# ---------------------------------------------------------------- helpers


@functools.cache
def constant(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant tensor, created once per device: copying a list to a GPU syncs with it."""
    with torch.inference_mode(False):  # later callers may not be in inference mode
        return torch.tensor(values, dtype=dtype, device=device)


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy x to the device without a host sync: from pinned memory, on the current stream."""
    device = torch.device(device)
    x = x.pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x
    return x.to(device, non_blocking=True)


@contextlib.contextmanager
def float32_products(gpu: str | None = None):
    """Multiply matrices in float32, whatever the caller set for the model: bf16, TF32 or autocast.
    gpu="ieee" includes convolutions on GPUs; gpu="tf32" allows TF32 for both."""
    backends = {torch.backends.cuda.matmul: gpu or "ieee", torch.backends.mkldnn.matmul: "ieee"}
    backends |= {torch.backends.cudnn.conv: gpu} if gpu else {}
    before = {x: x.fp32_precision for x in backends}
    changed = [x for x in backends if before[x].replace("none", "ieee") != backends[x]]
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        try:
            for x in changed:
                x.fp32_precision = backends[x]
            yield
        finally:
            for x in changed:
                x.fp32_precision = "none"  # inherits torch.backends.fp32_precision
                if x.fp32_precision != before[x]:
                    x.fp32_precision = before[x]


def trailing(x: Tensor | float, ndim: int) -> Tensor | float:
    """Append size-1 axes until x has `ndim`: a per-tensor value then broadcasts over the tensor."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim)) if isinstance(x, Tensor) else x


def wide(x: Tensor) -> Tensor:
    """x itself if it is float32 or float64, else x as float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def clean(g: Tensor, clip: float) -> Tensor:
    """The gradient, at least float32, with NaN and infinities replaced by 0, clipped to +-clip.

    DIVERGES: the paper does not say; one bad entry must not spread into the state.
    """
    return torch.nan_to_num(wide(g), nan=0.0, posinf=0.0, neginf=0.0).clamp(-clip, clip)


def factored_dims(shape: tuple[int, ...], out_axis: int = 0) -> Dims:
    """The axes (d1, d0): second largest and largest; None if the rank is below 2.

    DIVERGES: the paper has matrices only. Ties matter: the reference sorts the axes of
    (..., in, out) stably, so among equal sizes `out` wins, then `in`. Torch stores (out, in, ...):
    out_axis=0, the default. out_axis=1 is for (in, out, ...): embeddings and transposed
    convolutions; out_axis=-1 takes the axes as JAX stores them.
    """
    n = len(shape)
    if n < 2:
        return None
    order = list(range(n)) if out_axis == -1 else [*range(2, n), 1 - out_axis, out_axis]
    order.sort(key=lambda axis: shape[axis])  # stable
    return order[-2] - n, order[-1] - n


_shards = None  # how the tensor being stepped is sharded; None: it is whole


@contextlib.contextmanager
def over_shards(means):
    """Make mean_along and mean_all average over all shards. `means`: kernels.sharded.Means."""
    global _shards
    _shards = means
    try:
        yield
    finally:
        _shards = None


def sharded_axis() -> int | None:
    return _shards.axis if _shards else None


def mean_along(x: Tensor, axis: int) -> Tensor:
    """Mean along an axis of the tensor, counted from the end; it stays, with size 1."""
    return _shards.mean(x, axis) if sharded_axis() == axis else x.mean(axis, True)


def mean_all(x: Tensor, axis: int = -1) -> Tensor:
    """Mean over all entries of a tensor, which are flattened to this axis of x."""
    return _shards.mean(x, axis).squeeze(axis) if _shards else x.mean(axis)


def mean_of_each(x: Tensor) -> Tensor:
    """Mean of each tensor in (S, k, *shape): its axes stay, with size 1."""
    return trailing(mean_all(x.flatten(2)), x.ndim)


def safe(x: Tensor, factor: float = 1.0) -> Tensor:
    """A nonzero divisor: factor * x, or 1 where x counts as zero."""
    return torch.where(x <= TINY, torch.ones_like(x), factor * x)


# ---------------------------------------------------------------- accumulators


def accumulator_shapes(shape: tuple[int, ...], dims: Dims) -> list[tuple[int, ...]]:
    """The shapes of M, V, r and c for a stack; here `shape` is (S, ...), not one tensor's."""
    M = (shape[0], 3, *shape[1:])
    r, c = list(M), list(M)
    if dims is not None:
        d1, d0 = dims
        r[d0], c[d1] = 1, 1
    return [M, tuple(shape), tuple(r), tuple(c)]


def init_accumulators(p: Tensor, dims: Dims) -> Accumulators:
    """Zeros for a stack p of shape (S, *shape)."""
    shapes = accumulator_shapes(p.shape, dims)
    return Accumulators(*(p.new_zeros(shape, dtype=torch.float32) for shape in shapes))


def mixing_rate(offset: Tensor, beta0: tuple[float, ...], clip: bool) -> Tensor:
    """1 - beta, with beta = 1 - exp(10 (log(1 - beta0)/10 + o)) and the offset o learned.

    DIVERGES: the paper only says that the betas are learned; this is the reference's form. Betas of
    V, r and c are clipped to [0, 1], those of M are not. Like the reference, this rounds beta to
    float32 before it computes 1 - beta: a relative error of 1e-5 or more at beta = 0.999.
    """
    beta0 = constant(beta0, offset.dtype, offset.device)
    beta = 1 - (10 * ((1 - beta0).log() / 10 + offset)).exp()
    return 1 - (beta.clamp(0, 1) if clip else beta)


def rates_of(phi: Phi) -> Rates:
    """1 - beta of every accumulator: learned offsets in small_fc, fixed in VeLO."""
    if "momentum_decays" not in phi:
        return fixed_rates(phi["w0"].dtype, phi["w0"].device)
    return Rates(
        mixing_rate(phi["momentum_decays"], BETA_M, clip=False),
        mixing_rate(phi["rms_decays"], BETA_V, clip=True),
        mixing_rate(phi["adafactor_decays"], BETA_RC, clip=True),
    )


@functools.cache
def fixed_rates(dtype: torch.dtype, device: torch.device) -> Rates:
    with torch.inference_mode(False):
        zero = torch.zeros(1, 1, dtype=dtype, device=device)
        names = "momentum_decays", "rms_decays", "adafactor_decays"
        return rates_of(dict.fromkeys(names, zero))


def accumulate(acc: Accumulators, g: Tensor, dims: Dims, rates: Rates, eps: Eps) -> Accumulators:
    """Mix g into M, g^2 into V, and the row and column means of g^2 into r and c.

    M_i <- beta_i M_i + (1 - beta_i) g, and so on; r and c of a vector take g^2 itself.
    """
    q = g.square()
    M = torch.lerp(acc.M, g.unsqueeze(1), trailing(rates.M, acc.M.ndim))
    V = torch.lerp(acc.V, q, trailing(rates.V[:, 0], q.ndim))
    row, col = (q, q) if dims is None else (mean_along(q, dims[1]), mean_along(q, dims[0]))
    e30 = 0.0 if eps.mode == "relative" else trailing(1e-30 * eps.scale, q.ndim)
    rate = trailing(rates.rc, acc.r.ndim)
    r = torch.lerp(acc.r, (row + e30).unsqueeze(1), rate)
    return Accumulators(M, V, r, torch.lerp(acc.c, (col + e30).unsqueeze(1), rate))


# ---------------------------------------------------------------- per-parameter features


def parameter_features(
    p: Tensor,  # (S, *shape)
    g: Tensor,  # (S, *shape)
    acc: Accumulators,  # after `accumulate`
    dims: Dims,
    eps: Eps,
    kind: str,  # "small_fc", "velo" or "velo_paper"
) -> dict[str, Tensor]:
    """The network's inputs, (S, 1 or 3, *shape) each, before normalisation: the columns of A_hat.

    Their order is the reference's. Row and column features keep size 1 along the averaged axis.
    This dict is the only list of features: names, counts and the size of the network follow from it
    (`feature_names`).
    DIVERGES: g/sqrt(V) is in the reference's VeLO (30 features) but not in the paper's table (29).
    """
    M, r, c = acc.M, acc.r, acc.c
    p, g, V = p.unsqueeze(1), g.unsqueeze(1), acc.V.unsqueeze(1)
    e = epsilons(V, r, eps)
    by_V = (V + e.M).rsqrt()
    inv_V = by_V if e.V is e.M else (V + e.V).rsqrt()
    F_g, F_m = adafactor(r, c, dims, eps, kind != "small_fc")
    x = {"g": g}
    if kind != "small_fc":
        x["clip(g)"] = g.clamp(-0.1, 0.1)
    x |= {"p": p, "M": M, "V": V, "M/sqrt(V)": M * by_V, "1/sqrt(V)": inv_V, "g*F": g * F_g}
    if kind == "velo":
        x["g/sqrt(V)"] = g * by_V
    x |= {"r": r, "c": c, "1/sqrt(r)": (r + e.r).rsqrt(), "1/sqrt(c)": (c + e.r).rsqrt()}
    if eps.mode == "relative":
        x |= {"V": V / e.unit_V, "r": r / e.unit_r, "c": c / e.unit_r}
    x["M*F"] = M * F_m
    return x


@functools.cache
def feature_names(kind: str) -> tuple[str, ...]:
    """The name of each of the network's inputs, in order: 39 for small_fc, 30 (29) for VeLO."""
    one, three = torch.ones(1, 1), torch.ones(1, 3, 1)
    acc = Accumulators(three, one, three, three)  # of a vector with one entry
    names = []
    for name, x in parameter_features(one, one, acc, None, Eps("reference", 1e-5), kind).items():
        names += [name] if x.shape[1] == 1 else [f"{name}{k}" for k in (1, 2, 3)]
    return (*names, *(f"t/{x}" for x in TIMESCALES if kind == "small_fc"))


class Epsilons(NamedTuple):
    """Epsilons inside square roots, (S, 1 | 3, 1, ...) or a number; in relative mode also units."""

    unit_V: Tensor | None  # the network sees V / unit_V
    unit_r: Tensor | None  # and r / unit_r, c / unit_r
    M: Tensor | float  # added to V in M / sqrt(V)
    V: Tensor | float  # added to V in 1 / sqrt(V)
    r: Tensor | float  # added to r and c in 1 / sqrt(r), 1 / sqrt(c)


def epsilons(V: Tensor, r: Tensor, eps: Eps) -> Epsilons:
    """The epsilons of each tensor. Relative ones are fractions of its mean V and mean r."""
    if eps.mode == "relative":
        V, r = mean_of_each(V), mean_of_each(r)
        return Epsilons(safe(V), safe(r), safe(V, 1e-8), safe(V, 1e-2), safe(r, 1e-2))
    e6, e8 = (trailing(e * eps.scale, r.ndim) for e in (1e-6, 1e-8))
    return Epsilons(None, None, e6, e6, e8)


def adafactor(r: Tensor, c: Tensor, dims: Dims, eps: Eps, velo: bool) -> tuple[Tensor, Tensor]:
    """sqrt(mean(r) / (r c^T)), or 1 / sqrt(c) for vectors: F_g for g, F_m for M, (S, 3, *shape)."""
    e9, e6 = (trailing(e * eps.scale, r.ndim) for e in (1e-9, 1e-6))
    if eps.mode == "relative":
        mean = mean_of_each(r)  # one per tensor and decay
        F = torch.maximum(c, safe(mean, 1e-8)).rsqrt()
        if dims is not None:
            F = (r / safe(mean)).clamp_min(1e-8).rsqrt() * F
        return F, F
    if dims is not None:
        mean = mean_along(r, dims[0])  # over d1 = dims[0]: one per decay and batch index
        F = (r / (mean + e9)).clamp(min=e9).rsqrt() * c.clamp(min=e9).rsqrt()
        return F, F
    # DIVERGES: the reference's VeLO has no epsilon in F_m for vectors.
    return (c + e9).rsqrt(), (c if velo else c + e6).rsqrt()


def inverse_rms(ms: Tensor, eps: Eps) -> Tensor:
    """1 / RMS from the mean square (S, F). Without an epsilon, 0 for a feature that is all zero."""
    if eps.mode == "relative" or eps.rms == 0:
        return torch.where(ms <= TINY, torch.zeros_like(ms), ms.rsqrt())
    return (ms + trailing(eps.rms * eps.scale, 2)).rsqrt()


def time_features(
    t: Tensor, t_max: float | None, spec: str, timescales: Tensor | None = None
) -> Tensor:
    """tanh(t/x - 1) for the 11 timescales x, (..., 11); t = 0 at the first step.

    DIVERGES: the paper writes tanh(t/x). t is clamped at `t_max`, the longest horizon in
    meta-training. An exported graph passes its own `timescales`, which move with it to a device.
    """
    t = wide(t) if t_max is None else wide(t).clamp_max(t_max)
    if timescales is None:
        timescales = constant(TIMESCALES, t.dtype, t.device)
    ratio = t.unsqueeze(-1) / timescales
    return torch.tanh(ratio if spec == "paper" else ratio - 1)


def annealing(t: Tensor, t_max: float | None, power: float) -> Tensor | float:
    """The factor on updates beyond the meta-trained horizon, (t_max / t)^power; 1 up to it.

    DIVERGES: the reference has no horizon. With updates that suit t_max steps, the loss stops
    falling some time after t_max, as Adam's does at a constant learning rate.
    """
    if t_max is None or not power:
        return 1.0
    return (wide(t).clamp_min(t_max) / t_max) ** -power


# ---------------------------------------------------------------- per-tensor features (VeLO)


def fraction_features(
    t: Tensor, num_steps: Tensor, spec: str, fractions: Tensor | None = None
) -> Tensor:
    """VeLO's time features, tanh(10 (t/T - x)) for the 9 fractions x, (..., 9); T is `num_steps`.

    DIVERGES: the paper writes tanh(t/T - 10x), which is saturated at almost every t.
    """
    f = (wide(t) / num_steps).unsqueeze(-1)
    x = constant(FRACTIONS, f.dtype, f.device) if fractions is None else fractions
    return torch.tanh(f - 10 * x if spec == "paper" else 10 * (f - x))


class LossBuffer(NamedTuple):
    """VeLO's memory of the loss: 10 exponential means, their minima, and the number of updates."""

    means: Tensor  # (..., 10)
    low: Tensor  # (..., 10)
    count: Tensor  # (...)


def init_loss_buffer(*batch: int, device: torch.device | str | None = None) -> LossBuffer:
    zero = torch.zeros(*batch, 10, dtype=torch.float32, device=device)
    return LossBuffer(zero, zero + 999999999999.0, zero[..., 0].clone())


def pack_loss_buffer(buffer: LossBuffer) -> Tensor:
    """A buffer as one tensor, (..., 21)."""
    return torch.cat([buffer.means, buffer.low, buffer.count.unsqueeze(-1)], -1)


def unpack_loss_buffer(x: Tensor) -> LossBuffer:
    return LossBuffer(x[..., :10], x[..., 10:20], x[..., 20])


@functools.cache
def loss_decays(num_steps: int, bugged: bool, device: torch.device | str | None = None) -> Tensor:
    """The decays of the 10 means: time constants from 10 steps to num_steps (all 10 if bugged)."""
    top = 1.0 if bugged else math.log10(num_steps)
    with torch.inference_mode(False):
        time_constants = 10 ** torch.linspace(1, top, 10, dtype=torch.float32, device=device)
        return torch.exp(-1 / time_constants)


def loss_features(
    buffer: LossBuffer,
    loss: Tensor,  # (...)
    decay: Tensor,  # (..., 10) or (10,), from `loss_decays`
) -> tuple[LossBuffer, Tensor]:
    """Update the buffer with this step's loss; return it and the 9 EMA loss features of the LSTM.

    Feature k is (ema_k - low_k) / (ema_k+1 - low_k) - 1, clipped to [-1, 1]. A loss is capped at
    twice the largest current mean, and ignored if it is not finite. Features are 0 in the first
    two steps. Float32, as in the reference, so that 1 - decay^n loses the same digits.
    """
    finite, loss = (loss.abs() < math.inf).unsqueeze(-1), loss.unsqueeze(-1)
    n = buffer.count.unsqueeze(-1) + finite
    correction = 1 - decay**n  # as Adam's bias correction
    largest = torch.where(n == 1, loss, (buffer.means / correction).amax(-1, True))
    loss = torch.minimum(2 * largest.abs(), loss)
    means = torch.where(finite, buffer.means * decay + loss * (1 - decay), buffer.means)
    ema = means / correction
    low = torch.where(finite, torch.minimum(buffer.low, ema), buffer.low)
    x = (ema - low)[..., :-1] / (ema[..., 1:] - low[..., :-1]).clamp_min(1e-8) - 1
    x = x.clamp(-1, 1).masked_fill(n <= 2, 0.0)
    return LossBuffer(means, low, n.squeeze(-1)), x


def mean_square(p: Tensor) -> Tensor:
    """Mean of p^2 of each tensor, (S,)."""
    return mean_all(wide(p).flatten(1).square())


def param_scale(mean_square: Tensor) -> Tensor:
    """RMS of each tensor, the factor on VeLO's updates if param_scale_mult is set."""
    return (mean_square + 1e-9).sqrt()


def var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean along the last axis: torch.var_mean takes ten times longer."""
    mean = mean_all(x)
    return mean_all((x - mean.unsqueeze(-1)).square_()), mean


def tensor_statistics(p: Tensor, M: Tensor, V: Tensor) -> Tensor:
    """The mean of p^2, then mean_rms (1), var_mom (3) and var_rms (3) of each tensor: (S, 8).

    They use the accumulators of the previous step. As in the paper and the reference, var_rms
    subtracts m_k, the mean of the *momentum*: mean((V - m_k)^2) = var(V) + (mean(V) - m_k)^2.
    """
    ms = mean_square(p).unsqueeze(-1)
    inv_rms = ms.clamp_min(1e-9).rsqrt()  # 1 / RMS(W), (S, 1)
    var_M, mean_M = var_mean(M.flatten(2))  # (S, 3)
    var_V, mean_V = var_mean(V.unsqueeze(1).flatten(2))  # (S, 1)
    var_rms = var_V + (mean_V - mean_M).square()
    x = torch.cat([mean_V * inv_rms, var_M * inv_rms.square(), var_rms * inv_rms.square()], -1)
    # c_1 clip(log(c_2 x), -tau, tau) with c_1 = 1/2, c_2 = 10, tau = 5, as the paper sets them
    return torch.cat([ms, 0.5 * (1e-8 + (10 * x).abs()).log().clamp(-5, 5)], -1)


def rank_one_hot(shapes: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """The number of axes longer than 1 of each of T tensors, one-hot (T, 5); all 0 above 4."""
    ranks = [sum(n > 1 for n in shape) for shape in shapes]
    rows = tuple(tuple(float(k == rank) for k in range(5)) for rank in ranks)
    return constant(rows, torch.float32, device)


def tensor_features(statistics: Tensor, rank: Tensor) -> Tensor:
    """mean_rms (1), rank one-hot (5), var_mom (3) and var_rms (3) of each tensor: (..., 12)."""
    rank = rank.expand(*statistics.shape[:-1], 5)
    return torch.cat([statistics[..., 1:2], rank, statistics[..., 2:]], -1)
