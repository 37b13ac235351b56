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
from user_models import MLP, make, small, task, train, values, velo

import mulo
from mulo import LOConfig


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=5),
    kind=st.sampled_from(["small_fc", "velo"]),
    eps=st.sampled_from(["reference", "relative", "fan_in"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    steps=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_state_goes_on_bit_for_bit(shapes, kind, eps, dtype, steps, seed):
    """Tensors of any shape, also empty, in two groups, some without a gradient, saved to a file
    after any step and loaded into a new optimizer, which does not change what was loaded."""
    lo = velo() if kind == "velo" else small(0.1)
    lo.config = LOConfig(**{**vars(lo.config), "eps": eps})
    gen = torch.Generator().manual_seed(seed)

    def optimizer(params):
        half, options = len(params) // 2, {"lr": 0.7, "scale": 0.3, "weight_decay": 0.01}
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
        assert_equal(opt.state[p], opt2.state[q])
    assert_equal(state["state"], untouched)


def test_mismatched_state_is_refused_whole():
    x, y = task(MLP)
    net, opt = make()
    train(net, opt, 2, x, y)
    good = copy.deepcopy(opt.state_dict())
    wide_net, wide = make(width=32)
    train(wide_net, wide, 1, x, y)
    first = good["state"][0]
    for state, message in (
        (torch.optim.Adam(net.parameters()).state_dict(), "not a state_dict of MuLO"),
        (mulo.MuLO(net.parameters(), opt.lo).state_dict(), "groups of .*, not of"),
        (good | {"state": {0: first | {"M": 3}}}, "does not fit it"),
        (good | {"state": {0: first | {"extra": torch.zeros(1)}}}, "does not fit it"),
        (wide.state_dict(), "state of parameter '0.weight' does not fit it"),
    ):
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(state)
    assert_equal(opt.state_dict()["state"], good["state"])
    trained = make(velo(), num_steps=9)
    train(*trained, 2, x, y, with_loss=True)
    smaller = mulo.VeLO(LOConfig(net="velo", hidden_size=4, lstm_hidden=6, param_inits=4))
    for lo, state in ((velo(), good), (smaller, trained[1].state_dict())):
        with pytest.raises(ValueError, match="does not fit it"):
            make(lo, num_steps=9)[1].load_state_dict(state)


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
    """A state that is replaced, offloaded or changed in place is what the next step uses."""
    net, opt = make()
    train(net, opt, 2, *task(MLP))
    p, q, moved = net[2].weight, net[4].weight, net[0].weight
    opt.state[p]["M"] = torch.zeros_like(opt.state[p]["M"])
    opt.state[q]["V"].zero_()
    opt.state[moved]["M"].data = torch.zeros_like(opt.state[moved]["M"])
    train(net, opt, 1, *task(MLP))
    for x in (p, moved):
        torch.testing.assert_close(opt.state[x]["M"][0], 0.1 * x.grad, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(opt.state[q]["V"], 0.001 * q.grad**2, rtol=1e-3, atol=1e-12)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("lo", [small, velo])
@pytest.mark.parametrize("option", ["full_state_dict", "flatten_optimizer_state_dict"])
def test_distributed_checkpoint(lo, option, tmp_path):
    """A run that DCP saves and another that loads it go on bit for bit. Before the first step DCP
    creates the state by a step, with lr 0 and gradients 0, which does not count."""
    (x, y), lo = task(MLP), lo()
    options, velo = dcp_state.StateDictOptions(**{option: True}), isinstance(lo, mulo.VeLO)

    def states(run):
        names = "model_state_dict", "optim_state_dict"
        return dict(zip(names, dcp_state.get_state_dict(*run, options=options), strict=True))

    plain, net, other = (make(lo, num_steps=9) for _ in range(3))
    states(net)
    for run in (plain, net):
        train(*run, 2, x, y, with_loss=velo)
    assert torch.equal(values(net[0]), values(plain[0]))
    dcp.save(states(net), checkpoint_id=tmp_path)
    loaded = states(other)
    dcp.load(loaded, checkpoint_id=tmp_path)
    dcp_state.set_state_dict(*other, **loaded, options=options)
    for run in (net, other):
        train(*run, 2, x, y, with_loss=velo)
    assert torch.equal(values(net[0]), values(other[0]))


@pytest.mark.parametrize(("lr", "gradient"), [(0.0, 1.0), (1.0, 0.0)])
def test_other_steps_count(lr, gradient):
    """Unlike DCP's, which has lr 0 and gradients of 0."""
    p = nn.Parameter(torch.ones(3))
    opt = mulo.MuLO([p], small(), lr=lr)
    p.grad = torch.full((3,), gradient)
    opt.step()
    assert torch.equal(p, torch.ones(3)) == (lr == 0)
    assert opt.param_groups[0]["step"] == 1
