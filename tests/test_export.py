"""Exported files: what is in them, and everything that can be wrong with them."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import onnx
import pytest
from ahead import VELO
from exported_files import sign, small_cases

import export
import graphs
import mulo

ROOT = Path(__file__).parents[1]

KINDS = ("matrix", "tall", "tensor", "vector", "net")


def test_every_file_is_written_and_checked(exported):
    """By the README's command, which says how far each is off."""
    _, *lines, last = (exported / "said.txt").read_text().splitlines()
    files = {f"mulo_m.{kind}.{suffix}" for kind in KINDS for suffix in export.WRITERS}
    assert {line.split()[0] for line in lines} == files
    assert all(0 < float(line.split()[2]) <= 3e-6 for line in lines)
    assert last.endswith("every file agrees with the eager float64 step within 3e-06.")


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


@pytest.mark.parametrize(("name", "kind"), [("relative", "tall"), ("fan_in", "vector")])
def test_other_epsilons(epsilons, name, kind, monkeypatch):
    monkeypatch.setattr(graphs, "kinds", lambda config: (kind,))
    monkeypatch.setattr(export, "cases", small_cases)
    assert not export.verify(epsilons / f"{name}.json", say=lambda line: None)


def test_velo_graphs(velo, monkeypatch):
    monkeypatch.setattr(export, "cases", small_cases)
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
    monkeypatch.setattr(export, "cases", small_cases)
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


# Files that are not in order


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
    monkeypatch.setattr(export, "cases", small_cases)
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


def test_command_line(copied, complaint, monkeypatch):
    monkeypatch.setattr(export, "cases", small_cases)
    assert "lists no file of the matrix graph" in complaint(export, "--verify", copied)
    (copied / "mulo_m.vector.ts").write_bytes(b"")
    assert "vector.ts is damaged" in complaint(export, "--verify", copied)
    assert "no learned optimizer" in complaint(export, "nothing_like_it")
    assert "give the .json that export.py wrote" in complaint(export, "--verify", "nowhere")
    assert "choose another --out" in complaint(export, "mulo_m", "--out", copied / "mulo_m.json")
    assert "give a learned optimizer to export" in complaint(export)
