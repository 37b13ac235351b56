"""onnxruntime: what a Session refuses, and OrtMuLO, which is MuLO."""

import copy
import math
import pickle
import shutil

import pytest
import torch
from exported_files import inputs_of
from test_rule import Net
from torch import nn

import checkpoints
import graphs
import mulo
import serving
from serving import OrtMuLO, Session


def test_inputs_are_checked(exported):
    graph = graphs.make(mulo.load("mulo_m"), "matrix")
    session = Session(exported / "mulo_m.matrix.onnx")
    good = inputs_of(graph, b=2, m=3, n=5)
    session.run(good)
    wrong = [
        ({"row": good["row"][:, :, :1]}, "row must be .* with {'b': 2, 'm': 3, 'n': 5}"),
        ({"grad": good["grad"][:1]}, "grad must be"),
        ({"lr_scale": torch.ones(())}, "lr_scale must be"),
        ({"lr_scale": torch.ones(1)}, "lr_scale must be"),
        ({"step": torch.ones(1)}, "step must be"),
        ({"param": good["param"].double()}, "param must be float32 on cpu, not torch.float64"),
        ({"param": good["param"].mT.contiguous().mT}, "param must be contiguous"),
        ({"momentum": good["momentum"][:, :2]}, "momentum must be"),
        ({"second_moment": good["second_moment"] * math.nan}, "second_moment has NaN or infinite"),
        ({"param": good["param"] / 0}, "param has NaN or infinite"),
        ({"lr_scale": torch.tensor([1.0, math.inf])}, "lr_scale has NaN or infinite"),
        ({"gradient": good["grad"]}, r"\['gradient'\] are missing or unknown"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            session.run(good | change)
    with pytest.raises(ValueError, match="a 5 x 3 tensor is not for the matrix graph: use tall"):
        session.run(inputs_of(graph, b=2, m=5, n=3))
    wrong = [
        ({"step": 3.0}, "step must be a torch.Tensor, not float"),
        ({"param": good["param"].numpy()}, "param must be a torch.Tensor, not ndarray"),
        ({"second_moment": -good["second_moment"] - 1}, "second_moment has negative entries"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            session.run(good | change)
    outputs = [
        (torch.empty(2, 3, 5, dtype=torch.float64), "new_param must be float32"),
        (torch.empty(2, 5, 3).mT, "new_param must be contiguous"),
        (torch.empty(2, 3, 4), "new_param must be contiguous"),
        (good["param"], "not one of the inputs"),
    ]
    for x, message in outputs:
        with pytest.raises(ValueError, match=message):
            session.run(good, {"new_param": x})
    with pytest.raises(ValueError, match="there is no output newer_param"):
        session.run(good, {"newer_param": torch.empty(2, 3, 5)})
    with pytest.raises(ValueError, match=r"\['col'\] are missing or unknown"):
        session.run({k: v for k, v in good.items() if k != "col"})
    with pytest.raises(ValueError, match="param must be contiguous, not empty"):
        session.run({k: v[:0] if v.ndim else v for k, v in good.items()})


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_is_not_taken_for_granted(exported):
    with pytest.raises(RuntimeError, match="cannot run on CUDA here: install onnxruntime-gpu"):
        Session(exported / "mulo_m.vector.onnx", device="cuda")
    with pytest.raises(RuntimeError, match="cannot run on CUDA here"):
        OrtMuLO([nn.Parameter(torch.ones(3))], exported, device="cuda")


def test_other_devices_are_refused(exported):
    with pytest.raises(ValueError, match="use 'cpu' or 'cuda'"):
        Session(exported / "mulo_m.vector.onnx", device="mps")
    p = nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="a parameter is on meta, the optimizer on 'cpu'"):
        OrtMuLO([p], exported).step()


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere\.onnx: export the optimizer"):
        Session(tmp_path / "nowhere.onnx")


def test_optimizer_refuses_files_that_do_not_fit(copied):
    params = [nn.Parameter(torch.ones(3))]
    (copied / "mulo_m.vector.onnx").write_bytes(b"x")
    with pytest.raises(ValueError, match="damaged, or not the file its"):
        OrtMuLO(params, copied)
    (copied / "mulo_m.json").write_text('{"format": "mulo-export", "version": 3}')
    with pytest.raises(ValueError, match="has format version 3"):
        OrtMuLO(params, copied / "mulo_m.json")
    for path in (copied / "nothing.json", copied / "..", "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"give the \.json"):
            OrtMuLO(params, path)


# The optimizer in onnxruntime


def pair(exported, dtype=torch.float32, **options):
    """Two equal models of all ranks, one with MuLO and one with OrtMuLO, in odd groups."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    if "num_steps" in options:  # VeLO
        layers = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)]
        model = nn.Sequential(nn.Flatten(), *layers)
    models = model, copy.deepcopy(model)
    groups = []
    for m in models:
        p = list(m.parameters())
        some = [
            {"params": p[:5], "scale": 0.5, "weight_decay": 0.01},
            {"params": p[5:9], "lr": 0.7, "step": 3},
            {"params": p[9:], "out_axis": 1},
        ]
        groups.append([group for group in some if group["params"]])
    _, about = serving.sidecar(exported)
    lo = checkpoints.load(serving.sidecar(exported)[0].parent / f"{about['name']}.pt")
    opts = mulo.MuLO(groups[0], lo, **options), OrtMuLO(groups[1], exported, **options)
    return models, opts


def steps(models, opts, n, seed=0):
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
            update = (a - old).double()
            off = ((b - old).double() - update).abs().max()
            room = 2e-5 * update.abs().max() + torch.finfo(dtype).eps * old.abs().max().double()
            assert off <= room
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
    models, opts = pair(velo, num_steps=40)
    steps(models, opts, 12)


def test_torchs_default_type_does_not_matter(exported, velo):
    start, grad = torch.linspace(-1, 1, 20).view(5, 4), torch.linspace(0, 1, 20).view(5, 4)
    for folder, options in ((exported, {}), (velo, {"num_steps": 9})):
        ends = []
        for dtype in (torch.float32, torch.float64):
            p = nn.Parameter(start.clone())
            torch.set_default_dtype(dtype)
            try:
                opt = OrtMuLO([p], folder, **options)
                for _ in range(3):
                    p.grad = grad.clone()
                    opt.step(loss=1.0)
            finally:
                torch.set_default_dtype(torch.float32)
            ends.append(p.detach())
        torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_float64_is_refused(exported):
    """Their float32 copies would lose small updates."""
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"use mulo\.MuLO for float64 parameters"):
        OrtMuLO([p], exported).step()


def test_a_step_is_whole_or_not_at_all(exported, tmp_path):
    """Files that change under a running optimizer are refused, before anything is changed."""
    shutil.copytree(exported, tmp_path / "files")
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 5))
    opt = OrtMuLO([first, second], tmp_path / "files")
    first.grad, second.grad = torch.ones(3), torch.ones(4, 5)
    (tmp_path / "files" / "mulo_m.matrix.onnx").write_bytes(b"another")
    with pytest.raises(ValueError, match="damaged, or not the file its"):
        opt.step()
    assert torch.equal(first, torch.ones(3))
    opt = OrtMuLO([first], exported, lr=math.inf)
    with pytest.raises(ValueError, match="lr=inf is not finite"):
        opt.step()


def group_like(opt):
    return [dict(group) for group in opt.param_groups]


def test_state_goes_from_one_to_the_other(exported):
    """MuLO's state_dict continues in OrtMuLO and back; so do copies."""
    models, opts = pair(exported)
    steps(models, opts, 3)
    states = [copy.deepcopy(opt.state_dict()) for opt in opts]
    again = [mulo.MuLO(group_like(opts[0]), opts[0].lo), OrtMuLO(group_like(opts[1]), exported)]
    again[0].load_state_dict(states[1])
    again[1].load_state_dict(states[0])
    steps(models, again, 3, seed=1)
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
    with pytest.warns(UserWarning, match="2 gradient entries were NaN or infinite"):
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
    p.data[0, 0] = 1.0
    opt.state[p]["V"].fill_(math.inf)
    opt.load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match="state V has NaN or infinite entries"):
        opt.step()


def test_no_copies_and_two_sets_of_buffers(exported):
    """State alternates between two pieces of memory, and a gradient is read where it is."""
    p = nn.Parameter(torch.ones(40, 5))
    opt, seen, read = OrtMuLO([p], exported), [], []
    session = opt.session("tall")
    bind = session.run
    session.run = lambda inputs, *rest, **more: (
        read.append(inputs["grad"].data_ptr()) or bind(inputs, *rest, **more)
    )
    for _ in range(6):
        p.grad = torch.full_like(p, 0.1)
        opt.step()
        assert read[-1] == p.grad.data_ptr()
        seen.append(opt.state[p]["M"].data_ptr())
    assert len(set(seen)) == 2
    assert seen[::2] == [seen[0]] * 3


def test_equal_shapes_go_in_one_call(exported):
    params = [nn.Parameter(torch.randn(6, 7)) for _ in range(9)]
    opt = OrtMuLO(params, exported)
    calls = []
    session = opt.session("matrix")
    whole = session.run
    session.run = lambda x, *y, **z: calls.append(len(x["param"])) or whole(x, *y, **z)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    assert calls == [9]
