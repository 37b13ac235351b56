"""The step of a learned optimizer on GPUs: Triton kernels, in place, all tensors of a net at once.

    step_(config, rows, device, alpha, bad)  # one row per tensor, see kernels.ROW

A step is six passes, each one launch for all tensors. VeLO's `statistics_` is two more: `moments`
of chunks of a tensor, which `combine` combines.

    means       partial sums of g^2 along rows and columns        reads g
    factor      r and c move towards the means                    reads and writes r, c
    sides       factors of F_grad and F_mom, features of r and c  reads r, c
    accumulate  M, V; sums of squares of the dense features       reads p, g, M, V; writes M, V
    fold        1/RMS, time and the features of r and c into W0   reads the weights
    update      the network, and p                                reads p, g, M, V; writes p

A tensor is (A, X, B, Y, C): X and Y are factored, A, B and C are batch. r and c live on its two
*sides*: the x side (A, X, B, C), averaged over Y, and the y side (A, B, Y, C), averaged over X. A
vector has only a y side, of its own length, where r = c. A side is cut into blocks of N entries
along X or Y, a tensor into tiles of R rows (along X) and W columns (along Y and C).

A program reads its tensor and its blocks or tiles from `index`, the tensor's row from `rows`, and
offsets in `work` from `plan`; `index` and `plan` are cached. Sums are taken in a fixed order, so
they are reproducible. Names and formulas are those of features.py.
"""

# ruff: noqa: RUF005 (Triton does not support (*x, y))

from __future__ import annotations

import dataclasses
import functools
import math
from collections import namedtuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mulo.features import constant, send

N = tl.constexpr(128)  # entries of a block of a side
SIDE_PROGRAMS = tl.constexpr(512)  # most programs of a side per batch index; each sums all of them
CHUNK = tl.constexpr(4096)  # entries of a program of `moments`
MEANS_R, MEANS_W = tl.constexpr(32), tl.constexpr(64)  # rows and columns of a tile in `means`
TIMESCALES = tl.constexpr((1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000))
TINY, INFINITY = tl.constexpr(1e-28), tl.constexpr(math.inf)
NORMAL = tl.constexpr(1.2e-38)  # a GPU's 1/sqrt of smaller floats is infinite
FLOATS = tl.constexpr(tl.pointer_type(tl.float32))
# Columns of the plan: offsets in `work`; each column of the y side follows that of the x side.
PARTS, VALUES, OUT, SUMS = (tl.constexpr(k) for k in (0, 2, 4, 6))
SQUARES, V_SUMS, FOLDED, SQUARES_N, V_SUMS_N = (tl.constexpr(k) for k in range(8, 13))

Row = namedtuple("Row", "p g M V r c net A X B Y C kind t scale decay eps n plan work")
# r: pointer to r, or to c; n: entries; length: along X or Y; after: entries after that axis;
# span: blocks of a program; programs: at one batch index; total: programs
Side = namedtuple("Side", "r is_r n length after span programs total")


@dataclasses.dataclass(frozen=True)
class Case:
    """Compile-time constants of a kernel."""

    config: object  # mulo.LOConfig
    R: int = 8  # rows and columns of a tile, and its warps
    W: int = 64
    warps: int = 4

    velo = property(lambda case: case.config.net == "velo")
    relative = property(lambda case: case.config.eps == "relative")
    safe_rms = property(lambda case: case.relative or case.config.eps_rms == 0)
    clip = property(lambda case: 1000.0 if case.velo else 1e15)
    shift = property(lambda case: 0.0 if case.config.spec == "paper" else 1.0)
    F = property(lambda case: case.config.num_features)
    D = property(lambda case: {39: 16, 30: 18, 29: 17}[case.F])  # dense features
    H = property(lambda case: case.config.hidden_size)
    HP = property(lambda case: triton.next_power_of_2(case.H if case.H <= 8 else max(case.H, 16)))
    w1 = property(lambda case: 7 + case.F * case.H + case.H)  # after 7 rates, w0 and b0
    layer = property(lambda case: case.H * case.H + case.H)  # floats of a hidden layer


@triton.jit
def job(rows, plan, index, work):
    """Return this program's tensor and its two job numbers, from `index`."""
    index += 3 * tl.program_id(0)
    at = rows + 15 * tl.load(index)
    f = at.to(FLOATS, bitcast=True) + 26
    A, X, B = tl.load(at + 7), tl.load(at + 8), tl.load(at + 9)
    Y, C = tl.load(at + 10), tl.load(at + 11)
    row = Row(
        tl.load(at).to(FLOATS), tl.load(at + 1).to(FLOATS),
        tl.load(at + 2).to(FLOATS), tl.load(at + 3).to(FLOATS),
        tl.load(at + 4), tl.load(at + 5), tl.load(at + 6).to(FLOATS),
        A.to(tl.int32), X.to(tl.int32), B.to(tl.int32), Y.to(tl.int32), C.to(tl.int32),
        tl.load(at + 12).to(tl.int32), tl.load(f), tl.load(f + 1), tl.load(f + 2), tl.load(f + 3),
        A * X * B * Y * C, plan + 13 * tl.load(index), work,
    )  # fmt: skip
    return row, tl.load(index + 1), tl.load(index + 2)


@triton.jit
def place(row, column):
    return row.work + 4 * tl.load(row.plan + column)


@triton.jit
def clean(g, CASE: tl.constexpr):
    """g, clipped, with NaN and infinities taken as 0."""
    return tl.where(tl.abs(g) < INFINITY, tl.minimum(tl.maximum(g, -CASE.clip), CASE.clip), 0.0)


@triton.jit
def at_least(x, low):
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def safe(x, FACTOR: tl.constexpr):
    """FACTOR * x, or 1 where x counts as zero."""
    return tl.where(x <= TINY, 1.0, FACTOR * x)


@triton.jit
def inverse_rms(ms, eps, CASE: tl.constexpr):
    if CASE.safe_rms:
        return tl.where(ms <= TINY, 0.0, tl.rsqrt(ms))
    else:
        return tl.rsqrt(ms + CASE.config.eps_rms * eps)


@triton.jit
def total(ptr, count, STRIDE: tl.constexpr):
    at, x = tl.arange(0, N), tl.zeros([N], tl.float32)
    for k in range(0, count, N):
        x += tl.load(ptr + (k + at) * STRIDE, k + at < count, 0.0)
    return tl.sum(x)


@triton.jit
def means(rows, plan, index, work, bad_ptr, CASE: tl.constexpr):
    """Sum g^2 along a tile's columns and rows, at each index of C; count entries not finite."""
    row, b, _0 = job(rows, plan, index, work)
    across, down = tl.cdiv(row.Y, MEANS_W), tl.cdiv(row.X, MEANS_R)
    ti, tj, batch = b // across % down, b % across, b // (across * down)
    i, j = ti * MEANS_R + tl.arange(0, MEANS_R), tj * MEANS_W + tl.arange(0, MEANS_W)
    x_at = ((batch // row.B * row.X + i) * row.B + batch % row.B) * row.C
    at = (x_at * row.Y)[:, None] + (j * row.C)[None, :]
    ok = (i < row.X)[:, None] & (j < row.Y)[None, :]
    batches = row.A * row.B * row.C
    x_part = place(row, PARTS) + tj * (batches * row.X) + x_at
    y_part = place(row, PARTS + 1) + ti * (batches * row.Y) + (batch * row.Y + j) * row.C
    V_sum, bad = 0.0, tl.zeros([MEANS_R, MEANS_W], tl.int32)
    for c in range(row.C):
        raw = tl.load(row.g + at + c, ok, 0.0)
        bad, g = bad + tl.where(tl.abs(raw) < INFINITY, 0, 1), clean(raw, CASE)
        tl.store(x_part + c, tl.sum(g * g, 1), i < row.X)
        tl.store(y_part + c, tl.sum(g * g, 0), j < row.Y)
        if CASE.relative:  # these epsilons need the mean of the new V
            v = tl.load(row.V + at + c, ok, 0.0)
            V_sum += tl.sum(v + tl.load(row.net + 3) * (g * g - v))
    if CASE.relative:
        tl.store(place(row, V_SUMS) + b, V_sum)
    count = tl.sum(bad)
    tl.atomic_add(bad_ptr, count.to(tl.int64), mask=count > 0)


@triton.jit
def side_of(row, side):
    on_x, batches = side == 0, row.A * row.B * row.C
    length, after = tl.where(on_x, row.X, row.Y), tl.where(on_x, row.B * row.C, row.C)
    span = tl.cdiv(length, N * SIDE_PROGRAMS)
    programs = tl.cdiv(length, N * span)
    is_r, n = (row.kind == 1) == on_x, (batches * length).to(tl.int64)  # a vector's is r and c
    r = tl.where(is_r, row.r, row.c).to(FLOATS)
    return Side(r, is_r, n, length, after, span, programs, batches * programs)


@triton.jit
def block_of(s, k, b):
    """Offsets on the side of the entries of program k's block b, and which of them exist."""
    batch, i = k // s.programs, (k % s.programs * s.span + b) * N + tl.arange(0, N)
    return (batch // s.after * s.length + i) * s.after + batch % s.after, i < s.length


@triton.jit
def factor(rows, plan, index, work, CASE: tl.constexpr):
    """r_d <- beta_d r_d + (1 - beta_d) mean(g^2) in blocks of r (or c); also sum r_d."""
    row, side, k = job(rows, plan, index, work)
    s, m, d4 = side_of(row, side), tl.arange(0, 16), tl.arange(0, 4)
    count = tl.where(side == 0, tl.cdiv(row.Y, MEANS_W), tl.cdiv(row.X, MEANS_R))
    r_sums = tl.zeros([4, N], tl.float32)
    for b in range(s.span):
        e, ok = block_of(s, k, b)
        sums = tl.zeros([16, N], tl.float32)
        for first in range(0, count, 16):
            part = place(row, PARTS + side) + (first + m)[:, None] * s.n + e[None, :]
            sums += tl.load(part, (first + m < count)[:, None] & ok[None, :], 0.0)
        q = tl.sum(sums, 0) / tl.where(side == 0, row.Y, row.X).to(tl.float32)
        if not CASE.relative:
            q += 1e-30 * row.eps
        for d in tl.static_range(3):
            at = d * s.n + e
            r = tl.load(s.r + at, ok, 0.0)
            r += tl.load(row.net + 4 + d) * (q - r)
            tl.store(s.r + at, r, ok)
            tl.store(row.c.to(FLOATS) + at, r, tl.where(row.kind == 0, ok, False))
            r_sums += tl.where((d4 == d)[:, None] & ok[None, :], r[None, :], 0.0)
    tl.store(place(row, SUMS + side) + 9 * k + d4, tl.sum(r_sums, 1), d4 < 3)


@triton.jit
def sides(rows, plan, index, work, CASE: tl.constexpr):
    """From each r_d (or c_d) of some blocks: its factors in F_grad and F_mom, and the features r_d
    and 1/sqrt(r_d) before normalisation. Also sum the features' squares."""
    row, side, k = job(rows, plan, index, work)
    s, sums = side_of(row, side), place(row, SUMS + side)
    means, count, n = sums + 9 * (k // s.programs * s.programs), s.programs, s.length
    if CASE.relative:  # the mean of all of r, else along the axis of the block
        side_r = tl.where(row.kind == 1, 0, 1)
        whole = side_of(row, side_r)
        means, count, n = place(row, SUMS + side_r), whole.total, whole.n.to(tl.int32)
    for d in tl.static_range(3):
        mean = total(means + d, count, 9) / n.to(tl.float32)
        x_squares, y_squares = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
        for b in range(s.span):
            e, ok = block_of(s, k, b)
            r = tl.load(s.r + d * s.n + e, ok, 0.0)
            if CASE.relative:
                by = at_least(r, safe(mean, 1e-8))
                x, y = r / safe(mean, 1.0), tl.rsqrt(r + safe(mean, 1e-2))
                by = tl.rsqrt(tl.where(s.is_r & (row.kind > 0), at_least(x, 1e-8), by))
                by_M = by
            else:
                by = tl.where(s.is_r, r / (mean + 1e-9 * row.eps), r)
                by = tl.where(row.kind == 0, r + 1e-9 * row.eps, by)
                by = tl.rsqrt(at_least(by, 1e-9 * row.eps))
                by_M = tl.rsqrt(at_least(r, NORMAL) if CASE.velo else r + 1e-6 * row.eps)
                by_M = tl.where(row.kind == 0, by_M, by)
                x, y = r, tl.rsqrt(r + 1e-8 * row.eps)
            values = (by, by_M, x, y)
            for i in tl.static_range(4):
                tl.store(place(row, VALUES + side) + (3 * i + d) * s.n + e, values[i], ok)
            x_squares += x * x  # x is 0 outside
            y_squares += tl.where(ok, y * y, 0.0)
        tl.store(sums + 9 * k + 3 + d, tl.sum(x_squares))
        tl.store(sums + 9 * k + 6 + d, tl.sum(y_squares))
    if CASE.relative:
        if (side == 1) & (k == 0):
            V_sum = total(place(row, V_SUMS), tl.load(row.plan + V_SUMS_N), 1)
            tl.store(place(row, FOLDED), V_sum / row.n.to(tl.float32))


@triton.jit
def dense_features(row, b, MOVE: tl.constexpr, CASE: tl.constexpr):
    """Return the dense features of tile b, the offsets of its entries in the tensor and on the
    sides, a mask of the entries that exist, and p. With MOVE, update M and V."""
    R: tl.constexpr = CASE.R
    W: tl.constexpr = CASE.W
    matrix = row.kind > 0
    X, width = tl.where(matrix, row.X, tl.cdiv(row.Y, W)), tl.where(matrix, row.Y * row.C, W)
    across, down = tl.cdiv(width, W), tl.cdiv(X, R)
    batch = b // (across * down)
    i, j = b // across % down * R + tl.arange(0, R), b % across * W + tl.arange(0, W)
    x = (batch // row.B * X + i) * row.B + batch % row.B
    at = (x * width)[:, None] + j[None, :]
    ok = (i < tl.where(batch < row.A * row.B, X, 0))[:, None] & (j < width)[None, :]
    ok = ok & (at < row.n.to(tl.int32))
    x_at = (x * row.C)[:, None] + (j % row.C)[None, :]
    y_at = tl.where(matrix, (batch * width + j)[None, :], at)

    g = clean(tl.load(row.g + at, ok, 0.0), CASE)
    p = tl.load(row.p + at, ok, 0.0)
    v = tl.load(row.V + at, ok, 0.0)
    if MOVE:
        v += tl.load(row.net + 3) * (g * g - v)
        tl.store(row.V + at, v, ok)
    if CASE.relative:
        mean = tl.load(place(row, FOLDED))
        inv_M, inv_V = tl.rsqrt(v + safe(mean, 1e-8)), tl.rsqrt(v + safe(mean, 1e-2))
        v = v / safe(mean, 1.0)
    else:
        inv_M = tl.rsqrt(v + 1e-6 * row.eps)
        inv_V = inv_M
    batches = (row.A * row.B * row.C).to(tl.int64)
    n_x, n_y = batches * row.X, batches * row.Y
    M, M_by_V, F_grad, F_mom = (), (), (), ()
    for d in tl.static_range(3):
        m = tl.load(row.M + d * row.n + at, ok, 0.0)
        if MOVE:
            m += tl.load(row.net + d) * (g - m)
            tl.store(row.M + d * row.n + at, m, ok)
        by_x = tl.load(place(row, VALUES) + d * n_x + x_at, tl.where(matrix, ok, False), 1.0)
        by_y = place(row, VALUES + 1) + d * n_y + y_at
        M, M_by_V = M + (m,), M_by_V + (m * inv_M,)
        F_grad = F_grad + (g * by_x * tl.load(by_y, ok, 0.0),)
        F_mom = F_mom + (m * by_x * tl.load(by_y + 3 * n_y, ok, 0.0),)
    clipped, g_by_V, inv_V = (), (), (tl.where(ok, inv_V, 0.0),)
    if CASE.velo:
        clipped = (tl.minimum(tl.maximum(g, -0.1), 0.1),)
    if CASE.D == 18:
        g_by_V = (g * inv_M,)
    x = (g,) + clipped + (p,) + M + (v,) + M_by_V + inv_V + F_grad + g_by_V + F_mom
    return x, at, x_at, y_at, ok, p


@triton.jit
def accumulate(rows, plan, index, work, CASE: tl.constexpr):
    """Update M and V of a few tiles; sum the squares of their dense features."""
    row, program, tiles = job(rows, plan, index, work)
    sums = ()
    for _ in tl.static_range(tl.constexpr(CASE.D)):
        sums = sums + (tl.full([CASE.R, CASE.W], 0.0, tl.float32),)
    for b in range(program * tiles, program * tiles + tiles):
        x, _at, _x_at, _y_at, _ok, _p = dense_features(row, b, True, CASE)
        new = ()
        for k in tl.static_range(tl.constexpr(CASE.D)):
            new = new + (sums[k] + x[k] * x[k],)
        sums = new
    for k in tl.static_range(tl.constexpr(CASE.D)):
        tl.store(place(row, SQUARES) + program * CASE.D + k, tl.sum(sums[k]))


@triton.jit
def fold_dense(row, CASE: tl.constexpr):
    """The rows of W0 of the dense features, times 1/RMS."""
    k, h, m = tl.arange(0, 32), tl.arange(0, CASE.HP), tl.arange(0, 16)
    sums, count = tl.zeros([16, 32], tl.float32), tl.load(row.plan + SQUARES_N)
    for first in range(0, count, 16):
        ok = (first + m < count)[:, None] & (k < CASE.D)[None, :]
        at = (first + m)[:, None] * CASE.D + k[None, :]
        sums += tl.load(place(row, SQUARES) + at, ok, 0.0)
    by = inverse_rms(tl.sum(sums, 0) / row.n.to(tl.float32), row.eps, CASE)
    feature = tl.where(k < CASE.D - 3, k, k + 12)  # F_mom comes after r and c
    ok, out = (k < CASE.D)[:, None] & (h < CASE.H)[None, :], place(row, FOLDED) + 4
    w0 = tl.load(row.net + 7 + feature[:, None] * CASE.H + h[None, :], ok, 0.0)
    tl.store(out + k[:, None] * CASE.HP + h[None, :], w0 * by[:, None], (k < CASE.D)[:, None])


@triton.jit
def fold(rows, plan, index, work, t_max, CASE: tl.constexpr):
    """The features of r (or c) in blocks times their rows of W0; those of r add b0 and time."""
    row, side, k = job(rows, plan, index, work)
    if (side == 1) & (k == 0):
        fold_dense(row, CASE)
    s, h = side_of(row, side), tl.arange(0, CASE.HP)
    w0, ok_h, ok_c = row.net + 7 + h, h < CASE.H, (h < CASE.H) & (row.kind == 0)
    bias = tl.load(w0 + CASE.F * CASE.H, ok_h, 0.0)
    if not CASE.velo:
        for d in tl.static_range(11):
            x = tl.minimum(row.t, t_max) / TIMESCALES[d] - CASE.shift
            tanh = 1 - 2 / (tl.exp(2 * x) + 1)
            bias += tanh * tl.load(w0 + (28 + d) * CASE.H, ok_h, 0.0)
    bias = tl.where(s.is_r, bias, 0.0)
    w0 += (CASE.D - 3 + tl.where(s.is_r, 0, 3)) * CASE.H
    weights = ()
    for d in tl.static_range(6):  # in W0: r, c, 1/sqrt(r), 1/sqrt(c)
        w_ptr = w0 + (d + d // 3 * 3) * CASE.H
        w = tl.load(w_ptr, ok_h, 0.0) + tl.load(w_ptr + 3 * CASE.H, ok_c, 0.0)
        ms = total(place(row, SUMS + side) + 3 + d, s.total, 9) / s.n.to(tl.float32)
        weights = weights + (w * inverse_rms(ms, row.eps, CASE),)
    for b in range(s.span):
        e, ok = block_of(s, k, b)
        y = tl.full([N, CASE.HP], 0.0, tl.float32) + bias[None, :]
        for d in tl.static_range(6):
            value = tl.load(place(row, VALUES + side) + (6 + d) * s.n + e, ok, 0.0)
            y += value[:, None] * weights[d][None, :]
        tl.store(place(row, OUT + side) + e[:, None] * CASE.HP + h[None, :], y, ok[:, None])


@triton.jit
def small_network(row, x, x_at, y_at, ok, CASE: tl.constexpr):
    """The network on a tile, unrolled neuron by neuron."""
    w0, w, zero, y = place(row, FOLDED) + 4, row.net + CASE.w1, tl.zeros_like(x[0]), ()
    for h in tl.static_range(tl.constexpr(CASE.H)):
        a = tl.load(place(row, OUT) + x_at * CASE.HP + h, tl.where(row.kind > 0, ok, False), 0.0)
        a += tl.load(place(row, OUT + 1) + y_at * CASE.HP + h, ok, 0.0)
        for k in tl.static_range(tl.constexpr(CASE.D)):
            a += tl.load(w0 + k * CASE.HP + h) * x[k]
        y = y + (at_least(a, 0.0),)
    for _ in tl.static_range(1, tl.constexpr(CASE.config.hidden_layers)):
        z = ()
        for h in tl.static_range(tl.constexpr(CASE.H)):
            a = zero + tl.load(w + CASE.H * CASE.H + h)
            for k in tl.static_range(tl.constexpr(CASE.H)):
                a += tl.load(w + k * CASE.H + h) * y[k]
            z = z + (at_least(a, 0.0),)
        y = z
        w += CASE.layer
    d, m = zero + tl.load(w + 2 * CASE.H), zero + tl.load(w + 2 * CASE.H + 1)
    for h in tl.static_range(tl.constexpr(CASE.H)):
        d += tl.load(w + 2 * h) * y[h]
        m += tl.load(w + 2 * h + 1) * y[h]
    return d, m


@triton.jit
def joined(x, COUNT: tl.constexpr):
    """COUNT tiles (R, W) as one, (R, W, 2, ..., 2)."""
    if COUNT == 1:
        return x[0]
    else:
        pairs = ()
        for k in tl.static_range(COUNT // 2):
            pairs = pairs + (tl.join(x[k], x[k + COUNT // 2]),)
        return joined(pairs, COUNT // 2)


@triton.jit
def large_network(row, x, x_at, y_at, ok, CASE: tl.constexpr):
    """The network on a tile, by products of matrices in float32."""
    N_TILE: tl.constexpr = CASE.R * CASE.W
    h, w0, w = tl.arange(0, CASE.HP), place(row, FOLDED) + 4, row.net + CASE.w1
    x_at = tl.reshape(x_at, (N_TILE, 1)) * CASE.HP + h[None, :]
    y_at = tl.reshape(y_at, (N_TILE, 1)) * CASE.HP + h[None, :]
    ok = tl.reshape(ok, (N_TILE, 1))
    a = tl.load(place(row, OUT) + x_at, tl.where(row.kind > 0, ok, False), 0.0)
    a += tl.load(place(row, OUT + 1) + y_at, ok, 0.0)
    for k in tl.static_range(16, tl.constexpr(CASE.D)):  # VeLO has more than 16
        a += tl.reshape(x[k], (N_TILE, 1)) * tl.load(w0 + k * CASE.HP + h)[None, :]
    weights = tl.load(w0 + tl.arange(0, 16)[:, None] * CASE.HP + h[None, :])
    a = tl.dot(tl.reshape(joined(x, 16), (N_TILE, 16)), weights, a, input_precision="ieee")
    real = (h < CASE.H) | (CASE.H == CASE.HP)
    for _ in tl.static_range(1, tl.constexpr(CASE.config.hidden_layers)):
        both = real[:, None] & real[None, :]
        weights = tl.load(w + h[:, None] * CASE.H + h[None, :], both, 0.0)
        bias = tl.load(w + CASE.H * CASE.H + h, real, 0.0)
        a = tl.dot(at_least(a, 0.0), weights, input_precision="ieee") + bias[None, :]
        w += CASE.layer
    a = at_least(a, 0.0)
    d = tl.sum(a * tl.load(w + 2 * h, real, 0.0)[None, :], 1) + tl.load(w + 2 * CASE.H)
    m = tl.sum(a * tl.load(w + 2 * h + 1, real, 0.0)[None, :], 1) + tl.load(w + 2 * CASE.H + 1)
    return tl.reshape(d, (CASE.R, CASE.W)), tl.reshape(m, (CASE.R, CASE.W))


@triton.jit
def update(rows, plan, index, work, t_max, lam1, lam2, anneal, CASE: tl.constexpr):
    """theta <- theta - scale lam1 d exp(lam2 m) - decay theta, in a tile."""
    row, b, _0 = job(rows, plan, index, work)
    x, at, x_at, y_at, ok, p = dense_features(row, b, False, CASE)
    if CASE.H > 8:
        d, m = large_network(row, x, x_at, y_at, ok, CASE)
    else:
        d, m = small_network(row, x, x_at, y_at, ok, CASE)
    scale = lam1 * row.scale
    if not CASE.velo:
        scale *= tl.exp(anneal * tl.log(t_max / tl.maximum(row.t, t_max)))
    tl.store(row.p + at, p - scale * d * tl.exp(lam2 * m) - row.decay * p, ok)


@triton.jit
def moments(rows, index, work):
    """Of CHUNK entries: the sum of p^2, the means of M and V, and their squared deviations."""
    row, k, _0 = job(rows, work, index, work)
    at = k * CHUNK + tl.arange(0, CHUNK)
    ok, out = at < row.n, work + 9 * tl.program_id(0)
    p = tl.load(row.p + at, ok, 0.0)
    tl.store(out, tl.sum(p * p))
    for d in tl.static_range(4):
        x = tl.load(row.V + at if d == 3 else row.M + d * row.n + at, ok, 0.0)
        mean = tl.sum(x) / tl.minimum(row.n - k * CHUNK, CHUNK).to(tl.float32)
        tl.store(out + 1 + d, mean)
        tl.store(out + 5 + d, tl.sum(tl.where(ok, (x - mean) * (x - mean), 0.0)))


@triton.jit
def squash(x):
    x = at_least(tl.log(1e-8 + tl.abs(10 * x)), -5.0)
    return 0.5 * tl.minimum(x, 5.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def combine(rows, index, work, out):
    """features.tensor_statistics of a tensor, from the moments of its chunks."""
    row, first, count = job(rows, work, index, work)
    k, d, n = tl.arange(0, 64), tl.arange(0, 4), row.n.to(tl.float32)
    part, out, mean, x = work + 9 * first, out + 8 * tl.program_id(0), tl.zeros([4], tl.float32), ()
    for about_mean in tl.static_range(2):
        sums = tl.zeros([64, 4], tl.float32)
        for i in range(0, count, 64):
            ok, at = (i + k < count)[:, None], part + 9 * (i + k)[:, None] + d[None, :]
            weight = tl.minimum(row.n - (i + k) * CHUNK, CHUNK).to(tl.float32)[:, None]
            e = tl.load(at + 1, ok, 0.0) - mean[None, :]
            e = weight * e * e + tl.load(at + 5, ok, 0.0) if about_mean else weight * e
            sums += tl.where(ok, e, 0.0)
        x, mean = x + (tl.sum(sums, 0) / n,), tl.sum(sums, 0) / n
    ms = total(part, count, 9) / n
    by, by_2 = tl.rsqrt(at_least(ms, 1e-9)), 1 / at_least(ms, 1e-9)
    mean_V, var_V = tl.sum(tl.where(d == 3, x[0], 0.0)), tl.sum(tl.where(d == 3, x[1], 0.0))
    tl.store(out, ms)
    tl.store(out + 1, squash(mean_V * by))
    tl.store(out + 2 + d, squash(x[1] * by_2), d < 3)
    tl.store(out + 5 + d, squash((var_V + (mean_V - x[0]) * (mean_V - x[0])) * by_2), d < 3)


PROGRAMS = 1024  # enough to fill a GPU; with more tiles, a program of `accumulate` takes several


@functools.lru_cache(maxsize=64)
def planned(shapes: bytes, config, device: torch.device) -> tuple[Tensor, int, list[tuple]]:
    """For tensors of these shapes (A, X, B, Y, C, kind, int64 each): the kernels' plan, the size of
    `work`, and the launches: kernel, index (programs, 3) and case; two of `statistics_`."""
    A, X, B, Y, C, kind = np.frombuffer(shapes, np.int64).reshape(-1, 6).T
    matrix, n = kind > 0, A * B * C * np.stack([X, Y])  # entries of the sides
    # Kernels are compiled for these; the other numbers of a config are arguments.
    names = "net", "spec", "eps", "eps_rms", "hidden_size", "hidden_layers"
    config = type(config)(**{k: getattr(config, k) for k in names})
    case = Case(config)
    # Chosen such that no kernel spills registers (see tests/test_triton.py)
    tile = (8, 64, 4) if case.HP <= 8 else (4, 32, 4) if case.HP <= 32 else (1, 32, 8)
    update_case = Case(config, *tile)
    length = np.stack([X * matrix, Y])
    span = np.maximum(1, triton.cdiv(length, N.value * SIDE_PROGRAMS.value))
    blocks = A * B * C * triton.cdiv(length, N.value * span)  # programs of a side
    parts = np.stack([triton.cdiv(Y, MEANS_W), triton.cdiv(X, MEANS_R)])

    def tiles(case: Case) -> np.ndarray:
        of_matrix = A * B * triton.cdiv(X, case.R) * triton.cdiv(Y * C, case.W)
        return np.where(matrix, of_matrix, triton.cdiv(Y, case.R * case.W))

    means_tiles, chunks = A * B * parts.prod(0), triton.cdiv(A * X * B * Y * C, CHUNK.value)
    tiles_each = min(8, max(1, tiles(case).sum() // PROGRAMS))  # per program
    programs = triton.cdiv(tiles(case), tiles_each)
    sizes = [*(n * parts), *(n * 12), *(n * case.HP), *(blocks * 9), programs * case.D]
    sizes = np.stack([*sizes, means_tiles, 0 * Y + case.D * case.HP + 4])
    sizes = triton.cdiv(sizes, 4)  # offsets are multiples of 16 bytes
    places = sizes.cumsum().reshape(sizes.shape) - sizes
    plan = np.stack([*places, programs, means_tiles], 1)  # SQUARES_N and V_SUMS_N are the last

    def index(*jobs: tuple) -> Tensor:
        """The index (programs, 3): tensor and job. Each of `jobs` is the number of programs per
        tensor and two job numbers; None numbers the programs of a tensor."""
        columns = []
        for counts, *job in jobs:
            k = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            job = (k if x is None else x for x in job)
            columns.append(np.broadcast_arrays(np.repeat(np.arange(len(A)), counts), *job))
        return torch.from_numpy(np.hstack(columns).T.astype(np.int32, order="C")).to(device)

    on_sides = index((blocks[0], 0, None), (blocks[1], 1, None))
    launches = [
        (means, index((means_tiles, None, 0)), case),
        (factor, on_sides, case),
        (sides, on_sides, case),
        (accumulate, index((programs, None, tiles_each)), case),
        (fold, on_sides, case),
        (update, index((tiles(update_case), None, 0)), update_case),
        (moments, index((chunks, None, 0)), None),
        (combine, index((np.ones_like(A), chunks.cumsum() - chunks, chunks)), None),
    ]
    return torch.from_numpy(plan).to(device), 4 * int(sizes.sum()), launches


def statistics_(config, rows: np.ndarray, out: Tensor) -> None:
    """Write features.tensor_statistics of the tensors of `rows` to `out`, (rows, 8)."""
    words = rows.view("i8").reshape(len(rows), 15)
    *_, (_, chunks, _), (_, tensors, _) = planned(words[:, 7:13].tobytes(), config, out.device)[2]
    words, work = send(torch.from_numpy(words), out.device), out.new_empty(len(chunks), 9)
    with torch.cuda.device_of(out):
        moments[len(chunks),](words, chunks, work)
        combine[len(tensors),](words, tensors, work, out)


def step_(
    config, rows: np.ndarray, device: torch.device, alpha: Tensor | None, bad: Tensor | None
) -> None:
    """Step the tensors of `rows` (T, P) in place, without a sync; see kernels.step_."""
    words = rows.view("i8").reshape(-1, 15)
    plan, size, launches = planned(words[:, 7:13].tobytes(), config, device)  # A to C, and kind
    words = send(torch.from_numpy(words), device)
    if alpha is not None:
        words.view(torch.float32).view(*rows.shape, 30)[..., 27].mul_(alpha.T)  # scale
    work = torch.empty(size, device=device)
    bad = constant((0,), torch.int64, device) if bad is None else bad  # nobody reads the constant
    numbers = [float(x) for x in (config.t_max or 3e38, config.lam1, config.lam2, config.anneal)]
    more = {means: [bad], fold: numbers[:1], update: numbers}
    with torch.cuda.device_of(work):
        for kernel, index, case in launches[:6]:
            arguments = *more.get(kernel, []), case
            kernel[len(index),](words, plan, index, work, *arguments, num_warps=case.warps)
