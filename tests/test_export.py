"""Exported graphs: every format against float64, the optimizer in onnxruntime, other runtimes."""

import copy
import functools
import hashlib
import http.server
import json
import math
import pickle
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxscript.optimizer
import oracle
import pytest
import torch
from test_rule import Net
from torch import nn

import checkpoints
import export
import graphs
import mulo
import serving
from serving import OrtMuLO, Session

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import desk  # noqa: E402

KINDS = ("matrix", "tall", "tensor", "vector", "net")


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """mulo_m, written and checked by the command that the README gives, and the examples' task."""
    folder = tmp_path_factory.mktemp("exported")
    done = run(sys.executable, "export.py", "mulo_m", "--out", folder)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:-1]]
    files = {f"mulo_m.{kind}.{suffix}" for kind in KINDS for suffix in ("onnx", "pt2", "ts")}
    assert {line[0] for line in lines} == files
    assert all(0 < float(line[2]) <= 3e-6 for line in lines)
    desk.write(folder)
    return folder


VELO = ("tall", "vector", "net", "stats", "hyper")  # the graphs that an MLP needs


@pytest.fixture(scope="session")
def velo(tmp_path_factory):
    """A VeLO whose generated weights are of size 1, as ONNX."""
    config = mulo.LOConfig(
        hidden_size=4, lam1=0.01, lstm_hidden=6, param_inits=5, param_scale_mult=True
    )
    lo = mulo.VeLO(config, torch.Generator().manual_seed(0))
    lo.controls_w.mul_(0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "kinds", lambda config: VELO)
        return export.write(lo, tmp_path_factory.mktemp("velo"), "velo", ["onnx"])


@pytest.fixture
def copied(exported, tmp_path):
    """Some of the files, to be damaged."""
    for file in ("json", "pt", "vector.onnx", "vector.ts", "vector.pt2"):
        shutil.copy(exported / f"mulo_m.{file}", tmp_path)
    config = json.loads((tmp_path / "mulo_m.json").read_text())
    config["sha256"] = {k: v for k, v in config["sha256"].items() if (tmp_path / k).exists()}
    (tmp_path / "mulo_m.json").write_text(json.dumps(config))
    return tmp_path


def sign(folder, file):
    """Make the .json agree with a file that was changed."""
    config = json.loads((folder / "mulo_m.json").read_text())
    config["sha256"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    (folder / "mulo_m.json").write_text(json.dumps(config))


def inputs_of(graph, generator=None, **sizes):
    """Random inputs with gradients of size 0.01, and lr_scale = 1 / lam1."""
    x = {}
    for name, shape in graph.inputs.items():
        x[name] = torch.randn([sizes.get(d, d) for d in shape], generator=generator)
        if name in ("grad", "momentum"):
            x[name] *= 0.01
        if name in ("second_moment", "row", "col"):
            x[name] = (0.01 * x[name]).square()
    x["step"] = torch.tensor(12.0)
    x["lr_scale"] = torch.full_like(x["lr_scale"], 1 / graph.config.lam1)
    x["param"] *= 0.1
    return x


def error(session, graph, x):
    """Of the update, relative to its largest entry, against the eager step in float64."""
    given = session.run(x)["new_param"].double()
    right, *_ = copy.deepcopy(graph).double()(*(v.double() for v in x.values()))
    p = x["param"].double()
    return float(((given - p) - (right - p)).abs().max() / (right - p).abs().max())


# ---------------------------------------------------------------- graphs


@pytest.mark.parametrize("shape", [(5, 7), (1, 9), (1, 1), (6,)], ids=str)
def test_onnx_against_the_oracle(exported, shape):
    """Five steps beside an independent derivation in float64; ties as JAX has them: d0 is last."""
    lo = mulo.load("mulo_m")
    meta = {k: w.numpy() for k, w in lo.named_parameters()}
    session = Session(exported / f"mulo_m.{'vector' if len(shape) == 1 else 'matrix'}.onnx")
    rng = np.random.default_rng(0)
    tensor = oracle.Tensor(rng.standard_normal(shape).astype(np.float32), meta)
    p = torch.tensor(tensor.p, dtype=torch.float32)[None]
    state = {"second_moment": torch.zeros_like(p), "momentum": torch.zeros(1, 3, *shape)}
    state |= {"row": torch.zeros(1, 3, shape[0]), "col": torch.zeros(1, 3, shape[-1])}
    for t in (0, 1, 2, 700, 100_000):
        g = (0.01 * rng.standard_normal(shape)).astype(np.float32)
        x = {"param": p, "grad": torch.tensor(g)[None], "step": torch.tensor(float(t))}
        out = session.run(x | state | {"lr_scale": torch.tensor([1 / lo.config.lam1])})
        tensor.p = p[0].double().numpy()
        update = oracle.small_fc_step(tensor, meta, g, t, 1.0, lo.config.lam2, t_max=500.0)
        p = out.pop("new_param")
        off = np.abs(p[0].double().numpy() - tensor.p).max()
        assert off <= 3e-6 * np.abs(update).max()
        state = {k[4:]: v for k, v in out.items()}


CASES = {
    "wide, constant": (("matrix", dict(b=1, m=2, n=100_001)), 0.01),
    "tall, constant": (("tall", dict(b=1, m=30_000, n=3)), 0.01),
    "many rows, constant": (("tall", dict(b=1, m=3000, n=40)), 0.01),
    "vector, constant": (("vector", dict(b=1, n=300_001)), 0.01),
    "long row, constant": (("matrix", dict(b=1, m=1, n=1_000_001)), 0.01),
    "long vector, constant": (("vector", dict(b=1, n=2_000_001)), 0.01),
    "many small slices, constant": (("tensor", dict(b=1, e=300_000, m=2, n=2)), 0.01),
    "wide, zero": (("matrix", dict(b=1, m=3, n=65_537)), 0.0),
    "huge": (("matrix", dict(b=2, m=6, n=7)), 1e8),
    "tiny": (("matrix", dict(b=2, m=6, n=7)), 1e-12),
}


@pytest.mark.parametrize("name", CASES)
def test_long_sums_and_extreme_gradients(exported, name):
    """Equal entries are the worst case of adding one after another."""
    (kind, sizes), value = CASES[name]
    graph = graphs.make(mulo.load("mulo_m"), kind)
    x = inputs_of(graph, torch.Generator().manual_seed(0), **sizes)
    x["grad"] = torch.full_like(x["grad"], value)
    for k in ("second_moment", "momentum", "row", "col"):
        x[k] = torch.full_like(x[k], value if k == "momentum" else value**2)
    assert error(Session(exported / f"mulo_m.{kind}.onnx"), graph, x) <= 3e-6


@pytest.mark.parametrize("kind", ["matrix", "tall", "tensor"])
def test_blocks_change_nothing(exported, kind):
    """Cut into blocks of any size, also where the last one is shorter than the others."""
    graph, file = graphs.make(mulo.load("mulo_m"), kind), exported / f"mulo_m.{kind}.onnx"
    m, n = (13, 11) if kind == "tall" else (11, 13)
    x = inputs_of(graph, torch.Generator().manual_seed(0), b=2, e=3, m=m, n=n)
    whole = Session(file, block=10**9).run(x)
    for block in (1, 66, 150, 300):
        assert error(Session(file, block=block), graph, x) <= 3e-6
        parts = Session(file, block=block).run(x)
        for k, v in whole.items():
            torch.testing.assert_close(parts[k], v, rtol=0, atol=2e-6 * float(v.abs().max()))


def test_bad_gradients_count_as_zero(exported):
    graph = graphs.make(mulo.load("mulo_m"), "matrix")
    session = Session(exported / "mulo_m.matrix.onnx")
    x = inputs_of(graph, torch.Generator().manual_seed(0), b=1, m=4, n=5)
    x["grad"][0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    given = session.run(x)
    x["grad"][0, 0, :3] = 0
    assert all(torch.equal(given[k], v) for k, v in session.run(x).items())


def test_epsilons_survive_other_optimizers(exported):
    """torch's ONNX optimizer deletes additions of 1e-8 where it can: here it cannot."""
    model = onnxscript.optimizer.optimize(onnx.load(exported / "mulo_m.matrix.onnx"))
    file = exported / "optimized.onnx"
    onnx.save(model, file)
    graph = graphs.make(mulo.load("mulo_m"), "matrix")
    for value in (0.0, 0.01):
        x = inputs_of(graph, torch.Generator().manual_seed(0), b=2, m=4, n=5)
        for k in ("grad", "second_moment", "momentum", "row", "col"):
            x[k] = x[k] * value
            x[k][0, ..., 0] = 0
        assert error(Session(file), graph, x) <= 3e-6
    file.unlink()


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "ts"])
def test_files_carry_the_config_and_no_paths(exported, suffix):
    config = json.loads((exported / "mulo_m.json").read_text())
    del config["sha256"]
    assert len(config["features"].split()) == 39
    for kind in KINDS:
        file = exported / f"mulo_m.{kind}.{suffix}"
        if suffix == "onnx":
            model = onnx.load(file)
            onnx.checker.check_model(model, full_check=True)
            assert model.opset_import[0].version == 20
            assert not model.functions
            text, content = model.metadata_props[0].value, file.read_bytes()
        else:
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
                [text] = [archive.read(k) for k in names if k.endswith("mulo.json")]
                content = b"".join(archive.read(k) for k in names)
        assert json.loads(text) == config
        for word in (b"site-packages", str(ROOT).encode(), b".py\x00", b"lo.py"):
            assert word not in content
        if suffix != "pt2":
            assert file.stat().st_size <= 20_000


@pytest.mark.parametrize(
    ("kind", "options"),
    [("tall", {"eps": "relative"}), ("vector", {"eps": "fan_in", "eps_rms": 0.0})],
)
def test_other_epsilons(tmp_path, kind, options, monkeypatch):
    config = mulo.LOConfig(hidden_size=5, lam1=0.01, spec="paper", hidden_layers=1, **options)
    lo = mulo.SmallFC(config, torch.Generator().manual_seed(0))
    monkeypatch.setattr(graphs, "kinds", lambda config: (kind,))
    monkeypatch.setattr(export, "cases", lambda graph: small_cases(graph))
    assert not export.verify(export.write(lo, tmp_path, "other", ["onnx"]), say=lambda line: None)


def small_cases(graph, cases=export.cases):
    return ((what, x) for what, x in cases(graph) if x[0].numel() < 10_000)


def test_velo_graphs(velo, monkeypatch):
    monkeypatch.setattr(export, "cases", lambda graph: small_cases(graph))
    monkeypatch.setattr(graphs, "kinds", lambda config: VELO)
    lines = []
    assert not export.verify(velo, say=lines.append)
    assert len(lines) == 1 + len(VELO)


def test_velo_in_all_formats(tmp_path, monkeypatch):
    """The shipped one: its LSTM and statistics."""
    monkeypatch.setattr(graphs, "kinds", lambda config: ("stats", "hyper"))
    path = export.write(mulo.load("muvelo_m"), tmp_path, "muvelo_m")
    assert not export.verify(path, say=lambda line: None)


def test_epsilons_are_told(tmp_path):
    told = {}
    for eps in ("reference", "relative", "fan_in"):
        config = mulo.LOConfig(hidden_size=2, eps=eps)
        told[eps] = export.describe(mulo.SmallFC(config), "x")["epsilons"]
    assert told["reference"]["V"] == told["fan_in"]["V"] == 1e-6
    assert [told[k]["times"] for k in told] == ["1", "mean(V), mean(r)", "1/fan_in"]
    assert "vector F_mom" not in export.describe(mulo.load("muvelo_m"), "x")["epsilons"]


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "ts"])
def test_mutated_weights_fail(copied, suffix, monkeypatch):
    """One weight off by a thousandth, in a file that is otherwise in order."""
    monkeypatch.setattr(graphs, "kinds", lambda config: ("vector",))
    monkeypatch.setattr(export, "cases", lambda graph: small_cases(graph))
    assert not export.verify(copied, say=lambda line: None)
    lo = mulo.load("mulo_m")
    lo.w1[0, 0] *= 1.001
    config = json.loads((copied / "mulo_m.json").read_text())
    file = copied / f"mulo_m.vector.{suffix}"
    del config["sha256"]
    file.write_bytes(export.WRITERS[suffix](graphs.make(lo, "vector"), json.dumps(config)))
    [wrong] = export.verify(copied, say=lambda line: None)
    assert "damaged" in wrong
    sign(copied, file.name)
    [wrong] = export.verify(copied, say=lambda line: None)
    assert f"{file} is off by" in wrong


# ---------------------------------------------------------------- files that are not in order


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "ts"])
def test_damaged_files(copied, suffix):
    file = copied / f"mulo_m.vector.{suffix}"
    content = file.read_bytes()
    for wrong in (content[: len(content) // 2], b"", b"not a graph"):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"damaged|not written by export\.py"):
            export.open_graph(file)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="export the optimizer anew"):
        export.open_graph(file)
    assert "no file" in export.verify(copied, say=lambda line: None)[0]


def relabel(file, text):
    """Give an exported file another config."""
    if file.suffix == ".onnx":
        model = onnx.load(file)
        model.metadata_props[0].value = text
        onnx.save(model, file)
        return
    with zipfile.ZipFile(file) as archive:
        content = {k: archive.read(k) for k in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for k, x in content.items():
            archive.writestr(k, text if k.endswith("mulo.json") else x)


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "ts"])
def test_foreign_files_and_other_versions(copied, suffix):
    file = copied / f"mulo_m.vector.{suffix}"
    config = json.loads((copied / "mulo_m.json").read_text())
    relabel(file, json.dumps(config))
    export.open_graph(file)
    for text, message in (
        ("", "was not written by export.py"),
        ('{"a": 1}', "was not written by export.py"),
        ('{"format": "mulo-export", "version": 2}', "has format version 2, this code reads 1"),
    ):
        relabel(file, text)
        with pytest.raises(ValueError, match=re.escape(message)):
            export.open_graph(file)
    if suffix == "ts":
        relabel(file, json.dumps(config | {"torch": "1.0.0"}))
        with pytest.raises(ValueError, match=r"is TorchScript of torch 1\.0\.0, this is"):
            export.open_graph(file)


def test_sidecars_that_are_not_in_order(copied, monkeypatch):
    """Nothing to check, another optimizer's config, digests that are none: all are said."""
    monkeypatch.setattr(export, "cases", lambda graph: small_cases(graph))
    path = copied / "mulo_m.json"
    good = json.loads(path.read_text())

    def wrong(**changes):
        path.write_text(json.dumps(good | changes))
        return " ".join(export.verify(path, say=lambda line: None))

    assert "lists no file of the matrix graph" in wrong()
    assert "does not describe mulo_m.pt" in wrong(features="g")
    for changes in ({"sha256": None}, {"sha256": []}, {"name": 3}):
        with pytest.raises(ValueError, match=r"export (it|the optimizer) anew"):
            wrong(**changes)
    monkeypatch.setattr(graphs, "kinds", lambda config: ("vector",))
    assert wrong() == ""
    shutil.copy(copied / "mulo_m.vector.ts", copied / "mulo_m.vector.pt2")
    path.write_text(json.dumps(good))
    sign(copied, "mulo_m.vector.pt2")
    assert "is damaged or of another format" in export.verify(path, say=lambda line: None)[0]


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


def test_command_line(copied, complaint, monkeypatch):
    monkeypatch.setattr(export, "cases", lambda graph: small_cases(graph))
    assert "lists no file of the matrix graph" in complaint(export, "--verify", copied)
    (copied / "mulo_m.vector.ts").write_bytes(b"")
    assert "vector.ts is damaged" in complaint(export, "--verify", copied)
    assert "no learned optimizer" in complaint(export, "nothing_like_it")
    assert "give the .json that export.py wrote" in complaint(export, "--verify", "nowhere")
    assert "choose another --out" in complaint(export, "mulo_m", "--out", copied / "mulo_m.json")
    assert "give a learned optimizer to export" in complaint(export)


# ---------------------------------------------------------------- inputs


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
    with pytest.raises(ValueError, match="use 'cpu' or 'cuda'"):
        Session(exported / "mulo_m.vector.onnx", device="mps")
    p = nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="a parameter is on meta, the optimizer on 'cpu'"):
        OrtMuLO([p], exported).step()


# ---------------------------------------------------------------- the optimizer in onnxruntime


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


def test_ort_is_mulo_for_velo(velo):
    models, opts = pair(velo, num_steps=40)
    steps(models, opts, 12)


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


def group_like(opt):
    return [dict(group) for group in opt.param_groups]


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


# ---------------------------------------------------------------- other runtimes


@functools.cache
def eager_loss():
    return desk.train(lambda groups: mulo.MuLO(groups, mulo.load("mulo_m")))


def said(output):
    return float(re.findall(r"^loss (\S+)$", output, re.M)[0])


class Calls(torch.optim.Optimizer):
    """A step by calls of exported graphs, one for each tensor."""

    def __init__(self, groups, folder, suffix):
        kinds = ("matrix", "tall", "vector")
        self.graphs = {k: export.open_graph(folder / f"mulo_m.{k}.{suffix}") for k in kinds}
        self.t = 0
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            [p] = group["params"]
            kind = "vector" if p.ndim == 1 else "tall" if p.shape[0] >= p.shape[1] else "matrix"
            if p not in self.state:
                shapes = [p.shape, (3, *p.shape), (3, p.shape[0]), (3, p.shape[-1])]
                self.state[p] = [torch.zeros(1, *s) for s in shapes]
            t, rate = torch.tensor(float(self.t)), torch.tensor([group["scale"]])
            new = self.graphs[kind](p[None], p.grad[None], *self.state[p], t, rate)
            p.copy_(new[0][0])
            self.state[p] = list(new[1:])
        self.t += 1


@pytest.mark.parametrize("runtime", ["onnx", "pt2", "ts", "OrtMuLO"])
def test_same_training_in_python(exported, runtime):
    make = functools.partial(Calls, folder=exported, suffix=runtime)
    if runtime == "OrtMuLO":
        make = functools.partial(OrtMuLO, exported=exported)
    loss = desk.train(make)
    assert eager_loss() < 0.7
    assert loss == pytest.approx(eager_loss(), rel=1e-4)
    assert f"the same loss, {loss:.4f}," in (ROOT / "examples" / "README.md").read_text()


def test_same_training_without_torch(exported):
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv.pop(0); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run(sys.executable, "-c", code, "examples/train.py", exported)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == pytest.approx(eager_loss(), rel=1e-4)


JS = ROOT / "examples" / "js"


@pytest.mark.skipif(
    not shutil.which("node") or not (JS / "node_modules" / "onnxruntime-node").exists(),
    reason="needs Node.js and `npm ci` in examples/js",
)
def test_same_training_in_node(exported):
    done = run("node", JS / "train.mjs", exported)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == pytest.approx(eager_loss(), rel=1e-4)


class Site(http.server.SimpleHTTPRequestHandler):
    """The repository, with an exported folder in it."""

    folder: Path

    def translate_path(self, path):
        name = path.split("?")[0].lstrip("/")
        if name.startswith("exported/"):
            return str(self.folder / name.removeprefix("exported/"))
        return str(ROOT / name) if name != "examples/js/" else str(JS / "index.html")

    def log_message(self, *args):
        pass


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(
    not CHROMIUM or not (JS / "node_modules" / "onnxruntime-web").exists(),
    reason="needs Chromium and `npm ci` in examples/js",
)
def test_same_training_in_a_browser(exported, tmp_path):
    site = type("Here", (Site,), {"folder": exported})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=600000"]
        flags += ["--window-size=820,760", f"--screenshot={tmp_path / 'page.png'}", "--dump-dom"]
        url = f"http://127.0.0.1:{server.server_port}/examples/js/?folder=/exported"
        done = run(CHROMIUM, *flags, url, timeout=300)
        server.shutdown()
    [mu, adam] = re.findall(r"done: μLO loss ([\d.]+), Adam loss ([\d.]+)", done.stdout)[0]
    assert float(mu) == pytest.approx(eager_loss(), rel=1e-4)
    assert 0.1 < float(adam) < 2
    assert (tmp_path / "page.png").stat().st_size > 20_000  # both curves are in it


@pytest.mark.skipif(
    not shutil.which("cmake") or not shutil.which("g++"), reason="needs cmake and g++"
)
def test_same_training_in_cpp(exported, tmp_path):
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    made = run("cmake", "-S", "examples/cpp", "-B", tmp_path, "-DCMAKE_BUILD_TYPE=Release", prefix)
    assert made.returncode == 0, made.stderr
    made = run("cmake", "--build", tmp_path)
    assert made.returncode == 0, made.stderr + made.stdout
    done = run(tmp_path / "train", exported)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == pytest.approx(eager_loss(), rel=1e-4)
