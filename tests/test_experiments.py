"""Every experiment end to end at a tiny size, and the arithmetic of what it says."""

import dataclasses
import math

import pytest
import torch

import baselines
import cells as cells_module
import evaluate
import experiments
import metatrain
import report
import tasks
import training
from cells import Cells, Job, contender
from experiments import SMOKE

SUITE = dataclasses.replace(SMOKE, who=("mulo_m", "lo_m", "adamw", "muadam"))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Tuned values for the tiny runs, in a place of their own."""
    patch, before = pytest.MonkeyPatch(), {}
    for which in baselines.NAMES:
        before[which] = baselines.best(which, "fashion8_mlp", 500)
    patch.setattr(baselines, "TUNED", tmp_path_factory.mktemp("tuned"))
    for which, values in before.items():
        baselines.remember(which, "fashion8_mlp", 500, "constant", values)
        for times in SUITE.horizons:
            baselines.remember(which, "fashion8_mlp", times * SUITE.steps, "cosine", values)
    yield
    patch.undo()


@pytest.mark.parametrize("name", evaluate.EXPERIMENTS)
def test_smoke(name, tuned, tmp_path, monkeypatch):
    """A table, a figure, a sentence; and once more from the file alone, nothing trained."""
    found = evaluate.EXPERIMENTS[name](SUITE, Cells(tmp_path), tmp_path)
    assert "μLO_M" in found.said or "mulo_m" in found.said
    assert len((tmp_path / f"{name}.csv").read_text().splitlines()) > 3
    if name != "rank":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(training, "train", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(metatrain, "Trainer", lambda *a, **k: pytest.fail("meta-trained again"))
    assert evaluate.EXPERIMENTS[name](SUITE, Cells(tmp_path), tmp_path) == found
    report.keep(found, name, tmp_path)
    report.write(tmp_path, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    assert report.CLAIMS[name][0] in text
    assert text.count("**no**") == text.count(f"- {report.CLAIMS[name][0]}: ")
    assert text.count("**no**") == sum(not holds for holds in found.checks.values())


def test_end_is_the_last_tenth():
    losses = torch.arange(50.0).unsqueeze(1)
    assert float(training.final_loss(losses)) == 47
    assert float(training.final_loss(losses, 0.2)) == 9


def test_rank_counts_divergence_as_guessing(tmp_path, tuned):
    cells = Cells(tmp_path)
    losses = {
        "mulo_m": 0.5,
        "adamw": math.nan,
        "muadam": 2.0,
        "lo_m": 7.0,
    }  # 7: worse than guessing
    for who, loss in losses.items():
        for times in (1, 5):
            for key in SUITE.job(contender(who), "fashion8_mlp_w8_d3", times).keys():
                cells.rows[key] = " ".join([str(loss)] * 50)
    said, checks = experiments.rank(SUITE, cells, tmp_path)
    assert "after 1 horizon(s), best first: μLO_M 1.00, μAdam 2.00, LO_M 3.50, AdamW 3.50." in said
    assert "all,adamw,3.50,3.50,3.50" in (tmp_path / "rank.csv").read_text().splitlines()
    best = "μLO_M and μVeLO_M have the two best average ranks at width 8, after 1 horizon(s)"
    assert checks[best]
    assert not checks["LO_M and VeLO_M have the two worst at width 8, after 1 horizon(s)"]


def test_width_checks():
    suite = dataclasses.replace(SMOKE, widths=(64, 256, 1024), widest=64)
    flat, fall = [[0.5, 0.51]] * 3, [[0.6, 0.61], [0.5, 0.51], [0.4, 0.41]]
    gone = [[0.6, 0.61], [0.5, 0.51], [math.nan, 0.4]]

    def checks(mu, sp):
        ends = {"mulo_m": mu, "lo_m": sp}
        ends = {k: [torch.tensor(x) for x in found] for k, found in ends.items()}
        return list(experiments._width_checks("teacher_mlp", suite, ends).values())

    assert checks(fall, gone) == [True, True, True, True]
    assert checks(fall, flat) == [True, True, True, True]
    assert checks(flat, fall) == [False, False, False, False]
    assert checks(gone, fall) == [False, False, False, False]
    up = [[0.6, 0.61], [0.4, 0.41], [0.402, 0.412]]  # in both nets, by less than they differ
    assert checks(up, flat) == [True, False, True, True]


def test_pre_activations_are_the_layers_outputs():
    task = tasks.get("fashion8_mlp_w8_d3")
    theta = task.init(2, torch.Generator().manual_seed(0), zero_output=False)
    probe = torch.randn(5, 1, 8, 8)
    found = cells_module.pre_activations(task, theta, probe)
    assert list(found) == ["layers.0", "layers.1", "head"]
    first = probe.flatten(1) @ theta["layers.0.weight"][1].T + theta["layers.0.bias"][1]
    torch.testing.assert_close(found["layers.0"][1], first)
    hidden = found["layers.1"][1].relu()
    logits = (hidden @ theta["head.weight"][1].T + theta["head.bias"][1]) / 8
    torch.testing.assert_close(found["head"][1], logits)


def test_watch_sees_no_change_where_nothing_moves(tmp_path):
    who = dataclasses.replace(contender("mulo_m"), name="still")
    config = dataclasses.replace(who.lo.config, lam1=0.0)
    lo = type(who.lo)(config)
    look = Job(dataclasses.replace(who, lo=lo), "fashion8_mlp_w8_d3", 5, at=(1, 4))
    seen = Cells(tmp_path).watched(look)
    assert all(change == 0 for layer in seen.values() for change, _ in layer)
    assert all(norm > 0 for _, norm in seen["layers.0"])


def test_any_optimizers_may_be_left_out(tuned, tmp_path):
    for name in ("rank", "horizon"):
        suite = dataclasses.replace(SMOKE, who=("mulo_m",))
        found = experiments.EXPERIMENTS[name](suite, Cells(tmp_path), tmp_path)
        assert not [claim for claim in found.checks if "AdamW" in claim or "best" in claim]
    suite = dataclasses.replace(SMOKE, who=("weights/mulo_m.pt", "weights/lo_m.pt"))
    assert len(experiments.stability(suite, Cells(tmp_path), tmp_path).checks) == 2
