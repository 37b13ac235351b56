"""Exported files: their errors against float64, their contents, and files that are refused."""

import hashlib
import io
import json
import math
import warnings
import zipfile
from functools import cache
from pathlib import Path

import onnx
import onnxruntime
import onnxscript.optimizer
import pytest
import torch

import mulo
from mulo import export
from mulo.serving import Session

ROOT = Path(__file__).parents[1]
KINDS = ("tensor", "vector")


@pytest.fixture
def small(monkeypatch):
    """Check on small sizes only."""
    sizes = {k: [x for x in v if len(x) <= 10] for k, v in export.CHECKED.items()}
    monkeypatch.setattr(export, "CHECKED", sizes)


@cache
def open_graph(folder, kind, suffix):
    name = f"mulo_m.{suffix}" if suffix == "ts" else f"mulo_m.{kind}.{suffix}"
    with warnings.catch_warnings(action="ignore"):
        return export.open_graph(name, (folder / name).read_bytes(), kind)


def test_every_file_is_written_and_checked(exported):
    """By the README's command, which prints the error of each."""
    _, *lines, last = (exported / "said.txt").read_text().splitlines()
    assert {tuple(line.split()[:2]) for line in lines} == {
        (f"mulo_m.{k}.{x}", k) for k in KINDS for x in ("onnx", "pt2")
    } | {("mulo_m.ts", k) for k in KINDS}
    assert all(0 < float(line.split()[3]) <= 3e-6 for line in lines)
    assert last.endswith("every file agrees with the float64 step within 3e-06.")


def test_files_carry_the_config_and_no_paths(exported):
    config = json.loads((exported / "mulo_m.json").read_text())
    assert config.pop("contract") == export.CONTRACT
    files = list(config.pop("sha256"))
    hidden = {"init variance": -1, "output multiplier": 0, "update": -1}
    assert (config["mup"]["hidden"], len(config["features"])) == (hidden, 39)
    assert files[0] == "mulo_m.pt"
    for file in (exported / name for name in files[1:]):
        if file.suffix == ".onnx":
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
        for word in (b"site-packages", str(ROOT).encode(), b".py\x00", b"mulo.py"):
            assert word not in content
        assert file.suffix == ".pt2" or file.stat().st_size <= 32_000


def test_the_page_has_the_contract():
    """examples/README.md has every rule of CONTRACT."""
    page = (ROOT / "examples" / "README.md").read_text().replace("`", "").split()
    for sentence in (x for rules in export.CONTRACT.values() for x in rules):
        assert " ".join(sentence.split()) in " ".join(page), sentence


# Against float64


def error(session, lo, kind, x):
    """Of the update, relative to its largest entry, against the graph in float64."""
    graph = getattr(export.Graphs(lo, kind).double(), kind)
    p, right = x["p"].double(), graph(*(v.double() for v in x.values()))[0]
    return float((session.run(x)["new_p"] - right).abs().max() / (right - p).abs().max())


LONG = {
    "long row, constant": (dict(b=1, e=1, m=1, n=300_001), 0.01),
    "many small slices, constant": (dict(b=1, e=60_000, m=2, n=2), 0.01),
    "vector, constant": (dict(b=1, n=300_001), 0.01),
    "huge": (dict(b=2, e=1, m=6, n=7), 1e8),
    "tiny": (dict(b=2, e=1, m=6, n=7), 1e-12),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sums_and_extreme_gradients(exported, name):
    """Equal entries are the worst case of adding one after another."""
    sizes, value = LONG[name]
    lo, kind = mulo.load("mulo_m"), "tensor" if "m" in sizes else "vector"
    x = export.random_inputs(lo.config, kind, **sizes)
    for k in ("g", "M", "V", "r", "c"):
        x[k] = torch.full_like(x[k], value if k in ("g", "M") else value**2)
    assert error(Session(exported / f"mulo_m.{kind}.onnx"), lo, kind, x) <= 3e-6


SIZE_OPS = {"Shape", "Size", "Range", "ConstantOfShape"}


def test_graphs_suit_a_gpu(exported, velo, tmp_path):
    """No control flow; fixed sizes leave nothing to compute from them; and each state may be
    overwritten, because only the two nodes that compute its new value read it."""
    for file in (*exported.glob("*.onnx"), *velo.glob("*.onnx")):
        nodes = onnx.load(file).graph.node
        free = {node.op_type for node in nodes}
        assert not free & {"Loop", "If", "Scan", "SequenceEmpty"}
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / file.name)
        for name, size in {"b": 2, "e": 3, "m": 40, "n": 50, "T": 4}.items():
            options.add_free_dimension_override_by_name(name, size)
        onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
        fixed = {node.op_type for node in onnx.load(tmp_path / file.name).graph.node}
        assert not fixed & SIZE_OPS, file
        if "hyper" in file.name:
            continue
        assert free & SIZE_OPS  # negative control
        for k in "MVrc":
            first, last = (x for x in nodes if k in x.input and x.op_type != "Shape")
            assert (first.op_type, last.op_type) == ("Sub", "Add")
            assert list(last.output) == [f"new_{k}"]


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "ts"])
def test_bad_inputs_give_what_the_contract_says(exported, suffix):
    """m > n: all NaN. Bad entries of g count as 0; one of p makes its new_p NaN, nothing else."""
    run, config = open_graph(exported, "tensor", suffix), mulo.load("mulo_m").config
    for m, right in ((5, False), (4, True), (3, True)):
        new = run(*export.random_inputs(config, "tensor", b=2, e=1, m=m, n=4).values())[0]
        assert new.isfinite().all() if right else new.isnan().all()
    x = export.random_inputs(config, "tensor", b=2, e=1, m=4, n=5)
    x["g"][0, 0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    given = run(*x.values())
    x["g"][0, 0, 0, :3] = 0
    assert all(torch.equal(a, b) for a, b in zip(given, run(*x.values()), strict=True))
    x["p"][0, 0, 1, 1] = math.nan
    new_p, *state = run(*x.values())
    assert new_p[0].isnan().all()
    assert torch.equal(new_p[1], given[0][1])
    assert all(torch.equal(a, b) for a, b in zip(state, given[1:], strict=True))


def test_epsilons_survive_other_optimizers(exported):
    """torch's ONNX optimizer deletes additions of 1e-8 where it can: here it cannot."""
    model = onnxscript.optimizer.optimize(onnx.load(exported / "mulo_m.vector.onnx"))
    session, lo = Session(model.SerializeToString()), mulo.load("mulo_m")
    for value in (0.0, 0.01):
        x = export.random_inputs(lo.config, "vector", b=2, n=5)
        for k in ("g", "M", "V", "r", "c"):
            x[k] = x[k] * value
            x[k][0, ..., 0] = 0
        assert error(session, lo, "vector", x) <= 3e-6


@pytest.mark.parametrize("eps", ["reference", "relative", "fan_in"])
def test_other_epsilons(eps, small):
    """In TorchScript, which is quick to make; only fan_in has an input of its own."""
    config = mulo.LOConfig(hidden_size=5, hidden_layers=1, lam1=0.01, eps=eps, spec="paper")
    lo = mulo.SmallFC(config, torch.Generator().manual_seed(0))
    with warnings.catch_warnings(action="ignore"):
        traced = torch.jit.load(io.BytesIO(export.to_torchscript(lo, "")))
    for kind in KINDS:
        assert ("eps_scale" in export.shapes(config, kind)[0]) == (eps == "fan_in")
        errors = export.compare(lo, kind, {"ts": getattr(traced, kind)})
        assert errors["ts"][0] <= export.TOLERANCE


def test_velo(velo, small, capsys):
    """All graphs, as ONNX and TorchScript."""
    export.verify(velo / "velo.json")
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * 3


def test_an_error_in_any_output_counts(small):
    lo = mulo.load("mulo_m")
    right = export.Graphs(lo).vector
    wrong = {
        f"x {k}": lambda *x, k=k: (*right(*x)[:-1], right(*x)[-1] * k) for k in (1.001, math.nan)
    }
    errors = export.compare(lo, "vector", wrong)
    assert errors["x 1.001"][0] == pytest.approx(1e-3, rel=0.01)
    assert errors["x nan"][0] == math.inf


# Files that are not in order


@pytest.mark.parametrize("suffix", ["onnx", "pt2", "ts"])
@torch.no_grad()
def test_mutated_weights_fail(copied, suffix, small):
    """One weight off by a thousandth, in a file that is otherwise in order."""
    lo, path = mulo.load("mulo_m"), copied / "mulo_m.json"
    lo.w2.view(-1)[lo.w2.abs().argmax()] *= 1.001
    with warnings.catch_warnings(action="ignore"):
        if suffix == "ts":
            file, content = copied / "mulo_m.ts", export.to_torchscript(lo, "")
        else:
            file, program = copied / f"mulo_m.vector.{suffix}", export.to_program(lo, "vector")
            if suffix == "onnx":
                content = export.to_onnx(program, lo, "vector", "")
            else:
                content = export.to_pt2(program, "")
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file.name} is damaged"):
        export.verify(path)
    config = json.loads(path.read_text())
    config["sha256"][file.name] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{file.name}: vector is off by"):
        export.verify(path)


def test_command_line(copied, small, complaint):
    path = copied / "mulo_m.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"features": ["g"]}))
    assert "does not describe mulo_m.pt" in complaint(export, path)
    path.write_text(json.dumps(good | {"version": 1}))
    assert "is not of mulo-export version 3: export it again" in complaint(export, path)
    for text in ("[]", json.dumps(good)[:-9]):
        path.write_text(text)
        assert "mulo_m.json is damaged: export it again" in complaint(export, path)
    path.write_text(json.dumps(good))
    (copied / "mulo_m.vector.pt2").unlink()
    assert "mulo_m.vector.pt2 is missing beside" in complaint(export, path)
    assert "File exists" in complaint(export, "mulo_m", "--out", path)
