"""The compiled step is the eager one: all ranks, dtypes and layouts, one graph for all sizes."""

import dataclasses
import shutil
import sys
import types
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, pick_vec_isa
from torch.utils._pytree import tree_map_only

import features
import fused
import inductor
import lo
import mulo
import rule
import tasks
import training
from lo import LOConfig

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler"),
    pytest.mark.usefixtures("kernels"),
]
SHAPES = [(), (1,), (7,), (12, 20), (20, 12), (16, 16), (1, 9), (9, 1), (6, 5, 1, 1), (4, 3, 3, 3)]
SHAPES += [(2, 12, 3, 3)]  # whose factored axes are not neighbours: eager
# Updates of O(1), so that errors can be seen; one net, and a small one, as compiling takes long.
SMALL = LOConfig(hidden_size=2, lam1=1.0, lam2=0.1, t_max=1.0, anneal=0.5)


def network(config=SMALL, copies=1):
    """Random weights, biases and decays, so that no zero hides a term."""
    gen = torch.Generator().manual_seed(1)
    nets = [mulo.SmallFC(config, gen) for _ in range(copies)]
    for net in nets:
        for name, w in net.named_parameters():
            if name[0] == "b" or "decays" in name:
                w.normal_(0, 0.05, generator=gen)
    return {k: torch.cat([lo.stacked(n)[k] for n in nets]) for k in lo.stacked(nets[0])}


def graphs():
    return inductor.Graph.made


def worst(
    config, phi, shapes, steps=3, S=1, dtype=torch.float32, change=lambda net: net, eps_scale=1.0
):
    """Largest difference of updates of compiled and eager steps, relative to the largest update."""
    gen = torch.Generator().manual_seed(0)
    error = 0.0
    for shape in shapes:
        p = 0.01 * torch.randn(S, *(shape or (1,)), generator=gen).to(dtype)
        dims = features.factored_dims(tuple(p.shape[1:]))
        q, a = p.clone(), features.init_accumulators(p, dims)
        b = features.init_accumulators(p, dims, apart=True)
        off = size = 0.0
        for t in range(steps):
            g = 0.1 * torch.randn(p.shape, generator=gen).to(dtype)
            net = rule.prepare(config, phi).at(torch.full((S,), float(t)))
            rest = (torch.ones(S), dims, torch.full((S,), 0.01), eps_scale)
            before = p.clone()
            rule.step_(net, a, p, g, *rest)
            fused.step_(change(net), b, q, g, *rest)
            size = max(size, float((p - before).abs().max()))
            off = max(off, float((p - q).abs().max()))
            q.copy_(p)  # compare steps, not how rounding grows
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(y, x, rtol=2e-5, atol=1e-12)
        error = max(error, off / size)
    return error


def test_compiled_is_eager_on_all_ranks_over_200_steps():
    """As an Optimizer, twice, and the second compiles nothing. The state goes on; parameters are
    small and new at every step, so that their own rounding hides nothing."""
    torch.manual_seed(0)
    shapes = [*SHAPES, (12, 20), (0, 3)]
    nets = [[nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(3)]
    net = mulo.SmallFC(SMALL, torch.Generator().manual_seed(0))
    opts = [mulo.MuLO(n, net, compile=k > 0) for k, n in enumerate(nets)]
    compiled = None
    for step in range(200):
        now = [(0.1 * torch.randn(shape), torch.randn(shape)) for shape in shapes]
        for k, (opt, ps) in enumerate(zip(opts, nets, strict=True)):
            if k == 2:
                compiled = compiled or graphs()
            for p, (w, g) in zip(ps, now, strict=True):
                p.data.copy_(w)
                p.grad = g.clone()
            opt.step()
        for (w, _), p, *others in zip(now, *nets, strict=True):
            for q in others if p.numel() else ():
                assert (p - q).abs().max() <= 5e-6 * (p - w).abs().max(), (step, p.shape)
    assert graphs() == compiled


def test_one_graph_serves_ten_shapes():
    phi = network()
    assert worst(SMALL, phi, [(12, 20), (20, 12)]) <= 5e-6
    before = graphs()
    shapes = [(2, 2), (3, 50), (50, 3), (8, 8), (33, 17), (64, 96), (100, 7), (16, 16), (2, 130)]
    assert worst(SMALL, phi, [*shapes, (1, 40, 30)]) <= 5e-6
    assert graphs() == before


@pytest.mark.parametrize("shape", [(500_001,), (100_000, 3), (3, 100_000)])
def test_long_sums_are_done_with_care(shape):
    """Of equal numbers, where the errors of a sum add up."""
    dims, net = features.factored_dims(shape), rule.prepare(SMALL, network()).at(torch.zeros(1))
    updates = []
    for step_ in (rule.step_, fused.step_):
        p, g = torch.zeros(1, *shape), torch.full((1, *shape), 0.1)
        acc = features.init_accumulators(p, dims, apart=True)
        step_(net, acc, p, g, torch.ones(1), dims)
        updates.append(p)
    assert (updates[0] - updates[1]).abs().max() <= 5e-6 * updates[0].abs().max()


@pytest.mark.parametrize("own", [False, True], ids=["shared weights", "weights of their own"])
def test_stacks(own):
    """Also with a set of weights to a tensor, as the particles of meta-training have."""
    assert worst(SMALL, network(SMALL, copies=3 if own else 1), [(12, 20), (9, 9)], S=3) <= 5e-6
    before = graphs()
    assert worst(SMALL, network(SMALL, copies=4 if own else 1), [(9, 20)], S=4) <= 5e-6
    assert graphs() == before


OTHERS = [
    (dataclasses.replace(SMALL, eps="relative"), (12, 20), torch.float32),
    (dataclasses.replace(SMALL, eps="fan_in"), (33,), torch.float64),
    (LOConfig(net="velo", hidden_size=2, lam1=1.0, lam2=0.1), (20, 12), torch.float32),
]


@pytest.mark.parametrize(("config", "shape", "dtype"), OTHERS, ids=["relative", "fan_in", "VeLO"])
def test_other_networks_and_epsilons(config, shape, dtype):
    gen, phi = torch.Generator().manual_seed(0), network(config)
    if config.net == "velo":  # generated
        sizes = list(enumerate(pairwise(config.layer_sizes())))
        phi = {f"w{k}": 0.3 * torch.randn(1, n, m, generator=gen) for k, (n, m) in sizes}
        phi |= {f"b{k}": torch.randn(1, m, generator=gen) for k, (_, m) in sizes}
    scale = torch.full((1,), 0.05) if config.eps == "fan_in" else 1.0
    assert worst(config, phi, [shape], dtype=dtype, eps_scale=scale) <= 5e-6


def test_sums_in_groups():
    """Layers of more sums than are added to in turn, and of a number that does not divide."""
    config = dataclasses.replace(SMALL, hidden_size=inductor.SUMS + 3)
    assert worst(config, network(config), [(12, 20), (20, 13)]) <= 5e-6


def test_wider_networks_are_eager(monkeypatch):
    monkeypatch.setattr(fused, "WIDEST", 1)
    before = graphs()
    assert worst(SMALL, network(), [(12, 20)]) == 0
    assert graphs() == before


@pytest.mark.parametrize("S", [1, 2])
def test_the_operation_of_a_graph_is_the_network(S):
    """`mlp` as it is called by itself, against the network of `lo.py`."""
    phi = network(copies=S)
    x = torch.randn(S, 39, 5, 7)
    w, b = ([phi[f"{n}{k}"] for k in range(3)] for n in "wb")
    b = [b_k[..., None, None] for b_k in b]
    d, m = torch.ops.mulo.mlp([w_k.mT for w_k in w], b, list(x.unbind(1)))
    expected = lo.mlp(phi, x.movedim(1, -1), 2)
    torch.testing.assert_close(torch.stack([d, m], -1), expected)


@pytest.mark.parametrize("turned", [False, True], ids=["as it reads them", "turned"])
def test_the_operation_compiled(turned):
    """However weights lie in memory; a number of entries that no tile divides."""
    sizes, S = (5, 11, 3, 2), 2
    gen = torch.Generator().manual_seed(0)
    w = [torch.randn(S, n, m, generator=gen) for n, m in pairwise(sizes)]
    b = [torch.randn(S, m, 1, 1, generator=gen) for m in sizes[1:]]
    x = torch.randn(S, 5, 3, 21, generator=gen)

    def f(w, b, x):
        w = [w_k.mT if turned else w_k for w_k in w]
        return torch.ops.mulo.mlp(w, b, [2 * x_n for x_n in x.unbind(1)])

    given = ([w_k if turned else w_k.mT.contiguous() for w_k in w], b, x)
    tracer = inductor.Tracer(rank=3)
    with tracer.mode:
        fakes = tree_map_only(torch.Tensor, lambda y: torch.empty(y.shape), given)
    found = tracer.compile(f, *fakes).run(*inductor.leaves(given))
    phi = {f"w{k}": w_k for k, w_k in enumerate(w)}
    phi |= {f"b{k}": b_k.flatten(1) for k, b_k in enumerate(b)}
    expected = lo.mlp(phi, 2 * x.movedim(1, -1), 2)
    torch.testing.assert_close(torch.stack(list(found), -1), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(
    not isinstance(pick_vec_isa(), VecAVX2 | VecAVX512), reason="they are of AVX2 and AVX-512"
)
def test_quick_functions():
    """To 5e-7 where the step uses them, and finite beyond."""
    tracer = inductor.Tracer(rank=3, quick=True)
    with tracer.mode:
        fake = torch.empty(100_003)
    graph = tracer.compile(lambda x, y: [x.exp(), y.rsqrt()], fake, fake.clone())
    with tracer.mode:
        column, matrix = torch.empty(64, 1), torch.empty(64, 50)
    scaled = tracer.compile(lambda x, y: y * x.rsqrt(), column, matrix)  # of a number to a row
    column, matrix = torch.rand(64, 1) + 0.1, torch.randn(64, 50)
    torch.testing.assert_close(*scaled.run(column, matrix), matrix / column.sqrt())
    x, y = torch.linspace(-1, 1, 100_003), torch.logspace(-37, 30, 100_003)
    for found, exact in zip(graph.run(x, y), (x.double().exp(), y.double().rsqrt()), strict=True):
        assert (found / exact - 1).abs().max() <= 5e-7
    x, y = torch.linspace(-87, 88, 100_003), torch.zeros(100_003)
    y[::2] = torch.inf
    e, inverse = graph.run(x, y)
    assert (e / x.double().exp() - 1).abs().max() <= 3e-6
    assert (inverse[::2] == 0).all()
    assert inverse.isfinite().all()
    e, _ = graph.run(torch.linspace(-1e4, 1e4, 100_003), y)
    assert e.isfinite().all()


def test_particles():
    """The nets of meta-training: `training.Learned`, with weights and a time to each."""
    task, phi = tasks.get("fashion8_mlp_w16_d3"), network(SMALL, copies=3)
    theta = task.init(3, torch.Generator().manual_seed(0))
    grads = {k: torch.randn(p.shape) for k, p in theta.items()}
    found = []
    for how in (False, True):
        opt, now = training.Learned(SMALL, task, how), {k: p.clone() for k, p in theta.items()}
        state = opt.init(now, phi)
        for t in range(2):
            net, t = opt.prepare(phi), torch.tensor([0.0, 5.0, 90.0]) + t
            state, now = opt.step(net, state, now, grads, torch.zeros(3), t, lr=0.01)
        found.append(now)
    for k, p in theta.items():
        size = float((found[0][k] - p).abs().max())
        torch.testing.assert_close(found[1][k], found[0][k], rtol=1e-6, atol=1e-5 * size)


VELO = LOConfig(net="velo", hidden_size=2, lam1=0.1, lam2=0.1, lstm_hidden=3, param_inits=2)


@pytest.mark.parametrize("config", [SMALL, VELO], ids=["small_fc", "VeLO"])
def test_a_step_of_training_in_one_graph(config, tmp_path):
    """Losses, gradients and steps, of which one net's gradients are not finite; and after the state
    was saved and loaded."""
    task = tasks.get("fashion8_mlp_w16_d2")
    kind = mulo.VeLO if config.net == "velo" else mulo.SmallFC
    nets = [lo.stacked(kind(config, torch.Generator().manual_seed(k))) for k in range(3)]
    phi = {k: torch.cat([net[k] for net in nets]) for k in nets[0]}
    if config.net == "velo":
        phi["controls_w"] *= 0.1  # or updates overflow
    gen = torch.Generator().manual_seed(0)
    start, before = task.init(3, gen, zero_output=False), graphs()
    start["head.weight"][2, 0] = torch.inf
    batches = [task.data().batch(gen, 8, 3) for _ in range(3)]
    found = []
    for how in (False, True):
        opt, theta = training.Learned(config, task, how), {k: p.clone() for k, p in start.items()}
        state, net = opt.init(theta, phi, torch.full((3,), 9.0)), opt.prepare(phi)
        for n, batch in enumerate(batches):
            t = torch.tensor([0.0, 5.0, 90.0]) + n
            losses, state, theta = opt.advance(net, state, theta, batch, t)
            now = {"losses": losses} | state | theta
            found.append({k: x.clone() for k, x in now.items()})
            if n == 1:
                torch.save([state, theta], tmp_path / "state.pt")
                state, theta = torch.load(tmp_path / "state.pt")
    assert graphs() == before + 1
    for eager, compiled in zip(found[:3], found[3:], strict=True):
        for k, x in eager.items():
            atol = 1e-5 * float(x[:2].abs().max())
            torch.testing.assert_close(compiled[k], x, rtol=1e-5, atol=atol, equal_nan=True)


def test_a_step_of_training_a_transformer(monkeypatch):
    """What is traced, run as it is: to compile it would take minutes."""

    def run(traced, fakes, inner_compile, **options):
        graph = inner_compile.__self__
        graph.compiled, graph.constants = types.SimpleNamespace(), []
        graph.compiled.current_callable = lambda tensors: traced(*tensors)

    monkeypatch.setattr(inductor, "compile_fx", run)
    monkeypatch.setattr(training.Advance, "graphs", {})
    task, phi, gen = tasks.get("pixels_lm_w16_d1"), network(), torch.Generator().manual_seed(0)
    start, batch, found = task.init(2, gen), task.data().batch(gen, 4, 2), []
    batch[2][:, :, 50:] = False  # padding
    for how in (False, True):
        opt, theta = training.Learned(SMALL, task, how), {k: p.clone() for k, p in start.items()}
        state, net = opt.init(theta, phi), opt.prepare(phi)
        losses, _, theta = opt.advance(net, state, theta, batch, torch.zeros(2))
        found.append({"losses": losses} | theta)
    assert len(training.Advance.graphs) == 1
    for k, x in found[0].items():
        torch.testing.assert_close(found[1][k], x, rtol=1e-5, atol=1e-5 * float(x.abs().max()))


def test_low_precision():
    assert worst(SMALL, network(SMALL), [(12, 20)], dtype=torch.bfloat16) <= 1e-2


BAD = [[torch.nan, torch.inf], [1e20], [-torch.inf]]


@pytest.mark.parametrize(
    ("shape", "bad", "dtype"),
    [(shape, bad, torch.float32) for shape in ((6, 8), (8, 6), (48,)) for bad in BAD]
    + [((6, 8), BAD[0], torch.bfloat16)],
    ids=str,
)
def test_bad_and_strided_gradients(shape, bad, dtype):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for _ in range(2)]
    net = mulo.SmallFC(SMALL, torch.Generator().manual_seed(0))
    opts = [mulo.MuLO([p], net, compile=k == 1) for k, p in enumerate(params)]
    for p in params:
        g = torch.linspace(-1, 1, 48, dtype=dtype).view(shape[::-1])
        p.grad = g.permute(*range(len(shape))[::-1])
        p.grad[0], p.grad[-1] = bad[0], bad[-1]  # a row of a matrix, which is not contiguous
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [opt.step() for opt in opts]
    assert opts[0].nonfinite == opts[1].nonfinite
    assert (opts[1].nonfinite > 0) == (bad != [1e20])
    size = float(params[0].detach().abs().max())  # of the update
    atol = (5e-6 if dtype == torch.float32 else 1e-2) * size
    torch.testing.assert_close(params[1], params[0], rtol=0, atol=atol)
    for p, opt in zip(params, opts, strict=True):
        assert all(x.isfinite().all() for x in (p, *opt.state[p].values()))
    for x, y in zip(
        *(opt.state[p].values() for p, opt in zip(params, opts, strict=True)), strict=True
    ):
        torch.testing.assert_close(y, x)


def test_a_changed_weight_is_seen():
    def change(net):
        return dataclasses.replace(net, dense=net.dense * (1 + 1e-4))

    assert worst(SMALL, network(), [(12, 20)], change=change) > 5e-6


def stepped_with_one_warning(monkeypatch, match):
    monkeypatch.setattr(fused, "_available", {})
    p = nn.Parameter(torch.ones(6, 8))
    opt = mulo.MuLO([p], mulo.SmallFC(SMALL, torch.Generator().manual_seed(0)), compile=True)
    p.grad = torch.linspace(-1, 1, 48).view(6, 8)
    with pytest.warns(UserWarning, match=match):
        opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert not torch.equal(p, torch.ones(6, 8))


def test_without_a_compiler_there_is_one_warning(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no g++")

    monkeypatch.setattr(torch, "compile", broken)
    stepped_with_one_warning(monkeypatch, r"cannot compile for cpu.*no g\+\+")


def test_where_torch_is_another_inside_there_is_one_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "inductor", None)
    stepped_with_one_warning(monkeypatch, "cannot compile for cpu.*inductor")


def test_where_compiling_fails_there_is_one_warning(monkeypatch):
    def broken(*args, **kwargs):
        raise AttributeError

    monkeypatch.setattr(inductor.Tracer, "compile", broken)
    monkeypatch.setattr(fused, "_passes", {})
    stepped_with_one_warning(monkeypatch, "cannot compile for cpu.*AttributeError")

    task = tasks.get("fashion8_mlp_w16_d2")
    opt, theta = training.Learned(SMALL, task, True), task.init(2, torch.Generator())
    batch = task.data().batch(torch.Generator(), 4, 2)
    net, state = opt.prepare(network()), opt.init(theta, network())
    expected = task.losses(theta, batch)
    monkeypatch.setattr(fused, "_available", {"cpu": True})
    monkeypatch.setattr(training.Advance, "graphs", {})
    with pytest.warns(UserWarning, match="fashion8_mlp_w16_d2 cannot be compiled as one graph"):
        losses, *_ = opt.advance(net, state, theta, batch, torch.zeros(2))
    torch.testing.assert_close(losses, expected)
