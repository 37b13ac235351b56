"""PES against golden vectors and closed forms; runs that stop and go on without a trace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_files import GOLDEN

import metatrain
import mulo
from metatrain import pes_gradient

ROOT = Path(__file__).parents[1]
CASES = ["noreset", "first", "last", "mixed"]


def flat(z, prefix, names, pairs=True):
    """The arrays prefix/name of a golden file side by side, (n, D), or (D,) for a gradient."""
    parts = [torch.tensor(z[f"{prefix}/{name}"]) for name in names]
    return torch.cat([x.reshape(len(x), -1) if pairs else x.reshape(-1) for x in parts], -1)


@pytest.mark.parametrize("sign", ["", "_sign0.3"])
@pytest.mark.parametrize("case", CASES)
def test_golden_formula(case, sign):
    z = np.load(GOLDEN / "pes_formula.npz")
    delta = torch.tensor(z[f"{case}/p_loss"] - z[f"{case}/n_loss"])
    mask = torch.tensor(z[f"{case}/mask"])
    if sign:
        delta = (0.3 * (delta * mask).mean(0).sign()).expand_as(delta)
    finished = torch.tensor(z[f"{case}/is_done"]).cumsum(0) > 0
    eps, xi = (flat(z, f"{case}/{k}", "ab") for k in ("eps", "acc_before"))
    grad, new_xi = pes_gradient(delta, finished, mask, eps, xi, float(z["cfg/std"]))
    expected = flat(z, f"{case}{sign}/grad", "ab", pairs=False)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    torch.testing.assert_close(new_xi, flat(z, f"{case}{sign}/acc_after", "ab"))


def test_a_bad_pair_is_left_out():
    """NaN in one pair: the gradient is that of the others; the reference gives NaN for all."""
    z = np.load(GOLDEN / "pes_formula.npz")
    delta = torch.tensor(z["nan/p_loss"] - z["nan/n_loss"])
    mask, finished = torch.tensor(z["nan/mask"]), torch.tensor(z["nan/is_done"]).cumsum(0) > 0
    eps, xi = (flat(z, f"nan/{k}", "ab") for k in ("eps", "acc_before"))
    good = torch.where(mask, delta, 0).isfinite().all(0)
    assert 0 < good.sum() < len(good)
    grad, _ = pes_gradient(delta, finished, mask, eps, xi, 0.01)
    expected, _ = pes_gradient(
        delta[:, good], finished[:, good], mask[:, good], eps[good], xi[good], 0.01
    )
    torch.testing.assert_close(grad, expected)
    assert grad.isfinite().all()


def test_golden_quadratic():
    """The reference's whole schedule on a quadratic: own trajectories, resets, masks, gradients."""
    z = np.load(GOLDEN / "pes_quadratic.npz")
    h, x0 = torch.tensor(z["cfg/h"]), torch.tensor(z["cfg/x0"])
    x = [torch.tensor(z["x_pos_before"][0]), torch.tensor(z["x_neg_before"][0])]  # (n, 3)
    inner, done = torch.tensor(z["inner_step_before"][0]), torch.tensor(z["is_done_before"][0])
    xi = torch.cat(
        [torch.tensor(z["acc_before/drift"][0]), torch.tensor(z["acc_before/log_lr"][0])[:, None]],
        1,
    )
    for call in range(len(z["data"])):
        eps = torch.cat(
            [torch.tensor(z["eps/drift"][call]), torch.tensor(z["eps/log_lr"][call])[:, None]], 1
        )
        theta = torch.cat(
            [torch.tensor(z["theta/drift"][call]), torch.tensor(z["theta/log_lr"][call])[None]]
        )
        deltas, masks, dones = [], [], []
        for data in torch.tensor(z["data"][call]):
            mask, losses = ~done, []
            for side, sign in enumerate((1, -1)):
                phi = theta + sign * eps  # (n, 4)
                losses.append(0.5 * (h * (x[side] - data) ** 2).sum(-1) * mask)
                moved = x[side] - phi[:, 3:].exp() * (h * (x[side] - data) + phi[:, :3])
                x[side] = torch.where(mask[:, None], moved, x0)
            inner = torch.where(mask, inner + 1, 0)
            done = mask & (inner >= int(z["cfg/total_length"]))
            deltas.append(losses[0] - losses[1])
            masks.append(mask)
            dones.append(done)
        np.testing.assert_array_equal(torch.stack(masks), z["mask"][call])
        np.testing.assert_array_equal(torch.stack(dones), z["is_done"][call])
        finished = torch.stack(dones).cumsum(0) > 0
        grad, xi = pes_gradient(
            torch.stack(deltas), finished, torch.stack(masks), eps, xi, float(z["cfg/std"])
        )
        np.testing.assert_allclose(grad[:3], z["grad/drift"][call], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(grad[3], z["grad/log_lr"][call], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(xi[:, :3], z["acc_after/drift"][call], rtol=1e-5)


def quadratic_unrolls(n, length, truncation, sigma, seed, carry=True):
    """PES on x <- x - exp(phi) x, loss x^2, over whole unrolls from x = 1; the mean gradient."""
    gen = torch.Generator().manual_seed(seed)
    phi = torch.tensor(-2.0, dtype=torch.float64)
    x, xi = torch.ones(2, n, dtype=torch.float64), torch.zeros(n, 1, dtype=torch.float64)
    grads = []
    for _ in range(length // truncation):
        eps = sigma * torch.randn(n, 1, generator=gen, dtype=torch.float64)
        rate = torch.stack([(phi + eps[:, 0]).exp(), (phi - eps[:, 0]).exp()])
        deltas = []
        for _ in range(truncation):
            deltas.append(x[0] ** 2 - x[1] ** 2)
            x = x * (1 - rate)
        delta = torch.stack(deltas)
        no = torch.zeros_like(delta, dtype=torch.bool)
        grad, xi = pes_gradient(delta, no, ~no, eps, xi if carry else 0 * xi, sigma)
        grads.append(grad)
    return torch.stack(grads).mean()


def analytic(length):
    """d/dphi of the mean over t of (1 - e^phi)^(2t)."""
    phi = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    t = torch.arange(length, dtype=torch.float64)
    (1 - phi.exp()).pow(2 * t).mean().backward()
    return float(phi.grad)


def test_unbiased_on_a_quadratic():
    """The estimate meets the analytic meta-gradient; truncated ES, without xi, does not."""
    expected = analytic(20)
    pes = float(quadratic_unrolls(400_000, 20, 4, 0.01, 0))
    assert pes == pytest.approx(expected, rel=0.03)
    es = float(quadratic_unrolls(400_000, 20, 4, 0.01, 0, carry=False))
    assert abs(es - expected) > 0.2 * abs(expected)


def test_is_plain_es_when_a_truncation_is_the_unroll():
    torch.manual_seed(0)
    delta, eps = torch.randn(10, 6), 0.1 * torch.randn(6, 3)
    no = torch.zeros(10, 6, dtype=torch.bool)
    grad, _ = pes_gradient(delta, no, ~no, eps, torch.zeros(6, 3), 0.1)
    torch.testing.assert_close(grad, (delta.mean(0)[:, None] * eps).mean(0) / (2 * 0.1**2))


TINY = {
    "widths": (8, 16), "pairs": 2, "unroll": 6, "shortest": 3, "truncation": 4, "steps": 6,
    "batch_size": 8, "hidden_size": 4, "warmup": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", metatrain.RECIPES)
def test_recipes(name):
    paper, desk = metatrain.recipe(name, "paper"), metatrain.recipe(name)
    assert paper.widths == ((128, 512, 1024) if name.endswith("_m") else (128,))
    assert (paper.lam1, paper.mup) == ((0.01, True) if name.startswith("mulo") else (0.001, False))
    assert (paper.batch_size, paper.unroll, paper.truncation, paper.pairs) == (4096, 1000, 50, 8)
    assert (paper.sigma, paper.lr, paper.lr_end, paper.steps) == (0.01, 3e-3, 1e-3, 5000)
    assert desk.scale == "desk"
    assert len(desk.widths) == len(paper.widths)


def test_halves_of_a_pair_share_all_but_phi():
    """With no perturbation both halves stay equal, through resets."""
    trainer = metatrain.Trainer(metatrain.recipe("mulo_m", **TINY))
    particles = trainer.particles[0]
    phi = trainer.phi.detach().expand(4, -1)
    seen = []
    for _ in range(6):
        delta, finished, _ = particles.truncation(phi, trainer.lo)
        assert not delta.any()
        seen.append(finished)
        for p in particles.theta.values():
            assert torch.equal(p[:2], p[2:])
        assert (particles.t <= particles.length).all()
    assert torch.cat(seen).any()
    assert not torch.equal(
        particles.theta["layers.0.weight"][0], particles.theta["layers.0.weight"][1]
    )


def test_divergence_restarts_the_pair_and_spares_the_others():
    trainer = metatrain.Trainer(
        metatrain.recipe("mulo_m", **(TINY | {"unroll": 100, "shortest": 100}))
    )
    particles = trainer.particles[0]
    particles.t[:], particles.length[:] = 5, 100
    particles.theta["layers.0.weight"][0] = float("nan")
    phi = trainer.phi.detach().expand(4, -1)
    delta, finished, loss = particles.truncation(phi, trainer.lo)
    assert delta.isfinite().all()
    assert float(loss) < particles.bound
    assert finished[:, 0].tolist() == [False, True, True, True]
    assert not finished[:, 1].any()
    assert particles.theta["layers.0.weight"].isfinite().all()


def test_it_learns():
    """A few dozen outer steps at a tiny size bring the meta-loss down."""
    changes = TINY | {"widths": (8,), "pairs": 4, "unroll": 40, "shortest": 40, "truncation": 20}
    trainer = metatrain.Trainer(
        metatrain.recipe(
            "mulo_m",
            **changes,
        )
    )
    losses = [trainer.advance()["meta_loss"] for _ in range(40)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02


def command(out, every=1):
    flags = {k.replace("_", "-"): str(v) for k, v in TINY.items() if k != "widths"}
    flags |= {"out": str(out), "checkpoint-every": str(every)}
    numbers = [x for k, v in flags.items() for x in (f"--{k}", v)]
    return [sys.executable, ROOT / "metatrain.py", *numbers, "--widths", "8", "16"]


def finished_run(out):
    log = (out / "log.csv").read_text()
    weights = mulo.load(out / "lo.pt")
    return log, torch.cat([w.flatten() for w in weights.parameters()])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A short run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    done = subprocess.run(command(out), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "meta-loss" in done.stdout
    return out


def test_resume_after_kills(whole, tmp_path):
    """Killed at random moments and resumed until it is done: the same log and the same weights."""
    rng = np.random.default_rng(0)
    out, kills = tmp_path / "run", 0
    args = command(out)
    while not (out / "lo.pt").exists():
        assert kills < 40
        process = subprocess.Popen(
            args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        if kills < 4:
            while process.poll() is None and not list(out.glob("checkpoint_*.pt")):
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 0.4) if kills else 0)
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        args = [
            sys.executable,
            ROOT / "metatrain.py",
            "--resume",
            str(out),
            "--checkpoint-every",
            "1",
        ]
    log, weights = finished_run(out)
    expected_log, expected_weights = finished_run(whole)
    assert kills == 4
    assert log == expected_log
    assert torch.equal(weights, expected_weights)


def test_ctrl_c_stops_between_steps(whole, tmp_path):
    """It saves, says how to go on, and going on gives the log of the undisturbed run."""
    out = tmp_path / "run"
    args = command(out, every=100)
    process = subprocess.Popen(args, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    while "1/6" not in process.stderr.readline(400):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
    assert process.wait() == 1
    assert f"python metatrain.py --resume {out}" in said
    assert "Traceback" not in said
    steps = [int(f.stem.split("_")[1]) for f in out.glob("checkpoint_*.pt")]
    assert len(steps) == 1
    assert 1 <= steps[0] < 6
    done = subprocess.run(
        [sys.executable, ROOT / "metatrain.py", "--resume", str(out)], capture_output=True, cwd=ROOT
    )
    assert done.returncode == 0
    assert finished_run(out)[0] == finished_run(whole)[0]
    assert torch.equal(finished_run(out)[1], finished_run(whole)[1])


def test_a_corrupt_checkpoint_falls_back_to_the_one_before(whole, tmp_path):
    for file in whole.glob("checkpoint_*.pt"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    newest = max(tmp_path.glob("checkpoint_*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    run = metatrain.Run.resume(tmp_path, "cpu")
    assert run.trainer.step == 5
    run.train(every=1)
    assert finished_run(tmp_path)[0] == finished_run(whole)[0]
    assert len(list(tmp_path.glob("checkpoint_*.pt"))) == metatrain.Run.KEEP
    for file in tmp_path.glob("checkpoint_*.pt"):
        os.truncate(file, 10)
    with pytest.raises(FileNotFoundError, match="no checkpoint that can be read"):
        metatrain.Run.resume(tmp_path, "cpu")


def test_messages(whole, tmp_path):
    def run(*args):
        done = subprocess.run(
            [sys.executable, ROOT / "metatrain.py", *args], capture_output=True, text=True, cwd=ROOT
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    code, said = run("adam")
    assert code == 1
    assert "unknown recipe 'adam': use one of mulo_s" in said
    code, said = run("--out", str(whole))
    assert code == 1
    assert f"has a run already: add --resume {whole}" in said
    code, said = run("--resume", str(whole), "--steps", "9")
    assert code == 1
    assert "a resumed run keeps its numbers" in said
    code, said = run("--resume", str(tmp_path))
    assert code == 1
    assert "no checkpoint that can be read" in said
