"""Param groups: what is refused, what warns; lr and annealing, weight decay, frozen parameters."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from user_models import MLP, make, small, task, train, values, velo

import mulo


def test_bad_arguments():
    p = nn.Parameter(torch.zeros(3))
    opt = mulo.MuLO([p], mulo.SmallFC())
    for options, message in (
        ({"lr": -1.0}, "lr must be a number of 0 or more, not -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay must be a number of 0 or more, not nan"),
        ({"fan_in": 0}, "fan_in must be a number of 1 or more, not 0"),
        ({"out_axis": 3}, "out_axis must be 0, 1 or -1"),
        ({"params": nn.Parameter(torch.ones(3) + 0j)}, r"floating point, not torch\.complex64"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.add_param_group({"params": nn.Parameter(torch.zeros(2))} | options)
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="unknown backend 'fast': use auto, kernel"):
        mulo.MuLO([p], mulo.SmallFC(), backend="fast")
    with pytest.raises(TypeError, match="lo must be a learned optimizer"):
        mulo.MuLO([p], "mulo_m")
    with pytest.raises(TypeError, match=r"use mulo\.param_groups"):
        mulo.MuLO(nn.Linear(2, 3), mulo.load("mulo_m"))


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


def test_habits_from_adamw_are_warned_of():
    """At construction and when a group is added; not when a schedule warms up."""
    net, opt = make()
    for options, message in (
        ({"lr": 3e-4}, r"lr=0\.0003 is a factor on the update, not .* AdamW's: omit it"),
        ({"weight_decay": 0.1}, r"weight_decay=0\.1 shrinks parameters by .* per step: try"),
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
    plain, decayed = make(lr=0.5), make(lr=0.5, weight_decay=0.1)
    start = values(plain[0])
    for net, opt in (plain, decayed):
        train(net, opt, 1, *task(MLP))
    expected = values(plain[0]) - 0.05 * start
    torch.testing.assert_close(values(decayed[0]), expected, rtol=0, atol=1e-6)


def test_add_param_group_and_missing_gradients():
    """Parameters come, go and return; each one's state and options follow it."""
    lo, options = small(0.1), {"lr": 0.5, "scale": 0.2, "weight_decay": 0.001}
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    twins = [nn.Parameter(p.detach().clone()) for p in ps]
    opt = mulo.MuLO(ps[:2], lo)
    groups = [{"params": q} for q in twins[:2]] + [{"params": twins[2], **options}]
    opts = [mulo.MuLO([group], lo) for group in groups]
    with_gradient = [(0, 1), (0,), (0, 1, 2), (2,), (0, 1, 2)]
    for t, present in enumerate(with_gradient):
        if t == 2:
            opt.add_param_group({"params": [ps[2]], "step": 2, **options})
        for k in range(3):
            ps[k].grad = twins[k].grad = torch.randn(3, 4) if k in present else None
            opts[k].param_groups[0]["step"] = t
            opts[k].step()
        opt.step()
        torch.testing.assert_close(ps, twins, rtol=0, atol=1e-6)


def plateau(opt):
    scheduler = ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for _ in range(2):
        scheduler.step(1.0)


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
        (lambda opt: opt.param_groups[0].update(lr=0.5), 0.5),
        (plateau, 0.5),
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
