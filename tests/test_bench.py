"""bench.py: turns, minima, memory, and the tables it prints."""

import re
import sys
from pathlib import Path

import pytest
import torch

import mulo
from mulo import bench


def test_extra_bytes():
    """The peak of temporaries counts, not their sum."""
    x = torch.ones(1000, 1000)
    assert bench.extra_bytes(lambda: x.add_(1)) < 100
    assert bench.extra_bytes(lambda: x.add_((x * 2) * 3)) == pytest.approx(8e6, abs=100)
    three = bench.extra_bytes(lambda: [x.add_(x * 2) for _ in range(3)])
    assert three == pytest.approx(4e6, abs=100)


def test_race_takes_turns():
    turns = []
    best = bench.race({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, repeats=3)
    assert "".join(turns) == "ab" * 5
    assert all(0 <= t < 1 for t in best.values())


@pytest.mark.parametrize("net", ["small_fc", "velo"])
def test_comparison(net):
    """All contestants run; the literal step only where it takes less than seconds."""
    config = mulo.LOConfig(net=net, hidden_size=4)
    cases = {"small": ([(256, 256)], config), "large": ([(1025, 1024)], config)}
    times, memory = bench.compare(cases, 1, "cpu").values()
    small, large = times.values()
    assert "literal" in small.keys() - large.keys()
    ratio = small["kernel"] / small["AdamW foreach"]
    assert small["kernel / AdamW foreach"] == pytest.approx(ratio)
    small = memory["small: 65,536 in 1"]
    assert small["kernel"] < small["folded"] < small["literal"]
    assert small["AdamW foreach"] == pytest.approx(4, abs=0.1)


def test_sections(monkeypatch, capsys, complaint):
    """A command prints a section like those of BENCHMARKS.md, which all have a command."""
    rows = {"one": {"ns": 12345.6, "x": 0.1234}, "two": {"ns": 0.001}}
    monkeypatch.setitem(bench.COMMANDS, "step", lambda repeats, device: {"a race": rows})
    monkeypatch.setattr(sys, "argv", ["bench.py", "step"])
    bench.main()
    printed = capsys.readouterr().out
    assert printed.startswith("## python bench.py step\n\n")
    assert torch.__version__ in printed
    table = "| | ns | x |\n|---|---:|---:|\n| one | 12,346 | 0.123 |\n| two | < 0.01 |  |\n"
    assert f"**a race**\n\n{table}" in printed
    page = (Path(bench.__file__).parent / "BENCHMARKS.md").read_text()
    assert set(re.findall(r"^## python bench.py (\w+)", page, re.M)) <= set(bench.COMMANDS)
    assert "metatrain is measured on the CPU only" in complaint(
        bench, "metatrain", "--device", "cuda"
    )
    assert "'0' must be an integer of 1 or more" in complaint(bench, "step", "--repeats", 0)
