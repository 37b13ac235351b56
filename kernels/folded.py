"""The step of `mulo.py` with fewer memory accesses, for any device and for export.

- Time features are the same for every parameter: their product with W0 is added to the first bias.
- Row and column features are vectors: their products with W0 are added by broadcasting.
- RMS normalisers are scalars per tensor: they scale the rows of W0, not the features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mulo import features
from mulo.features import Accumulators, Dims, Eps, Phi, Rates, trailing


def step(
    config,  # mulo.LOConfig
    phi: Phi,
    acc: Accumulators,
    p: Tensor,
    g: Tensor,
    t: Tensor,
    scale: Tensor,
    dims: Dims,
    decay: Tensor | float = 0.0,
    eps_scale: Tensor | float = 1.0,
    timescales: Tensor | None = None,
    rates: Rates | None = None,
) -> tuple[Accumulators, Tensor]:
    """`mulo.step`: the same arguments and result; an exported graph passes its timescales too."""
    eps, rates = Eps(config.eps, config.eps_rms, eps_scale), rates or features.rates_of(phi)
    p, g = features.wide(p), features.clean(g, features.CLIP[config.net]).to(acc.V)
    acc = features.accumulate(acc, g, dims, rates, eps)
    x = features.parameter_features(p.to(acc.V), g, acc, dims, eps, config.feature_set)
    *vectors, (w, X) = first_layer(phi["w0"], x, eps)
    b = phi["b0"]  # (S | 1, h)
    if config.net == "small_fc":
        x_time = features.time_features(t.reshape(-1), config.t_max, config.spec, timescales)
        b = b + (x_time.unsqueeze(1) @ phi["w0"][:, -x_time.shape[-1] :]).squeeze(1)
        scale = scale * features.annealing(t, config.t_max, config.anneal)
    rest = trailing(b, X.ndim)  # (S | 1, h, *shape), with size 1 along some axes
    for w_k, x_k in vectors:
        rest = (w_k @ x_k.flatten(2)).unflatten(-1, x_k.shape[2:]) + rest
    y = ((w @ X.flatten(2)).unflatten(-1, X.shape[2:]) + rest).flatten(2)  # (S, h, n)
    for k in range(1, config.hidden_layers + 1):
        w = phi[f"w{k}"].mT.expand(y.shape[0], -1, -1)
        y = torch.baddbmm(phi[f"b{k}"].unsqueeze(-1), w, y.relu())
    d, m = y.unflatten(2, X.shape[2:]).unbind(1)
    d, e_m = trailing(scale, p.ndim) * d, (config.lam2 * m).exp()
    return acc, torch.addcmul(p * (1 - trailing(decay, p.ndim)), d, e_m, value=-config.lam1)


def first_layer(
    w0: Tensor,  # (S | 1, F, h)
    inputs: dict[str, Tensor],  # from features.parameter_features
    eps: Eps,
) -> list[tuple[Tensor, Tensor]]:
    """Group the features by the axes along which they are constant; full-size features come last.

    Returns, per group, W0 times the normalisers, (S, h, k), and the features, (S, k, *shape).
    """
    groups: dict[tuple[bool, ...], list[tuple[Tensor, Tensor]]] = {}
    start, whole, sharded = 0, inputs["g"].shape, features.sharded_axis()
    for x in inputs.values():
        if sharded is not None:  # a shard may have size 1 there by chance
            x = x.expand(*(whole[k] if k - x.ndim == sharded else n for k, n in enumerate(x.shape)))
        sizes = enumerate(x.shape[2:], 2 - x.ndim)  # by axis, counted from the end
        axes = tuple(bool(n == 1) and k != sharded for k, n in sizes)
        rows = w0[:, start : start + x.shape[1]]
        groups.setdefault(axes, []).append((rows, x))
        start += x.shape[1]
    layers = []
    for axes in sorted(groups, key=lambda axes: -sum(axes)):
        rows, xs = zip(*groups[axes], strict=True)
        x = torch.cat(xs, 1)
        norm = features.inverse_rms(features.mean_all(x.square().flatten(2)), eps)
        layers.append((torch.cat(rows, 1).mT * norm.unsqueeze(1), x))
    return layers
