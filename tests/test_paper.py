"""Every experiment end to end at a tiny size, the arithmetic of its checks, and RESULTS.md."""

import csv
import dataclasses
import inspect
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from mulo import evaluate, paper, training
from mulo.evaluate import Job, Results, contender
from mulo.results import report

ROOT = Path(__file__).parents[1]
SMALL = {"columns": (8, 8, 8), "base": 8, "longest": 3}
FEW = SMALL | {"few_seeds": 1}
MLPS = paper.Family("fashion8_mlp", (8, 16), depths=(3, 4), horizons=(2, 3), seeds=2, **SMALL)
VITS = paper.Family("fashion_vit", (8, 16), depths=(1, 2), seeds=2, suffix="_b2", **FEW)
SUITE = paper.Suite(
    ("mulo_m", "lo_m", "adamw", "muon"), (MLPS, VITS), steps=6,
    resnets=("fashion8_mlp_w8_d3", "fashion8_mlp_w16_d3"),
)  # fmt: skip


def shrink(patch, tuned):
    """Small experiments, with tuned values in a folder of their own."""
    patch.setattr(evaluate, "TUNED", tuned)
    patch.setattr(evaluate, "RATES", {k: [0.01] for k in evaluate.RATES})
    patch.setattr(evaluate, "HORIZONS", (SUITE.steps,))
    patch.setattr(paper, "TRANSFER", {"fashion8_mlp_w{}_d3": (8, 16)})
    patch.setattr(paper, "SEEDS", 2)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, tmp_path_factory.mktemp("tuned"))
        paper.tune(SUITE, Results(tmp_path_factory.mktemp("none")))
        return evaluate.TUNED


@pytest.fixture
def tiny(monkeypatch, tuned):
    shrink(monkeypatch, tuned)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the results: experiments share nets."""
    return tmp_path_factory.mktemp("results")


def test_everything_is_tuned_once(tiny, monkeypatch):
    monkeypatch.setattr(training, "train", lambda *a, **k: pytest.fail("tuned again"))
    paper.tune(SUITE, Results(Path("none")))
    assert len(list(evaluate.TUNED.glob("*.json"))) == 2


@pytest.mark.parametrize("name", paper.EXPERIMENTS)
def test_smoke(tiny, name, folder):
    finding = paper.EXPERIMENTS[name](SUITE, Results(folder))
    assert "μLO_M" in finding.summary
    assert len(finding.rows) > 3
    assert len({len(row) for row in finding.rows}) == 1


def test_muon_is_left_out_of_wide_nets(monkeypatch):
    monkeypatch.setattr(paper, "MUON_WIDEST", 8)
    narrow, wide, vit = MLPS.task(8), MLPS.task(16), VITS.task(8)
    assert list(SUITE.muon(narrow, vit)) == ["muon", "muon_oracle"]
    assert SUITE.muon(narrow, wide) == {}
    assert list(SUITE.contenders()) == ["mulo_m", "lo_m", "adamw"]


def test_any_optimizers_may_be_left_out(tiny, folder):
    alone = dataclasses.replace(SUITE, optimizers=("mulo_m",))
    for name in ("rank", "horizon"):
        finding = paper.EXPERIMENTS[name](alone, Results(folder))
        assert not [claim for claim in finding.checks if "AdamW" in claim or "best" in claim]
    twice = dataclasses.replace(SUITE, optimizers=("mulo_m", str(ROOT / "weights" / "mulo_m.pt")))
    with pytest.raises(ValueError, match="two of --optimizers are runs of one recipe"):
        twice.contenders()
    with pytest.raises(ValueError, match="needs mulo_s: add its run to --optimizers"):
        paper.distribution(dataclasses.replace(alone, scale="paper"), Results(folder))


def test_rank_counts_divergence_as_guessing(tiny, tmp_path):
    results = Results(tmp_path)
    losses = {"mulo_m": 0.5, "lo_m": 7.0, "adamw": math.nan, "muadam": 2.0}  # 7: worse than that
    alone = dataclasses.replace(SUITE, optimizers=tuple(losses), families=(MLPS,))
    for name, loss in losses.items():
        for times in (1, 5):
            job = Job(contender(name), MLPS.task(8), times * alone.steps, seeds=range(5))
            results.kept |= {key: [loss] * 50 for key in job.keys()}
    finding = paper.rank(alone, results)
    order = "μLO_M 1.00, μAdam 2.00, LO_M 3.50, AdamW 3.50"
    assert finding.summary.startswith(f"average rank after 1x the horizon: {order};")
    assert ["all", "adamw", *["3.50"] * 9] in finding.rows
    where = "XL, after 1x the horizon"
    assert finding.checks[f"μLO_M and μVeLO_M have the two best average ranks, {where}"]
    assert not finding.checks[f"LO_M and VeLO_M have the two worst, {where}"]


def test_width_checks(tmp_path):
    family = paper.Family("teacher_mlp", (64, 256, 1024), seeds=2)
    suite = paper.Suite(("mulo_m", "lo_m"), (family,))
    flat, fall = [[0.5, 0.51]] * 3, [[0.6, 0.61], [0.5, 0.51], [0.4, 0.41]]
    gone = [[0.6, 0.61], [0.5, 0.51], [math.nan, 0.4]]

    def checks(mu, sp):
        results = Results(tmp_path)
        for name, by_width in (("mulo_m", mu), ("lo_m", sp)):
            for width, losses in zip(family.widths, by_width, strict=True):
                job = Job(contender(name), family.task(width), 500, seeds=(0, 1))
                by_key = zip(job.keys(), losses, strict=True)
                results.kept |= {key: [loss] * 50 for key, loss in by_key}
        return list(paper.width(suite, results).checks.values())

    assert checks(fall, gone) == [True, True, True, True]
    assert checks(fall, flat) == [True, True, True, True]
    assert checks(flat, fall) == [False, False, False, False]
    assert checks(gone, fall) == [False, False, False, False]
    up = [[0.6, 0.61], [0.4, 0.41], [0.402, 0.412]]  # in both nets, by less than they differ
    assert checks(up, flat) == [True, False, True, True]


def test_resnet_checks():
    """Ahead at every width, falling, and test near train: each check can fail alone."""

    def failing(train=(), test=()):
        losses = []
        for changes in (train, test):
            means = {"mulo_m": (0.6, 0.5), "lo_m": (0.8, 0.7)} | dict(changes)
            pairs = [((k, w), x) for k in means for w, x in zip((32, 64), means[k], strict=True)]
            losses.append({key: torch.tensor([x, x + 0.01]) for key, x in pairs})
        return [claim for claim, holds in report.resnet_checks(*losses).items() if not holds]

    near = "at every width, the test loss is within 10% of the train loss"
    assert failing() == failing(test={"mulo_m": (0.6, 0.54)}) == []
    assert failing(test={"mulo_m": (0.6, 0.57)}) == [f"μLO_M: {near}"]
    rises, ahead = "the test loss falls with width, within the standard error", "at every width in"
    worse = [f"LO_M: {near}", f"LO_M: {rises}", f"μLO_M is ahead of LO_M {ahead} test loss"]
    assert failing(test={"lo_m": (0.6, 0.7)}) == worse
    diverged = {"mulo_m": (0.6, math.nan)}
    assert len(failing(diverged, diverged)) == 5


def test_arithmetic():
    a, b, gone = torch.tensor([1.0, 1.1]), torch.tensor([0.5, 0.6]), torch.tensor([0.4, torch.nan])
    assert report.falls([a, b])
    assert report.falls([a, a - 0.02, a - 0.01])  # up, but within the standard error
    assert not any(report.falls(losses) for losses in ([b, a], [a, a], [a, gone]))
    assert [report.stopped(x) for x in ([a, b, b], [a, a, b], [a, b, gone])] == [True, False, True]
    pairs = (a, b), (b, a), (gone, a), (a, gone)
    assert [report.worse(*pair) for pair in pairs] == [True, False, True, False]
    assert report.ranked(torch.tensor([0.3, 0.1, 0.3, 0.2])).tolist() == [3.5, 1.0, 3.5, 2.0]
    text = report.listing({"x": gone, "y": 1e5 * b, "mulo_m": b})
    assert text == "μLO_M 0.550, y 6e+04, x diverged"


def test_commands(tiny, folder, tmp_path, monkeypatch, capsys, complaint):
    """One experiment leaves a table and a figure; all of them RESULTS.md and README's picture."""
    monkeypatch.setattr(paper, "SUITES", {"desk": SUITE})
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "results")

    def run(line: str) -> str:
        monkeypatch.setattr(sys, "argv", ["paper.py", *line.split()])
        paper.main()
        return capsys.readouterr().out

    printed = run("depth --processes 1")
    assert "depth: fashion8_mlp, 4 layers: " in printed
    assert printed.count("\nyes ") + printed.count("\nNO ") == 4
    with open(tmp_path / "results" / "depth.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert (head[-2:], len(rows)) == (["loss", "stderr"], 12)
    assert all(row[3] == f"{float(row[3]):.4f}" for row in rows)
    assert (tmp_path / "results" / "depth.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "RESULTS.md").exists()
    monkeypatch.setattr(Figure, "savefig", lambda fig, file, **k: file.write(b"figure"))  # faster
    monkeypatch.setattr(paper, "EXPERIMENTS", {k: paper.EXPERIMENTS[k] for k in ("width", "coord")})
    run("all --processes 1")
    page = (tmp_path / "RESULTS.md").read_text()
    assert "## Wider nets" in page
    assert "[table](results/coord.csv)" in page
    assert (tmp_path / "results" / "picture.png").read_bytes() == b"figure"
    assert "no file 'sgd'" in complaint(paper, "width", "--optimizers", "sgd")


def test_results_follow_from_the_kept_losses(tmp_path, monkeypatch):
    """RESULTS.md and the tables are written again, byte for byte, with nothing to train."""
    monkeypatch.setattr(training, "train", lambda *a, **k: pytest.fail("a net is missing"))
    monkeypatch.setattr(Figure, "savefig", lambda *a, **k: None)  # seconds, for all figures
    results, findings, docs = Results(ROOT / "results"), {}, {}
    shutil.copy(ROOT / "RESULTS.md", tmp_path)
    for name, experiment in paper.EXPERIMENTS.items():
        findings[name], docs[name] = experiment(paper.Suite(), results), inspect.getdoc(experiment)
        report.write_finding(findings[name], name, tmp_path / "results")
        written = (tmp_path / "results" / f"{name}.csv").read_text()
        assert written == (ROOT / "results" / f"{name}.csv").read_text(), name
    report.write_results(findings, docs, tmp_path / "results", tmp_path / "RESULTS.md")
    assert (tmp_path / "RESULTS.md").read_text() == (ROOT / "RESULTS.md").read_text()
