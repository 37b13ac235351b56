"""Dry runs: every job of the paper's suite is listed, and costs what closed forms say."""

import dataclasses
import functools
import itertools
import sys

import pytest

from mulo import estimate, evaluate, tasks
from mulo.evaluate import Job, Results, contender
from mulo.paper import ablations, claims, plan, resnet, transfer  # noqa: F401 (experiments)

A6000 = estimate.CARDS["a6000"]
PAPER = claims.SUITES["paper"]


@pytest.fixture
def one_width(monkeypatch):
    """One job of each kind is costed: this test counts no FLOPs."""
    known, cost = {}, plan.cost

    def once(job, on):
        meta = isinstance(job, ablations.MetaTraining)
        key = meta or str(job).split(" on ")[-1].split("_w")[0]
        return known.get(key) or known.setdefault(key, cost(job, on))

    monkeypatch.setattr(plan, "cost", once)


def test_every_job_of_the_papers_suite_is_listed(tmp_path, monkeypatch, capsys, one_width):
    """No data set, no tuned values under a schedule, no variants: nothing stops a dry run."""
    out = tmp_path / "none"
    flags = ["all", "--scale", "paper", "--dry-run", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *flags])
    evaluate.main()
    lines = capsys.readouterr().out.splitlines()
    assert not out.exists()
    assert [x[:-1] for x in lines if x.endswith(":")] == list(claims.EXPERIMENTS)
    for name, family in itertools.product(PAPER.who, PAPER.families):
        for task in map(family.task, family.widths):
            assert any(x.startswith(f"  {name} on {task} ") for x in lines)
    for task in PAPER.resnets:
        assert any(x.startswith(f"  mulo_m on {task} ") for x in lines)
    assert sum("  meta-training " in x for x in lines) == 11 * PAPER.ablate_seeds
    assert any("twice the steps, seed 1 on in32_mlp_w1024_d3" in x for x in lines)
    assert any("tuning adamw on c10s_vit_w64_d3_b16, cosine" in x for x in lines)
    assert sum("muadam on in32_mlp_w1024_d3, cosine" in x for x in lines) == 6  # tuned, and run
    jobs = sum(x.startswith("  ") for x in lines)
    assert lines[-1].startswith(f"{jobs} jobs that {out} does not have, ")
    assert "Estimated on an A6000. Not measured" in lines[-1]


def test_finished_jobs_are_not_listed(tmp_path):
    family = claims.Family("fashion8_mlp", (8, 16), (8, 8, 8), seeds=2)
    tiny = dataclasses.replace(PAPER, who=("mulo_m",), families=(family,), steps=4)
    Results(tmp_path).losses(tiny.job(contender("mulo_m"), "fashion8_mlp_w8_d3", seeds=1))
    found = functools.partial(plan.report, ["width"], tiny, tmp_path, A6000)
    [_, first, second, total] = found().splitlines()
    assert ("w8_d3" in first, " 1 nets" in first) == (True, True)
    assert ("w16_d3" in second, " 2 nets" in second) == (True, True)
    assert total.startswith("2 jobs")
    assert found(fresh=True).count(" 2 nets") == 2
    assert found(fresh=True, at_once=1).count(" 1 nets") == 4
    claims.width(tiny, Results(tmp_path, at_once=1))
    assert found().splitlines()[-1].startswith("0 jobs")
    assert len(Results(tmp_path).kept) == 4


def test_costs():
    """Parameters exactly; time is linear in steps; memory is the closed form's."""
    who = contender("adamw")
    one, long = (plan.cost(Job(who, "in32_mlp_w1024_d3", n), A6000) for n in (1000, 3000))
    assert one.parameters == 3072 * 1024 + 1024 + 1024**2 + 1024 + 1000 * 1024 + 1000
    assert long.hours == pytest.approx(3 * one.hours)
    assert one[2:4] == long[2:4]
    fixed = estimate.CONTEXT + estimate.DATASETS["imagenet32"]
    assert one.bytes > fixed + 3 * 4 * one.parameters  # θ, m, v


@pytest.mark.parametrize("name", ["vit_w3072_d3", "lm_w3072_d3", "resnet_w2048"])
def test_the_papers_largest(name):
    found = plan.cost(Job(contender("muvelo_m"), name, 1000, seeds=(0, 1, 2)), A6000)
    assert found.parameters == tasks._count(tasks.get(name))
    assert found.bytes > estimate.CONTEXT + 3 * 20 * found.parameters  # 16 bytes of state


def test_jobs_that_do_not_fit_are_marked():
    job = Job(contender("adamw"), "lm_w3072_d3", 1000, seeds=(0, 1, 2, 3, 4))
    cost = plan.cost(job, A6000)
    assert cost.bytes > A6000.memory > plan.cost(dataclasses.replace(job, seeds=(0,)), A6000).bytes
    assert 1 <= cost.fit < 5
    note = plan.line(job, cost, A6000.memory)
    assert note.endswith(f"  more than 48 GiB: fewer seeds at a time, --at-once {cost.fit}")
    assert plan.line(job, cost, estimate.card("1000,60").memory).endswith(" h")
    alone = plan.line(job, cost._replace(fit=0), A6000.memory)
    assert alone.endswith("  more than 48 GiB: use a larger card")


def test_bad_card(complaint, tmp_path):
    said = complaint(evaluate, "width", "--dry-run", "--card", "h100", "--out", tmp_path)
    assert "unknown card 'h100': use one of a6000, a100" in said
