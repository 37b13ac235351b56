"""Tasks: the paper's table, stacked nets against single ones, and μP in all families; one's own."""

import copy
import itertools
import math
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import mulo
from mulo import metatrain, tasks
from mulo.optimizees import datasets
from mulo.roles import ALL, NORMS, coordinate_check, weights_of

FAMILIES = ["fashion8_mlp_w64_d3", "fashion_vit_w32_d2", "pixels_lm_w32_d2", "fashion_resnet_w32"]
FAMILIES += ["fashion_conv_w16_d3"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# Numbers of parameters, derived by hand from the paper's tables and not from the code; batch size,
# heads and data set.
TABLE = {
    "in32_mlp_w128_d3": (538_856, 4096, 0, "imagenet32"),
    "in32_mlp_w8192_d3": (100_484_072, 4096, 0, "imagenet32"),
    "in64_mlp_w4096_d3": (71_214_056, 4096, 0, "imagenet64"),
    "c10_mlp_w1024_d3": (4_206_602, 4096, 0, "cifar10"),
    "in32_mlp_w1024_d16": (18_866_152, 128, 0, "imagenet32"),
    "vit_w192_d3": (1_547_368, 1024, 3, "imagenet32"),
    "vit_w3072_d3": (343_247_848, 1024, 16, "imagenet32"),
    "vit_w1024_d16": (202_551_272, 128, 3, "imagenet32"),
    "lm_w768_d3": (70_489_088, 128, 8, "lm1b"),
    "lm_w2048_d3": (282_289_408, 128, 16, "lm1b"),
    "lm_w1024_d16": (267_044_096, 128, 3, "lm1b"),
    "resnet_w128": (828_728, 128, 0, "imagenet32"),
    "resnet_w2048": (180_607_208, 128, 0, "imagenet32"),
}


def test_the_papers_table():
    """At full size, on the meta device."""
    for name, (count, batch_size, heads, dataset) in TABLE.items():
        task = tasks.get(name)
        model = task.skeleton()
        assert sum(p.numel() for p in model.parameters()) == count, name
        assert all(p.is_meta for p in model.parameters())
        assert (task.batch_size, task.heads, task.dataset) == (batch_size, heads, dataset), name
        side = 64 if "in64" in name else 32
        assert task.shape == ((64,) if name.startswith("lm") else (3, side, side)), name


def test_any_width_and_depth():
    task = tasks.get("c10_mlp_w96_d5")
    assert (task.width, task.depth, task.dataset) == (96, 5, "cifar10")
    assert len(task.skeleton().layers) == 4
    assert tasks.get("lm_w100_d2").heads == 2
    assert tasks.get("vit_w64_d1").skeleton().blocks[0].attention.scale == 1 / 64
    assert tasks.get("vit_w64_d1", rules=()).skeleton().blocks[0].attention.scale == 1 / 8
    assert tasks.get("text_lm_w64_d3", dataset="text:book.txt").dataset == "text:book.txt"
    deep = tasks.get("lm_w1024_d16_b4")
    assert (deep.batch_size, deep.heads) == (4, 3)
    assert tasks.get("fashion_resnet_w32_d18") == tasks.get("fashion_resnet_w32")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlp_w128", "unknown kind 'mlp': use one of in32_mlp, .*text_lm"),
        ("in32_mlp_w128", "'in32_mlp_w128' has no depth: use in32_mlp_w128_d3"),
        ("resnet_w128_d3", "resnet_w128: a resnet's width is a multiple of 32, its depth 18"),
        ("", "unknown task '': a name is kind, width and depth, such as fashion8_mlp_w64_d3"),
        ("c10_mlp_w64_d1", "c10_mlp_w64_d1 is too small: use w1_d2 or more"),
    ],
)
def test_names_that_are_wrong(name, message):
    with pytest.raises(ValueError, match=message):
        tasks.get(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_roles_and_init(name):
    """By the table under μP; N(0, 1/fan_in), zero biases and a plain head in SP; zero outputs."""
    roles = tasks.get(name).roles()
    assert [n for n, role in roles.items() if role == "output"] == ["head.weight"]
    for rules in (ALL, ()):
        task = tasks.get(name, rules=rules)
        params = task.init(8, seeded(), zero_output=False)
        for w in weights_of(task.skeleton()):
            p = params[w.name]
            assert p.shape == (8, *w.param.shape)
            if isinstance(w.module, NORMS):
                assert (p == float(w.name.endswith("weight"))).all()
            elif w.kind == "vector":
                assert float(p.std()) == pytest.approx(1, rel=0.35) if rules else not p.any()
            else:
                power = {"output": 0}.get(roles[w.name], -1) if rules else -1
                assert float(p.var()) == pytest.approx(w.fan_in**power, rel=0.25), w.name
        assert not torch.equal(params["head.weight"][0], params["head.weight"][1])
    task = tasks.get(name)
    assert not task.init(2, seeded())["head.weight"].any()
    model = task.model(seeded(3))
    for n, p in model.named_parameters():
        assert torch.equal(p, task.init(1, seeded(3))[n][0])


def test_the_lm_is_causal_and_padding_does_not_count():
    task = tasks.get("pixels_lm_w32_d2")
    model = task.model(seeded(), zero_output=False)
    x = torch.randint(17, (3, 64), generator=seeded())
    y = x.clone()
    y[:, 40:] = (y[:, 40:] + 1) % 17
    before, after = model(x), model(y)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert (before[:, 40:] - after[:, 40:]).abs().max() > 1e-4

    targets, mask = torch.randint(17, (3, 64), generator=seeded(1)), torch.arange(64) < 30
    loss = task.loss(model, (x, targets, mask.expand(3, 64)))
    expected = nn.functional.cross_entropy(before[:, :30].flatten(0, 1), targets[:, :30].flatten())
    torch.testing.assert_close(loss, expected)
    assert task.loss(model, (x, targets, torch.zeros(3, 64, dtype=torch.bool))) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_stacked_is_a_loop(name):
    """Losses and gradients of P stacked nets equal those of P single nets."""
    P, task, dtype = 2, tasks.get(name), torch.float64
    batch = task.data().batch([seeded(k) for k in range(P)], 6)
    batch = tuple(b.to(dtype) if b.is_floating_point() else b for b in batch)
    params = task.init(P, seeded(), zero_output=False)
    params = {n: p.to(dtype).requires_grad_() for n, p in params.items()}
    losses = task.losses(params, batch)
    grads = torch.autograd.grad(losses.sum(), list(params.values()))
    for k in range(P):
        model = copy.deepcopy(task.skeleton()).to_empty(device="cpu").to(dtype)
        model.load_state_dict({n: p[k].detach() for n, p in params.items()})
        loss = task.loss(model, tuple(b[k] for b in batch))
        loss.backward()
        torch.testing.assert_close(losses[k], loss, rtol=1e-5, atol=0)
        for (n, p), g in zip(model.named_parameters(), grads, strict=True):
            assert float((g[k] - p.grad).norm()) <= 1e-5 * float(p.grad.norm()) + 1e-9, n


CHECKS = {  # kind: widths, batch size, repeats, other fields
    "fashion8_mlp_w{}_d3": ([64, 256], 64, 4, {}),
    "fashion_vit_w{}_d1": ([128, 512], 4, 3, {"heads": 2}),
    "pixels_lm_w{}_d1": ([64, 192], 4, 4, {"heads": 2}),
    "fashion_resnet_w{}": ([64, 192], 16, 4, {}),
    "fashion_conv_w{}_d3": ([64, 192], 16, 3, {}),
}


@pytest.mark.parametrize("kind", CHECKS)
def test_coordinate_check_with_adam(kind):
    """In the first steps the slopes of all layers are small under μP, and far off in SP."""
    widths, size, repeats, fields = CHECKS[kind]
    batch = tasks.get(kind.format(widths[0])).data().batch(seeded(1), size)
    worst = {}
    for rules, times in ((ALL, repeats), ((), 1)):  # SP is so far off that it needs no averaging
        seeds = itertools.count()

        def setup(width, rules=rules, seeds=seeds):
            task = tasks.get(kind.format(width), rules=rules, **fields)
            model = task.model(seeded(next(seeds)))
            groups = mulo.param_groups(model, task.roles(), rules)
            opt = torch.optim.Adam([g | {"lr": 0.01 * g["scale"]} for g in groups])

            def train():
                opt.zero_grad()
                task.loss(model, batch).backward()
                opt.step()

            return model, train

        result = coordinate_check(setup, batch[0], widths, steps=3, repeats=times)
        worst[rules] = max(float(s.abs().max()) for s in result.values())
    noise = 0.15 if "resnet" in kind else 0.0  # of its slopes, with so few nets
    assert worst[ALL] <= 0.1 + noise
    assert worst[()] > 0.4


# ---------------------------------------------------------------- kinds of one's own


@pytest.fixture
def no_kinds(monkeypatch):
    """Kinds that a test registers are forgotten after it."""
    monkeypatch.setattr(tasks, "KINDS", dict(tasks.KINDS))


OWN = Path(__file__).parents[1] / "examples" / "own_task.py"


def edited(tmp_path, old="", new=""):
    """Run a copy of the example in which something is replaced."""
    (tmp_path / "mine.py").write_text(OWN.read_text().replace(old, new))
    runpy.run_path(str(tmp_path / "mine.py"))


class Zeros:
    """Data of two classes."""

    shape, classes = (3,), 2

    def __init__(self, device):
        pass

    def batch(self, generators, size):
        return torch.zeros(len(generators), size, 3), torch.zeros(len(generators), size).long()


def test_own_task(no_kinds):
    """The example: its parts and its loss."""
    runpy.run_path(str(OWN))
    task = tasks.get("sines_w16_d4")
    assert (task.name, task.kind, task.shape) == ("sines_w16_d4", "sines", (8,))
    assert task.roles() | {"6.weight": "output", "2.weight": "hidden"} == task.roles()
    assert tasks.get("sines_w16_d4", loss_bound=3.0).loss_bound == 3
    model = task.model(seeded(), zero_output=False)
    x, y = task.data().batch([seeded()], 5)
    losses = task.losses({n: p[None] for n, p in model.named_parameters()}, (x, y))
    torch.testing.assert_close(losses, (model(x[0]) - y[0]).square().mean()[None])


def test_cross_entropy_is_the_default(no_kinds):
    """With a data set of datasets.py and its classes: the task is teacher_mlp."""
    tasks.register("mine", partial(tasks.MLP, 64, 10), lambda device: datasets.Teacher())
    task, known = tasks.get("mine_w16_d3"), tasks.get("teacher_mlp_w16_d3")
    assert (task.loss_bound, task.batch_size) == (1.5 * math.log(10), 64)
    batch = task.data().batch([seeded(), seeded(1)], 7)
    theta = task.init(2, seeded(), zero_output=False)
    torch.testing.assert_close(task.losses(theta, batch), known.losses(theta, batch))


WRONG = {  # text of the example, its replacement: the error
    ('"sines"', '"vit"'): "'vit' cannot be registered: use an identifier other than in32_mlp, ",
    ('"sines"', '"my sines"'): "'my sines' cannot be registered",
    (", loss_bound=0.75", ""): "sines has no classes: give tasks.register a loss_bound",
    ("loss_bound=0.75", "loss_bound=0"): "loss_bound must be a number above 0, not 0",
    ("(8,), None", "(9,), None"): r"gives \[\(3, 2, 8\), .*: make the inputs \(3, 2, 9\)",
}


@pytest.mark.parametrize("edit", WRONG)
def test_own_tasks_that_are_wrong(edit, tmp_path, no_kinds):
    with pytest.raises(ValueError, match=WRONG[edit]):  # noqa: PT012
        edited(tmp_path, *edit)
        tasks.get("sines_w8_d3")


def test_own_models_and_losses_that_are_wrong(no_kinds):
    tasks.register("two", lambda w, d: nn.Sequential(nn.Linear(3, w), nn.Linear(w, 2)), Zeros,
                   loss=lambda y, t: y.sum(-1))  # fmt: skip
    task = tasks.get("two_w8_d2")
    with pytest.raises(ValueError, match=r"the loss of two is \(4,\), not a scalar: take its mean"):
        task.losses(task.init(2, seeded()), task.data().batch([seeded()] * 2, 4))
    tasks.register("norm", lambda w, d: nn.Sequential(nn.Linear(3, w), nn.BatchNorm1d(w)), Zeros)
    with pytest.raises(ValueError, match=r"norm has a buffer '1\.running_mean', which .*: compute"):
        tasks.get("norm_w8_d2").init(2, seeded())


def test_parameters_without_a_rule_keep_the_models_values(no_kinds):
    """Norms, and bare parameters, which may be random: another draw for every net."""

    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.inner, self.head = nn.Linear(3, width), nn.Linear(width, 2)
            self.norm, self.gain = nn.LayerNorm(width), nn.Parameter(torch.tensor(0.25))
            self.shift = nn.Parameter(torch.randn(width))
            nn.init.zeros_(self.norm.weight)

        def forward(self, x):
            return self.head(self.gain * self.norm(self.inner(x)) + self.shift)

    tasks.register("bare", Net, Zeros)
    task, before = tasks.get("bare_w64_d2"), torch.get_rng_state()
    params, again = (task.init(2, seeded()) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, again[n]) for n, p in params.items())
    assert (params["gain"] == 0.25).all()
    assert not params["norm.weight"].any()
    assert float(params["shift"].std()) == pytest.approx(1, rel=0.3)
    assert not torch.equal(*params["shift"])
    assert float(params["inner.weight"].var()) == pytest.approx(1 / 3, rel=0.3)
    assert torch.equal(task.model(seeded()).gain, params["gain"][0])


def test_an_edited_task_has_another_digest(tmp_path, no_kinds):
    """Saved losses are keyed by it."""
    digests = []
    for old, new in (("", ""), ("", ""), ("square()", "abs()")):
        edited(tmp_path, old, new)
        digests.append(tasks.get("sines_w8_d3").own.digest)
    assert digests[0] == digests[1] != digests[2]
    exec("tasks.register('mine', print, print)", {"tasks": tasks, "__file__": "<stdin>"})
    assert tasks.KINDS["mine"].own.digest == ""


def test_own_task_on_the_command_line(tmp_path, no_kinds, monkeypatch):
    """Meta-trained, resumed, and evaluated in two worker processes, which register it again."""
    monkeypatch.chdir(tmp_path)
    small = "--steps 2 --widths 8 --pairs 2 --truncation 3 --unroll 5 --shortest 5 --batch-size 8"
    for line in (f"{small} --out run", "--resume run --steps 3"):
        monkeypatch.setattr(sys, "argv", [str(OWN), *line.split(), "--no-picture"])
        runpy.run_path(str(OWN), run_name="__main__")
    assert len((tmp_path / "run" / "log.csv").read_text().splitlines()) == 4
    flags = "--optimizers run adamw_default --steps 5 --seeds 1 --processes 2 --out results"
    command = [sys.executable, OWN, "evaluate", "task", "sines_w8_d3", "sines_w16_d3"]
    done = subprocess.run([*command, *flags.split()], capture_output=True, text=True)
    losses = re.findall(r"sines_w\d+_d3 +(\S+) +(\S+)", done.stdout)
    assert len(losses) == 2, done.stderr
    assert all(0.1 < float(x) < 0.75 for row in losses for x in row)


def test_errors_of_ones_own_code_are_raised(tmp_path, no_kinds, monkeypatch):
    """They are not cut to a sentence, as errors of ours are."""
    edited(tmp_path, "return (output", "raise ValueError('mine')  #")
    flags = ["--kind", "sines", "--steps", "1", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["mine.py", *flags])
    with pytest.raises(ValueError, match="mine"):
        metatrain.main()
