"""MuLO's state: saved, loaded by torch and by DCP, copied, edited."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from user_models import MLP, loss_of, make, small, task, train, values, velo

import mulo
from mulo import LOConfig


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=4).map(tuple), min_size=1, max_size=5),
    kind=st.sampled_from(["small_fc", "velo"]),
    eps=st.sampled_from(["reference", "relative", "fan_in"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    options=st.fixed_dictionaries(
        {
            "lr": st.floats(0, 2, allow_subnormal=False),
            "scale": st.floats(0.1, 1),
            "weight_decay": st.floats(0, 0.1, allow_subnormal=False),
        }
    ),
    steps=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_state_goes_on_bit_for_bit(shapes, kind, eps, dtype, options, steps, seed):
    """Tensors of any shape in two groups, some without a gradient, saved to a file after any step
    and loaded into a new optimizer, which does not change what was loaded."""
    lo = velo() if kind == "velo" else small(0.1)
    lo.config = LOConfig(**{**vars(lo.config), "eps": eps})
    gen = torch.Generator().manual_seed(seed)

    def optimizer(params):
        half = len(params) // 2
        groups = [{"params": params[:half], **options}, {"params": params[half:]}]
        return mulo.MuLO([g for g in groups if g["params"]], lo, num_steps=9)

    def step(opt, params, gen):
        for p in params:
            p.grad = torch.randn(p.shape, generator=gen).to(dtype)
            if torch.rand((), generator=gen) < 0.2:
                p.grad = None
        opt.step(loss=float(torch.rand((), generator=gen)))

    params = [nn.Parameter(torch.randn(s, generator=gen).to(dtype)) for s in shapes]
    opt = optimizer(params)
    for _ in range(steps):
        step(opt, params, gen)
    torch.save([opt.state_dict(), params, gen.get_state()], file := io.BytesIO())
    file.seek(0)
    state, params2, position = torch.load(file, weights_only=True)
    file.seek(0)
    untouched = torch.load(file, weights_only=True)[0]["state"]
    opt2, gen2 = optimizer(params2), torch.Generator()
    opt2.load_state_dict(state)
    gen2.set_state(position)
    for _ in range(2):
        step(opt, params, gen)
        step(opt2, params2, gen2)
    for p, q in zip(params, params2, strict=True):
        assert torch.equal(p, q)
        assert opt.state[p].keys() == opt2.state[q].keys()
        assert all(torch.equal(x, opt2.state[q][k]) for k, x in opt.state[p].items())
    for key, tensors in state["state"].items():
        assert all(torch.equal(x, untouched[key][k]) for k, x in tensors.items())


def test_mismatched_state_is_refused_whole():
    x, y = task(MLP)
    net, opt = make()
    train(net, opt, 2, x, y)
    good = copy.deepcopy(opt.state_dict())
    wide_net, wide = make(width=32)
    train(wide_net, wide, 1, x, y)
    bad = copy.deepcopy(good)
    bad["state"][0]["extra"] = torch.zeros(1)
    for state, message in (
        (torch.optim.Adam(net.parameters()).state_dict(), "not a state_dict of MuLO"),
        (mulo.MuLO(net.parameters(), opt.lo).state_dict(), "groups of .*, not of"),
        (good | {"state": {0: {**good["state"][0], "M": 3}}}, "does not fit it"),
        (wide.state_dict(), "state of parameter '0.weight' does not fit it"),
        (bad, "does not fit it"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(state)
    for k, state in opt.state_dict()["state"].items():
        assert all(torch.equal(v, good["state"][k][name]) for name, v in state.items())
    with pytest.raises(ValueError, match="does not fit it"):
        mulo.MuLO(make()[1].param_groups, velo(), num_steps=9).load_state_dict(good)
    make(width=32)[1].load_state_dict(wide.state_dict())
    net, opt = make(velo(), num_steps=9)
    train(net, opt, 2, x, y, with_loss=True)
    state = copy.deepcopy(opt.state_dict())
    for saved in state["state"].values():
        del saved["loss"]
    with pytest.raises(ValueError, match="does not fit it"):
        opt.load_state_dict(state)
    other = mulo.VeLO(LOConfig(net="velo", hidden_size=4, lstm_hidden=6, param_inits=4))
    with pytest.raises(ValueError, match="does not fit it"):
        make(other, num_steps=9)[1].load_state_dict(opt.state_dict())


def test_copies():
    """deepcopy and pickle give an optimizer that goes on alone, bit for bit."""
    x, y = task(MLP)
    net, opt = make()
    train(net, opt, 3, x, y)
    copies = [copy.deepcopy((net, opt)), pickle.loads(pickle.dumps((net, opt)))]
    train(net, opt, 3, x, y)
    for net2, opt2 in copies:
        assert not torch.equal(values(net), values(net2))
        train(net2, opt2, 3, x, y)
        assert torch.equal(values(net), values(net2))


def test_state_can_be_edited():
    """A state that is replaced, or changed in place, is what the next step uses."""
    x, y = task(MLP)
    net, opt = make()
    train(net, opt, 2, x, y)
    p = net[2].weight
    opt.state[p]["M"] = torch.zeros_like(opt.state[p]["M"])
    opt.state[net[4].weight]["V"].zero_()
    opt.zero_grad()
    loss_of(net, x, y).backward()
    opt.step()
    g = p.grad
    torch.testing.assert_close(opt.state[p]["M"][0], 0.1 * g, rtol=1e-4, atol=1e-9)
    g = net[4].weight.grad
    torch.testing.assert_close(opt.state[net[4].weight]["V"], 0.001 * g**2, rtol=1e-3, atol=1e-12)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("lo", [small, velo])
@pytest.mark.parametrize("option", ["full_state_dict", "flatten_optimizer_state_dict"])
def test_distributed_checkpoint(lo, option, tmp_path):
    """A run that DCP saves and another that loads it go on bit for bit. Before the first step DCP
    creates the state by a step, with lr 0 and gradients 0, which does not count."""
    (x, y), lo = task(MLP), lo()
    options, velo = dcp_state.StateDictOptions(**{option: True}), isinstance(lo, mulo.VeLO)
    plain, net, other = (make(lo, num_steps=9) for _ in range(3))
    for run in (net, other):
        saved = dict(
            zip(("net", "opt"), dcp_state.get_state_dict(*run, options=options), strict=True)
        )
        if run is net:
            for trained in (plain, net):
                train(*trained, 2, x, y, with_loss=velo)
            assert torch.equal(values(net[0]), values(plain[0]))
            saved = dict(
                zip(("net", "opt"), dcp_state.get_state_dict(*net, options=options), strict=True)
            )
            dcp.save(saved, checkpoint_id=tmp_path)
    dcp.load(saved, checkpoint_id=tmp_path)
    states = {"model_state_dict": saved["net"], "optim_state_dict": saved["opt"]}
    dcp_state.set_state_dict(*other, **states, options=options)
    for run in (net, other):
        train(*run, 2, x, y, with_loss=velo)
    assert torch.equal(values(net[0]), values(other[0]))


def test_warm_up_from_zero_is_a_step():
    """Unlike DCP's: there are gradients."""
    net, opt = make(lr=0.0)
    before = values(net)
    train(net, opt, 1, *task(MLP))
    assert torch.equal(values(net), before)
    assert opt.param_groups[0]["step"] == 1
    assert any(state["V"].any() for state in opt.state.values())
