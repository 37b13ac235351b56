"""All backends are one step: literal = folded = C++ = Triton (in its interpreter)."""

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mulo
from mulo import LOConfig, Stack, Weights, features, kernels
from mulo.features import Numbers

ROOT = Path(__file__).parents[1]
CONFIGS = {
    "H=4": LOConfig(hidden_size=4),
    "H=8, one layer": LOConfig(hidden_size=8, hidden_layers=1, spec="paper"),
    "H=32, rms 0": LOConfig(hidden_size=32, eps_rms=0.0),
    "H=5, three layers": LOConfig(hidden_size=5, hidden_layers=3),
    "velo": LOConfig(net="velo", hidden_size=4),
    "velo, relative": LOConfig(net="velo", hidden_size=4, eps="relative"),
    "velo, paper": LOConfig(net="velo", hidden_size=4, spec="paper"),
    "relative": LOConfig(hidden_size=4, eps="relative"),
    "fan_in, annealed": LOConfig(hidden_size=4, eps="fan_in", t_max=40.0, anneal=0.5),
}
SHAPES = [
    (1,), (7,), (1000,),  # a scalar is a vector of one
    (5, 9), (9, 5), (6, 6), (1, 8), (8, 1), (1, 1), (40, 70), (70, 33), (3, 1100),
    (6, 4, 3), (3, 4, 6), (6, 4, 3, 3), (20, 33, 3, 3), (8, 1, 3, 3), (64, 2, 3, 3), (2, 3, 40, 5),
    (3, 5, 2, 4, 2), (2, 2, 3, 5, 6),
    (3000, 4), (700, 31), (2, 300, 3, 5), (300, 3, 4, 4), (90, 1),  # short rows, joined
]  # fmt: skip
TOLERANCE = {"folded": 5e-6, "kernel": 5e-6, "triton": 1e-5}


@pytest.fixture(params=TOLERANCE)
def backend(request, monkeypatch):
    """A backend by name; "triton" runs the GPU's kernels on the CPU, in Triton's interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton 3.7.1, which torch's CUDA build brings")
        monkeypatch.setitem(kernels.LAUNCH, "cpu", kernels.LAUNCH["cuda"])
        monkeypatch.setitem(kernels.STATISTICS, "cpu", kernels.STATISTICS["cuda"])
    return request.param


class Case:
    """Stacks of P tensors of several shapes, stepped by the literal step and by another backend."""

    def __init__(self, config, shapes, P=2, own=False, dtype=torch.float32, out_axis=0, seed=0):
        self.config = dataclasses.replace(config, lam1=1.0, lam2=0.1)  # updates of order 1
        self.gen, T = torch.Generator().manual_seed(seed), len(shapes)
        lead = (P if own else 1, *([T] if config.net == "velo" else []))
        self.phi = kernels.random_weights(self.config, self.gen, *lead)
        self.stacks = []
        for shape in shapes:
            p = torch.randn(P, *shape, generator=self.gen).to(dtype)
            dims = features.factored_dims(shape, out_axis)
            self.stacks.append(Stack(p, features.init_accumulators(p, dims), dims))
        rest = torch.rand(4, P, T, generator=self.gen)
        rest *= torch.tensor([80.0, 1.0, 0.1, 1.0]).view(4, 1, 1)
        self.numbers = Numbers(*rest.numpy())
        if config.eps != "fan_in":
            self.numbers.eps_scale.fill(1)

    def gradients(self, size=0.1):
        return [size * torch.randn(x.p.shape, generator=self.gen) for x in self.stacks]

    def step(self, backend, grads):
        """Step copies of the stacks; return them, and the count of bad entries."""
        stacks = [
            Stack(x.p.clone(), features.Accumulators(*(y.clone() for y in x.acc)), x.dims)
            for x in self.stacks
        ]
        backend = "kernel" if backend == "triton" else backend
        if backend == "kernel":
            for x in stacks:
                x.rows = kernels.rows(x.p, x.acc, x.dims)
                assert x.rows is not None
        weights = Weights(self.config, self.phi, backend)
        bad = torch.zeros((), dtype=torch.int64)
        mulo.advance_(self.config, backend, weights, stacks, grads, self.numbers, bad)
        return stacks, int(bad)

    def compare(self, backend, grads, tolerance):
        """One step by both; the next starts from the literal one's result. Returns the largest
        difference and the count of bad entries."""
        expected, bad = self.step("literal", grads)
        got, bad_too = self.step(backend, grads)
        assert bad == bad_too
        worst = 0.0
        for before, x, y in zip(self.stacks, expected, got, strict=True):
            update = (x.p - before.p).abs().amax().item()
            error = (x.p - y.p).abs().amax().item() / max(update, 0.1)
            assert error <= tolerance, (tuple(x.p.shape), error)
            worst = max(worst, error)
            for name, a, b in zip(x.acc._fields, x.acc, y.acc, strict=True):
                room = 2e-6 * a.abs().amax().item()
                torch.testing.assert_close(b, a, rtol=1e-5, atol=room, msg=name)
        self.stacks = expected
        return worst, bad


@pytest.mark.parametrize("name", CONFIGS)
def test_backends_are_one_step(backend, name):
    """Every shape in one call, shared weights (one set per tensor for VeLO), three steps. Triton's
    interpreter takes a second for a few tensors: one step, with weights per net."""
    slow = backend == "triton"
    shapes = [(7,), (5, 9), (4, 3, 2), (2, 3, 2, 4)] if slow else SHAPES
    case = Case(CONFIGS[name], shapes, own=slow)
    for _ in range(1 if slow else 3):
        worst, _ = case.compare(backend, case.gradients(), TOLERANCE[backend])
    assert worst > 0  # it is not the literal step itself


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflows in Triton's interpreter
@pytest.mark.parametrize("name", ["H=4", "relative", "velo"])
def test_gradients_of_any_size(backend, name):
    """Zero, tiny, large and clipped gradients, with bad entries and dead rows and columns."""
    slow = backend == "triton"
    sizes, shapes = (0.0, 1e-6, 1e3, 1e18), [(17,), (5, 6), (20, 30), (30, 20), (6, 4, 3, 3)]
    shapes = shapes[: 2 if slow else 5]
    case = Case(CONFIGS[name], shapes * len(sizes), P=1 if slow else 2)
    for _ in range(1 if slow else 2):
        grads = case.gradients(1.0)
        for k, g in enumerate(grads):
            g *= sizes[k // len(shapes)]
            if g.ndim > 2:
                g[:, 3] = g[:, :, 2] = 0
            g.view(len(g), -1)[0, [2, 11, 16]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        _, bad = case.compare(backend, grads, 5 * TOLERANCE[backend])
        assert bad == 3 * len(grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_all_tensors(backend, dtype):
    """VeLO's statistics, with means of M that are large beside their deviations."""
    case = Case(
        CONFIGS["velo"], [(1,), (7,), (9000,), (5, 9), (70, 130), (6, 4, 3, 3)], dtype=dtype
    )
    for x in case.stacks:
        x.rows = kernels.rows(x.p, x.acc, x.dims)
        x.acc.M.copy_(0.2 + 0.01 * torch.randn(x.acc.M.shape, generator=case.gen))
        x.acc.V.copy_(torch.rand(x.acc.V.shape, generator=case.gen))
    backend = "kernel" if backend == "triton" else backend
    got = mulo.statistics_of(case.config, backend, case.stacks)
    for n, x in enumerate(case.stacks):
        expected = features.tensor_statistics(x.p.double(), *(y.double() for y in x.acc[:2]))
        assert (got[:, n] - expected).abs().amax() <= 2e-6
        assert expected[:, 1:].abs().amin() < 2.5 or x.p[0].numel() == 1  # not clipped


@given(
    shapes=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5).map(tuple), max_size=4),
    out_axis=st.sampled_from([0, 1, -1]),
    P=st.integers(1, 3),
    own=st.booleans(),
    name=st.sampled_from(["H=4", "velo", "relative", "fan_in, annealed"]),
    size=st.sampled_from([0.0, 1e-6, 1e-2, 1e3]),
    seed=st.integers(0, 99),
)
def test_any_tensors(shapes, out_axis, P, own, name, size, seed):
    """Any ranks and sizes, stacks with shared or own weights, gradients of any size."""
    case = Case(CONFIGS[name], [(3,), *shapes], P, own, out_axis=out_axis, seed=seed)
    for _ in range(2):
        grads, before = case.gradients(size), case.stacks
        case.compare("folded", grads, 2e-5)
        case.stacks = before
        case.compare("kernel", grads, 2e-5)


def test_long_rows_keep_their_digits():
    """Means of g^2 over 300,000 entries: within 2e-7 of float64."""
    torch.manual_seed(0)
    config = CONFIGS["H=4"]
    case = Case(config, [(4, 300_000), (300_000, 4), (2, 3, 100_000)], P=1)
    grads = [1 + 0.01 * torch.randn(x.p.shape) for x in case.stacks]
    got, _ = case.step("kernel", grads)
    rate = features.rates_of(case.phi).rc
    for x, g in zip(got, grads, strict=True):
        q = g.double().square()
        for acc, axis in ((x.acc.r, x.dims[1]), (x.acc.c, x.dims[0])):
            expected = rate.view(1, 3, *[1] * (q.ndim - 1)) * q.mean(axis, True).unsqueeze(1)
            torch.testing.assert_close(acc.double(), expected.double(), rtol=3e-7, atol=0)


def test_long_sides_on_gpus(monkeypatch):
    """Programs that take several blocks of a side."""
    tl = pytest.importorskip("triton.language", reason="needs triton")
    from mulo.kernels import gpu

    monkeypatch.setitem(kernels.LAUNCH, "cpu", kernels.LAUNCH["cuda"])
    monkeypatch.setattr(gpu, "SIDE_PROGRAMS", tl.constexpr(2))
    gpu.planned.cache_clear()
    case = Case(CONFIGS["H=4"], [(300,), (1, 300)], P=1)
    case.compare("triton", case.gradients(), TOLERANCE["triton"])
    gpu.planned.cache_clear()


def test_threads_do_not_change_a_bit():
    case = Case(CONFIGS["H=4"], [(300, 700), (9,), (64, 64), (100_000,), (40, 33, 3, 3)], P=1)
    grads, results = case.gradients(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            results.append([[x.p, *x.acc] for x in case.step("kernel", grads)[0]])
        finally:
            torch.set_num_threads(1)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def one_tensor(*shape, backend="kernel"):
    """A parameter of ones, its gradient of ones, and its optimizer."""
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.ones(shape)
    lo = mulo.SmallFC(LOConfig(hidden_size=4), torch.Generator().manual_seed(0))
    return p, mulo.MuLO([p], lo, backend=backend)


def test_what_is_written_by_address_is_known_to_autograd():
    """A step between forward and backward is an error, as with any optimizer."""
    p, opt = one_tensor(4, 4)
    loss = p.square().sum()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["kernel", "folded"])
def test_state_that_does_not_fit_is_not_written_to(backend):
    """A parameter that has grown since its last step: an error, not memory of others."""
    p, opt = one_tensor(4, 4, backend=backend)
    opt.step()
    p.data, p.grad = torch.ones(40, 4), torch.ones(40, 4)
    with pytest.raises(RuntimeError):
        opt.step()


@pytest.mark.parametrize("backend", ["kernel", "literal"])
def test_nan_parameters_stay_nan(backend):
    """A NaN reaches the whole tensor, through every layer, as it does in torch."""
    p, opt = one_tensor(4, 4, backend=backend)
    p.data[1, 2] = torch.nan
    opt.step()
    assert p.isnan().all()


# ---------------------------------------------------------------- choosing and building


@pytest.fixture
def unchecked():
    """No kernel has been checked, none is loaded."""
    caches = kernels.choose, kernels.library
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def fresh(unchecked, monkeypatch, tmp_path):
    """The cache is an empty folder; what is compiled is not optimized."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "FLAGS", ["-O0", *kernels.FLAGS[1:]])
    return tmp_path / "mulo"


CPU, SMALL = torch.device("cpu"), LOConfig(hidden_size=3, hidden_layers=1)


def test_a_library_is_built_once_and_rebuilt_when_damaged(fresh):
    """Rebuilt by two processes at once."""
    assert kernels.choose("auto", SMALL, CPU) == "kernel"
    [file] = fresh.iterdir()
    built = file.stat().st_mtime_ns
    kernels.library.cache_clear()
    kernels.library(3, 1, 39)
    assert file.stat().st_mtime_ns == built
    content = file.read_bytes()
    file.unlink()  # this process has it loaded: its memory must not change
    file.write_bytes(content[: len(content) // 2])  # loading this would kill the process (SIGBUS)
    code = (
        f"from mulo import kernels; kernels.FLAGS = {kernels.FLAGS}; kernels.library(3, 1, 39).step"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert [file] == list(fresh.iterdir())
    assert file.stat().st_size == len(content)


def test_without_a_compiler_it_is_folded_with_a_warning(fresh, monkeypatch):
    monkeypatch.setenv("CXX", str(fresh / "no-such-compiler"))
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.warns(UserWarning, match=r"without a kernel on cpu.*no-such-compiler.*folded"):
        mulo.MuLO([p], mulo.SmallFC(SMALL)).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mulo.MuLO([p], mulo.SmallFC(SMALL)).step()  # said once
    with pytest.raises(ValueError, match="no kernel for this learned optimizer on cpu"):
        mulo.MuLO([p], mulo.SmallFC(SMALL), backend="kernel").step()


def test_a_cache_that_cannot_be_written(fresh, monkeypatch):
    fresh.parent.joinpath("mulo").write_text("a file where the folder should be")
    assert kernels.choose("auto", SMALL, CPU) == "kernel"


def test_a_kernel_that_gives_nan_is_not_used(unchecked, monkeypatch):
    def broken(config, table, *args):
        table["scale"] = np.nan
        launch(config, table, *args)

    launch = kernels.launch_cpu
    monkeypatch.setitem(kernels.LAUNCH, "cpu", broken)
    with pytest.warns(UserWarning, match="differs from the folded step by nan"):
        assert kernels.choose("auto", CONFIGS["H=4"], CPU) == "folded"


@pytest.mark.parametrize("name", ["g", "c", "1/sqrt(V)", "M*F"])
def test_a_changed_feature_is_noticed(unchecked, monkeypatch, name):
    """Kernels have features of their own: if features.py has others, they are not used."""
    original = features.parameter_features

    def changed(*args):
        found = original(*args)
        found[name] = found[name] * (1 + 0.01 * found["p"])
        return found

    monkeypatch.setattr(features, "parameter_features", changed)
    with pytest.warns(UserWarning, match="differs from the folded step"):
        assert kernels.choose("auto", CONFIGS["H=4"], CPU) == "folded"


def test_what_kernels_do_not_know(unchecked):
    for config in (LOConfig(hidden_layers=4), LOConfig(hidden_size=129)):
        with pytest.warns(UserWarning, match="up to 3 hidden layers of up to 128 units"):
            assert kernels.choose("auto", config, CPU) == "folded"
