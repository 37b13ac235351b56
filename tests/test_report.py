"""RESULTS.md says what the kept results say, and these what the kept losses say."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import ablate
import evaluate
import report
import training
from cells import Cells
from experiments import Suite

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
FOUND = [name for name in report.CLAIMS if (RESULTS / f"{name}.json").exists()]


@pytest.mark.parametrize("name", FOUND)
def test_results_follow_from_the_losses(name, tmp_path, monkeypatch):
    """Table, sentence and checks are drawn anew, and nothing has to be trained for that."""
    monkeypatch.setattr(training, "train", lambda *a, **k: pytest.fail("a cell is missing"))
    monkeypatch.setattr(ablate.Training, "run", lambda *a, **k: pytest.fail("a run is missing"))
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.png"))
    out = tmp_path / "results"
    found = evaluate.EXPERIMENTS[name](Suite(), Cells(out), out)
    assert found._asdict() == json.loads((RESULTS / f"{name}.json").read_text())
    assert (out / f"{name}.csv").read_text() == (RESULTS / f"{name}.csv").read_text()


@pytest.mark.skipif(not FOUND, reason="no results are kept")
def test_results_md_is_up_to_date(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results")
    report.write(tmp_path / "results", tmp_path / "RESULTS.md")
    assert (tmp_path / "RESULTS.md").read_text() == (ROOT / "RESULTS.md").read_text()


def test_falls_and_worse():
    a, b, gone = torch.tensor([1.0, 1.1]), torch.tensor([0.5, 0.6]), torch.tensor([0.4, torch.nan])
    assert report.falls([a, b])
    assert not report.falls([b, a])
    assert report.falls([a, a - 0.02, a - 0.01])  # up, but within the standard error
    assert not report.falls([a, a])
    assert report.stopped([a, b, b])
    assert not report.stopped([a, a, b])
    assert report.stopped([a, b, gone])
    ranks = report.ranked(torch.tensor([0.3, 0.1, 0.3, 0.2]))
    assert ranks.tolist() == [3.5, 1.0, 3.5, 2.0]
    assert not report.falls([a, gone])
    assert report.worse(a, b)
    assert not report.worse(b, a)
    assert report.worse(gone, a)
    assert not report.worse(a, gone)
    assert report.ordered({"x": float("nan"), "mulo_m": 0.25}) == "μLO_M 0.250, x diverged"


def test_tables_quote_what_they_must(tmp_path):
    report.write_table(tmp_path / "x.csv", ["a", "|b|"], [["1, 2", 3], ["mulo_m", 4]])
    assert report.rows_of(tmp_path / "x.csv")[0] == {"a": "1, 2", "|b|": "3"}
    assert report.table(tmp_path / "x.csv")[0] == r"| a | \|b\| |"
    assert report.table(tmp_path / "x.csv")[2:] == ["| 1, 2 | 3 |", "| μLO_M | 4 |"]
