"""The networks and the step: folded is literal, blocks and stacks change nothing, mutants die."""

import copy
import dataclasses

import pytest
import torch
from golden_files import Golden, run
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import features
import lo
import mulo
import rule
from lo import LOConfig


class Net(nn.Module):
    """A small real model with parameters of every rank from 0 to 5."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.conv3 = nn.Conv3d(1, 4, 3, padding=1)
        self.seq = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.square, self.wide = nn.Linear(24, 24), nn.Linear(24, 40)
        self.out = nn.Linear(40, 5)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):  # (b, 1, 4, 4)
        x = x + self.conv3(x[:, None]).mean((1, 2))[:, None]
        x = self.norm(self.conv(x)).relu()  # (b, 6, 4, 4)
        x = self.seq(x.flatten(2)).relu()[..., :4].flatten(1) * self.gain
        return self.out(self.wide(self.square(x).relu()).relu())


@pytest.fixture(scope="module")
def gradients():
    """Parameters and gradients of 100 steps of real training, one list a step."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(64, 1, 4, 4), torch.randint(5, (64,))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for _ in range(100):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        history.append([(p.detach().clone(), p.grad.clone()) for p in model.parameters()])
        opt.step()
    assert {p.ndim for p in model.parameters()} == {0, 1, 2, 3, 4, 5}
    return history


def network(config):
    """Random weights, biases and decays, so that no zero hides a term; VeLO's are generated."""
    gen = torch.Generator().manual_seed(1)
    if config.net == "velo":
        net = mulo.VeLO(dataclasses.replace(config, lstm_hidden=6, param_inits=5), gen)
        h = 0.02 * torch.randn(1, 6, generator=gen)  # weights are 100 times a mean: make them O(1)
        weights, _ = lo.hypernetwork(net.config, lo.stacked(net), h[None])
        return {k: w[0] for k, w in weights.items()}
    net = mulo.SmallFC(config, gen)
    for name, w in net.named_parameters():
        if name[0] == "b" or "decays" in name:
            w.normal_(0, 0.05, generator=gen)
    return lo.stacked(net)


def stack(*tensors):
    return torch.stack([x.reshape(x.shape or (1,)) for x in tensors])


CONFIGS = {
    "H=4": LOConfig(hidden_size=4),
    "H=32": LOConfig(hidden_size=32),
    "velo": LOConfig(net="velo", hidden_size=4),
    "velo, paper": LOConfig(net="velo", hidden_size=4, spec="paper"),
    "relative": LOConfig(hidden_size=4, eps="relative"),
    "fan_in": LOConfig(hidden_size=4, eps="fan_in"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_folded_is_literal(name, gradients, monkeypatch):
    """100 steps of real gradients; updates are compared, with lam1 = 1, so that they are O(1)."""
    monkeypatch.setattr(rule, "BLOCK", 2000)  # several blocks to most tensors
    config = dataclasses.replace(CONFIGS[name], lam1=1.0, lam2=0.1)
    phi = network(config)
    states, error, size = {}, {}, {}
    for t, tensors in enumerate(gradients[: 100 if name in ("H=4", "H=32") else 25]):
        for k, (p, g) in enumerate(tensors):
            p, g = stack(p), stack(g)
            dims = features.factored_dims(p.shape[1:])
            literal, folded, blocked = states.get(k) or (features.init_accumulators(p, dims),) * 3
            blocked = features.Accumulators(*(x.clone() for x in blocked))
            rest = (torch.tensor([float(t)]), torch.ones(1), dims, 0.0, torch.full((1,), 0.1))
            literal, a = rule.literal_step(config, phi, literal, p, g, *rest)
            net, rest = rule.prepare(config, phi).at(rest[0]), rest[1:]
            folded, b = rule.step(net, folded, p, g, *rest)
            c = p.clone()
            rule.step_(net, blocked, c, g, *rest)
            states[k] = literal, folded, blocked
            size[k] = max(size.get(k, 0.0), float((a - p).abs().max()))
            off = max(float((a - b).abs().max()), float((a - c).abs().max()))
            error[k] = max(error.get(k, 0.0), off)
    worst = max(error[k] / size[k] for k in size)
    assert 0 < worst <= 5e-6


@pytest.mark.parametrize("shape", [(3000,), (40, 70), (3, 5000), (12, 9, 3, 3)], ids=str)
def test_stacks_and_blocks_change_nothing(shape, monkeypatch):
    """S tensors with weights, times and scales of their own equal S separate steps."""
    torch.manual_seed(0)
    config = LOConfig(hidden_size=4, lam1=1.0)
    nets = [mulo.SmallFC(config) for _ in range(3)]
    phi = {k: torch.cat([lo.stacked(n)[k] for n in nets]) for k in lo.stacked(nets[0])}
    p, g = torch.randn(3, *shape), 0.1 * torch.randn(3, *shape)
    dims = features.factored_dims(shape)
    t, scale, decay = torch.tensor([0.0, 5.0, 90.0]), torch.tensor([1.0, 0.5, 2.0]), torch.rand(3)
    net = rule.prepare(config, phi).at(t)
    acc, together = rule.step(net, features.init_accumulators(p, dims), p, g, scale, dims, decay)
    for k, single in enumerate(nets):
        one = slice(k, k + 1)
        _, alone = rule.literal_step(
            config, lo.stacked(single), features.init_accumulators(p[one], dims), p[one], g[one],
            t[one], scale[one], dims, decay[one],
        )  # fmt: skip
        torch.testing.assert_close(
            together[one], alone, rtol=0, atol=1e-5 * float(alone.abs().max())
        )
    for block in (500, 10**6):
        monkeypatch.setattr(rule, "BLOCK", block)
        q, acc_ = p.clone(), features.init_accumulators(p, dims)
        rule.step_(net, acc_, q, g, scale, dims, decay)
        torch.testing.assert_close(q, together, rtol=0, atol=1e-5 * float(q.abs().max()))
        for x, y in zip(acc, acc_, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=0)


@given(
    shape=st.lists(st.integers(1, 7), max_size=5).map(tuple),
    out_axis=st.sampled_from([0, 1, -1]),
    S=st.integers(1, 3),
    own=st.booleans(),
    name=st.sampled_from(list(CONFIGS)),
    size=st.sampled_from([0.0, 1e-6, 1e-2, 1e3]),
    block=st.sampled_from([1, 200, rule.BLOCK]),
    seed=st.integers(0, 99),
)
def test_three_forms_are_one_step(shape, out_axis, S, own, name, size, block, seed):
    """Any rank and sizes, stacks with shared or own weights, gradients of any size, any blocks."""
    gen = torch.Generator().manual_seed(seed)
    config = dataclasses.replace(CONFIGS[name], lam1=1.0, lam2=0.1)
    phi = network(config)
    if own:
        phi = {k: torch.cat([w * (1 + 0.1 * n) for n in range(S)]) for k, w in phi.items()}
    p = torch.randn(S, *(shape or (1,)), generator=gen)
    dims = features.factored_dims(p.shape[1:], out_axis)
    literal = folded = features.init_accumulators(p, dims)
    in_place = features.Accumulators(*(x.clone() for x in literal))
    rates = torch.rand(3, S, generator=gen)  # lr times the μP factor, weight decay, 1/fan_in
    rest = (rates[0], dims, 0.1 * rates[1], rates[2])
    for t in (0.0, 1.0, 900.0):
        g = size * torch.randn(p.shape, generator=gen)
        t = t + torch.arange(float(S))
        literal, a = rule.literal_step(config, phi, literal, p, g, t, *rest)
        net = rule.prepare(config, phi).at(t)
        folded, b = rule.step(net, folded, p, g, *rest)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rule, "BLOCK", block)
            rule.step_(net, in_place, c := p.clone(), g, *rest)
        room = 2e-5 * float((a - p).abs().max())
        for x in (b, c):
            torch.testing.assert_close(x, a, rtol=0, atol=room)
        for x, y, z in zip(literal, folded, in_place, strict=True):
            for other in (y, z):
                torch.testing.assert_close(other, x, rtol=1e-5, atol=1e-6 * float(x.abs().max()))
        p = a


def test_block_axis():
    assert rule.block_axis((1024, 1024), 4096) == (-2, 4)
    assert rule.block_axis((4, 10**6), 4096) == (-1, 1024)
    assert rule.block_axis((10**5,), 4096) == (-1, 4096)
    assert rule.block_axis((5000, 5000), 100) == (-2, 1)  # no slice is small enough: the smallest
    assert rule.block_axis((3, 3), 0) == (-2, 1)


def test_step_is_pure_and_differentiable():
    """Inputs are not touched, and d(new p)/d(phi) agrees with a finite difference."""
    torch.manual_seed(0)
    config = LOConfig(hidden_size=4, lam1=1.0)
    phi = network(config)
    p, g = torch.randn(1, 5, 6), 0.1 * torch.randn(1, 5, 6)
    dims = features.factored_dims((5, 6))
    acc = features.init_accumulators(p, dims)
    before = copy.deepcopy((phi, acc, p, g))

    def loss(w0):
        net = rule.prepare(config, phi | {"w0": w0}).at(torch.zeros(1))
        _, q = rule.step(net, acc, p, g, torch.ones(1), dims)
        return q.square().sum()

    w0 = phi["w0"].clone().requires_grad_()
    loss(w0).backward()
    assert all(torch.equal(x, phi[k]) for k, x in before[0].items())
    for x, y in zip((*before[1], *before[2:]), (*acc, p, g), strict=True):
        assert torch.equal(x, y)
    direction = torch.randn_like(w0)
    step = 1e-3
    with torch.no_grad():
        numeric = (loss(w0 + step * direction) - loss(w0 - step * direction)) / (2 * step)
    assert float((w0.grad * direction).sum()) == pytest.approx(float(numeric), rel=2e-2)


# Mutations: one feature, one epsilon, one beta. Each must show against the golden vectors.


def update_errors(name, layout="jax"):
    """Largest error of the updates, relative to the largest update, over all tensors and steps."""
    golden = Golden(name)
    previous = {n: golden[f"param_init/{n}"] for n in golden.names}
    worst = 0.0
    for s, params, _ in run(golden, layout):
        for n, p in params.items():
            size = abs(golden[f"out/{n}/step"][s]).max() * float(golden.z.get(f"mup_lr/{n}", 1))
            got = previous[n] - p.detach().numpy()
            expected = previous[n] - golden[f"out/{n}/param"][s]
            worst = max(worst, abs(got - expected).max() / max(size, 1e-30))
            previous[n] = golden[f"out/{n}/param"][s]
            p.data.copy_(torch.tensor(previous[n]))
    return worst


MUTANTS = {
    "feature: F_mom uses the wrong momentum": (
        "dense_features",
        lambda f: lambda *a, **k: [*(x := f(*a, **k))[:-1], x[-1].roll(1, 1)],
    ),
    "feature: row and column swapped": (
        "row_col_features",
        lambda f: lambda r, c, eps: tuple(
            torch.cat([x[:, 3:], x[:, :3]], 1) for x in f(r, c, eps)
        ),
    ),
    "feature: time is off by one": (
        "time_features",
        lambda f: lambda t, *a: f(t + 1, *a),
    ),
    "epsilon: 1e-8 instead of 1e-6 in M / sqrt(V)": (
        "scales",
        lambda f: lambda *a: f(*a)._replace(eps_M=1e-8, eps_V=1e-8),
    ),
    "epsilon: none in the RMS normaliser": (
        "inverse_rms",
        lambda f: lambda ms, eps: f(ms, eps._replace(rms=0.0)),
    ),
    "beta: 0.99 for V": (
        "accumulate",
        lambda f: lambda M, V, g, q, rates, **k: f(
            M, V, g, q, rates._replace(V=10 * rates.V), **k
        ),
    ),
    "beta: those of r and c reversed": (
        "accumulate_factored",
        lambda f: lambda r, c, a, b, rates, eps: f(
            r, c, a, b, rates._replace(rc=rates.rc.flip(-1)), eps
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_mutants_are_seen(mutant, monkeypatch):
    if mutant is not None:
        name, mutate = MUTANTS[mutant]
        monkeypatch.setattr(features, name, mutate(getattr(features, name)))
    error = update_errors("small_fc_h4_bigmult")
    assert error < 2e-5 if mutant is None else error > 1e-3


def test_ties_swapped_are_seen(monkeypatch):
    """The error of copying JAX's rule for square tensors into torch's layout."""
    golden = Golden("small_fc_h4_bigmult")
    monkeypatch.setattr(
        features, "factored_dims", lambda shape, out_axis, f=features.factored_dims: f(shape, -1)
    )
    for s, params, _ in run(golden, "torch"):
        moved = abs(params["e_square"].detach().numpy().T - golden["out/e_square/param"][s]).max()
    assert moved > 0.1
