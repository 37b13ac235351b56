"""Every experiment end to end at a tiny size, and the arithmetic of its checks."""

import dataclasses
import math

import pytest
import torch

from mulo import metatrain, training
from mulo.evaluate import Results, contender
from mulo.paper import ablations, baselines, claims, report, resnet, transfer  # noqa: F401 (experiments)

TINY = (("steps", 2), ("pairs", 1), ("unroll", 4), ("shortest", 4), ("truncation", 2))
SMALL = {"columns": (8, 8, 8), "base": 8, "longest": 3}
MLPS = claims.Family("fashion8_mlp", (8, 16), depths=(3, 4), horizons=(2, 3), seeds=2, **SMALL)
VITS = claims.Family("fashion_vit", (8, 16), depths=(1, 2), seeds=2, few=1, suffix="_b2", **SMALL)
SUITE = claims.Suite(
    who=("mulo_m", "lo_m", "adamw", "muadam"), families=(MLPS, VITS), steps=6,
    ablate_widths=(8, 16), ablate_seeds=1, ablate_recipe=TINY, transfer_seeds=2,
    transfer={"fashion8_mlp_w{}_d3": (8, 16)},
    resnets=("fashion8_mlp_w8_d3", "fashion8_mlp_w16_d3"),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def tuned(tmp_path_factory):
    """Tuned values for the tiny runs, in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        known = {which: baselines.best(which, "fashion8_mlp", 500) for which in baselines.BASELINES}
        patch.setattr(baselines, "TUNED", tmp_path_factory.mktemp("tuned"))
        for which, values in known.items():
            for family in SUITE.families:
                baselines.remember(values, which, family.kind, 500, "constant")
                baselines.remember(values, which, family.kind, SUITE.steps, "constant")
            for times in MLPS.horizons:
                baselines.remember(values, which, "fashion8_mlp", times * SUITE.steps, "cosine")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the results: experiments share nets."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize("name", claims.EXPERIMENTS)
def test_smoke(name, folder, tmp_path, monkeypatch):
    """A table and a sentence; and once more from the files alone, nothing trained."""
    monkeypatch.setattr(report, "save", lambda *a: None)  # seconds, for all figures
    found = claims.EXPERIMENTS[name](SUITE, Results(folder))
    assert "μLO_M" in found.said[0] or "mulo_s" in found.said[0]
    assert len(found.rows) > 3
    assert len({len(row) for row in found.rows}) == 1
    monkeypatch.setattr(training, "train", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(metatrain, "Trainer", lambda *a, **k: pytest.fail("meta-trained again"))
    again = claims.EXPERIMENTS[name](SUITE, Results(folder))
    assert (again.rows, again.said, again.checks) == (found.rows, found.said, found.checks)
    report.keep(found, name, tmp_path)
    assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == len(found.rows)
    report.write(tmp_path, tmp_path / "RESULTS.md")
    text = (tmp_path / "RESULTS.md").read_text()
    assert report.CLAIMS[name][0] in text
    assert f"| {sum(found.checks.values())} of {len(found.checks)} |" in text
    assert text.count("**no**") == sum(not holds for holds in found.checks.values())


def test_any_optimizers_may_be_left_out(folder):
    alone = dataclasses.replace(SUITE, who=("mulo_m",))
    for name in ("rank", "horizon"):
        found = claims.EXPERIMENTS[name](alone, Results(folder))
        assert not [claim for claim in found.checks if "AdamW" in claim or "best" in claim]
    files = dataclasses.replace(SUITE, who=("weights/mulo_m.pt", "weights/lo_m.pt"))
    assert len(claims.stability(files, Results(folder)).checks) == 2


def test_rank_counts_divergence_as_guessing(tmp_path):
    results, alone = Results(tmp_path), dataclasses.replace(SUITE, families=(MLPS,))
    losses = {"mulo_m": 0.5, "adamw": math.nan, "muadam": 2.0, "lo_m": 7.0}  # 7: worse than that
    for who, loss in losses.items():
        for times in (1, 5):
            job = alone.job(contender(who), MLPS.task(8), times)
            results.kept |= {key: " ".join([str(loss)] * 50) for key in job.keys()}
    found = claims.rank(alone, results)
    order = "best first: μLO_M 1.00, μAdam 2.00, LO_M 3.50, AdamW 3.50."
    assert found.said[0] == f"Average rank after 1 horizon(s), {order}"
    assert ["all", "adamw", *["3.50"] * 9] in found.rows
    where = "XL, after 1 horizon(s)"
    assert found.checks[f"μLO_M and μVeLO_M have the two best average ranks, {where}"]
    assert not found.checks[f"LO_M and VeLO_M have the two worst, {where}"]


def test_width_checks():
    family = claims.Family("teacher_mlp", (64, 256, 1024))
    flat, fall = [[0.5, 0.51]] * 3, [[0.6, 0.61], [0.5, 0.51], [0.4, 0.41]]
    gone = [[0.6, 0.61], [0.5, 0.51], [math.nan, 0.4]]

    def checks(mu, sp):
        losses = {
            name: dict(zip(family.widths, map(torch.tensor, some), strict=True))
            for name, some in (("mulo_m", mu), ("lo_m", sp))
        }
        return list(claims.width_checks(family, losses).values())

    assert checks(fall, gone) == [True, True, True, True]
    assert checks(fall, flat) == [True, True, True, True]
    assert checks(flat, fall) == [False, False, False, False]
    assert checks(gone, fall) == [False, False, False, False]
    up = [[0.6, 0.61], [0.4, 0.41], [0.402, 0.412]]  # in both nets, by less than they differ
    assert checks(up, flat) == [True, False, True, True]


def test_resnet_checks():
    """Ahead at every width, falling, and test near train: each check can fail alone."""

    def checks(**changes):
        means = {"mulo_m": (0.6, 0.5), "lo_m": (0.8, 0.7)}
        final = {
            split: {
                (name, w): torch.tensor([x, x + 0.01])
                for name, some in (means | changes.get(split, {})).items()
                for w, x in zip((32, 64), some, strict=True)
            }
            for split in ("train", "test")
        }
        found = report.Finding(1, ())
        resnet.describe(found, final)
        return [claim for claim, holds in found.checks.items() if not holds]

    falls = "loss falls with width, within the standard error"
    near = "at every width, the test loss is within 10% of the train loss"
    assert checks() == []
    assert checks(test={"mulo_m": (0.6, 0.54)}) == []
    assert checks(test={"mulo_m": (0.6, 0.57)}) == [f"μLO_M: {near}"]
    assert checks(test={"lo_m": (0.6, 0.7)}) == [
        f"LO_M: {near}", f"LO_M: the test {falls}",
        "μLO_M is ahead of LO_M at every width in test loss",
    ]  # fmt: skip
    gone = {"mulo_m": (0.6, math.nan)}
    assert checks(train=gone, test=gone) == [
        f"μLO_M: {near}", f"μLO_M: the train {falls}", f"μLO_M: the test {falls}",
        *(f"μLO_M is ahead of LO_M at every width in {x} loss" for x in ("train", "test")),
    ]  # fmt: skip
    gone = {"lo_m": (0.8, math.nan)}
    assert "μLO_M is ahead of LO_M at every width in test loss" not in checks(test=gone)


def test_arithmetic():
    a, b, gone = torch.tensor([1.0, 1.1]), torch.tensor([0.5, 0.6]), torch.tensor([0.4, torch.nan])
    assert claims.falls([a, b])
    assert not claims.falls([b, a])
    assert claims.falls([a, a - 0.02, a - 0.01])  # up, but within the standard error
    assert not claims.falls([a, a])
    assert not claims.falls([a, gone])
    assert claims.stopped([a, b, b])
    assert not claims.stopped([a, a, b])
    assert claims.stopped([a, b, gone])
    assert claims.worse(a, b)
    assert not claims.worse(b, a)
    assert claims.worse(gone, a)
    assert not claims.worse(a, gone)
    assert claims.ranked(torch.tensor([0.3, 0.1, 0.3, 0.2])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert (
        claims.ordered({"x": gone, "y": 1e5 * b, "mulo_m": b}) == "μLO_M 0.550, y 6e+04, x diverged"
    )


def test_final_loss_is_of_the_last_tenth():
    losses = torch.arange(50.0).unsqueeze(1)
    assert float(training.final_loss(losses)) == 47
    assert float(training.final_loss(losses, 0.2)) == 9
