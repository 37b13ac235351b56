"""Stacked optimizers against the Optimizers for one net, and training of many nets at once."""

import dataclasses
from functools import partial

import pytest
import torch

import mulo
from mulo import roles, tasks, training

TASK = tasks.get("fashion8_mlp_w12_d3", batch_size=16)


def random_lo(net, seed, **config):
    gen = torch.Generator().manual_seed(seed)
    kind = mulo.VeLO if net == "velo" else mulo.SmallFC
    size = {"hidden_size": 4 if net == "velo" else 8, "lstm_hidden": 6, "param_inits": 5}
    config = mulo.LOConfig(net=net, **size, **config)
    lo = kind(config, gen)
    for w in lo.parameters():  # so that no zero hides a term
        w.add_(0.03 * torch.randn(w.shape, generator=gen))
    return lo


def stack(models):
    """Parameters of several nets, (P, *shape) each."""
    params = [dict(model.named_parameters()) for model in models]
    return {name: torch.stack([p[name].detach() for p in params]) for name in params[0]}


@pytest.mark.parametrize("rules", [roles.ALL, ()], ids=["mup", "SP"])
@pytest.mark.parametrize(
    ("net", "backend", "config"),
    [
        ("small_fc", "auto", {}),
        ("small_fc", "folded", {"input_base": 16.0, "by_channels": True, "eps": "fan_in"}),
        ("velo", "auto", {"t_max": 2.0, "anneal": 0.5}),
        ("velo", "literal", {"param_scale_mult": True}),
    ],
    ids=["small_fc", "rules beyond the paper", "velo, annealed", "velo, times RMS(W)"],
)
def test_learned_is_the_optimizer_for_one_net(net, backend, config, rules):
    """Three nets with weights phi of their own, side by side and each under MuLO."""
    task, P = dataclasses.replace(TASK, rules=rules), 3
    los = [random_lo(net, k, lam1=0.1, **config) for k in range(P)]
    phi = {k: torch.cat([mulo.stacked(lo)[k] for lo in los]) for k in mulo.stacked(los[0])}
    gens = [torch.Generator().manual_seed(k) for k in range(P)]
    models, horizons = [task.model(g) for g in gens], [6, 20, 700]
    singles = [
        mulo.MuLO(mulo.param_groups(m, task.roles(), rules=rules), lo, num_steps=n)
        for m, lo, n in zip(models, los, horizons, strict=True)
    ]
    theta, before = stack(models), stack(models)
    opt = training.Learned(los[0].config, task, backend=backend)
    state = opt.init(theta, phi, torch.tensor(horizons, dtype=torch.float32))
    weights, data = opt.prepare(phi), task.data()
    for t in range(6):
        batch = training.batches(data, gens, task.batch_size)
        losses, grads = training.gradients(task, theta, batch)
        opt.step(weights, state, theta, grads, losses, torch.full((P,), float(t)))
        for k, (model, single) in enumerate(zip(models, singles, strict=True)):
            for name, p in model.named_parameters():
                p.grad = grads[name][k]
            single.step(loss=losses[k])
    for name, expected in stack(models).items():
        moved = (theta[name] - before[name]).abs().max()
        assert moved > 1e-5
        assert (theta[name] - expected).abs().max() <= 2e-4 * moved, name


@pytest.mark.parametrize("rules", [roles.ALL, ()], ids=["mup", "SP"])
def test_adam_is_torchs(rules):
    """Nets with rates, betas and decays of their own, each beside torch.optim.AdamW. Under μP rates
    are multiplied by the scales of param_groups, weight decay is not."""
    task, P = dataclasses.replace(TASK, rules=rules), 3
    lr, b1 = torch.tensor([1e-3, 1e-2, 0.1]), torch.tensor([0.9, 0.85, 0.99])
    b2, decay = torch.tensor([0.999, 0.95, 0.9]), torch.tensor([0.0, 0.1, 0.01])
    gens = [torch.Generator().manual_seed(k) for k in range(P)]
    models = [task.model(g) for g in gens]
    theta = stack(models)
    singles = []
    for k, model in enumerate(models):
        groups = mulo.param_groups(model, task.roles(), rules)
        for g in groups:
            g |= {"lr": float(lr[k]) * g["scale"], "weight_decay": float(decay[k]) / g["scale"]}
        singles.append(torch.optim.AdamW(groups, betas=(float(b1[k]), float(b2[k]))))
    opt, data = training.Adam(task, lr, b1, b2, decay), task.data()
    state = opt.init(theta)
    for t in range(8):
        batch = training.batches(data, gens, task.batch_size)
        _, grads = training.gradients(task, theta, batch)
        for k, (model, single) in enumerate(zip(models, singles, strict=True)):
            for name, p in model.named_parameters():
                p.grad = grads[name][k].clone()
            single.step()
        opt.step(state, theta, grads, t)
        torch.testing.assert_close(theta, stack(models), rtol=1e-5, atol=1e-6)


def test_copies_of_a_seed_see_the_same():
    """Copies share init and batches: equal rates give equal curves; a seed alone gives the same."""
    lr = torch.tensor([1e-3, 1e-3, 1e-2, 1e-2, 1e-3, 1e-3])
    losses = training.train(TASK, lambda task: training.Adam(task, lr), 5, [3, 4], copies=3)
    assert losses.shape == (5, 6)
    assert torch.equal(losses[:, :2], losses[:, 4:])
    assert not torch.allclose(losses[2:, :2], losses[2:, 2:4])
    alone = training.train(TASK, lambda task: training.Adam(task, lr[:1]), 5, [4])
    torch.testing.assert_close(losses[:, 1:2], alone)


def test_a_schedule_takes_the_place_of_annealing():
    lo = random_lo("small_fc", 0, lam1=0.1, t_max=1.0, anneal=2.0)
    plain = lo.with_config(anneal=0.0)
    annealed, constant = (training.train(TASK, x, 6, [0]) for x in (lo, plain))
    assert torch.equal(annealed[:3], constant[:3])  # t = 0 and 1 are within the horizon
    assert not torch.allclose(annealed[3:], constant[3:])
    runs = [training.train(TASK, x, 6, [0], schedule=lambda t: 0.5) for x in (lo, plain)]
    torch.testing.assert_close(*runs, rtol=0, atol=0)
    assert torch.equal(runs[0][0], constant[0])
    assert not torch.allclose(runs[0][1:], constant[1:])


def test_nets_of_all_widths_see_the_same_batches(monkeypatch):
    """With data_seeds; without, initial weights have used the same generators."""
    drawn, draw = [], training.batches
    monkeypatch.setattr(training, "batches", lambda *a: drawn.append(draw(*a)) or drawn[-1])
    for width, data_seeds in ((8, [5]), (16, [5]), (8, None), (16, None)):
        task = tasks.get(f"fashion8_mlp_w{width}_d3")
        adam = partial(training.Adam, lr=torch.ones(1))
        training.train(task, adam, 1, [3], data_seeds=data_seeds)
    one, same, own, other = (x[0] for x in drawn)
    assert torch.equal(one, same)
    assert not torch.equal(own, other)


def test_final_loss_is_of_the_last_tenth():
    losses = torch.arange(50.0).unsqueeze(1)
    assert float(training.final_loss(losses)) == 47
    assert float(training.final_loss(losses, 0.2)) == 9


def test_orthogonalise_maps_the_singular_values():
    """Newton-Schulz keeps the singular vectors, and maps singular values by a known polynomial."""
    gen = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 5), (2, 4, 9)):
        d = torch.randn(shape, generator=gen, dtype=torch.float64)
        u, x, v = torch.linalg.svd(d, full_matrices=False)
        x = x / x.norm(dim=1, keepdim=True)
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
        assert 0.5 < x.min() < x.max() < 1.3
        torch.testing.assert_close(training.orthogonalise(d), u * x[:, None] @ v, atol=1e-6, rtol=0)


def test_probe(monkeypatch):
    """The change of the first layer is known. `batch` must get a list, as tasks.register says."""
    data, draw = TASK.data(), TASK.data().batch
    monkeypatch.setattr(data, "batch", lambda gens, size: draw(list(iter(gens)), size))
    monkeypatch.setattr(tasks.Task, "data", lambda task, device: data)
    callback, records = training.probe(TASK, [1], "cpu")
    theta = TASK.init(2, torch.Generator().manual_seed(0))
    callback(0, theta)
    callback(1, theta | {"layers.0.weight": theta["layers.0.weight"] + 1})
    assert [name for t, name in records if t == 1] == ["layers.0", "layers.1", "head"]
    x = draw([torch.Generator().manual_seed(123)], 64)[0].flatten(2)[0]
    change = x.sum(1, keepdim=True).expand(-1, 12).std()
    assert records[1, "layers.0"][0] == pytest.approx(float(change), rel=1e-4)
