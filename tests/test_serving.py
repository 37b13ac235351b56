"""onnxruntime: inputs that a Session refuses, and OrtMuLO against MuLO."""

import contextlib
import copy
import functools
import json
import math
import pickle
import re
import shutil
from functools import partial

import onnx
import onnxruntime
import pytest
import torch
from exported_files import inputs_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mulo
from mulo import checkpoints, export, serving
from mulo.serving import OrtMuLO, Session


def test_inputs_are_checked(exported):
    session, config = Session(exported / "mulo_m.tensor.onnx"), mulo.load("mulo_m").config
    good = inputs_of(config, "tensor", b=2, e=1, m=3, n=5)
    session.run(good)
    wrong = [
        ({"r": good["r"][..., :1, :]}, "r must be .* with {'b': 2, 'e': 1, 'm': 3, 'n': 5}"),
        ({"g": good["g"][:1]}, "g must be"),
        ({"scale": torch.ones(())}, "scale must be"),
        ({"scale": torch.ones(1)}, "scale must be"),
        ({"p": good["p"].double()}, "p must be .*, not torch.float64 on cpu"),
        ({"p": good["p"].mT.contiguous().mT}, "p must be contiguous"),
        ({"p": good["p"].to("meta")}, "p must be .*, not torch.float32 on meta"),
        ({"M": good["M"][:, :2]}, "M must be"),
        ({"gradient": good["g"]}, r"\['gradient'\] are missing or unknown"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            session.run(good | change)
    with pytest.raises(ValueError, match=r"\['c'\] are missing or unknown"):
        session.run({k: v for k, v in good.items() if k != "c"})
    with pytest.raises(ValueError, match="p must be contiguous float32 on cpu, not empty"):
        session.run({k: v[:0] for k, v in good.items()})


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests the error where there is no CUDA, and it is here"
)
def test_cuda_is_not_taken_for_granted(exported, capfd):
    """The error quotes onnxruntime's log, or names its providers."""
    for make in (
        partial(Session, exported / "mulo_m.vector.onnx"),
        partial(OrtMuLO, [nn.Parameter(torch.ones(3))], exported),
    ):
        with pytest.raises(RuntimeError, match="install onnxruntime-gpu with its") as caught:
            make(device="cuda")
        [reason] = re.findall(r"cannot run on CUDA here \((.*)\): install", str(caught.value))
        if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
            assert len(reason) > 40
            assert reason in capfd.readouterr().err
        else:
            assert reason == "its providers are " + ", ".join(onnxruntime.get_available_providers())


def test_cuda_that_fails_as_it_starts_is_quoted(exported, monkeypatch):
    """onnxruntime raises a RuntimeError if there is no driver, and other types for bad files."""

    def fail(*args, **options):
        raise RuntimeError("CUDA failure 35: driver version is insufficient")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(RuntimeError, match=r"here \(CUDA failure 35: driver .*\): install"):
        Session(exported / "mulo_m.vector.onnx", device="cuda")


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in for CUDA whose device is the CPU; records the use of streams and sessions."""
    events = []

    class Stream:
        device, cuda_stream = torch.device("cpu"), 1234

        def __init__(self, name="onnxruntime"):
            self.name = name if isinstance(name, str) else "onnxruntime"

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

        def synchronize(self):
            events.append("host sync")

    class OnCuda(onnxruntime.InferenceSession):
        def __init__(self, graph, options, providers, enable_fallback):
            events.append(providers)
            super().__init__(graph, options, ["CPUExecutionProvider"])

        def get_providers(self):
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]

        def run_with_iobinding(self, binding, options):
            free = options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
            events.append("run" if free else "host sync")
            super().run_with_iobinding(binding, options)

    class Binding(onnxruntime.IOBinding):
        def synchronize_inputs(self):
            events.append("host sync")

        synchronize_outputs = synchronize_inputs

    @contextlib.contextmanager
    def current_device(device):
        events.append("device saved")
        yield
        events.append("device restored")

    monkeypatch.setattr(onnxruntime, "InferenceSession", OnCuda)
    monkeypatch.setattr(OnCuda, "io_binding", lambda session: Binding(session))
    monkeypatch.setattr(serving, "stream_on", functools.cache(lambda device: Stream()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", current_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("torch"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: events.append("host sync"))
    return events


class NoListIndex(TorchDispatchMode):
    """Refuses tensors that are indexed by a list, which a GPU has to wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten.index.Tensor
        return function(*args, **(kwargs or {}))


def test_steps_on_cuda_have_no_host_sync(exported, cuda):
    """Streams wait for one another around every call; shapes have sessions; no device leaks."""
    params = [nn.Parameter(torch.ones(s)) for s in ((3,), (4, 5), (4, 5), (2, 3, 7))]
    opt = OrtMuLO(params, exported, device="cuda")
    saved, [(provider, settings)], restored = cuda
    assert (saved, restored) == ("device saved", "device restored")
    assert provider == "CUDAExecutionProvider"
    assert settings["use_tf32"] == "0"
    assert settings["arena_extend_strategy"] == "kSameAsRequested"
    assert settings["user_compute_stream"] == "1234"
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert {*opt._sessions} == {
        ("vector", 1, 1), ("vector", 1, 3), ("tensor", 2, 1, 4, 5), ("tensor", 1, 2, 3, 7)
    }  # fmt: skip
    for (_, *sizes), session in opt._sessions.items():
        shape = session.inputs["p"]
        assert shape == tuple(sizes)
        with pytest.raises(ValueError, match="p must be"):
            session.run(inputs_of(opt.lo.config, "tensor" if len(shape) > 2 else "vector",
                                  b=9, e=9, m=9, n=9))  # fmt: skip
    cuda.clear()
    with NoListIndex():
        opt.step()
    call = ["onnxruntime waits for torch", "run", "torch waits for onnxruntime"]
    assert cuda == 3 * ["device saved", *call, "device restored"]


def test_batches_on_cuda_have_a_limit_of_their_own(exported, cuda, monkeypatch):
    params = [nn.Parameter(torch.ones(6, 7)) for _ in range(5)]
    monkeypatch.setattr(serving, "MAX_BATCH_ELEMENTS", {"cpu": 1, "cuda": 42 * 4})
    opt = OrtMuLO(params, exported, device="cuda")
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert [key[1] for key in opt._sessions if key[0] == "tensor"] == [4, 1]


def test_other_devices_and_float64_are_refused(exported):
    with pytest.raises(ValueError, match="use 'cpu' or 'cuda'"):
        Session(exported / "mulo_m.vector.onnx", device="mps")
    for options, message in (
        ({"device": "meta"}, "a parameter is on meta, the optimizer on 'cpu'"),
        ({"dtype": torch.float64}, r"use mulo\.MuLO for float64 parameters"),
    ):
        p = nn.Parameter(torch.ones(3, **options))
        p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match=message):
            OrtMuLO([p], exported).step()


def test_optimizer_refuses_files_that_do_not_fit(copied):
    params = [nn.Parameter(torch.ones(3))]
    model = onnx.load(copied / "mulo_m.vector.onnx")
    model.metadata_props[0].value = '{"a": 1}'
    with pytest.raises(ValueError, match="the graph has format version None, this code reads 3"):
        Session(model.SerializeToString())
    (copied / "mulo_m.vector.onnx").write_bytes(b"x")
    with pytest.raises(ValueError, match="is damaged or does not belong to its"):
        OrtMuLO(params, copied)
    shutil.copy(copied / "mulo_m.json", copied / "other.json")
    with pytest.raises(ValueError, match=r"has 2 optimizers: give the \.json of one"):
        OrtMuLO(params, copied)
    (copied / "mulo_m.json").write_text('{"format": "mulo-export", "version": 1}')
    with pytest.raises(ValueError, match="has format version 1, this code reads 3"):
        OrtMuLO(params, copied / "mulo_m.json")
    for path in (copied / "nothing.json", "nowhere"):
        with pytest.raises(FileNotFoundError, match="has no exported optimizer"):
            OrtMuLO(params, path)


# The optimizer in onnxruntime


class Net(nn.Module):
    """A small real model with parameters of every rank from 0 to 5, tall, wide and square."""

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


def pair(exported, dtype=torch.float32, **options):
    """Two equal models of all ranks, one with MuLO and one with OrtMuLO, in odd groups."""
    torch.manual_seed(0)
    models = [Net().to(dtype)]
    models.append(copy.deepcopy(models[0]))
    [(path, about)] = export.sidecars(exported)
    lo, opts = checkpoints.load(path.parent / f"{about['name']}.pt"), []
    makers = partial(mulo.MuLO, lo=lo, backend="folded"), partial(OrtMuLO, exported=path)
    for model, make in zip(models, makers, strict=True):
        p = list(model.parameters())
        groups = [
            {"params": p[:5], "scale": 0.5, "weight_decay": 0.01},
            {"params": p[5:9], "lr": 0.7, "step": 3},
            {"params": p[9:], "out_axis": 1},
        ]
        opts.append(make(groups, **options))
    return models, opts


def steps(models, opts, n, seed=0, room=3e-6):
    """Train both; every step's update is compared, as both start it from the same parameters."""
    torch.manual_seed(seed)
    dtype = next(models[0].parameters()).dtype
    for _ in range(n):
        x, y = torch.randn(32, 1, 4, 4).to(dtype), torch.randint(5, (32,))
        before = [p.detach().clone() for p in models[0].parameters()]
        for model, opt in zip(models, opts, strict=True):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            opt.step(loss=loss.detach())
        for old, a, b in zip(before, *(m.parameters() for m in models), strict=True):
            update = (a.detach() - old).double()
            off = ((b.detach() - old).double() - update).abs().max()
            rounding = 4 * torch.finfo(dtype).eps * old.abs().max()
            assert off <= room * update.abs().max() + rounding
            b.data.copy_(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ort_is_mulo(exported, dtype):
    """Ranks 0 to 5, several groups, times, rates, decays and ties; 20 steps of real gradients."""
    models, opts = pair(exported, dtype)
    steps(models, opts, 20)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        a, b = opts[0].state[p], opts[1].state[q]
        assert a.keys() == b.keys()
        for k in a:
            assert a[k].shape == b[k].shape
            size = float(a[k].abs().max())
            torch.testing.assert_close(a[k], b[k], rtol=0, atol=1e-3 * size)


def test_ort_is_mulo_for_velo(velo):
    steps(*pair(velo, num_steps=40), 12, room=1e-5)  # its made-up network amplifies rounding


def test_velo_by_the_contract(velo):
    """hyper, then the steps, with first values from the .json: as in a program without torch.

    The loss features cancel in float32: runtimes may differ by 1e-3.
    """
    about = json.loads((velo / "velo.json").read_text())
    sessions = {k: Session(velo / f"velo.{k}.onnx") for k in about["graphs"]}
    generator = torch.Generator().manual_seed(0)
    shapes = {"bias": (7,), "weight": (4, 9), "kernel": (2, 3, 5)}  # as (e, m, n): no transposes
    shaped = {"bias": (1, 7), "weight": (1, 1, 4, 9), "kernel": (1, 2, 3, 5)}
    p = {k: 0.1 * torch.randn(s, generator=generator) for k, s in shapes.items()}
    given = {k: nn.Parameter(x.clone()) for k, x in p.items()}
    opt = mulo.MuLO(given.values(), checkpoints.load(velo / "velo.pt"), num_steps=20)

    def first(kind, axes, sizes):
        sizes, states = dict(zip(axes, sizes, strict=True)), {}
        for x in about["graphs"][kind]["inputs"]:
            if "first" in x:
                zeros = torch.zeros([sizes.get(d, d) for d in x["shape"]])
                states[x["name"]] = zeros + torch.tensor(x["first"])
        return states

    kinds = {k: "vector" if len(s) == 1 else "tensor" for k, s in shapes.items()}
    axes = {"vector": "bn", "tensor": "bemn"}
    state = {k: first(kind, axes[kind], shaped[k]) for k, kind in kinds.items()}
    for k, s in shapes.items():
        state[k]["features"][0, 1 + len(s)] += 1
    decay = torch.exp(-1 / 10 ** torch.linspace(1, math.log10(20), 10))
    lstm = first("hyper", "T", [3]) | {"num_steps": torch.tensor(20.0), "loss_decay": decay}
    for t in range(6):
        grads = {k: 0.1 * torch.randn(s, generator=generator) for k, s in shapes.items()}
        loss, before = torch.tensor(2.0 - 0.1 * t + 0.3 * (t % 2)), dict(p)
        lstm |= {"features": torch.cat([x["features"] for x in state.values()]), "loss": loss}
        out = sessions["hyper"].run(lstm | {"t": torch.full((3,), float(t))})
        lstm |= {k[4:]: x for k, x in out.items() if k.startswith("new_")}
        for i, k in enumerate(shapes):
            x = {"p": p[k].reshape(shaped[k]), "g": grads[k].reshape(shaped[k])} | state[k]
            x |= {"t": torch.tensor([float(t)]), "scale": out["alpha"][i : i + 1]}
            x |= {n: w[i : i + 1] for n, w in out.items() if n[0] in "wb"}
            new = sessions[kinds[k]].run(x | {"decay": torch.zeros(1)})
            p[k] = new.pop("new_p").reshape(shapes[k])
            state[k] = {n[4:]: v for n, v in new.items()}
            given[k].grad = grads[k]
        opt.step(loss=loss)
        for k, q in given.items():
            update = q.detach() - before[k]
            assert (p[k] - q.detach()).abs().max() <= 1e-3 * update.abs().max()
            p[k] = q.detach().clone()


@pytest.mark.parametrize("folder", ["exported", "velo"])
def test_torchs_default_type_does_not_matter(folder, request):
    ends, grad = [], torch.linspace(0, 1, 20).view(5, 4)
    for dtype in (torch.float32, torch.float64):
        p = nn.Parameter(torch.linspace(-1, 1, 20).view(5, 4))
        torch.set_default_dtype(dtype)
        try:
            opt = OrtMuLO([p], request.getfixturevalue(folder), num_steps=9)
            for _ in range(3):
                p.grad = grad.clone()
                opt.step(loss=1.0)
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_state_goes_from_one_to_the_other(exported):
    """MuLO's state_dict continues in OrtMuLO and back; so do copies."""
    models, opts = pair(exported)
    steps(models, opts, 3)
    states = [copy.deepcopy(opt.state_dict()) for opt in opts]
    groups = [[dict(group) for group in opt.param_groups] for opt in opts]
    again = [mulo.MuLO(groups[0], opts[0].lo, backend="folded"), OrtMuLO(groups[1], exported)]
    again[0].load_state_dict(states[1])
    again[1].load_state_dict(states[0])
    steps(models, again, 3, seed=1, room=2e-5)  # the states differ in the last digit
    assert all(
        x.is_contiguous() for p in models[0].parameters() for x in again[0].state[p].values()
    )
    twin = pickle.loads(pickle.dumps(again[1]))
    assert isinstance(twin, OrtMuLO)
    for p in (p for group in twin.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    twin.step()


def test_ort_counts_bad_gradients_and_refuses_bad_parameters(exported):
    p, first = nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(3))
    opt = OrtMuLO([first, p], exported)
    first.grad, p.grad = torch.full_like(first, 0.1), torch.full_like(p, 0.1)
    p.grad[0, :2] = math.nan
    with pytest.warns(UserWarning, match="NaN or infinite gradient entries"):
        opt.step()
    assert opt.nonfinite == 2
    assert p.isfinite().all()
    assert all(x.isfinite().all() for x in opt.state[p].values())
    before, t = {k: x.clone() for k, x in opt.state[p].items()}, opt.param_groups[0]["step"]
    p.data[0, 0], old = math.nan, first.detach().clone()
    with pytest.raises(ValueError, match="a parameter has NaN or infinite entries"):
        opt.step()
    assert torch.equal(first, old)
    assert all(torch.equal(x, before[k]) for k, x in opt.state[p].items())
    assert opt.param_groups[0]["step"] == t


def seen_by(opt, kind, monkeypatch):
    """What the graph of a kind is called with, a list that grows."""
    session, calls = opt.session(kind, (1,) * (4 if kind == "tensor" else 2)), []
    whole = session.run
    monkeypatch.setattr(session, "run", lambda x, *y, **z: calls.append(x) or whole(x, *y, **z))
    return calls


def test_state_stays_in_the_graphs_layout(exported, monkeypatch):
    """A tall weight's state is transposed once; a wide weight's gradient is read in place."""
    tall, wide = nn.Parameter(torch.ones(40, 5)), nn.Parameter(torch.ones(4, 9))
    opt = OrtMuLO([tall, wide], exported)
    calls = seen_by(opt, "tensor", monkeypatch)
    for _ in range(3):
        tall.grad, wide.grad = torch.full_like(tall, 0.1), torch.full_like(wide, 0.1)
        opt.step()
        first, second = calls[-2:]
        assert second["g"].data_ptr() == wide.grad.data_ptr()
        assert first["M"].data_ptr() == opt.state[tall]["M"].data_ptr()
        assert first["p"].shape == (1, 1, 5, 40)
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert calls[-2]["M"].data_ptr() == opt.state[tall]["M"].data_ptr()


def test_tensors_of_one_size_go_in_one_call(exported, monkeypatch):
    """Tall ones with wide ones, but no more than fit the cache."""
    params = [nn.Parameter(torch.randn(6, 7)) for _ in range(4)]
    params += [nn.Parameter(torch.randn(7, 6)) for _ in range(5)]
    opt = OrtMuLO(params, exported)
    calls = seen_by(opt, "tensor", monkeypatch)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    monkeypatch.setattr(serving, "MAX_BATCH_ELEMENTS", {"cpu": 42 * 4})
    opt.step()
    assert [len(x["p"]) for x in calls] == [9, 4, 4, 1]
