"""Baselines and their tuning, jobs and kept results, the command line."""

import dataclasses
import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mulo
from mulo import evaluate, metatrain, roles, tasks, training
from mulo.evaluate import Job, Results, contender
from mulo.optimizees import datasets
from mulo.paper import baselines, choose, claims

ROOT = Path(__file__).parents[1]
NAME = "fashion8_mlp_w8_d3"
VALUES = {"lr": 0.01, "b1": 0.9, "b2": 0.999, "weight_decay": 0.0}


def job(who, steps, seeds, schedule="constant", probe_at=()):
    return Job(who, NAME, steps, schedule, tuple(seeds), probe_at)


@pytest.fixture
def lo_m(tmp_path):
    """A contender from the folder of a meta-training run, with an untrained optimizer in it."""
    r = metatrain.recipe("lo_m", seed=3)
    (tmp_path / "lo_m_seed3").mkdir()
    mulo.save(metatrain.new_lo(r), tmp_path / "lo_m_seed3" / "lo.pt", recipe=vars(r))
    return contender(str(tmp_path / "lo_m_seed3"))


# ---------------------------------------------------------------- baselines


def test_grids_are_the_papers():
    assert len(baselines.grid("adamw")) == 504
    assert len(baselines.grid("muadam")) == 512
    rates = {k: [f"{lr:.2e}" for lr in v["lr"]] for k, v in baselines.GRIDS.items()}
    for lr in ("1.00e-01", "4.92e-02", "1.19e-02", "7.02e-04", "1.00e-05"):
        assert lr in rates["adamw"]
    for lr in ("1.00e-06", "1.56e-06", "8.62e-05", "4.42e-02", "1.08e-01", "1.00e+00"):
        assert lr in rates["muadam"]


def test_tuning_sorts_by_final_loss_and_survives_divergence(monkeypatch):
    monkeypatch.setattr(baselines, "CHUNK", 10)
    name, configs = "fashion8_mlp_w16_d3_b16", baselines.grid("adamw", baselines.USUAL)
    tuning = baselines.Tuning("adamw", name, 20, seeds=(0, 1), configs=configs)
    found = tuning.search(configs, [0, 1], "cpu")
    losses = [c["loss"] for c in found]
    assert len(found) == 14
    assert losses == sorted(losses)
    assert 1e-3 < found[0]["lr"] < 0.1
    adam = baselines.adam([found[0]] * 2)
    again = training.train(tasks.get(name, rules=()), adam, 20, [0, 1])
    assert float(training.final_loss(again).mean()) == pytest.approx(losses[0], rel=1e-4)
    monkeypatch.setattr(training, "train", lambda *a: torch.tensor([[math.nan, 1, 2]]))
    configs = [baselines.USUAL | {"lr": lr} for lr in (0.1, 0.2, 0.3)]
    assert [c["lr"] for c in tuning.search(configs, [0], "cpu")] == [0.2, 0.3, 0.1]


def test_rates_are_tuned_by_one_seed_and_the_best_by_all(monkeypatch):
    tried, best = [], [0.3, 0.2, 0.1]

    def search(self, configs, seeds, device):
        tried.append(([c["lr"] for c in configs], list(seeds)))
        return [baselines.USUAL | {"lr": lr, "loss": 1.0} for lr in [*best, 1e-4]]

    monkeypatch.setattr(baselines.Tuning, "search", search)
    found = baselines.Tuning("muadam", NAME, 7, "cosine").run()
    assert tried == [(baselines.RATES["muadam"], [5001]), (best, [5001, 5002, 5003])]
    assert (found["lr"], found["configurations"], found["seeds"]) == (0.3, 9, 3)


def test_tuned_values_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    assert baselines.best("adamw", "fashion8_mlp", 500) is None
    assert baselines.best("muadam", "lm", 1000)["lr"] == 0.1077  # the paper's
    baselines.remember(VALUES | {"loss": 1.0}, "muadam", "lm", 1000, "cosine")
    baselines.remember(VALUES | {"lr": 0.25}, "adamw", "lm", 1000, "cosine")
    assert baselines.best("muadam", "lm", 1000, "cosine")["loss"] == 1.0
    assert baselines.best("adamw", "lm", 1000, "cosine")["lr"] == 0.25
    assert baselines.best("muadam", "lm", 1000)["lr"] == 0.1077
    with pytest.raises(ValueError, match=r"evaluate\.py tune fashion8_mlp --steps 10 --sch"):
        job(contender("muadam"), 10, [0], "cosine").keys()


def test_shipped_values_are_of_the_full_grid():
    for which, size in (("adamw", 504), ("muadam", 512)):
        found = baselines.best(which, "fashion8_mlp", 500)
        assert (found["configurations"], found["width"]) == (size, 64)


def test_schedules():
    cosine = baselines.schedule_of("cosine", 100)
    for t, factor in ((0, 1), (50, 0.55), (100, 0.1)):
        assert cosine(t) == pytest.approx(factor)
    assert baselines.schedule_of("constant", 100) is None


# ---------------------------------------------------------------- jobs and results


def test_contenders(lo_m):
    assert contender("muadam") == evaluate.Contender("muadam", roles.ALL)
    assert contender("adamw").rules == ()
    assert (contender("mulo_m").name, contender("mulo_m").rules) == ("mulo_m", roles.ALL)
    assert (lo_m.name, lo_m.rules, lo_m.recipe) == ("lo_m_seed3", (), "lo_m")
    with pytest.raises(FileNotFoundError, match="no learned optimizer 'sgd'"):
        contender("sgd")


def test_arrays_of_velo(tmp_path, velo_4000):
    """Under the file's name, in SP, whichever names its arrays have; also among the claims."""
    loaded = []
    for kind, arrays in velo_4000.items():
        np.savez(tmp_path / f"{kind}.npz", **arrays)
        who = contender(str(tmp_path / f"{kind}.npz"))
        assert (who.name, who.rules, who.recipe) == (kind, (), None)
        loaded.append(who)
    config = loaded[0].lo.config
    assert (config.lstm_hidden, config.param_inits, config.hidden_size) == (512, 256, 4)
    assert (config.param_scale_mult, config.use_bugged_loss_features) == (True, False)
    one, two = (dict(c.lo.named_parameters()) for c in loaded)
    assert all(torch.equal(one[k], two[k]) for k in one)
    losses = Results(tmp_path).losses(job(loaded[0], 3, [0]))
    assert losses.isfinite().all()
    suite = claims.Suite(who=(str(tmp_path / "released.npz"), "adamw"))
    assert list(suite.contenders()) == ["released", "adamw"]


def test_arrays_that_are_not_an_optimizer(tmp_path, complaint, velo_4000):
    short = {k: x for k, x in velo_4000["plain"].items() if k != "rnn/step_size/w"}
    for arrays, reason in (
        ({"x": np.zeros(3)}, "no 'w0' or 'ff/w0' among"),
        ({"w0": np.array("text")}, "can't convert np.ndarray"),
        (short, "VeLO's array 'rnn/step_size/w' is missing"),
        (None, "has no learned optimizer's arrays"),
    ):
        path = tmp_path / "bad.npz"
        path.write_bytes(b"PK\x03\x04 and no zip file")
        if arrays:
            np.savez(path, **arrays)
        said = complaint(evaluate, "task", NAME, "--who", path)
        assert said.startswith(f"evaluate.py: {path} has no learned optimizer's arrays: ")
        assert reason in said
        assert "\n" not in said


def test_finished_jobs_are_not_run_again(tmp_path, monkeypatch, lo_m):
    first = Results(tmp_path).losses(job(lo_m, 60, [0, 1]))
    assert first.shape == (50, 2)
    task, batches = tasks.get(NAME, rules=()), [evaluate.DATA_SEED, evaluate.DATA_SEED + 1]
    expected = training.train(task, lo_m.lo, 60, [0, 1], data_seeds=batches)
    torch.testing.assert_close(first[0], expected[:2].mean(0), rtol=0, atol=6e-5)
    torch.testing.assert_close(first[-1], expected[-1:].mean(0), rtol=0, atol=6e-5)

    trained, train = [], training.train
    monkeypatch.setattr(
        training, "train", lambda *a, **k: (trained.append(a[3]), train(*a, **k))[1]
    )
    again = Results(tmp_path)
    assert torch.equal(again.losses(job(lo_m, 60, [1, 0])), first.flip(1))
    assert trained == []
    again.losses(job(lo_m, 60, [0, 1, 2]))
    assert trained == [[2]]
    again.losses(job(lo_m, 60, [0], "cosine"))
    assert trained == [[2], [0]]


def test_fresh_trains_what_is_kept(tmp_path, monkeypatch, lo_m):
    """Each net once a session; what it gives replaces the old row, also beside other writers."""
    old = Results(tmp_path)
    losses = old.losses(job(lo_m, 4, [0, 1]))
    assert old.origin() == f"All nets were trained now; their losses are kept in {tmp_path}."
    for key in old.kept:
        old.kept[key] = "9 9 9 9"
    old.save()
    stale = Results(tmp_path)
    assert (stale.losses(job(lo_m, 4, [0, 1, 2]))[:, :2] == 9).all()
    said = f"2 of 3 results were read from {tmp_path}, not trained now: --fresh trains them anew."
    assert stale.origin() == said
    trained, train = [], training.train
    monkeypatch.setattr(
        training, "train", lambda *a, **k: (trained.append(a[3]), train(*a, **k))[1]
    )
    fresh = Results(tmp_path, fresh=True)
    for _ in range(2):
        assert torch.equal(fresh.losses(job(lo_m, 4, [0, 1])), losses)
    assert trained == [[0, 1]]
    stale.save()
    assert torch.equal(Results(tmp_path).losses(job(lo_m, 4, [0, 1])), losses)
    assert "All nets were trained now" in fresh.origin()


def test_optimizers_of_one_name_are_told_apart(tmp_path, lo_m):
    """A retrained one, or other rules, make another row."""
    results = Results(tmp_path)
    before = results.losses(job(lo_m, 5, [0]))
    for w in lo_m.lo.parameters():
        w.add_(0.1)
    assert not torch.equal(results.losses(job(lo_m, 5, [0])), before)
    results.losses(job(dataclasses.replace(lo_m, rules=("update",)), 5, [0]))
    assert len(results.kept) == 3


@dataclasses.dataclass(frozen=True)
class Broken:
    """A job that fails."""

    def __str__(self):
        return "broken"

    def run(self, *how):
        raise OSError("it broke")


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """A file that registered a task, whose losses are below 0.001."""
    monkeypatch.setattr(tasks, "KINDS", dict(tasks.KINDS))
    text = (ROOT / "examples" / "own_task.py").read_text().replace("square().mean()", "mean() ** 2")
    (tmp_path / "mine.py").write_text(text)
    runpy.run_path(str(tmp_path / "mine.py"))
    return tmp_path / "mine.py"


def test_processes_give_what_one_does(tmp_path, lo_m):
    """Losses and activations; a failure stops no others."""
    probe = job(lo_m, 4, [0, 1], probe_at=(1, 3))
    jobs = [job(contender("muadam"), 4, [0, 1]), probe]
    done = Results(tmp_path, processes=2).execute([Broken(), *jobs], "test")
    found = [next(done) for _ in jobs]
    assert {str(x): result for x, result in found} == {str(x): x.run() for x in jobs}
    with pytest.raises(RuntimeError, match="1 of 3 jobs failed: broken: it broke"):
        next(done)
    assert list(Results(tmp_path).activations(probe)) == ["layers.0", "layers.1", "head"]


def test_a_registered_task_is_known_by_its_file(tmp_path, lo_m, own_task):
    """Losses below 0.0001 are kept, and an edit makes another row."""
    mine = Job(lo_m, "sines_w8_d3", 4, seeds=(0,))
    losses = Results(tmp_path).losses(mine)
    assert 0 < losses.min() < 1e-3
    expected = training.train(mine.get_task(), lo_m.lo, 4, [0], data_seeds=[evaluate.DATA_SEED])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match=r"adamw is not .* tune sines\.$"):
        Job(contender("adamw"), "sines_w8_d3", 4).keys()
    with pytest.raises(ValueError, match="sines is registered, so it has no test data"):
        Job(lo_m, "sines_w8_d3", 4, test=True)
    before = mine.keys()
    own_task.write_text(own_task.read_text() + "# edited\n")
    runpy.run_path(str(own_task))
    assert Job(lo_m, "sines_w8_d3", 4, seeds=(0,)).keys() != before


def test_baselines_tuned_for_these_steps_will_do(tmp_path, monkeypatch):
    """Where the meta-trained horizon has not been tuned for, which comes first."""
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    baselines.remember(VALUES | {"lr": 0.7}, "adamw", "fashion8_mlp", 7, "constant")
    assert job(contender("adamw"), 7, [0]).values["lr"] == 0.7
    with pytest.raises(ValueError, match="adamw is not tuned for fashion8_mlp"):
        job(contender("adamw"), 8, [0]).keys()
    baselines.remember(VALUES, "adamw", "fashion8_mlp", 500, "constant")
    assert job(contender("adamw"), 7, [0]).values["lr"] == VALUES["lr"]


def test_two_evaluations_may_write_to_one_folder(tmp_path, lo_m):
    one, two = Results(tmp_path), Results(tmp_path)
    one.losses(job(lo_m, 4, [0]))
    two.losses(job(lo_m, 4, [1]))
    assert len(Results(tmp_path).kept) == 2


def test_tuning_that_ends_meanwhile_changes_nothing(tmp_path, monkeypatch):
    """A job keeps the values it was made with, and is kept under them."""
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    baselines.remember(VALUES, "adamw", "fashion8_mlp", 500, "constant")
    first = job(contender("adamw"), 4, [0])
    baselines.remember(VALUES | {"lr": 1.0}, "adamw", "fashion8_mlp", 500, "constant")
    second = job(contender("adamw"), 4, [0])
    assert first.keys() != second.keys()
    results = Results(tmp_path)
    assert results.losses(first)[-1] < results.losses(second)[-1]


def test_jobs_that_cannot_be(lo_m):
    with pytest.raises(ValueError, match="unknown task"):
        Job(lo_m, "foo", 4)


def test_divergence_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "TUNED", tmp_path)
    baselines.remember(VALUES | {"lr": 1e30}, "adamw", "fashion8_mlp", 500, "constant")
    diverges = job(contender("adamw"), 120, [0])
    assert math.isnan(Results(tmp_path).losses(diverges)[-1, 0])
    assert math.isnan(Results(tmp_path).losses(diverges)[-1, 0])  # read from the file


def test_test_loss_is_of_data_held_out(tmp_path):
    """Nets train on the train split; their test losses are kept beside, under keys of their own."""
    plain = Job(contender("adamw"), NAME, 20, seeds=(0, 1), values=VALUES)
    held_out = dataclasses.replace(plain, test=True)
    assert not set(plain.keys()) & set(held_out.keys())
    results, seen = Results(tmp_path), []
    results.run([plain, held_out])
    assert len(results.trained) == 4
    task = tasks.get(NAME, rules=(), split="train")
    losses = training.train(
        task, baselines.adam([VALUES] * 2), 20, [0, 1],
        data_seeds=[evaluate.DATA_SEED, evaluate.DATA_SEED + 1],
        look=lambda t, theta: seen.append({k: p.clone() for k, p in theta.items()}),
    )  # fmt: skip
    torch.testing.assert_close(results.losses(held_out), losses, rtol=0, atol=6e-5)
    assert not torch.allclose(results.losses(plain), losses)
    images = datasets.load(size=8)  # "test" are its last 2,000, here in one piece
    everything = images.take(torch.arange(8000, 10_000))
    everything = tuple(x.expand(2, *x.shape) for x in everything)
    expected = [task.losses(theta, everything) for theta in seen[::2]]
    found = Results(tmp_path).losses(held_out, test=True)
    assert found.shape == (11, 2)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-4)
    assert found[-1].max() < found[0].min() - 0.2  # the nets do learn


def test_pre_activations_are_the_layers_outputs():
    task, probe = tasks.get(NAME), torch.randn(5, 1, 8, 8)
    theta = task.init(2, torch.Generator().manual_seed(0), zero_output=False)
    found = evaluate.pre_activations(task, theta, probe)
    assert list(found) == ["layers.0", "layers.1", "head"]
    first = probe.flatten(1) @ theta["layers.0.weight"][1].T + theta["layers.0.bias"][1]
    torch.testing.assert_close(found["layers.0"][1], first)
    hidden = found["layers.1"][1].relu()
    logits = (hidden @ theta["head.weight"][1].T + theta["head.bias"][1]) / 8
    torch.testing.assert_close(found["head"][1], logits)


def test_activations_do_not_change_where_nothing_moves(tmp_path):
    lo = mulo.load("mulo_m", lam1=0.0)
    who = dataclasses.replace(contender("mulo_m"), name="still", lo=lo)
    found = Results(tmp_path).activations(job(who, 5, [0], probe_at=(1, 4)))
    assert all(change == 0 for layer in found.values() for change, _ in layer)
    assert all(norm > 0 for _, norm in found["layers.0"])


# ---------------------------------------------------------------- command line


def test_messages(tmp_path, complaint):
    task = ["task", NAME]
    for flags, reason in (
        (["tune", "fashion9_mlp"], "unknown kind 'fashion9_mlp': use one of in32_mlp"),
        (["tune", "fashion8_mlp", "--seeds", 0], "must be 1 or more"),
        (["tune", "fashion14_mlp", "--rates-only"], "first run python evaluate.py tune fashion14"),
        (["validate", tmp_path / "none.pt"], "no learned optimizer"),
        (["task", "foo", "--who", "adamw"], "unknown task"),
        ([*task, "--who", "sgd"], "no learned optimizer 'sgd'"),
        (task, "say which optimizers to compare"),
        ([*task, "--who", "adamw", "--seeds", 0], "must be 1 or more"),
        ([*task, "--who", "adamw", "--device", "foo"], "unknown device 'foo'"),
        (["task", "fashion_conv_w8_d2", "--who", "adamw"], "evaluate.py tune fashion_conv"),
        (["width", "--who", "mulo_m", ROOT / "weights" / "mulo_m.pt"], "two runs of one recipe"),
    ):
        assert reason in complaint(evaluate, *flags)


def test_commands(tmp_path, monkeypatch, capsys):
    """Tune, train on a task, test a claim, validate, choose: each says so, and leaves its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(baselines, "TUNED", tmp_path / "results" / "tuned")
    for which in baselines.BASELINES:
        baselines.remember(VALUES, which, "fashion8_mlp", 500, "constant")
    nets = claims.Family("fashion8_mlp", (8,), base=8, depths=(3, 4), seeds=2)
    tiny = claims.Suite(("mulo_m",), (nets,), steps=10)
    monkeypatch.setattr(claims, "SUITES", {"desk": tiny})

    def run(line: str) -> str:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *line.split()])
        evaluate.main()
        return capsys.readouterr().out

    said = run("tune fashion8_mlp --width 8 --steps 4 --seeds 1 --schedule cosine --rates-only")
    assert "of 14, kept in" in said
    assert "of 32, kept in" in said
    kept = json.loads((tmp_path / "results" / "tuned" / "fashion8_mlp.json").read_text())
    assert kept["muadam, 4 steps, cosine"]["configurations"] == 32
    task = "task fashion8_mlp_w8_d3 --who mulo_m adamw --steps 4 --seeds 2 --processes 1"
    said = run(task)
    assert "fashion8_mlp_w8_d3" in said
    assert said.count("±") == 2
    assert said.endswith("All nets were trained now; their losses are kept in results.\n")
    assert "4 of 4 results were read from results, not trained now: --fresh" in run(task)
    assert run(f"{task} --fresh") == said
    assert "  test loss" not in said
    *_, train, test, _ = run(f"{task} --test").splitlines()
    assert (train[:26].strip(), test[:26]) == (NAME, "  test loss".ljust(26))
    assert test.count("±") == 2
    assert "4 layers, final loss: μLO_M" in run("depth --processes 1")
    assert "## Deeper nets" in (tmp_path / "RESULTS.md").read_text()
    monkeypatch.setattr(choose, "validate", lambda *a: {"one task": 1.0, "another": 2.0})
    assert f"{ROOT / 'weights' / 'lo_m.pt'}: 1.4142" in run(f"validate {ROOT}/weights/lo_m.pt")
    monkeypatch.setattr(choose, "choose", lambda name, some, device: [name, len(some), device])
    assert run("choose mulo_m a b") == "chosen: ['mulo_m', 2, 'cpu']\n"
    run("depth --processes 1 --who mulo_m --out elsewhere")
    assert "not run: `python evaluate.py width`" in (tmp_path / "elsewhere/RESULTS.md").read_text()


def test_ctrl_c_is_one_sentence(tmp_path, monkeypatch, complaint):
    def stop(*args):
        """As when a user has seen enough."""
        raise KeyboardInterrupt

    monkeypatch.setitem(claims.EXPERIMENTS, "depth", stop)
    assert "stopped; finished nets are kept" in complaint(evaluate, "depth", "--out", tmp_path)


# Final losses of several meta-training seeds at 1, 4 and 16 times the widest meta-training task:
# python evaluate.py task fashion8_mlp_w64_d3 fashion8_mlp_w256_d3 fashion8_mlp_w1024_d3
#   --who runs/mulo_m_desk_seed{0,1,2,3,4} runs/lo_m_desk_seed{0,1,2} adamw muadam
#   --seeds 2 --out results/meta_seeds
def meta_seeds():
    found = {}
    for (who, _, task, *_), losses in Results(ROOT / "results" / "meta_seeds").kept.items():
        final = [float(x) for x in losses.split()][-5:]
        found.setdefault((who, tasks.get(task).width), []).append(sum(final) / 5)
    return {key: sum(x) / len(x) for key, x in found.items()}


def test_every_meta_seed_generalizes_to_wider_nets():
    loss = meta_seeds()
    for seed in range(3):
        for width in (256, 1024):
            sp = loss[f"lo_m_desk_seed{seed}", width]
            assert not sp <= loss[f"mulo_m_desk_seed{seed}", width]  # or it is nan: diverged
    at_16 = sorted(loss[f"mulo_m_desk_seed{seed}", 1024] for seed in range(5))
    assert at_16[2] < loss["muadam", 1024]
