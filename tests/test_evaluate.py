"""Experiments and their command line."""

import dataclasses
import json
import sys
from pathlib import Path

import baselines
import evaluate
from cells import Cells
from experiments import SMOKE

ROOT = Path(__file__).parents[1]


def test_messages(tmp_path, complaint):
    task = ["task", "fashion8_mlp_w8_d3"]
    for flags, reason in (
        (["tune", "fashion9_mlp"], "unknown task"),
        (["tune", "fashion8_mlp", "--seeds", 0], "must be 1 or more"),
        (["tune", "fashion_mlp", "--rates-only"], "first run python evaluate.py tune fashion_mlp"),
        (["validate", tmp_path / "none.pt"], "no learned optimizer"),
        (["task", "foo", "--who", "adamw"], "unknown task"),
        ([*task, "--who", "sgd"], "no learned optimizer 'sgd'"),
        (task, "say which optimizers to compare"),
        ([*task, "--who", "adamw", "--seeds", 0], "must be 1 or more"),
        ([*task, "--who", "adamw", "--device", "foo"], "device 'foo' is not there"),
        (
            ["task", "fashion_vit_w8_d2", "--who", "adamw"],
            "run python evaluate.py tune fashion_vit",
        ),
    ):
        assert reason in complaint(evaluate, *flags)


def test_commands(tmp_path, monkeypatch, capsys):
    """Tune rates, look at a task, test a claim: each says so, and leaves its files."""
    before = {which: baselines.best(which, "fashion8_mlp", 500) for which in baselines.NAMES}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(baselines, "TUNED", tmp_path / "results" / "tuned")
    for which, values in before.items():
        baselines.remember(which, "fashion8_mlp", 500, "constant", values)
    monkeypatch.setattr(evaluate, "SUITES", {"desk": dataclasses.replace(SMOKE, who=("mulo_m",))})

    def run(line: str) -> str:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *line.split()])
        evaluate.main()
        return capsys.readouterr().out

    said = run("tune fashion8_mlp --width 8 --steps 4 --seeds 1 --schedule cosine --rates-only")
    assert "of 14, kept in" in said
    assert "of 32, kept in" in said
    kept = json.loads((tmp_path / "results" / "tuned" / "fashion8_mlp.json").read_text())
    assert kept["muadam, 4 steps, cosine"]["configurations"] == 32
    said = run("task fashion8_mlp_w8_d3 --who mulo_m adamw --steps 4 --seeds 2 --processes 1")
    assert "fashion8_mlp_w8_d3" in said
    assert said.count("±") == 2
    assert "4 layers, final loss: μLO_M" in run("depth --processes 1")
    assert "## Deeper nets" in (tmp_path / "RESULTS.md").read_text()
    run("depth --processes 1 --who mulo_m --out elsewhere")
    assert "Not run: `python evaluate.py width`" in (tmp_path / "elsewhere/RESULTS.md").read_text()


def test_ctrl_c_is_one_sentence(tmp_path, monkeypatch, complaint):
    def stop(*args):
        """As when a user has seen enough."""
        raise KeyboardInterrupt

    monkeypatch.setitem(evaluate.EXPERIMENTS, "depth", stop)
    assert "stopped; what was finished is kept" in complaint(evaluate, "depth", "--out", tmp_path)


# Final losses of several meta-training seeds at 1, 4 and 16 times the widest meta-training task:
# python evaluate.py task fashion8_mlp_w64_d3 fashion8_mlp_w256_d3 fashion8_mlp_w1024_d3
#   --who runs/mulo_m_desk_seed{0,1,2,3,4} runs/lo_m_desk_seed{0,1,2} adamw muadam
#   --seeds 2 --out results/meta_seeds
def meta_seeds():
    found = {}
    for (who, _, task, *_), losses in Cells(ROOT / "results" / "meta_seeds").rows.items():
        final = [float(x) for x in losses.split()][-5:]
        found.setdefault((who, int(task.split("_w")[1].split("_")[0])), []).append(sum(final) / 5)
    return {key: sum(x) / len(x) for key, x in found.items()}


def test_every_meta_seed_generalizes_to_wider_nets():
    loss = meta_seeds()
    for seed in range(3):
        for width in (256, 1024):
            sp = loss[f"lo_m_desk_seed{seed}", width]
            assert not sp <= loss[f"mulo_m_desk_seed{seed}", width]  # or it is nan: diverged
    at_16 = sorted(loss[f"mulo_m_desk_seed{seed}", 1024] for seed in range(5))
    assert at_16[2] < loss["muadam", 1024]
