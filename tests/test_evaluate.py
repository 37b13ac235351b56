"""Tuned baselines, jobs and kept results, the command line."""

import csv
import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import mulo
from mulo import evaluate, paper, recipes, roles, tasks, training
from mulo.evaluate import Job, Results, Tuning, contender
from mulo.optimizees import datasets

ROOT = Path(__file__).parents[1]
NAME = "fashion8_mlp_w8_d3"
VALUES = {"lr": 0.01, "b1": 0.9, "b2": 0.999, "weight_decay": 0.0}
BATCHES = [evaluate.DATA_SEED, evaluate.DATA_SEED + 1]  # of the seeds 0 and 1


def job(optimizer, steps, seeds, schedule="constant", probe_at=()):
    return Job(optimizer, NAME, steps, schedule, tuple(seeds), probe_at)


@pytest.fixture
def lo_m(tmp_path):
    """A contender from the folder of a meta-training run, with an untrained optimizer in it."""
    r = recipes.recipe("lo_m", seed=3)
    (tmp_path / "lo_m_seed3").mkdir()
    mulo.save(recipes.new_lo(r), tmp_path / "lo_m_seed3" / "lo.pt", recipe=vars(r))
    return contender(str(tmp_path / "lo_m_seed3"))


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Saved values go to a folder of their own."""
    monkeypatch.setattr(evaluate, "TUNED", tmp_path / "tuned")
    return tmp_path / "tuned"


# ---------------------------------------------------------------- baselines


def test_grids_are_the_papers():
    for name, size, rates in (
        ("adamw", 504, ("1.00e-01", "4.92e-02", "1.19e-02", "7.02e-04", "1.00e-05")),
        ("muadam", 512, ("1.00e-06", "1.56e-06", "8.62e-05", "4.42e-02", "1.08e-01", "1.00e+00")),
    ):
        configs = Tuning(name, NAME, 7, full=True).configurations()
        assert len(configs) == size
        assert {f"{values['lr']:.2e}" for values in configs} >= set(rates)


def test_tuning_takes_the_lowest_final_loss(monkeypatch):
    """The mean over seeds; divergence is never the best."""
    monkeypatch.setattr(evaluate, "CHUNK", 10)
    rates = evaluate.GRIDS["adamw"]["lr"]
    monkeypatch.setitem(evaluate.RATES, "adamw", rates)
    name = "fashion8_mlp_w16_d3_b16"
    entry = Tuning("adamw", name, 20, seeds=(0, 1)).run()
    assert 1e-3 < entry["lr"] < 0.1
    assert (entry["configurations"], entry["seeds"], entry["width"]) == (14, 2, 16)
    adam = evaluate.adam([entry] * 2)
    again = training.train(tasks.get(name, rules=()), adam, 20, [0, 1])
    assert float(training.final_loss(again).mean()) == pytest.approx(entry["loss"], rel=1e-4)
    losses = torch.tensor([[math.nan, 1.0, 3.0, 2.0]])  # of two rates, two seeds each
    monkeypatch.setitem(evaluate.RATES, "adamw", rates[:2])
    monkeypatch.setattr(training, "train", lambda *a: losses)
    assert Tuning("adamw", name, 20, seeds=(0, 1)).run()["lr"] == rates[1]


def test_saved_values():
    """The paper's; searches of rates keep the other values of the meta-trained horizon."""
    assert Tuning("muadam", "lm_w1024_d3", 1000).saved()["lr"] == 0.1077
    configs = Tuning("muadam", NAME, 7, "cosine").configurations()
    assert [values["lr"] for values in configs] == evaluate.RATES["muadam"]
    others = {k: configs[0][k] for k in ("b1", "b2", "weight_decay")}
    assert others.items() <= Tuning("muadam", NAME, 500).saved().items()


def test_tuned_values_are_saved(tuned):
    """Those of the meta-trained horizon come first, then those for these steps."""
    Tuning("adamw", NAME, 10, "cosine").save(VALUES)
    Tuning("adamw", NAME, 10, "cosine", True).save(VALUES | {"lr": 0.25})
    rates = [job(contender(k), 10, [0], "cosine").values["lr"] for k in ("adamw", "adamw_oracle")]
    assert rates == [VALUES["lr"], 0.25]
    with pytest.raises(ValueError, match=r"evaluate\.py tune fashion8_mlp_w64_d3 --steps 10 --s"):
        job(contender("muadam"), 10, [0], "cosine")
    with pytest.raises(ValueError, match=r"tune fashion8_mlp_w16_d3 .* --every-width"):
        Job(contender("adamw_oracle"), "fashion8_mlp_w16_d3", 10, "cosine")
    Tuning("adamw", NAME, 7).save(VALUES | {"lr": 0.7})
    first = job(contender("adamw"), 7, [0])
    with pytest.raises(ValueError, match="adamw is not tuned for fashion8_mlp"):
        job(contender("adamw"), 8, [0])
    Tuning("adamw", NAME, 500).save(VALUES)
    second = job(contender("adamw"), 7, [0])
    assert (first.values["lr"], second.values["lr"]) == (0.7, VALUES["lr"])
    assert first.keys() != second.keys()  # a job keeps the values that it was made with


def test_schedules():
    assert evaluate.schedule_of("constant", 100) is None
    for name, factors in (("cosine", (1, 0.55, 0.1)), ("cosine2", (2, 1.1, 0.2))):
        schedule = evaluate.schedule_of(name, 100)
        assert [schedule(t) for t in (0, 50, 100)] == pytest.approx(factors)


# ---------------------------------------------------------------- jobs and results


def test_contenders(lo_m, tmp_path):
    assert contender("muadam") == evaluate.Contender("muadam", roles.ALL)
    assert contender("adamw").rules == ()
    assert (contender("mulo_m").name, contender("mulo_m").rules) == ("mulo_m", roles.ALL)
    assert (lo_m.name, lo_m.rules, lo_m.recipe) == ("lo_m_seed3", (), "lo_m")
    with pytest.raises(FileNotFoundError, match="no file 'sgd'"):
        contender("sgd")
    for lo in (mulo.load("mulo_m"), mulo.SmallFC()):  # without a recipe, as export.py saves
        mulo.save(lo, tmp_path / "bare.pt")
        if lo.mup is None:
            with pytest.raises(ValueError, match="mup=True"):
                contender(str(tmp_path / "bare.pt"))
        else:
            assert contender(str(tmp_path / "bare.pt")).rules == roles.ALL


def test_an_imported_velo(tmp_path, velo_4000):
    """Under the file's name, in SP; also in experiments."""
    path = tmp_path / "velo_4000.pt"
    lo = mulo.from_reference(velo_4000["released"], param_scale_mult=True)
    mulo.save(lo, path, mup=False)
    optimizer = contender(str(path))
    assert (optimizer.name, optimizer.rules, optimizer.recipe) == (path.stem, (), None)
    assert list(paper.Suite(optimizers=(str(path), "adamw")).contenders()) == [path.stem, "adamw"]


@pytest.fixture
def trained(monkeypatch):
    """The seeds of each call of `training.train`."""
    calls, train = [], training.train

    def counted(*args, **options):
        calls.append(args[3])
        return train(*args, **options)

    monkeypatch.setattr(training, "train", counted)
    return calls


def test_finished_jobs_are_not_run_again(tmp_path, trained, lo_m):
    task = tasks.get(NAME, rules=())
    expected = training.train(task, lo_m.lo, 60, [0, 1], data_seeds=BATCHES)
    first = Results(tmp_path).losses(job(lo_m, 60, [0, 1]))
    assert first.shape == (50, 2)
    torch.testing.assert_close(first[0], expected[:2].mean(0), rtol=0, atol=6e-5)
    torch.testing.assert_close(first[-1], expected[-1:].mean(0), rtol=0, atol=6e-5)
    trained.clear()
    again, other = Results(tmp_path), Results(tmp_path)
    assert torch.equal(again.losses(job(lo_m, 60, [1, 0])), first.flip(1))
    assert trained == []
    again.losses(job(lo_m, 60, [0, 1, 2]))
    assert trained == [[2]]
    cosine = job(lo_m, 60, [0, 1], "cosine"), job(lo_m, 60, [1, 2], "cosine")
    other.run(cosine)  # beside another writer
    assert trained == [[2], [0, 1], [2]]
    assert len(Results(tmp_path).kept) == 6


def test_losses_are_numbers_in_a_table(tmp_path, lo_m):
    """A row for each net, a number in each cell; test losses and activations likewise."""
    probed, tested = job(lo_m, 6, [0, 1], probe_at=(1, 5)), Job(lo_m, NAME, 20, test=True)
    results = Results(tmp_path)
    results.run([job(lo_m, 6, [0, 1]), probed, tested])
    with open(tmp_path / "losses.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["split"] for row in rows] == ["train", "test", "all", "all"]
    row = next(row for row in rows if row["seed"] == "1")
    assert [float(row[f"loss_{k}"]) for k in range(6)] == pytest.approx(
        results.losses(job(lo_m, 6, [1]))[:, 0].tolist()
    )
    assert not row["loss_6"]
    with open(tmp_path / "activations.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["layer"]) for row in rows[:4]] == [
        ("1", "layers.0"), ("1", "layers.1"), ("1", "head"), ("5", "layers.0"),
    ]  # fmt: skip
    read = Results(tmp_path)
    assert read.kept == results.kept
    assert read.activations(probed)["head"][1] == [float(rows[5]["change"]), float(rows[5]["size"])]
    assert read.losses(tested, "test").shape == (11, 1)
    (tmp_path / "losses.csv").write_text("optimizer,losses\nmulo_m,0.5 0.4\n")
    with pytest.raises(ValueError, match="has other columns: move it away"):
        Results(tmp_path)


def test_optimizers_of_one_name_are_told_apart(lo_m):
    """A retrained one, or other rules, make another row."""
    keys = job(lo_m, 5, [0]).keys()
    for w in lo_m.lo.parameters():
        w.add_(0.1)
    keys += job(lo_m, 5, [0]).keys()
    keys += job(dataclasses.replace(lo_m, rules=("update",)), 5, [0]).keys()
    assert len(set(keys)) == 3


def test_processes_give_what_one_does(tmp_path, lo_m):
    """Losses and activations."""
    probe = job(lo_m, 4, [0, 1], probe_at=(1, 3))
    jobs, results = [job(contender("muadam"), 4, [0, 1]), probe], Results(tmp_path, processes=2)
    results.run(jobs)
    assert results.kept == {key: x for each in jobs for key, x in each.run().items()}
    assert list(Results(tmp_path).activations(probe)) == ["layers.0", "layers.1", "head"]


def test_a_registered_task(tmp_path, monkeypatch, lo_m):
    """Small losses keep their digits; there is no test data, and nothing is tuned."""
    monkeypatch.setattr(tasks, "KINDS", dict(tasks.KINDS))
    images = tasks.get(NAME)
    tasks.register(
        "mine", lambda width, depth: tasks.get(f"fashion8_mlp_w{width}_d{depth}").build(),
        lambda device: images.data(device=device), lambda y, target: 1e-4 * y.square().mean(),
        loss_bound=1.0,
    )  # fmt: skip
    losses = Results(tmp_path).losses(Job(lo_m, "mine_w8_d3", 4))
    task = tasks.get("mine_w8_d3", rules=())
    expected = training.train(task, lo_m.lo, 4, [0], data_seeds=BATCHES[:1])
    assert expected.max() < 1e-3
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match=r"adamw is not .* compare with adamw_default or muon"):
        Job(contender("adamw"), "mine_w8_d3", 4)
    with pytest.raises(ValueError, match="mine is registered, so it has no test data"):
        Job(lo_m, "mine_w8_d3", 4, test=True)


def test_divergence_is_a_result(tmp_path):
    diverges = Job(contender("adamw"), NAME, 120, values=VALUES | {"lr": 1e30})
    for _ in range(2):  # the second is read from the file
        assert math.isnan(Results(tmp_path).losses(diverges)[-1, 0])


def test_test_loss_is_of_data_held_out(tmp_path):
    """Nets train on the train split; their test losses are kept beside, under keys of their own."""
    plain = Job(contender("adamw"), NAME, 20, seeds=(0, 1), values=VALUES)
    held_out = dataclasses.replace(plain, test=True)
    assert not set(plain.keys()) & set(held_out.keys())
    results, seen = Results(tmp_path), []
    results.run([plain, held_out])
    assert len(results.trained) == 6  # two rows of losses for a net with test data
    task = tasks.get(NAME, rules=(), split="train")
    losses = training.train(
        task, evaluate.adam([VALUES] * 2), 20, [0, 1], data_seeds=BATCHES,
        callback=lambda t, theta: seen.append({k: p.clone() for k, p in theta.items()}),
    )  # fmt: skip
    torch.testing.assert_close(results.losses(held_out), losses, rtol=0, atol=6e-5)
    assert not torch.allclose(results.losses(plain), losses)
    images = datasets.load(size=8)  # "test" are its last 2,000, here in one piece
    everything = images.take(torch.arange(8000, 10_000))
    everything = tuple(x.expand(2, *x.shape) for x in everything)
    expected = [task.losses(theta, everything) for theta in seen[::2]]
    saved = Results(tmp_path).losses(held_out, "test")
    assert saved.shape == (11, 2)
    torch.testing.assert_close(saved, torch.stack(expected), rtol=0, atol=1e-4)
    assert saved[-1].max() < saved[0].min() - 0.2  # the nets do learn


# ---------------------------------------------------------------- command line


def test_messages(tmp_path, complaint):
    task = ["task", NAME]
    for flags, reason in (
        (["tune", "fashion9_mlp_w8_d3"], "unknown kind 'fashion9_mlp': use one of in32_mlp"),
        (["tune", NAME, "--seeds", 0], "must be an integer of 1 or more"),
        (["task", "foo", "--optimizers", "adamw"], "unknown task"),
        ([*task, "--optimizers", "sgd"], "no file 'sgd'"),
        ([*task, "--optimizers", "adamw", "--device", "foo"], "unknown device 'foo'"),
        (
            ["task", "fashion_conv_w8_d2", "--optimizers", "adamw"],
            "evaluate.py tune fashion_conv_w64_d2",
        ),
    ):
        assert reason in complaint(evaluate, *flags)


def test_commands(tmp_path, tuned, monkeypatch, capsys):
    """Tune and train on a task: each prints what it did, and leaves its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "RATES", {k: [0.01, 0.001] for k in evaluate.RATES})
    Tuning("adamw", NAME, 500).save(VALUES)

    def run(line: str) -> str:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *line.split()])
        evaluate.main()
        return capsys.readouterr().out

    printed = run("tune fashion8_mlp_w8_d3 --steps 4 --seeds 1 --schedule cosine")
    assert printed.count("saved in") == 2
    saved = json.loads((tuned / "fashion8_mlp.json").read_text())
    assert saved["muadam, 4 steps, cosine"]["configurations"] == 2
    task = "task fashion8_mlp_w8_d3 --optimizers mulo_m adamw --steps 4 --seeds 2 --processes 1"
    printed = run(task)
    assert "fashion8_mlp_w8_d3" in printed
    assert printed.count("±") == 2
    assert "0 of 4 results were read from results" in printed
    assert "4 of 4 results were read from results, not trained" in run(task)
    assert run(f"{task} --out other").splitlines()[:-1] == printed.splitlines()[:-1]
    assert "  test loss" not in printed
    _, _, train, test, _ = run(f"{task} --test").splitlines()
    assert (train[:26].strip(), test[:26]) == (NAME, "  test loss".ljust(26))
    assert test.count("±") == 2


def test_ctrl_c_is_one_sentence(tmp_path, monkeypatch, complaint):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Results, "run", stop)
    flags = ["task", NAME, "--optimizers", "adamw", "--out", tmp_path]
    assert "stopped. Results saved so far are kept" in complaint(evaluate, *flags)
