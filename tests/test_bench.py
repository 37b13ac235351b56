"""bench.py measures what it says: turns, minima, and memory."""

import pytest
import torch

import bench


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


def test_contestants_all_run_and_folded_needs_little_memory():
    runs = bench.contestants_for([(256, 256), (256,)], hidden=4, with_literal=True)
    assert len(runs) == 4
    for run in runs.values():
        run()
    size = 256 * 257
    folded, literal = (
        bench.extra_bytes(runs[f"μLO {k}, H=4"]) / size for k in ("folded", "literal")
    )
    assert literal > 300
    assert folded < literal / 2  # at this size one block is the whole tensor
