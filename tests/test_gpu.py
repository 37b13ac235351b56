"""Without a GPU: the meta device stands for one beside real CPU tensors.

A dispatch mode raises when both meet in one operation (a mix-up), and counts kernels and host syncs
by the line of ours that caused them.
"""

import collections
import contextlib
import copy
import functools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mulo
from mulo import features, kernels, metatrain, tasks, training
from mulo.optimizees import datasets

ROOT = Path(__file__).parents[1]
aten = torch.ops.aten


class Lists(TorchFunctionMode):
    """Python numbers and lists that go to the GPU, which torch does not dispatch."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            if "meta" in str(kwargs.get("device")):
                self.gpu.sync("a list to the GPU")
        elif func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(k, list) for k in key):
                self.gpu.sync("list indices to the GPU")
        return func(*args, **kwargs)


class Gpu(TorchDispatchMode):
    """Counts kernels and syncs; raises where CPU and "GPU" tensors meet."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.syncs, self.kernels = collections.Counter(), 0

    def __enter__(self):
        self.lists = Lists(self)
        self.lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.lists.__exit__(*error)

    def sync(self, cause):
        frame = sys._getframe(2)
        while frame and Path(frame.f_code.co_filename).parent not in (ROOT, ROOT / "optimizees"):
            frame = frame.f_back
        line = frame and f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.syncs[cause, line] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        cpu, gpu = ([x for x in given if x.is_meta == side] for side in (False, True))
        to = kwargs.get("device")
        to = to and torch.device(to).type
        copies = aten.copy_.default, aten.index.Tensor, aten.index_put_.default
        if func is aten._local_scalar_dense.default and gpu:
            self.sync("item")
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten._to_copy.default and gpu and to == "cpu":
            self.sync("to the CPU")
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        if func is aten._to_copy.default and cpu and to == "meta":
            if not kwargs.get("non_blocking"):
                self.sync("from the CPU")
        elif func in copies and cpu and gpu:
            self.sync("from the CPU")
        elif gpu and any(x.ndim for x in cpu):
            places = [(x.device.type, tuple(x.shape)) for x in given]
            raise RuntimeError(f"{func} mixes devices: {places}")
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        view = view or func is aten._unsafe_view.default
        self.kernels += bool((gpu or to == "meta") and not view)
        return func(*args, **kwargs)


@pytest.fixture
def images(monkeypatch):
    """A task's data on the device that is asked for."""
    x, y = torch.zeros(50, 1, 8, 8, dtype=torch.uint8), torch.zeros(50, dtype=torch.long)

    def data(self, split="train", device="cpu"):
        return datasets.Images(x, y, 10, [1.0], [1.0], device=device)

    monkeypatch.setattr(tasks.Task, "data", data)


@pytest.fixture
def triton_launches(monkeypatch):
    """The Triton kernels are launched on the meta device too: they are counted, not run."""
    pytest.importorskip("triton", reason="needs triton, which torch's CUDA build brings")
    from mulo.kernels import gpu

    def count(kernel, *args, grid, **kwargs):
        launched.append(kernel.fn.__name__)

    launched = []
    monkeypatch.setattr(type(gpu.update), "run", count)
    monkeypatch.setitem(kernels.LAUNCH, "meta", kernels.LAUNCH["cuda"])
    monkeypatch.setitem(kernels.STATISTICS, "meta", kernels.STATISTICS["cuda"])
    return launched


@pytest.mark.parametrize("backend", ["folded", "kernel"])
@pytest.mark.parametrize("name", ["mulo_m", "muvelo_m"])
def test_an_inner_step_of_meta_training_does_not_sync(name, backend, images, triton_launches):
    steps = 7
    r = metatrain.recipe(name, truncation=steps, widths=(16,), pairs=2, backend=backend)
    with Gpu() as gpu:
        trainer = metatrain.Trainer(r, metatrain.new_lo(r, "meta"))
        trainer.advance()
        for group in trainer.particles:
            group.length += 1000  # no restart: those are rare
        gpu.clear()
        trainer.advance()
    inner = {k: n for k, n in gpu.syncs.items() if n >= steps}
    assert not inner
    assert sum(gpu.syncs.values()) <= 12  # once an outer step: the log's numbers
    if backend == "kernel":  # with allocations and copies, and an outer step in `steps`
        # there were two truncations
        kernels_each = (gpu.kernels + len(triton_launches) / 2) / steps
        assert kernels_each <= {"mulo_m": 55, "muvelo_m": 108}[name]


def build(width, depth=1):
    hidden = [x for k in range(depth) for x in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), *hidden, nn.Linear(width, 3))


@pytest.mark.parametrize("backend", ["folded", "kernel"])
@pytest.mark.parametrize("net", [mulo.SmallFC, mulo.VeLO])
def test_a_step_of_the_optimizer_does_not_sync(net, backend, request):
    """And the number of launches does not depend on the number of tensors."""
    launched = request.getfixturevalue("triton_launches") if backend == "kernel" else []
    counts = []
    for depth in (1, 40):
        build_deep = functools.partial(build, depth=depth)
        with Gpu() as gpu:
            roles = mulo.infer_roles(build_deep, 16)
            with torch.device("meta"):
                model = build_deep(16)
            mulo.multiply_outputs_(model, roles)
            groups = mulo.param_groups(model, roles)
            opt = mulo.MuLO(groups, net(), num_steps=9, backend=backend)  # its weights on the CPU
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            loss = torch.ones((), device="meta")
            for _ in range(2):
                gpu.clear()
                launched.clear()
                opt.step(loss=loss)
        assert not gpu.syncs
        counts.append((gpu.kernels, len(launched)))
    if backend == "kernel":
        assert counts[0] == counts[1]
        assert sum(counts[0]) <= (60 if net is mulo.VeLO else 8)  # with allocations and copies


def test_a_step_is_not_captured_in_a_cuda_graph(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="capture forward and backward only"):
        mulo.MuLO([p], mulo.SmallFC()).step()
    assert torch.equal(p, torch.ones(3))


def test_tensors_beyond_32_bit_offsets_are_not_for_the_kernel():
    """On a GPU they are stepped by "folded", in the same call."""
    for shape, fits in (((2**16, 2**14), True), ((2**16, 2**15), False), ((2**25,), False)):
        p = torch.empty(1, *shape, device="meta")
        dims = features.factored_dims(shape)
        assert (kernels.rows(p, features.init_accumulators(p, dims), dims) is not None) == fits
    p = nn.Parameter(torch.empty(2**25, device="meta"))
    p.grad = torch.empty_like(p)
    mulo.MuLO([p], mulo.SmallFC(), backend="kernel").step()


def precisions():
    """Of products and convolutions on GPUs, and of products on CPUs."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul
    return [x.fp32_precision for x in backends]


class Products(TorchDispatchMode):
    """The dtype and precisions of every product of matrices."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in (aten.mm, aten.bmm, aten.baddbmm, aten.addmm):
            self.seen.add((args[0].dtype, *(x.replace("none", "ieee") for x in precisions())))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def legacy_api():
    torch.set_float32_matmul_precision("medium")  # TF32 on GPUs, bf16 on CPUs
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def new_api():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    yield
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("setting", [legacy_api, new_api, autocast])
@pytest.mark.parametrize("name", ["mulo_m", "muvelo_m"])
def test_the_callers_precision_does_not_reach_the_step(name, setting):
    """The self-check, a step and an inner step of meta-training multiply in float32."""
    r = metatrain.recipe(name, truncation=2, widths=(8,), pairs=1, backend="folded")
    lo, results = metatrain.new_lo(r), []
    for context in (contextlib.nullcontext, setting):
        p = nn.Parameter(torch.ones(4, 6))
        p.grad = torch.linspace(-1, 1, 24).view(4, 6)
        opt = mulo.MuLO([p], lo, num_steps=9, backend="folded")
        trainer = metatrain.Trainer(r, copy.deepcopy(lo))
        with context(), Products() as products:
            before = precisions()
            error = kernels.self_check(lo.config, torch.device("cpu"))
            opt.step(loss=1.0)
            trainer.advance()
            assert precisions() == before
        seen = {(dtype, gpu, cpu) for dtype, gpu, _, cpu in products.seen}
        assert seen == {(torch.float32, "ieee", "ieee")}
        assert error < 1e-5
        results.append((p, trainer.phi))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("setting", [legacy_api, new_api])
@pytest.mark.parametrize("tf32", [False, True])
def test_gradients_use_tf32_only_if_asked(tf32, setting):
    """Whether the caller used the legacy or the new API; their setting is restored."""
    task, gen = tasks.get("fashion8_mlp_w16_d3"), torch.Generator()
    theta, batch = task.init(1, gen), training.batches(task.data(), [gen], 4)
    with setting(), Products() as products:
        before = precisions()
        training.gradients(task, theta, batch, tf32)
        assert precisions() == before
    gpu = "tf32" if tf32 else "ieee"
    assert products.seen == {(torch.float32, gpu, gpu, "ieee")}


def test_mix_ups_and_syncs_are_seen():
    """Negative controls."""
    x = torch.zeros(3, device="meta")
    with Gpu(), pytest.raises(RuntimeError, match="mixes devices"):
        x + torch.ones(3)
    for cause in (
        lambda: x[0].item(),
        lambda: x.cpu(),
        lambda: torch.ones(3).to("meta"),
        lambda: torch.tensor([1.0], device="meta"),
        lambda: x[[0, 1]],
    ):
        with Gpu() as gpu:
            cause()
        assert gpu.syncs
    with Gpu() as gpu:
        torch.ones(3).to("meta", non_blocking=True)
        x + 1
    assert not gpu.syncs
    assert gpu.kernels == 2
