"""Validation, the choice among seeds and its record; what is shipped."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import mulo
from mulo import checkpoints, recipes
from mulo.weights import choose


def run_file(path, seed, lam1=0.01):
    """The lo.pt of a run, with an untrained optimizer in it."""
    r = recipes.recipe("mulo_m", seed=seed, unroll=10, shortest=10, lam1=lam1)
    about = {"recipe": vars(r), "command": f"python metatrain.py --seed {seed}", "commit": "abc"}
    path.mkdir()
    mulo.save(recipes.new_lo(r), path / "lo.pt", minutes=1.0, meta_loss=2.0, **about)
    return path / "lo.pt"


def test_the_best_seed_is_shipped_with_the_record_of_all(tmp_path, monkeypatch, capsys, complaint):
    """A run whose nets diverge has the highest validation loss, and is recorded too."""
    monkeypatch.setattr(checkpoints, "SHIPPED", tmp_path / "weights")
    checkpoints.SHIPPED.mkdir()
    short = ("fashion8_mlp_w96_d2", 10, "constant"), ("teacherv_mlp_w48_d3", 20, "cosine")
    monkeypatch.setattr(choose, "VALIDATION", short)
    paths = [run_file(tmp_path / "a", 0, lam1=1e30), run_file(tmp_path / "b", 1)]
    monkeypatch.setattr(sys, "argv", ["choose.py", *map(str, paths), "--ship", "mulo_m"])
    choose.main()
    target = tmp_path / "weights" / "mulo_m.pt"
    assert f"chosen: {paths[1]}, saved as {target}" in capsys.readouterr().out
    shipped = mulo.load("mulo_m")
    assert torch.equal(shipped.w0, mulo.load(paths[1]).w0)
    tried = json.loads(mulo.load(target).about["chosen_among"])
    assert [x["seed"] for x in tried] == [0, 1]
    assert tried[0]["validation"] > tried[1]["validation"]
    assert len(tried[1]["scores"]) == 2
    record = (tmp_path / "weights" / "README.md").read_text()
    assert "| mulo_m | 1 | shipped |" in record
    assert "| mulo_m | 0 |  |" in record
    assert "is a run of mulo_m, not of lo_m" in complaint(choose, *paths, "--ship", "lo_m")
    mulo.save(mulo.SmallFC(), tmp_path / "other.pt")
    assert "was not meta-trained at desk scale" in complaint(choose, tmp_path / "other.pt")


def test_the_record_follows_from_the_shipped_files(tmp_path, monkeypatch):
    for file in checkpoints.SHIPPED.glob("*.pt"):
        (tmp_path / file.name).symlink_to(file)
    before = Path(shutil.copy(checkpoints.SHIPPED / "README.md", tmp_path)).read_text()
    monkeypatch.setattr(checkpoints, "SHIPPED", tmp_path)
    choose.write_record()
    assert (tmp_path / "README.md").read_text() == before


@pytest.mark.parametrize("name", [path.stem for path in checkpoints.SHIPPED.glob("*.pt")])
def test_shipped(name):
    """Each is of the recipe that it claims, and the best of several seeds."""
    lo = mulo.load(name)
    recipe, tried = lo.about["recipe"], json.loads(lo.about["chosen_among"])
    r = recipes.recipe(name, seed=recipe["seed"])
    assert lo.config == recipes.new_lo(r).config
    assert {field: recipe[field] for field in vars(r)} == vars(r)
    assert len({x["seed"] for x in tried}) >= 2
    assert min(tried, key=lambda x: x["validation"])["seed"] == r.seed
