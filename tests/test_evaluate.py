"""Experiments and their command line."""

from pathlib import Path

import evaluate
from cells import Cells

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
