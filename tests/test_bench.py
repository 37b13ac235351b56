"""bench.py: the contestants, and the tables it prints."""

import re
import sys
from pathlib import Path

import pytest
import torch

import mulo
from mulo import bench


@pytest.mark.parametrize("net", ["small_fc", "velo"])
def test_comparison(net):
    """All contestants run; the literal step only where it takes less than seconds."""
    config = mulo.LOConfig(net=net, hidden_size=4)
    cases = {"small": ([(256, 256)], config), "large": ([(1025, 1024)], config)}
    small, large = bench.compare(cases, 1, "cpu").values()
    assert "literal" in small.keys() - large.keys()
    ratio = small["kernel"] / small["AdamW foreach"]
    assert small["kernel / AdamW foreach"] == pytest.approx(ratio)


def test_sections(monkeypatch, capsys, complaint):
    """A command prints a section like those of BENCHMARKS.md, which all have a command."""
    rows = {"one": {"ns": 12345.6, "x": 0.1234}, "two": {"ns": 0.001}}
    monkeypatch.setitem(bench.COMMANDS, "step", lambda *a: bench.print_table("a race", rows))
    monkeypatch.setattr(sys, "argv", ["bench.py", "step"])
    bench.main()
    printed = capsys.readouterr().out
    assert printed.startswith("## python bench.py step\n\n")
    assert torch.__version__ in printed
    table = "| | ns | x |\n|---|---:|---:|\n| one | 12,346 | 0.123 |\n| two | 0.001 |  |\n"
    assert f"**a race**\n\n{table}" in printed
    page = (Path(bench.__file__).parent / "BENCHMARKS.md").read_text()
    assert set(re.findall(r"^## python bench.py (\w+)", page, re.M)) <= set(bench.COMMANDS)
    refusal = complaint(bench, "metatrain", "--device", "cuda")
    assert "metatrain is measured on the CPU only" in refusal
