"""The paper's grids, tuning, and where its results are kept."""

import math

import pytest
import torch

import baselines
import tasks
import training

TASK = tasks.get("fashion8_mlp_w16_d3", batch_size=16)


def test_grids_are_the_papers():
    assert len(baselines.grid("adamw")) == 504
    assert len(baselines.grid("muadam")) == 512
    rates = {k: [f"{lr:.2e}" for lr in v["lr"]] for k, v in baselines.GRIDS.items()}
    for lr in ("1.00e-01", "4.92e-02", "1.19e-02", "7.02e-04", "1.00e-05"):
        assert lr in rates["adamw"]
    for lr in ("1.00e-06", "1.56e-06", "8.62e-05", "4.42e-02", "1.08e-01", "1.00e+00"):
        assert lr in rates["muadam"]


def test_tuning_sorts_by_final_loss_and_survives_divergence():
    found = baselines.tune("adamw", TASK, 20, [0, 1], fixed=baselines.USUAL, chunk=10)
    losses = [c["loss"] for c in found]
    assert len(found) == 14
    assert losses == sorted(losses)
    assert 1e-3 < found[0]["lr"] < 0.1
    values = {k: torch.tensor([found[0][k]] * 2) for k in baselines.FIELDS}
    task = training.with_rules(TASK, False)
    again = training.train(task, baselines.adam(values), 20, [0, 1])
    assert float(training.final_loss(again).mean()) == pytest.approx(losses[0], rel=1e-4)


def test_nan_comes_last(monkeypatch):
    monkeypatch.setattr(training, "train", lambda *a, copies, **k: torch.tensor([[math.nan, 1, 2]]))
    monkeypatch.setitem(baselines.GRIDS, "adamw", {"lr": [0.1, 0.2, 0.3]})
    found = baselines.tune("adamw", TASK, 1, [0], fixed=baselines.USUAL)
    assert [c["lr"] for c in found] == [0.2, 0.3, 0.1]


def test_what_was_found_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    assert baselines.best("adamw", "fashion8_mlp", 500) is None
    assert baselines.best("muadam", "lm", 1000)["lr"] == 0.1077
    entry = {"lr": 0.5, "b1": 0.9, "b2": 0.99, "weight_decay": 0.0, "loss": 1.0}
    baselines.remember("muadam", "lm", 1000, "cosine", entry)
    baselines.remember("adamw", "lm", 1000, "cosine", entry | {"lr": 0.25})
    assert baselines.best("muadam", "lm", 1000, "cosine") == entry
    assert baselines.best("adamw", "lm", 1000, "cosine")["lr"] == 0.25
    assert baselines.best("muadam", "lm", 1000)["lr"] == 0.1077


def test_schedules():
    cosine = baselines.schedule_of("cosine", 100)
    assert cosine(0) == pytest.approx(1)
    assert cosine(50) == pytest.approx(0.55)
    assert cosine(100) == pytest.approx(0.1)
    assert baselines.schedule_of("constant", 100) is None
    with pytest.raises(ValueError, match="use constant or cosine"):
        baselines.schedule_of("linear", 100)


def test_shipped_values_are_of_the_full_grid():
    for which, size in (("adamw", 504), ("muadam", 512)):
        found = baselines.best(which, "fashion8_mlp", 500)
        assert (found["configurations"], found["width"]) == (size, 64)
