"""An independent derivation of small_fc_lopt, in float64 numpy, one tensor at a time.

Written from the formulas of golden/README.md and the paper, not from the code under test: features
are built with the axes as stored (JAX's convention for ties), tiled in full, concatenated last.
"""

import numpy as np

BETA0 = {
    "momentum_decays": np.array([0.9, 0.99, 0.999]),
    "rms_decays": np.array([0.999]),
    "adafactor_decays": np.array([0.9, 0.99, 0.999]),
}


def betas(meta: dict) -> dict:
    out = {}
    for name, b0 in BETA0.items():
        b0 = b0.astype(np.float32)
        if name in meta:
            log = np.log(np.float32(1) - b0) / np.float32(10)
            exponent = np.float32(10) * (log + meta[name].astype(np.float32))
            b0 = np.float32(1) - np.exp(exponent)
        out[name] = (b0 if name == "momentum_decays" else np.clip(b0, 0, 1)).astype(np.float64)
    return out


def factored(shape: tuple) -> tuple | None:
    if len(shape) < 2:
        return None
    order = np.argsort(shape, kind="stable")
    return int(order[-2]), int(order[-1])


def nonzero(mean: float, factor: float = 1.0) -> float:
    return factor * mean if mean > 1e-28 else 1.0


class Tensor:
    """Accumulators and features of one tensor. `eps` is "reference" or "relative"."""

    def __init__(self, p, meta, eps="reference", eps_rms=1e-5):
        self.p = np.asarray(p, np.float64)
        self.beta, self.eps, self.eps_rms = betas(meta), eps, eps_rms
        self.dims = factored(self.p.shape)
        self.M = [np.zeros_like(self.p) for _ in range(3)]
        self.V = np.zeros_like(self.p)
        self.r, self.c = [0.0] * 3, [0.0] * 3

    def accumulate(self, g):
        b1, b4, b5 = (self.beta[k] for k in BETA0)
        q = g * g + (0 if self.eps == "relative" else 1e-30)
        self.V = b4[0] * self.V + (1 - b4[0]) * g * g
        for i in range(3):
            self.M[i] = b1[i] * self.M[i] + (1 - b1[i]) * g
            if self.dims is None:
                row = col = q
            else:
                d1, d0 = self.dims
                row, col = q.mean(d0, keepdims=True), q.mean(d1, keepdims=True)
            self.r[i] = b5[i] * self.r[i] + (1 - b5[i]) * row
            self.c[i] = b5[i] * self.c[i] + (1 - b5[i]) * col

    def normaliser(self, i):
        """What g and M are multiplied by in F_grad and F_mom, for decay i."""
        r, c = self.r[i], self.c[i]
        if self.eps == "relative":
            F = np.maximum(c, nonzero(r.mean(), 1e-8)) ** -0.5
            if self.dims is not None:
                F = np.maximum(r / nonzero(r.mean()), 1e-8) ** -0.5 * F
            return F, F
        if self.dims is None:
            return np.maximum(r + 1e-9, 1e-9) ** -0.5, (r + 1e-6) ** -0.5
        mean = r.mean(self.dims[0], keepdims=True)
        return (np.maximum(r / (mean + 1e-9), 1e-9) ** -0.5 * np.maximum(c, 1e-9) ** -0.5,) * 2

    def raw(self, g):
        """The unnormalised features in the reference's order, (*shape, 28)."""
        unit, e_M, e_V, R, e_r = 1.0, 1e-6, 1e-6, [1.0] * 3, [1e-8] * 3
        if self.eps == "relative":
            unit, e_M, e_V = (nonzero(self.V.mean(), factor) for factor in (1.0, 1e-8, 1e-2))
            R, e_r = ([nonzero(r.mean(), factor) for r in self.r] for factor in (1.0, 1e-2))
        inv = (self.V + e_M) ** -0.5
        f = [g, self.p, *self.M, self.V / unit, *[m * inv for m in self.M], (self.V + e_V) ** -0.5]
        f += [g * self.normaliser(i)[0] for i in range(3)]
        f += [x / u for x, u in zip(self.r, R, strict=True)]
        f += [x / u for x, u in zip(self.c, R, strict=True)]
        f += [(x + e) ** -0.5 for x, e in zip(self.r, e_r, strict=True)]
        f += [(x + e) ** -0.5 for x, e in zip(self.c, e_r, strict=True)]
        f += [self.M[i] * self.normaliser(i)[1] for i in range(3)]
        return np.stack([np.broadcast_to(x, self.p.shape) for x in f], -1)

    def normalised(self, g):
        raw = self.raw(g)
        ms = (raw**2).mean(tuple(range(self.p.ndim)))
        if self.eps == "relative" or self.eps_rms == 0:
            return raw * np.where(ms > 1e-28, np.maximum(ms, 1e-300) ** -0.5, 0)
        return raw * (self.eps_rms + ms) ** -0.5


def mlp(x, weights):
    n = sum(k.startswith("w") for k in weights)
    for k in range(n):
        x = x @ weights[f"w{k}"].astype(np.float64) + weights[f"b{k}"]
        x = np.maximum(x, 0) if k < n - 1 else x
    return x


SCALES = np.array([1, 3, 10, 30, 100, 300, 1e3, 3e3, 1e4, 3e4, 1e5])


def small_fc_step(
    tensor, meta, g, t, lam1, lam2, scale=1.0, spec="reference", t_max=None, anneal=0.0
):
    """One step of small_fc_lopt on an oracle Tensor; returns the update that was subtracted."""
    if t_max is not None and t > t_max:
        scale = scale / (t / t_max) ** anneal
    g = np.asarray(g, np.float64)
    tensor.accumulate(g)
    x = tensor.normalised(g)
    t = t if t_max is None else min(t, t_max)
    time = np.tanh(t / SCALES - (0 if spec == "paper" else 1))
    x = np.concatenate([x, np.broadcast_to(time, (*tensor.p.shape, 11))], -1)
    y = mlp(x, {k: v for k, v in meta.items() if k[0] in "wb"})
    update = scale * lam1 * y[..., 0] * np.exp(lam2 * y[..., 1])
    tensor.p = tensor.p - update
    return update
