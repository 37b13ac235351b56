"""Estimates of memory and time: against the profiler, closed forms, and by hand."""

import re
import sys

import pytest
import torch

from mulo import bench, estimate, metatrain, pes, tasks

TINY = {"pairs": 4, "micro_batch": 4, "truncation": 3, "unroll": 9, "shortest": 4}


def test_memory_is_what_the_profiler_sees():
    r = metatrain.recipe("mulo_m", widths=(128,), batch_size=64, **TINY)
    trainer = metatrain.Trainer(r, metatrain.new_lo(r))
    [particles] = trainer.particles[0]
    particles.truncation(trainer.phi.detach())
    phi = torch.zeros(8, len(trainer.phi))

    def inner() -> None:
        batch = (torch.zeros(8, 64, 1, 8, 8), torch.zeros(8, 64, dtype=torch.long))
        particles.inner_step(particles.opt.prepare(pes.unflatten(phi, trainer.lo)), batch)

    with estimate.Count() as count:
        inner()
    assert count.peak == pytest.approx(bench.extra_bytes(inner), rel=0.05)
    meta = metatrain.Trainer(r, metatrain.new_lo(r, "meta"), data=False)
    [[held, more, _]], *_ = estimate.meta_training(meta, estimate.CARDS["a6000"])
    assert more == pytest.approx(count.peak, rel=0.01)
    per_net = 26_122 * (1 + 3 + 1) * 4  # parameters, M and V: the rest is rows and columns
    assert 8 * per_net < held < 1.1 * 8 * per_net


def test_time_of_one_operation():
    """A large product is bound by FLOPs, a large sum by memory, a small one by its launch."""
    card = estimate.Card("test", 1e12, 1e13, 2e13)
    x = torch.empty(4096, 4096, device="meta")
    small = torch.empty(8, device="meta")
    for run, seconds in (
        (lambda: x @ x, 2 * 4096**3 / 1e13 / estimate.BUSY_MATMUL),
        (lambda: x + x, 3 * 4 * 4096**2 / 1e12 / estimate.BUSY_MEMORY),
        (lambda: small + small, estimate.LAUNCH),
    ):
        with estimate.Count() as count:
            run()
        assert count.seconds(card, tf32=False) == pytest.approx(seconds)
    with estimate.Count() as count:
        x @ x
    assert count.seconds(card, tf32=True) == pytest.approx(4096**3 / 1e13 / estimate.BUSY_MATMUL)


def test_a_step_of_an_evaluation():
    """Of an MLP by hand: its products, Adam's state; and no FLOPs of grouped convolutions twice."""
    task = tasks.get("in32_mlp_w256_d3")
    found = estimate.nets_step(task, "adam", 3)
    inputs, rest = 3072 * 256, 256**2 + 256 * 1000  # no gradient with respect to the images
    assert found.entries == 3 * (inputs + rest + 256 + 256 + 1000)
    products = 2 * 4096 * (2 * inputs + 3 * rest) * 3
    flops = sum(flops for _, flops in found.count.operations)
    assert flops == pytest.approx(products, rel=1e-3)
    assert flops == pytest.approx(6 * 4096 * found.entries, rel=0.3)
    assert found.held == 3 * 4 * found.entries
    assert found.kernel is None
    resnet = tasks.get("fashion_resnet_w32")
    one, three = (
        sum(flops for _, flops in estimate.nets_step(resnet, "adam", n).count.operations)
        for n in (1, 3)
    )
    assert three == pytest.approx(3 * one)


def said(monkeypatch, capsys, *flags):
    monkeypatch.setattr(sys, "argv", ["metatrain.py", *flags, "--scale", "paper", "--dry-run"])
    metatrain.main()
    return capsys.readouterr().out.splitlines()


def test_the_papers_recipe(monkeypatch, capsys):
    """mulo_m on an A6000: the nets' products by hand, and the whole within its bounds."""
    *tasks, memory, time = said(monkeypatch, capsys, "mulo_m")
    assert [line.split(":")[0] for line in tasks] == [f"in32_mlp_w{w}_d3" for w in (128, 512, 1024)]
    assert 7 < float(re.search(r"about (\S+) GiB", memory)[1]) < 8.5
    seconds = float(re.search(r"(\S+) s per outer step", time)[1])
    weights = sum(3072 * w + w * w + 1000 * w for w in (128, 512, 1024))
    inputs = sum(3072 * w for w in (128, 512, 1024))  # no gradient with respect to the inputs
    products = 2 * 4096 * (3 * weights - inputs) * 16 * 50  # forward, and twice backward
    assert 0.75 * seconds > products / (0.75 * 38.7e12) > 0.3 * seconds
    assert seconds <= 8
    assert "the paper: 103 h" in time
    folded = said(monkeypatch, capsys, "mulo_m", "--backend", "folded")[-1]
    assert float(re.search(r"(\S+) s per outer step", folded)[1]) > 3 * seconds
    fast = said(monkeypatch, capsys, "mulo_m", "--tf32", "--card", "a100")[-1]
    assert float(re.search(r"(\S+) s per outer step", fast)[1]) < seconds


def test_cards():
    assert estimate.card("A100") is estimate.CARDS["a100"]
    assert estimate.card("1000,60")[1:3] == (1e12, 6e13)
    with pytest.raises(ValueError, match="unknown card 'h100': use one of a6000, a100, or GB/s"):
        estimate.card("h100")


def test_views_and_in_place_steps_take_no_memory():
    old = torch.zeros(1000)
    with estimate.Count() as peak:
        old.view(10, 100).add_(1)
        kept = old * 2
        old * 3
    assert peak.peak == 8000
    del kept
    assert peak.now == 0
