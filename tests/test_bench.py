"""bench.py measures what it says: turns, minima, memory; and writes it down."""

import json

import pytest
import torch

from mulo import bench


def test_extra_bytes():
    """The peak of temporaries counts, not their sum."""
    x = torch.ones(1000, 1000)
    assert bench.extra_bytes(lambda: x.add_(1)) < 100
    assert bench.extra_bytes(lambda: x.add_(x * 2)) == pytest.approx(4_000_000, abs=100)
    assert bench.extra_bytes(lambda: x.add_((x * 2) * 3)) == pytest.approx(8_000_000, abs=100)
    assert bench.extra_bytes(lambda: [x.add_(x * 2) for _ in range(3)]) == pytest.approx(
        4e6, abs=100
    )


def test_race_takes_turns():
    turns = []
    best = bench.race({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, repeats=3)
    assert "".join(turns) == "ab" * 5
    assert all(0 <= t < 1 for t in best.values())


def test_contestants_all_run_and_kernels_need_little_memory():
    names = ("kernel", "folded", "literal")
    runs = bench.contestants_for([(1024, 1024)], 4, backends=names)
    assert {*(f"μLO {k}, H=4" for k in names), "AdamW foreach", "AdamW fused"} <= set(runs)
    for run in runs.values():
        run()
    folded, literal = (bench.extra_bytes(runs[f"μLO {k}, H=4"]) / 2**20 for k in names[1:])
    kernel = bench.extra_resident(runs["μLO kernel, H=4"]) / 2**20
    assert literal > 300
    assert folded < literal / 2
    assert kernel < 2  # the figure itself is in BENCHMARKS.md; pages and caches add noise here


def test_sections_are_kept_apart(tmp_path):
    """A section that is measured again replaces itself, and only itself."""
    table = bench.Table("a race", ["ns", "x"], {"one": [12345.6, 0.1234], "two": [1.0, ""]}, ["!"])
    bench.keep("step", [table], folder=tmp_path)
    bench.keep("many", [table], folder=tmp_path)
    table.rows = {"one": [2.0, 3.0]}
    bench.keep("step", [table], folder=tmp_path)
    kept = json.loads((tmp_path / "results" / "bench.json").read_text())
    assert list(kept) == ["step", "many"]
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert text.count("| two |") == 1
    assert "| one | 12,346 | 0.123 |" in text
    assert text.count("| one | 2 | 3 |") == 1
    assert torch.__version__ in text


def test_benchmarks_are_what_is_kept():
    kept = json.loads((bench.FOLDER / "results" / "bench.json").read_text())
    assert bench.written(kept) == (bench.FOLDER / "BENCHMARKS.md").read_text()


def test_many_and_roofline(monkeypatch):
    """The tables, from a race that nobody runs."""
    seconds = {"copy": 2 * 64 * 2**22 / 1e10, "product": 2 * 1024**3 / 1e11}
    monkeypatch.setattr(bench, "race", lambda runs, *_: {k: seconds.get(k, 1e-3) for k in runs})
    monkeypatch.setattr(bench, "extra_bytes", lambda run: 0)
    monkeypatch.setattr(bench.mulo.MuLO, "step", lambda self: None)
    vit, resnet = bench.bench_many(1, "cpu")
    assert "in 147 tensor(s)" in vit.title
    assert vit.rows["μLO kernel, H=4"][1] == 1
    assert "Bar" in vit.notes[-1]
    assert "resnet" in resnet.title
    [table] = bench.bench_roofline(1, "cpu")
    assert table.rows["H=4"][2] == pytest.approx(7.2)  # 72 bytes at 10 GB/s
    assert table.rows["H=32"][2] == pytest.approx(32.6, rel=0.02)  # 3,260 operations at 100 GFLOP/s


def test_bars():
    assert bench.bar("at most 2x", 1.5, 2).endswith("1.50, met.")
    assert bench.bar("at most 2x", 2.5, 2).endswith("2.50, MISSED.")
    assert bench.bar("at least 2x", 1.5, least=2).endswith("1.50, MISSED.")


def test_no_gpu_kernel_spills():
    """In the stored section, which `python bench.py gpu` made: three architectures, four nets."""
    stored = json.loads((bench.FOLDER / "results" / "bench.json").read_text())["gpu"]["tables"]
    assert len(stored) == 4
    for table in stored:
        spills = table["head"].index("spills")
        assert {name.split(":")[0] for name in table["rows"]} == {"sm_80", "sm_86", "sm_90"}
        assert all(row[spills] == 0 for row in table["rows"].values())
