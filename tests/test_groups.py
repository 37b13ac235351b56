"""Param groups: what is refused, what warns; lr and annealing, weight decay, frozen parameters."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from user_models import MLP, make, small, task, train, values, velo

import mulo


def test_bad_arguments():
    p = nn.Parameter(torch.zeros(3))
    lo = mulo.SmallFC()
    for kwargs, message in (
        ({"lr": -1.0}, "lr must be a number of 0 or more, not -1.0"),
        ({"lr": None}, "lr must be a number of 0 or more, not None"),
        ({"weight_decay": float("nan")}, "weight_decay must be a number of 0 or more, not nan"),
    ):
        with pytest.raises(ValueError, match=message):
            mulo.MuLO([p], lo, **kwargs)
    with pytest.raises(TypeError, match="lo must be a learned optimizer"):
        mulo.MuLO([p], "mulo_m")
    with pytest.raises(ValueError, match=r"real floating point, not torch\.complex64"):
        mulo.MuLO([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], lo)
    opt = mulo.MuLO([p], lo)
    for options, message in (
        ({"fan_in": 0}, "fan_in must be a number of 1 or more, not 0"),
        ({"out_axis": 3}, "out_axis must be 0, 1 or -1"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))], **options})
    assert len(opt.param_groups) == 1


def test_groups_that_contradict_the_meta_training_are_warned_of():
    """At the user's line; never for learned optimizers of unknown origin."""
    p, q = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    scaled, plain = ([{"params": [p], "scale": scale}] for scale in (0.5, 1.0))
    for params, name, message in (
        ([p], "mulo_m", "meta-trained under μP.*mulo.param_groups"),
        ([*scaled, {"params": [q]}], "mulo_m", "meta-trained under μP.*mulo.param_groups"),
        (scaled, "lo_m", r"without μP.*pass rules=\(\)"),
    ):
        with pytest.warns(UserWarning, match=message) as caught:
            mulo.MuLO(params, mulo.load(name, lam1=0.01))
        assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        mulo.MuLO(scaled, mulo.load("mulo_m", anneal=0.0))
        mulo.MuLO([p], mulo.load("lo_m"))
        mulo.MuLO(plain, mulo.load("lo_m"))
        mulo.MuLO(scaled, mulo.SmallFC())
    with pytest.raises(TypeError, match=r"use mulo\.param_groups"):
        mulo.MuLO(nn.Linear(2, 3), mulo.load("mulo_m"))


def test_habits_from_adamw_are_warned_of():
    """At construction and when a group is added; not when a schedule warms up."""
    net, opt = make()
    for options, message in (
        ({"lr": 3e-4}, r"lr=0\.0003 is a factor on updates .* with lr=1: omit it"),
        ({"weight_decay": 0.1}, r"weight_decay=0\.1 shrinks parameters by lr \* weight_decay"),
    ):
        with pytest.warns(UserWarning, match=message):
            make(**options)
        with pytest.warns(UserWarning, match=message):
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))], **options})
    with pytest.warns(UserWarning, match="found no gradient") as caught:
        opt.step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        net, opt = make(lr=2.0, weight_decay=1e-4)
        LambdaLR(opt, lambda t: t / 1000)
        train(net, opt, 2, *task(MLP))


def test_weight_decay_is_decoupled():
    """It adds -lr * weight_decay * p to the update and is not multiplied by the μP scale."""
    x, y = task(MLP)
    plain, opt = make(lr=0.5)
    train(plain, opt, 1, x, y)
    decayed, opt = make(lr=0.5, weight_decay=0.1)
    start = values(decayed)
    train(decayed, opt, 1, x, y)
    torch.testing.assert_close(values(decayed), values(plain) - 0.05 * start, rtol=0, atol=1e-6)


def test_groups_of_their_own():
    """lr, scale, step and weight decay act on their group only, though all are stacked."""
    torch.manual_seed(0)
    lo = small(0.1)
    init, grad = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    options = [{}, {"lr": 0.3}, {"scale": 0.2, "step": 700}, {"weight_decay": 0.1}]

    def params():
        ps = [nn.Parameter(x.clone()) for x in init]
        for p, g in zip(ps, grad, strict=True):
            p.grad = g.clone()
        return ps

    together = params()
    opt = mulo.MuLO([{"params": [p], **o} for p, o in zip(together, options, strict=True)], lo)
    alone = params()
    opts = [mulo.MuLO([{"params": [p], **o}], lo) for p, o in zip(alone, options, strict=True)]
    for _ in range(3):
        opt.step()
        for one in opts:
            one.step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert [g["step"] for g in opt.param_groups] == [3, 3, 703, 3]
    assert (together[1] - init[1]).abs().max() < 0.5 * (together[0] - init[0]).abs().max()


def test_add_param_group_and_missing_gradients():
    """Parameters come, go and return; each one's state follows it."""
    lo = small(0.1)
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    twins = [nn.Parameter(p.detach().clone()) for p in ps]
    opt = mulo.MuLO(ps[:2], lo)
    opts = [mulo.MuLO([q], lo) for q in twins]
    present = [(0, 1), (0,), (0, 1, 2), (2,), (0, 1, 2)]
    for t, who in enumerate(present):
        if t == 2:
            opt.add_param_group({"params": [ps[2]], "lr": 0.5, "step": 2})
            opts[2].param_groups[0]["lr"] = 0.5
        for k in range(3):
            g = torch.randn(3, 4)
            ps[k].grad = twins[k].grad = g if k in who else None
            opts[k].param_groups[0]["step"] = t
            opts[k].step()
        opt.step()
        for p, q in zip(ps, twins, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def by_hand(opt):
    opt.param_groups[0]["lr"] = 0.5


def plateau(opt):
    scheduler = ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for _ in range(2):
        scheduler.step(1.0)


def one_cycle(opt):
    OneCycleLR(opt, max_lr=2.0, total_steps=9, div_factor=4.0, cycle_momentum=False)


class Run:
    """One parameter at step 1000, far beyond t_max."""

    def __init__(self, anneal):
        self.p = nn.Parameter(torch.linspace(-1, 1, 30).view(6, 5))
        lo = mulo.load("mulo_m", t_max=10.0, anneal=anneal)
        self.opt = mulo.MuLO([{"params": [self.p], "scale": 0.25, "step": 1000}], lo)

    def step(self):
        """How far a step moves the parameter."""
        before, self.p.grad = self.p.detach().clone(), torch.linspace(1, -1, 30).view(6, 5)
        self.opt.step()
        return self.p.detach() - before


@pytest.mark.parametrize(
    ("drive", "factor"),
    [
        (lambda opt: None, 0.1),  # sqrt(t_max / t)
        (by_hand, 0.5),
        (plateau, 0.5),
        (one_cycle, 0.5),
        (lambda opt: LambdaLR(opt, lambda t: 1.0), 1.0),
    ],
)
def test_updates_anneal_unless_lr_is_driven(drive, factor):
    annealed, plain = Run(0.5), Run(0.0)
    drive(annealed.opt)
    torch.testing.assert_close(annealed.step(), factor * plain.step(), rtol=1e-3, atol=1e-7)
    assert annealed.opt.param_groups[0]["scale"] == 0.25


def test_annealing_stops_where_it_is():
    """A reduced lr makes updates smaller, however long they have been annealed, and after it they
    no longer shrink; so after loading."""
    annealed, plain = Run(0.5), Run(0.0)
    for run in (annealed, plain):
        run.step()
    plateau(annealed.opt)
    for t in (1001, 1600, 90000):
        for run in (annealed, plain):
            run.opt.load_state_dict(run.opt.state_dict())
            run.opt.param_groups[0]["step"] = t
        ratio = 0.5 * (10 / 1000) ** 0.5
        torch.testing.assert_close(annealed.step(), ratio * plain.step(), rtol=2e-2, atol=1e-6)


@pytest.mark.parametrize("backend", ["literal", "folded", "kernel"])
@pytest.mark.parametrize("lo", [small, velo])
def test_freeze_zero_grad(lo, backend):
    """Entries without a gradient stay, also under weight decay; the rest moves as without it."""
    torch.manual_seed(0)
    lo, start, moved = lo(), torch.randn(6, 5), []
    for frozen in (False, True):
        p = nn.Parameter(start.clone())
        group = {"params": [p], "weight_decay": 0.001, "freeze_zero_grad": frozen}
        opt = mulo.MuLO([group], lo, num_steps=9, backend=backend)
        p.grad = torch.ones(6, 5)
        p.grad[::2] = 0.0
        opt.step(loss=1.0)
        moved.append(p.detach() - start)
    assert moved[0].all()
    assert not moved[1][::2].any()
    assert torch.equal(moved[1][1::2], moved[0][1::2])


def test_parameters_that_are_unfrozen_later():
    """They start with new state at the group's time, and VeLO knows the losses until then, though
    the parameter that it was trained on has no gradient now."""
    start = torch.linspace(-1, 1, 12).view(3, 4)
    ends = []
    for both in (False, True):
        p, q = (nn.Parameter(start.clone()) for _ in range(2))
        opt = mulo.MuLO([p, q], velo(), num_steps=9)
        for t in range(7):
            p.grad = torch.full((3, 4), 0.1) if t < 3 else None
            q.grad = torch.full((3, 4), 0.2) if t >= 3 else None
            opt.step(loss=5.0 - t)
            if t == 4 and both:  # all that is known of p
                del opt.state[p]
        ends.append(q.detach())
        assert all(torch.equal(s["loss"], opt.state[q]["loss"]) for s in opt.state.values())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], start)
