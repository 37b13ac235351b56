"""RESULTS.md says what the kept results say, and these what the kept losses say."""

import json
import shutil
from pathlib import Path

import pytest

from mulo import evaluate, training
from mulo.paper import ablations, claims, report, resnet, transfer  # noqa: F401 (experiments)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


@pytest.mark.parametrize("name", report.CLAIMS)
def test_results_follow_from_the_losses(name, tmp_path, monkeypatch):
    """Table, sentence and checks are made again, and nothing has to be trained for that."""
    monkeypatch.setattr(training, "train", lambda *a, **k: pytest.fail("a net is missing"))
    monkeypatch.setattr(ablations.MetaTraining, "run", lambda *a: pytest.fail("a run is missing"))
    monkeypatch.setattr(report, "save", lambda *a: None)  # seconds, for all figures
    report.keep(claims.EXPERIMENTS[name](claims.Suite(), evaluate.Results(RESULTS)), name, tmp_path)
    for file in (f"{name}.json", f"{name}.csv"):
        assert (tmp_path / file).read_text() == (RESULTS / file).read_text()


def test_results_md_is_up_to_date(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results")
    report.write(tmp_path / "results", tmp_path / "RESULTS.md")
    assert (tmp_path / "RESULTS.md").read_text() == (ROOT / "RESULTS.md").read_text()


def test_readme_picture(tmp_path):
    report.draw_readme_picture(tmp_path, "fashion8_mlp", 64)
    assert not list(tmp_path.iterdir())  # there are no tables yet
    for name in ("width", "coord"):
        shutil.copy(RESULTS / f"{name}.csv", tmp_path)
    report.draw_readme_picture(tmp_path, "fashion8_mlp", 64)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_findings_are_written(tmp_path):
    found = report.Finding(1, ("a", "|b|"))
    found.rows += [["1, 2", 3], ["mulo_m", 4]]
    found.said, found.checks = ["One.", "Two."], {"it holds": True}
    (tmp_path / "new").mkdir()
    report.keep(found, "depth", tmp_path / "new")
    assert (tmp_path / "new" / "depth.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "new" / "depth.json").read_text()) == {
        "said": "One.\nTwo.", "checks": {"it holds": True},
    }  # fmt: skip
    assert (tmp_path / "new" / "depth.csv").read_text() == 'a,|b|\n"1, 2",3\nmulo_m,4\n'
    table = report.markdown(tmp_path / "new" / "depth.csv")
    assert table[0] == r"| a | \|b\| |"
    assert table[2:] == ["| 1, 2 | 3 |", "| μLO_M | 4 |"]
    report.write(tmp_path / "new", tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    assert f"| [Deeper nets](#deeper-nets) | {report.SHORT['depth']} | One. | 1 of 1 |" in text
    assert "| Wider nets |" in text
    assert "not run: `python evaluate.py width`" in text
    assert "One.\n\nTwo.\n\n- yes: it holds\n\n![Deeper nets](new/depth.png)" in text
