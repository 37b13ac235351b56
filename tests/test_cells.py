"""Trained nets are kept, and found again; contenders by name."""

import math

import pytest
import torch

import baselines
import cells
import metatrain
import mulo
import stacked
import tasks

TASK = tasks.get("fashion8_mlp_w8_d3", batch_size=8)


@pytest.fixture
def run_folder(tmp_path):
    """The folder of a meta-training run, with an untrained optimizer in it."""
    r = metatrain.recipe("lo_m", seed=3)
    (tmp_path / "lo_m_seed3").mkdir()
    mulo.save(metatrain.new_lo(r), tmp_path / "lo_m_seed3" / "lo.pt", recipe=vars(r))
    return tmp_path / "lo_m_seed3"


def test_contenders(run_folder):
    assert cells.contender("muadam") == cells.Contender("muadam", True)
    assert cells.contender("adamw").mup is False
    shipped, run = cells.contender("mulo_m"), cells.contender(str(run_folder))
    assert (shipped.name, shipped.mup) == ("mulo_m", True)
    assert (run.name, run.mup) == ("lo_m_seed3", False)
    with pytest.raises(FileNotFoundError, match="no learned optimizer 'sgd'"):
        cells.contender("sgd")


def test_finished_cells_are_not_run_again(tmp_path, monkeypatch, run_folder):
    path, who = tmp_path / "losses.csv", cells.contender(str(run_folder))
    table = cells.Cells(path)
    first = table.get(who, TASK, 60, "constant", [0, 1])
    assert first.shape == (50, 2)
    expected = stacked.train(stacked.with_rules(TASK, False), who.lo, 60, [0, 1])
    torch.testing.assert_close(first[0], expected[:2].mean(0), rtol=0, atol=6e-5)
    torch.testing.assert_close(first[-1], expected[-1:].mean(0), rtol=0, atol=6e-5)

    trained, train = [], stacked.train
    monkeypatch.setattr(stacked, "train", lambda *a, **k: (trained.append(a[3]), train(*a, **k))[1])
    again = cells.Cells(path)
    assert torch.equal(again.get(who, TASK, 60, "constant", [1, 0]), first.flip(1))
    assert trained == []
    again.get(who, TASK, 60, "constant", [0, 1, 2])
    assert trained == [[2]]
    again.get(who, TASK, 60, "cosine", [0])
    assert trained == [[2], [0]]


def test_optimizers_of_one_name_are_told_apart(tmp_path, run_folder):
    """A retrained one, or another batch size, is another cell."""
    table, who = cells.Cells(tmp_path / "losses.csv"), cells.contender(str(run_folder))
    before = table.get(who, TASK, 5, "constant", [0])
    for w in who.lo.parameters():
        w.add_(0.1)
    assert not torch.equal(table.get(who, TASK, 5, "constant", [0]), before)
    larger = tasks.get("fashion8_mlp_w8_d3", batch_size=16)
    table.get(who, larger, 5, "constant", [0])
    assert len(table.rows) == 3


def test_divergence_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    huge = {"lr": 1e30, "b1": 0.9, "b2": 0.999, "weight_decay": 0.0, "loss": 9.0}
    baselines.remember("adamw", "fashion8_mlp", 500, "constant", huge)
    table = cells.Cells(tmp_path / "losses.csv")
    losses = table.get(cells.contender("adamw"), TASK, 10, "constant", [0])
    assert math.isnan(losses[-1, 0])
    assert math.isnan(cells.Cells(tmp_path / "losses.csv").get(
        cells.contender("adamw"), TASK, 10, "constant", [0])[-1, 0])  # fmt: skip


def test_a_baseline_that_was_not_tuned_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    table = cells.Cells(tmp_path / "losses.csv")
    with pytest.raises(ValueError, match=r"evaluate\.py tune fashion8_mlp --steps 10 --sch"):
        table.get(cells.contender("muadam"), TASK, 10, "cosine", [0])
