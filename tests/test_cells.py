"""Trained nets are kept, and found again; contenders by name."""

import dataclasses
import math

import pytest
import torch

import baselines
import cells
import metatrain
import mulo
import roles
import tasks
import training

TASK = "fashion8_mlp_w8_d3"


def job(who, steps, seeds, schedule="constant"):
    return cells.Job(who, TASK, steps, schedule, tuple(seeds))


@pytest.fixture
def run_folder(tmp_path):
    """The folder of a meta-training run, with an untrained optimizer in it."""
    r = metatrain.recipe("lo_m", seed=3)
    (tmp_path / "lo_m_seed3").mkdir()
    mulo.save(metatrain.new_lo(r), tmp_path / "lo_m_seed3" / "lo.pt", recipe=vars(r))
    return tmp_path / "lo_m_seed3"


def test_contenders(run_folder):
    assert cells.contender("muadam") == cells.Contender("muadam", roles.ALL)
    assert cells.contender("adamw").rules == ()
    shipped, run = cells.contender("mulo_m"), cells.contender(str(run_folder))
    assert (shipped.name, shipped.rules) == ("mulo_m", roles.ALL)
    assert (run.name, run.rules) == ("lo_m_seed3", ())
    with pytest.raises(FileNotFoundError, match="no learned optimizer 'sgd'"):
        cells.contender("sgd")


def test_finished_cells_are_not_run_again(tmp_path, monkeypatch, run_folder):
    who = cells.contender(str(run_folder))
    table = cells.Cells(tmp_path)
    first = table.losses(job(who, 60, [0, 1]))
    assert first.shape == (50, 2)
    task, batches = tasks.get(TASK, rules=()), [cells.BATCHES, cells.BATCHES + 1]
    expected = training.train(task, who.lo, 60, [0, 1], data_seeds=batches)
    torch.testing.assert_close(first[0], expected[:2].mean(0), rtol=0, atol=6e-5)
    torch.testing.assert_close(first[-1], expected[-1:].mean(0), rtol=0, atol=6e-5)

    trained, train = [], training.train
    monkeypatch.setattr(
        training, "train", lambda *a, **k: (trained.append(a[3]), train(*a, **k))[1]
    )
    again = cells.Cells(tmp_path)
    assert torch.equal(again.losses(job(who, 60, [1, 0])), first.flip(1))
    assert trained == []
    again.losses(job(who, 60, [0, 1, 2]))
    assert trained == [[2]]
    again.losses(job(who, 60, [0], "cosine"))
    assert trained == [[2], [0]]


def test_optimizers_of_one_name_are_told_apart(tmp_path, run_folder):
    """A retrained one, or other rules, make another cell."""
    table, who = cells.Cells(tmp_path), cells.contender(str(run_folder))
    before = table.losses(job(who, 5, [0]))
    for w in who.lo.parameters():
        w.add_(0.1)
    assert not torch.equal(table.losses(job(who, 5, [0])), before)
    table.losses(job(dataclasses.replace(who, rules=("update",)), 5, [0]))
    assert len(table.rows) == 3


def test_processes_give_what_one_does(tmp_path, run_folder):
    """Losses and looks, trained by two processes and by one."""
    who = cells.contender(str(run_folder))
    looks = dataclasses.replace(job(who, 4, [0, 1]), at=(1, 3))
    jobs = [job(who, 4, [0]), job(cells.contender("muadam"), 4, [0, 1]), looks]
    for folder, processes in (("one", 1), ("two", 2)):
        cells.Cells(tmp_path / folder, processes=processes).fill(jobs)
    one, two = cells.Cells(tmp_path / "one"), cells.Cells(tmp_path / "two")
    assert one.rows == two.rows
    assert len(one.rows) == 3
    assert one.seen == two.seen
    assert list(one.watched(looks)) == ["layers.0", "layers.1", "head"]


def test_tables_of_two_processes_are_merged(tmp_path, run_folder):
    """As when two evaluations write to one folder."""
    who = cells.contender(str(run_folder))
    one, two = cells.Cells(tmp_path), cells.Cells(tmp_path)
    one.losses(job(who, 4, [0]))
    two.losses(job(who, 4, [1]))
    assert len(cells.Cells(tmp_path).rows) == 2


def test_tuning_that_ends_meanwhile_changes_nothing(tmp_path, monkeypatch):
    """A job keeps the values it was made with, and is kept under them."""
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    values = {"lr": 0.01, "b1": 0.9, "b2": 0.999, "weight_decay": 0.0}
    baselines.remember("adamw", "fashion8_mlp", 500, "constant", values)
    first = job(cells.contender("adamw"), 4, [0])
    baselines.remember("adamw", "fashion8_mlp", 500, "constant", values | {"lr": 1.0})
    second = job(cells.contender("adamw"), 4, [0])
    assert first.keys() != second.keys()
    table = cells.Cells(tmp_path)
    assert table.losses(first)[-1] < table.losses(second)[-1]


@dataclasses.dataclass(frozen=True)
class Broken:
    """A job that fails."""

    def title(self):
        return "broken"

    def cost(self):
        return 10**9

    def run(self, device):
        raise OSError("it broke")


def test_a_failure_does_not_stop_the_others(tmp_path, run_folder):
    table, good = cells.Cells(tmp_path, processes=2), job(cells.contender(str(run_folder)), 4, [0])
    results = table.train([Broken(), good], "test")
    assert next(iter(results))[0] == good
    with pytest.raises(RuntimeError, match="1 of 2 jobs failed: broken: it broke"):
        list(results)


def test_jobs_that_cannot_be(run_folder):
    who = cells.contender(str(run_folder))
    with pytest.raises(ValueError, match="unknown task"):
        cells.Job(who, "foo", 4)
    for steps, seeds in ((0, [0]), (4, [])):
        with pytest.raises(ValueError, match="steps and seeds must be 1 or more"):
            job(who, steps, seeds)


def test_divergence_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    huge = {"lr": 1e30, "b1": 0.9, "b2": 0.999, "weight_decay": 0.0, "loss": 9.0}
    baselines.remember("adamw", "fashion8_mlp", 500, "constant", huge)
    gone = job(cells.contender("adamw"), 120, [0])
    assert math.isnan(cells.Cells(tmp_path).losses(gone)[-1, 0])
    assert math.isnan(cells.Cells(tmp_path).losses(gone)[-1, 0])


def test_a_baseline_that_was_not_tuned_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    with pytest.raises(ValueError, match=r"evaluate\.py tune fashion8_mlp --steps 10 --sch"):
        cells.Cells(tmp_path).losses(job(cells.contender("muadam"), 10, [0], "cosine"))
