"""onnxruntime: inputs that a Session refuses, and OrtMuLO against MuLO."""

import contextlib
import copy
import json
import math
import pickle
from functools import partial
from unittest import mock

import onnxruntime
import pytest
import torch
from torch import nn

import mulo
from mulo import checkpoints, export, serving
from mulo.serving import OrtMuLO, Session


def test_inputs_are_checked(exported):
    session, config = Session(exported / "mulo_m.tensor.onnx"), mulo.load("mulo_m").config
    good = export.random_inputs(config, "tensor", b=2, e=1, m=3, n=5)
    session.run(good)
    wrong = [
        ({"r": good["r"][..., :1, :]}, r"r must be .*, \(2, 3, 1, 3, 1\), not"),
        ({"p": good["p"].double()}, "p must be .*, not torch.float64"),
        ({"p": good["p"].mT.contiguous().mT}, "p must be contiguous"),
        ({"p": good["p"].to("meta")}, "p must be contiguous float32 on cpu"),
        ({"gradient": good["g"]}, r"\['gradient'\] are missing or unknown"),
        ({k: v[:0] for k, v in good.items()}, "p must be contiguous float32 on cpu, not empty"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            session.run(good | change)


@pytest.fixture
def cuda(monkeypatch):
    """The meta device stands for CUDA; records the use of devices, streams and sessions."""
    events = []

    class Stream:
        cuda_stream = 1234

        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

    class OnCuda(onnxruntime.InferenceSession):
        providers = ("CUDAExecutionProvider", "CPUExecutionProvider")

        def __init__(self, graph, options, providers, enable_fallback):
            events.append(providers)
            super().__init__(graph, options, ["CPUExecutionProvider"])

        def get_providers(self):
            return self.providers

        def io_binding(self):
            return mock.Mock()  # onnxruntime cannot bind meta tensors

        def run_with_iobinding(self, binding, options):
            free = options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
            events.append("run" if free else "host sync")

    @contextlib.contextmanager
    def current_device(device):
        events.append("device saved")
        yield
        events.append("device restored")

    monkeypatch.setitem(serving.PROVIDERS, "meta", "CUDAExecutionProvider")
    monkeypatch.setattr(onnxruntime, "InferenceSession", OnCuda)
    monkeypatch.setattr(serving, "stream_on", lambda device: Stream("onnxruntime"))
    monkeypatch.setattr(torch.cuda, "device", current_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("torch"))
    return events


def test_steps_on_cuda_have_no_host_sync(exported, cuda):
    """Streams wait for one another around every call; shapes have sessions; no device leaks."""
    shapes = (3,), (4, 5), (5, 4), (2, 3, 7)
    params = [nn.Parameter(torch.ones(s, device="meta")) for s in shapes]
    opt = OrtMuLO(params, exported / "mulo_m.json")
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()  # reading a meta tensor would raise
    saved, [(provider, settings)], restored = cuda[:3]
    assert (saved, restored) == ("device saved", "device restored")
    assert provider == "CUDAExecutionProvider"
    assert settings == {
        "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested", "device_id": "0",
        "user_compute_stream": "1234",
    }  # fmt: skip
    sessions = {(kind, *sizes): x for (kind, _, *sizes), x in opt._sessions.items()}
    assert {*sessions} == {("vector", 1, 3), ("tensor", 1, 1, 4, 5), ("tensor", 1, 2, 3, 7)}
    for (_, *sizes), session in sessions.items():
        assert session.inputs["p"] == session.outputs["new_p"] == tuple(sizes)
    bound = sessions["tensor", 1, 1, 4, 5].binding.bind_output.call_args_list
    assert {call.args[0] for call in bound} == {"new_p", "new_M", "new_V", "new_r", "new_c"}
    cuda.clear()
    opt.step()
    call = ["onnxruntime waits for torch", "run", "torch waits for onnxruntime"]
    assert cuda == 4 * ["device saved", *call, "device restored"]


def test_onnxruntime_that_falls_back_to_the_cpu_is_refused(exported, cuda, monkeypatch):
    monkeypatch.setattr(onnxruntime.InferenceSession, "providers", ("CPUExecutionProvider",))
    with pytest.raises(RuntimeError, match="cannot use CUDA here"):
        Session(exported / "mulo_m.vector.onnx", device="meta")


def test_other_parameters_and_files_are_refused(copied):
    path, p = copied / "mulo_m.json", nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="move the model to the CPU or CUDA"):
        Session(copied / "mulo_m.vector.onnx", device="mps")
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"use mulo\.MuLO for sharded or float64 parameters"):
        OrtMuLO([p], path).step()
    shard = mulo.Stack(torch.ones(1, 3), None, None, shards=object())
    with pytest.raises(RuntimeError, match=r"use mulo\.MuLO for sharded or float64 parameters"):
        OrtMuLO([p], path)._advance("folded", None, [shard], [torch.ones(1, 3)], None, None)
    (copied / "mulo_m.vector.onnx").write_bytes(b"x")
    with pytest.raises(ValueError, match="is damaged or does not belong to"):
        OrtMuLO([p], path)
    about = json.loads(path.read_text())
    about["sha256"] = {}
    path.write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"lists no \.onnx files: export it again"):
        OrtMuLO([p], path)


# The optimizer in onnxruntime


SHAPES = [  # ranks 0 to 5; tall, wide and square
    (6, 1, 3, 3), (6,), (4, 1, 3, 3, 3), (5, 40), (24, 24), (6, 6, 3), (), (40, 24), (7,), (9, 4),
]  # fmt: skip


def pair(path, dtype=torch.float32, **options):
    """Equal parameters for MuLO and for OrtMuLO, in groups with different options."""
    torch.manual_seed(0)
    params = [[nn.Parameter(0.2 * torch.randn(s, dtype=dtype)) for s in SHAPES]]
    params.append(copy.deepcopy(params[0]))
    lo, opts = checkpoints.load(path.with_suffix(".pt")), []
    makers = partial(mulo.MuLO, lo=lo, backend="folded"), partial(OrtMuLO, exported=path)
    for p, make in zip(params, makers, strict=True):
        groups = [
            {"params": p[:4], "scale": 0.5, "weight_decay": 0.01},
            {"params": p[4:8], "lr": 0.7, "step": 1000},  # beyond t_max: updates anneal
            {"params": p[8:], "out_axis": 1},
        ]
        opts.append(make(groups, **options))
    return params, opts


def steps(params, opts, n, seed=0, room=3e-6):
    """Step both; every step's update is compared, as both start it from the same parameters."""
    torch.manual_seed(seed)
    for t in range(n):
        before = [p.detach().clone() for p in params[0]]
        for p, q in zip(*params, strict=True):
            p.grad = 0.1 * torch.randn_like(p)
            if p.ndim > 3:
                p.grad[0] = math.nan
            q.grad = p.grad.clone()
        for opt in opts:
            opt.step(loss=2 - 0.05 * t)
        for old, a, b in zip(before, *params, strict=True):
            update = (a.detach() - old).double()
            off = ((b.detach() - old).double() - update).abs().max()
            rounding = 4 * torch.finfo(old.dtype).eps * old.abs().max()
            assert off <= room * update.abs().max() + rounding
            b.data.copy_(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ort_is_mulo(exported, dtype):
    """Several ranks, groups, times, rates, decays and ties; bad gradients are counted."""
    params, opts = pair(exported / "mulo_m.json", dtype)
    steps(params, opts, 20)
    assert opts[0].nonfinite == opts[1].nonfinite > 0
    for p, q in zip(*params, strict=True):
        a, b = opts[0].state[p], opts[1].state[q]
        assert a.keys() == b.keys()
        for k in a:
            assert a[k].shape == b[k].shape
            size = float(a[k].abs().max())
            torch.testing.assert_close(a[k], b[k], rtol=0, atol=1e-5 * size)


def test_ort_is_mulo_for_velo(velo):
    steps(*pair(velo / "velo.json", num_steps=40), 12, room=1e-5)


def test_velo_by_the_contract(velo):
    """hyper, then the steps, with first values from the .json: as in a program without torch.

    The loss features cancel in float32: runtimes may differ by 1e-3.
    """
    about = json.loads((velo / "velo.json").read_text())
    sessions = {k: Session(velo / f"velo.{k}.onnx") for k in about["graphs"]}
    torch.manual_seed(0)
    shapes = {"vector": (1, 7), "tensor": (1, 1, 4, 9)}  # one parameter for each graph
    params = {k: nn.Parameter(0.1 * torch.randn(shape).squeeze()) for k, shape in shapes.items()}
    opt = mulo.MuLO(params.values(), checkpoints.load(velo / "velo.pt"), num_steps=20)

    def first(kind, **sizes):
        inputs = [x for x in about["graphs"][kind]["inputs"] if "first" in x]
        zeros = [torch.zeros([sizes.get(d, d) for d in x["shape"]]) for x in inputs]
        return {x["name"]: y + torch.tensor(x["first"]) for x, y in zip(inputs, zeros, strict=True)}

    state = {"vector": first("vector", b=1, n=7), "tensor": first("tensor", b=1, e=1, m=4, n=9)}
    for k, p in params.items():
        state[k]["features"][0, 1 + p.ndim] += 1
    decay = torch.exp(-1 / 10 ** torch.linspace(1, math.log10(20), 10))
    lstm = first("hyper", T=2) | {"num_steps": torch.tensor(20.0), "loss_decay": decay}
    for t in range(6):
        loss, results = torch.tensor(2.0 - 0.1 * t + 0.3 * (t % 2)), []
        lstm |= {"features": torch.cat([x["features"] for x in state.values()]), "loss": loss}
        out = sessions["hyper"].run(lstm | {"t": torch.full((2,), float(t))})
        lstm |= {k[4:]: x for k, x in out.items() if k.startswith("new_")}
        for i, (k, p) in enumerate(params.items()):
            p.grad = 0.1 * torch.randn_like(p)
            x = {"p": p.detach().view(shapes[k]), "g": p.grad.view(shapes[k])} | state[k]
            x |= {"t": torch.tensor([float(t)]), "decay": torch.zeros(1)}
            x |= {"scale": out["alpha"][i : i + 1]}
            x |= {name: w[i : i + 1] for name, w in out.items() if name[0] in "wb"}
            new = sessions[k].run(x)
            results.append((p, p.detach().clone(), new.pop("new_p").view_as(p)))
            state[k] = {name[4:]: y for name, y in new.items()}
        opt.step(loss=loss)
        for p, before, new_p in results:
            assert (new_p - p).abs().max() <= 1e-3 * (p - before).abs().max()


OPTIMIZERS = {
    "MuLO": lambda p, folder: mulo.MuLO([p], mulo.load("lo_m"), weight_decay=0.1),
    "OrtMuLO": lambda p, folder: OrtMuLO([p], folder / "velo.json", num_steps=9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_default_type_does_not_matter(name, velo):
    ends = []
    for dtype in (torch.float32, torch.float64):
        p = nn.Parameter(torch.linspace(-1, 1, 20).view(5, 4))
        p.grad = torch.linspace(0, 1, 20).view(5, 4)
        torch.set_default_dtype(dtype)
        try:
            OPTIMIZERS[name](p, velo).step(loss=1.0)
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_state_goes_from_one_to_the_other(exported):
    """MuLO's state_dict continues in OrtMuLO and back; so do copies."""
    path = exported / "mulo_m.json"
    params, opts = pair(path)
    steps(params, opts, 3)
    states = [copy.deepcopy(opt.state_dict()) for opt in opts]
    groups = [[dict(group) for group in opt.param_groups] for opt in opts]
    again = [mulo.MuLO(groups[0], opts[0].lo, backend="folded"), OrtMuLO(groups[1], path)]
    again[0].load_state_dict(states[1])
    again[1].load_state_dict(states[0])
    steps(params, again, 3, seed=1, room=2e-5)  # the states differ in the last digit
    assert all(x.is_contiguous() for p in params[0] for x in again[0].state[p].values())
    twin = pickle.loads(pickle.dumps(again[1]))
    assert isinstance(twin, OrtMuLO)
    for p in (p for group in twin.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    twin.step()


def test_state_stays_in_the_graphs_layout(exported, monkeypatch):
    """A tall weight's state is transposed once and then updated in place; also a loaded one."""
    p, given, run = nn.Parameter(torch.ones(40, 5)), [], Session.run
    monkeypatch.setattr(Session, "run", lambda *args: given.append(args[1]) or run(*args))
    opt, p.grad = OrtMuLO([p], exported / "mulo_m.json"), torch.ones_like(p)
    for _ in range(2):
        for _ in range(2):
            opt.step()
            assert all(given[-1][k].data_ptr() == opt.state[p][k].data_ptr() for k in "MVrc")
        opt.load_state_dict(opt.state_dict())
