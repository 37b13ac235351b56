"""bench.py: turns, minima, memory, and the page it writes."""

import pytest
import torch

import mulo
from mulo import bench


def test_extra_bytes():
    """The peak of temporaries counts, not their sum."""
    x = torch.ones(1000, 1000)
    assert bench.extra_bytes(lambda: x.add_(1)) < 100
    assert bench.extra_bytes(lambda: x.add_(x * 2)) == pytest.approx(4e6, abs=100)
    assert bench.extra_bytes(lambda: x.add_((x * 2) * 3)) == pytest.approx(8e6, abs=100)
    assert bench.extra_bytes(lambda: [x.add_(x * 2) for _ in range(3)]) == pytest.approx(
        4e6, abs=100
    )


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
    times, memory = bench.compare(cases, 1, "cpu")
    assert times.head[-1] == "kernel / AdamW foreach"
    small, large = (dict(zip(times.head, row, strict=True)) for row in times.rows.values())
    assert large["literal"] == "" != small["literal"]
    ratio = small["kernel"] / small["AdamW foreach"]
    assert small["kernel / AdamW foreach"] == pytest.approx(ratio)
    assert "small: 65,536 in 1" in memory.rows
    small = dict(zip(memory.head, memory.rows["small: 65,536 in 1"], strict=True))
    assert small["kernel"] < small["folded"] < small["literal"]
    assert small["AdamW foreach"] == pytest.approx(4, abs=0.1)


def test_sections_are_kept_apart(tmp_path):
    """A section that is measured again replaces itself, and only itself."""
    page = tmp_path / "page.md"
    table = bench.Table("a race", ["ns", "x"], {"one": [12345.6, 0.1234], "two": [0.001, ""]})
    bench.keep("step", [table], page=page)
    bench.keep("many", [table], page=page)
    table.rows = {"one": [2.0, 3.0]}
    bench.keep("step", [table], page=page)
    text = page.read_text()
    assert text.startswith(bench.HEAD)
    assert text.count("| two | < 0.01 |  |") == 1
    assert text.count("| one | 12,346 | 0.123 |") == 1
    assert text.index("| one | 2 | 3 |") < text.index("## python bench.py many")
    assert torch.__version__ in text


def test_the_page_has_only_sections_of_commands():
    page = bench.PAGE.read_text()
    assert page.startswith(bench.HEAD)
    titles = [x for x in page.splitlines() if x.startswith("## ")]
    assert {x.split()[3] for x in titles} <= set(bench.COMMANDS)
