"""Accumulators and features against the reference's golden vectors, closed forms and the oracle."""

import numpy as np
import oracle
import pytest
import torch
from golden_files import GOLDEN, SMALL_FC, VELO, Golden, run

import mulo
from mulo import LOConfig, features, nets, stacked
from mulo.features import Eps, rates_of

REFERENCE = Eps("reference", 1e-5)


def all_features(acc, p, g, dims, eps, kind):
    """The network's input without time, (*shape, 28 or 30): raw and normalised."""
    inputs = features.parameter_features(p, g, acc, dims, eps, kind).values()
    x = torch.cat([x.expand(-1, -1, *p.shape[1:]) for x in inputs], 1)
    ms = x.square().flatten(2).mean(-1)
    normalised = x * features.trailing(features.inverse_rms(ms, eps), x.ndim)
    return x[0].movedim(0, -1), normalised[0].movedim(0, -1)


@pytest.mark.parametrize("name", SMALL_FC + VELO)
def test_golden_features(name):
    """Raw and normalised features of every tensor at every stored step."""
    golden = Golden(name)
    lo = golden.lo()
    kind = lo.config.net
    raw, net_in = ("raw30", "in30") if kind == "velo" else ("raw28", "in39")
    rates = rates_of({"w0": torch.zeros(1, 1, 1)} if kind == "velo" else stacked(lo))
    stored = list(golden["cfg/feat_steps"])
    assert 0 < len(stored) <= golden.steps
    for n in golden.names:
        start = golden[f"param_init/{n}"]
        shape = start.shape or (1,)
        p = torch.tensor(start).reshape(1, *shape)
        dims = features.factored_dims(shape, out_axis=-1)
        acc = features.init_accumulators(p, dims)
        for s in range(golden.steps):
            g = torch.tensor(golden[f"grad/{n}"][s]).view_as(p)
            g = features.clean(g, features.CLIP[kind])
            acc = features.accumulate(acc, g, dims, rates, REFERENCE)
            if s in stored:
                ours, normalised = all_features(acc, p, g, dims, REFERENCE, kind)
                expected = golden[f"feat/{n}/{raw}"][stored.index(s)].reshape(ours.shape)
                room = 1e-8 * abs(expected).max()
                np.testing.assert_allclose(ours, expected, rtol=3e-4, atol=room)
                expected = golden[f"feat/{n}/{net_in}"][stored.index(s)]
                expected = expected[..., : ours.shape[-1]].reshape(ours.shape)
                np.testing.assert_allclose(normalised, expected, rtol=3e-4, atol=1e-5)
            p = torch.tensor(golden[f"out/{n}/param"][s]).view_as(p)


@pytest.mark.parametrize("name", VELO)
def test_golden_lstm_inputs(name, monkeypatch):
    """VeLO's 30 per-tensor features, each group to its own tolerance, and the loss buffer."""
    golden, seen = Golden(name), []
    original = nets.lstm_step
    monkeypatch.setattr(
        nets, "lstm_step", lambda phi, x, *rest: (seen.append(x[0]), original(phi, x, *rest))[1]
    )
    for s, _, opt in run(golden, "jax"):
        np.testing.assert_allclose(seen[s], golden["lstm_in"][s], atol=1e-3)
        exact = np.r_[:9, 18:30]  # all but the loss features, whose 1 - decay^n cancels in float32
        np.testing.assert_allclose(seen[s][:, exact], golden["lstm_in"][s][:, exact], atol=2e-5)
        memory = features.unpack_loss_buffer(next(iter(opt.state.values()))["loss"])
        # 1 - decay has four digits in float32, by the processor's exp
        np.testing.assert_allclose(memory.means, golden["loss_buffer/means"][s], rtol=1e-4)
        np.testing.assert_allclose(memory.low, golden["loss_buffer/running_min"][s], rtol=1e-4)


def test_time_features():
    """Against the reference; those of the paper's text, which it does not have."""
    z = np.load(GOLDEN / "time_embeddings.npz")
    ours = features.time_features(torch.tensor(z["t"]), None, "reference")
    np.testing.assert_allclose(ours, z["tanh_embedding"], atol=1e-6)
    ours = features.fraction_features(torch.tensor(z["fraction"]), 1, "reference")
    np.testing.assert_allclose(ours, z["fractional_tanh_embed"], atol=2e-6)
    t, x = torch.tensor([0.0, 7.0, 80.0]), torch.tensor(features.FRACTIONS)
    expected = torch.tanh(t[:, None] / 100 - 10 * x)
    torch.testing.assert_close(features.fraction_features(t, 100, "paper"), expected)


def test_ties_of_factored_dims():
    """d0 is the out axis, d1 the in axis: last in JAX, first in torch; then the others."""
    for shape, jax, torch_ in (
        ((6, 6), (-2, -1), (-1, -2)),
        ((2, 2, 2, 2, 2), (-2, -1), (-4, -5)),
        ((3, 7, 7, 7), (-2, -1), (-1, -3)),  # torch: in = 7, kernel 7x7; of its axes kw wins
    ):
        assert features.factored_dims(shape, -1) == jax
        assert features.factored_dims(shape, 0) == torch_
    assert features.factored_dims((6, 6), 1) == (-2, -1)  # an embedding's (in, out) is JAX's order


SHAPES = [(), (1,), (7,), (5, 9), (9, 4), (6, 6), (1, 7), (7, 1), (1, 1), (4, 2, 6), (4, 4, 2)]
SHAPES += [(3, 3, 4, 8), (1, 1, 5, 5), (2, 3, 1, 4, 5), (2, 2, 2, 2, 2)]
VARIANTS = {
    "reference": {},
    "eps_rms 0": {"eps_rms": 0.0},
    "relative": {"eps": "relative"},
    "paper": {"spec": "paper"},
    "t_max": {"t_max": 2.0},
    "anneal": {"t_max": 1.5, "anneal": 0.5},
    "one layer": {"hidden_layers": 1},
    "three layers of 8": {"hidden_layers": 3, "hidden_size": 8},
}


def check_against_the_oracle(lo, shape, gradients, gen, room):
    """Updates of the Optimizer for these gradients, scaled to O(1), against float64 NumPy."""
    config, meta = lo.config, {k: v.numpy() for k, v in lo.named_parameters()}
    time = {"spec": config.spec, "t_max": config.t_max, "anneal": config.anneal}
    start, gradients = 0.3 * torch.randn(shape, generator=gen), list(gradients)
    backends = ["folded", "auto"] if config.hidden_layers == 2 else ["folded"]  # compile one kernel
    for backend in backends:
        p = torch.nn.Parameter(start.clone())
        ref = oracle.Tensor(start.numpy(), meta, eps=config.eps, eps_rms=config.eps_rms)
        opt = mulo.MuLO([{"params": [p], "out_axis": -1}], lo, backend=backend)
        for t, g in enumerate(gradients):
            p.grad, before = g.clone(), p.detach().clone()
            opt.step()
            ref.p = before.double().numpy()
            update = oracle.small_fc_step(ref, meta, g.numpy(), t, config.lam1, config.lam2, **time)
            got = (before - p.detach()).numpy()
            np.testing.assert_allclose(got, update, atol=room * max(1.0, abs(update).max()))


CASES = [(shape, variant) for variant in ("reference", "relative") for shape in SHAPES]
CASES += [(shape, x) for x in VARIANTS for shape in ((), (7,), (6, 6), (3, 3, 4, 8))]


@pytest.mark.parametrize(("shape", "variant"), dict.fromkeys(CASES), ids=str)
def test_small_fc_against_the_oracle(shape, variant):
    """All ranks, all options."""
    config = LOConfig(**({"hidden_size": 4, "lam1": 1.0, "lam2": 0.5} | VARIANTS[variant]))
    gen = torch.Generator().manual_seed(3)
    lo = mulo.SmallFC(config, gen)
    for name, w in lo.named_parameters():
        if name[0] == "b" or "decays" in name:
            w.normal_(0, 0.05, generator=gen)
    gradients = (0.02 * torch.randn(shape, generator=gen) for _ in range(5))
    check_against_the_oracle(lo, shape, gradients, gen, room=1e-5)


def test_a_loss_that_is_not_finite_is_left_out():
    decays = features.loss_decays(100, False)
    interrupted, plain = features.init_loss_buffer(), features.init_loss_buffer()
    for loss in (2.0, 1.5, 3.0, 1.0):
        for bad in (float("nan"), float("inf"), -float("inf")):
            interrupted, y = features.loss_features(interrupted, torch.tensor(bad), decays)
            assert y.isfinite().all()
        interrupted, y = features.loss_features(interrupted, torch.tensor(loss), decays)
        plain, x = features.loss_features(plain, torch.tensor(loss), decays)
        assert torch.equal(x, y)
    assert all(map(torch.equal, interrupted, plain))
    assert torch.equal(features.loss_features(plain, torch.tensor(torch.nan), decays)[1], x)


@pytest.mark.parametrize("shape", [(6, 9), (6, 6), (40,), (4, 3, 3, 3)], ids=str)
def test_relative_epsilons_against_the_oracle_with_dead_units(shape):
    """Small gradients in rows of very different size, and dead ones, where floors decide."""
    gen = torch.Generator().manual_seed(4)
    lo = mulo.SmallFC(LOConfig(hidden_size=4, lam1=1.0, eps="relative"), gen)
    sizes = 1e-6 * torch.logspace(0, -7, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    sizes[1] = 0
    columns = torch.ones(shape[-1])
    columns[0] = 1e-6 if len(shape) > 1 else 1
    gradients = (sizes * columns * torch.randn(shape, generator=gen) for _ in range(5))
    check_against_the_oracle(lo, shape, gradients, gen, room=2e-5)


def test_what_counts_as_zero():
    """A mean square of 1e-27 is still normalised, one of 1e-29 is not."""
    ms = torch.tensor([[1e-27, 1e-29, 0.0]])
    x = features.inverse_rms(ms, Eps("reference", 0.0))
    assert float(x[0, 0] * ms[0, 0].sqrt()) == pytest.approx(1, rel=1e-5)
    assert (x[0, 1:] == 0).all()
