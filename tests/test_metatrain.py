"""PES against golden vectors and closed forms; particles, processes; runs that stop and resume."""

import io
import math
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_files import GOLDEN
from torch.nn.utils import parameters_to_vector
from torch.utils._pytree import tree_leaves

import mulo
from mulo import metatrain, tasks
from mulo.metatrain import Run, Trainer, pes_gradient
from mulo.recipes import new_lo, recipe

ROOT = Path(__file__).parents[1]


def flat(z, prefix, names="ab", pairs=True):
    """The arrays prefix/name of a golden file side by side, (n, D), or (D,) for a gradient."""
    parts = [torch.tensor(z[f"{prefix}/{name}"]) for name in names]
    return torch.cat([x.reshape(len(x), -1) if pairs else x.reshape(-1) for x in parts], -1)


def losses(z, case):
    """delta and began of a golden case. In `pes_gradient` every step counts; the reference leaves
    out the step at which an unroll ends, so the others get its weight."""
    p_loss, n_loss, mask, done = (
        torch.tensor(z[f"{case}{name}"]) for name in ("p_loss", "n_loss", "mask", "is_done")
    )
    return (p_loss - n_loss) * mask * len(mask) / mask.sum(0), done.cumsum(0) > 0


@pytest.mark.parametrize("case", ["noreset", "first", "last", "mixed"])
def test_golden_formula(case):
    z = np.load(GOLDEN / "pes_formula.npz")
    eps, xi = (flat(z, f"{case}/{k}") for k in ("eps", "acc_before"))
    grad, new_xi = pes_gradient(*losses(z, f"{case}/"), eps, xi, float(z["cfg/std"]))
    expected = flat(z, f"{case}/grad", pairs=False)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    torch.testing.assert_close(new_xi, flat(z, f"{case}/acc_after"))


def test_golden_quadratic():
    """Five truncations of the reference on a quadratic; xi is carried from one to the next."""
    z, names, xi = np.load(GOLDEN / "pes_quadratic.npz"), ("drift", "log_lr"), None
    for k in range(5):
        call = {name: x[k] for name, x in z.items() if x.shape[:1] == (5,)}
        eps, before, after = (flat(call, x, names) for x in ("eps", "acc_before", "acc_after"))
        xi = before if k == 0 else xi
        grad, xi = pes_gradient(*losses(call, ""), eps, xi, float(z["cfg/std"]))
        expected = flat(call, "grad", names, pairs=False)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(xi, after, rtol=1e-5, atol=0)


def test_a_bad_pair_is_left_out():
    """NaN in one pair: the gradient is that of the others; the reference gives NaN for all."""
    delta, began, (eps, xi) = torch.randn(5, 3), torch.zeros(5, 3).bool(), torch.randn(2, 3, 4)
    expected, _ = pes_gradient(delta[:, :2], began[:, :2], eps[:2], xi[:2], 0.01)
    delta[1, 2] = math.nan
    grad, _ = pes_gradient(delta, began, eps, xi, 0.01)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("carry", [True, False])
def test_unbiased_on_a_quadratic(carry):
    """x <- x - exp(phi) x, loss x^2, over whole unrolls from x = 1. The estimate meets the analytic
    meta-gradient; truncated ES, without xi, does not."""
    n, length, truncation, sigma = 100_000, 20, 4, 0.01
    gen, grads = torch.Generator().manual_seed(0), []
    phi = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    t = torch.arange(length, dtype=torch.float64)
    (1 - phi.exp()).pow(2 * t).mean().backward()  # the loss at step t is (1 - e^phi)^(2t)
    x, xi = torch.ones(2, n, dtype=torch.float64), torch.zeros(n, 1, dtype=torch.float64)
    for _ in range(length // truncation):
        eps = sigma * torch.randn(n, 1, generator=gen, dtype=torch.float64)
        rate = (phi.detach() + torch.stack([eps[:, 0], -eps[:, 0]])).exp()
        delta = []
        for _ in range(truncation):
            delta.append(x[0] ** 2 - x[1] ** 2)
            x = x * (1 - rate)
        began = torch.zeros(truncation, n, dtype=torch.bool)
        grad, xi = pes_gradient(torch.stack(delta), began, eps, xi if carry else 0 * xi, sigma)
        grads.append(grad)
    off = abs(float(torch.stack(grads).mean() / phi.grad) - 1)
    assert off < 0.03 if carry else off > 0.2


TINY = {
    "widths": (8, 16), "pairs": 4, "unroll": 6, "shortest": 3, "truncation": 4, "steps": 6,
    "batch_size": 8, "lstm_hidden": 6, "param_inits": 5, "warmup": 2,
}  # fmt: skip


def trainer_of(name="mulo_m", **changes):
    r = recipe(name, **(TINY | changes))
    return Trainer(r, new_lo(r))


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every call of pes_gradient: delta, began, eps, xi and sigma."""
    seen = []
    monkeypatch.setattr(
        metatrain, "pes_gradient", lambda *args: seen.append(args) or pes_gradient(*args)
    )
    return seen


def truncation(trainer):
    """Estimate the meta-gradient on the first micro-batch."""
    return trainer.particles[0].estimate(trainer.phi.detach())


@pytest.mark.parametrize("name", ["mulo_m", "muvelo_m"])
def test_halves_of_a_pair_share_all_but_phi(name, calls):
    """With (almost) no perturbation both halves stay equal, through resets."""
    trainer = trainer_of(name, sigma=1e-30)
    particles, restarts = trainer.particles[0], 0
    for k in range(6):
        truncation(trainer)
        delta, began, eps, *_ = calls[-1]
        assert not delta.any()
        assert eps.any()
        restarts += k > 0 and began.any()
        for p in tree_leaves((particles.theta, particles.state)):
            assert torch.equal(p[:4], p[4:])
    assert restarts
    assert not torch.equal(*particles.theta["layers.0.weight"][:2])


def test_divergence_restarts_the_pair_and_spares_the_others(calls):
    trainer = trainer_of(unroll=100, shortest=100, pairs=2)
    particles = trainer.particles[0]
    truncation(trainer)
    particles.t[:], particles.length[:] = 5, 100
    particles.theta["layers.0.weight"][0] = float("nan")
    _, loss, diverged = truncation(trainer)
    assert diverged == 1
    assert float(loss) < particles.task.loss_bound
    assert particles.t.tolist() == [3, 9]
    delta, began, *_ = calls[-1]
    assert delta.isfinite().all()
    assert began.T.tolist() == [[False, True, True, True], [False] * 4]
    assert all(p.isfinite().all() for p in particles.theta.values())


def test_micro_batches_change_nothing():
    whole, split = trainer_of("velo_m", micro_batch=4), trainer_of("velo_m", micro_batch=1)
    assert [len(trainer.particles) for trainer in (whole, split)] == [2, 8]
    for _ in range(3):
        a, b = whole.advance(), split.advance()
        assert a["meta_loss"] == pytest.approx(b["meta_loss"], rel=1e-5)
        torch.testing.assert_close(whole.phi.grad, split.phi.grad, rtol=1e-3, atol=1e-4)


def test_a_run_without_signal_stops(monkeypatch):
    """Updates of any size diverge all nets; a NaN: each stops the run, before phi changes."""
    trainer = trainer_of(lam1=1e30)
    trainer.advance()
    before = trainer.phi.detach().clone()
    with pytest.raises(FloatingPointError, match="is 0 at step 2, as when every net diverges"):
        trainer.advance()
    nan = torch.full_like(before, math.nan), torch.tensor(1.0), torch.tensor(0.0)
    monkeypatch.setattr(trainer, "estimate", lambda task: nan)
    with pytest.raises(FloatingPointError, match=r"is nan at step 2, .*smaller --lr or --sigma"):
        trainer.advance()
    assert torch.equal(trainer.phi, before)
    gentle = trainer_of(truncation=1)
    assert gentle.advance()["grad_norm"] == 0  # the first losses of both halves are equal
    assert gentle.advance()["grad_norm"] > 0


@pytest.mark.parametrize(("kind", "bound"), [("fashion8_mlp", 1.5 * np.log(10)), ("sines", 0.75)])
def test_losses_are_clipped_at_the_tasks_bound(kind, bound, monkeypatch, calls):
    """A regression has no classes: its kind gives the bound."""
    monkeypatch.setattr(tasks, "KINDS", dict(tasks.KINDS))
    runpy.run_path(str(ROOT / "examples" / "own_task.py"))
    trainer = trainer_of(pairs=2, kind=kind)
    particles, given = trainer.particles[0], torch.tensor([math.nan, 50.0, 0.5, -1.0])
    assert 0 < trainer.advance()["meta_loss"] < bound
    monkeypatch.setattr(particles, "inner_step", lambda weights: given)
    _, loss, diverged = truncation(trainer)
    np.testing.assert_allclose(calls[-1][0][0], [bound - 0.5, bound], rtol=1e-6)
    assert float(loss) == pytest.approx((2 * bound + 0.5) / 4)
    assert diverged == trainer.recipe.truncation


def test_gradients_by_independent_bookkeeping(calls):
    """Each step's difference times the sum of the perturbations since that net's own t = 0."""
    trainer = trainer_of(pairs=3, micro_batch=2, truncation=5)
    unrolls = defaultdict(list)  # the perturbations of each pair's current unroll
    for _ in range(8):
        calls.clear()
        scale, grads = min(1.0, 1 / trainer.advance()["grad_norm"]), []
        for i, (delta, began, eps, _, sigma) in enumerate(calls):
            for j, mine in enumerate(eps):
                earlier = sum(unrolls[i, j], torch.zeros_like(mine))
                sums = [mine if new else mine + earlier for new in began[:, j]]
                products = [d * total for d, total in zip(delta[:, j], sums, strict=True)]
                grads.append(sum(products) / 5 / (2 * sigma**2))
                unrolls[i, j] = [mine] if began[-1, j] else [*unrolls[i, j], mine]
        expected = scale * torch.stack(grads).mean(0)
        torch.testing.assert_close(trainer.phi.grad, expected, rtol=1e-3, atol=1e-4 * scale)
        assert float(trainer.phi.grad.norm()) <= 1.0001


def test_schedule_of_the_rate():
    trainer = trainer_of(warmup=4, steps=20, lr=0.5, lr_end=0.1)
    rates = []
    for trainer.step in range(21):
        rates.append(trainer.rate())
    assert rates[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])
    assert rates[12] == pytest.approx(0.3)
    assert rates[20] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["mulo_m", "muvelo_m", "lo_m"])
def test_three_outer_steps_as_before(name):
    """phi and meta-loss of the release before this one."""
    small = {"widths": (8, 12), "steps": 3, "pairs": 2, "micro_batch": 2, "truncation": 5}
    small |= {"batch_size": 16, "unroll": 9, "shortest": 4, "warmup": 1, "input_base": 0.0}
    small |= {} if "velo" in name else {"lr": 1e-2, "lr_end": 1e-3}
    small |= {"eps": "reference", "anneal": 0.0} if name == "muvelo_m" else {}
    r = recipe(name, lstm_hidden=4, param_inits=6, **small)
    trainer = Trainer(r, new_lo(r))
    for _ in range(3):
        row = trainer.advance()
    kept = np.load(ROOT / "tests" / "golden" / "regression.npz")
    np.testing.assert_allclose(trainer.phi.detach(), kept[f"pes/{name}"], rtol=0, atol=5e-6)
    assert row["meta_loss"] == pytest.approx(float(kept[f"pes/{name}/meta_loss"]), abs=1e-6)


def test_a_run_of_other_features_is_refused():
    """A checkpoint of a network of another size, as when a feature was added since."""
    trainer = trainer_of()
    with pytest.raises(ValueError, match="features or tasks have changed since this run"):
        trainer.load_state_dict(trainer_of(hidden_size=5, backend="folded").state_dict())
    assert trainer.step == 0


# ---------------------------------------------------------------- runs

SHORT = TINY | {"pairs": 2}


def command(out, *flags, minutes=0, **changes):
    numbers = {k.replace("_", "-"): v for k, v in (SHORT | changes).items() if k != "widths"}
    numbers |= {"out": out, "checkpoint-every": minutes}
    given = [str(x) for k, v in numbers.items() for x in (f"--{k}", v)]
    return ["mulo_m", *given, "--widths", "8", "16", *flags]


def finished_run(out):
    """The log and the weights of a run."""
    phi = parameters_to_vector(mulo.load(out / "lo.pt").parameters())
    return (out / "log.csv").read_text(), phi.tolist()


def new_run(out, name="mulo_m", **changes):
    return Run(recipe(name, **(SHORT | changes)), out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A short run that nobody disturbed, by the README's command, and its output."""
    out = tmp_path_factory.mktemp("whole")
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
        patch.setattr(sys, "argv", ["metatrain.py", *command(out)])
        metatrain.main()
    (out / "output.txt").write_text(output.getvalue())
    return out


def program(*commands):
    """Run metatrain.py with each (arguments, environment), after copying files."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for args, env, copies in commands:
        for source, target in copies:
            shutil.copy(source, target)
        os.environ.update(env)
        sys.argv = ["metatrain.py", *map(str, args)]
        metatrain.main()
    os._exit(0)  # gloo's threads can abort the shutdown of the interpreter


def start(*commands):
    """The program in a process of its own. Not forked: the threads of other tests could hang it."""
    process = multiprocessing.get_context("spawn").Process(target=program, args=commands)
    process.start()
    return process


def test_resume_after_a_kill(tmp_path):
    """kill -9 at a random moment: the resumed run has the log and weights of a whole one."""
    expected, out, long = tmp_path / "whole", tmp_path / "run", {"steps": 20, "truncation": 8}
    new_run(expected, **long).train(minutes=0)
    process = start((command(out, "--no-picture", **long), {}, []))
    while not any(out.glob("checkpoint_*.pt")):
        time.sleep(0.002)
    time.sleep(np.random.default_rng().uniform(0, 0.2))
    process.kill()
    process.join()
    assert not (out / "lo.pt").exists()
    Run.resume(out, "cpu").train(minutes=0)
    assert finished_run(out) == finished_run(expected)


def test_ctrl_c_stops_between_steps(whole, tmp_path, complaint, monkeypatch):
    """It saves and says how to continue; then the log is that of the undisturbed run."""
    out, advance = tmp_path / "run", Trainer.advance

    def interrupted(trainer):
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", interrupted)
        output = complaint(metatrain, *command(out, minutes=100))
    assert output.endswith(f"stopped at step 3: continue with --resume {out}.")
    assert [f.name for f in out.glob("checkpoint_*.pt")] == ["checkpoint_000003_rank0.pt"]
    Run.resume(out, "cpu").train(minutes=0)
    assert finished_run(out) == finished_run(whole)


def test_a_run_is_extended(whole, tmp_path):
    """The outer learning rate follows the cosine of the new length."""
    for file in whole.glob("checkpoint_*.pt"):
        shutil.copy(file, tmp_path)
    damaged = tmp_path / "checkpoint_000099_rank0.pt"
    damaged.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="Delete it to resume from the one before"):
        Run.resume(tmp_path, "cpu")
    damaged.unlink()
    run = Run.resume(tmp_path, "cpu", steps=8)
    run.train(minutes=0)
    run.step = 7
    assert run.rows[7]["lr"] == run.rate()
    assert finished_run(tmp_path)[0].startswith(finished_run(whole)[0])
    about = mulo.load(tmp_path / "lo.pt").about
    assert about["recipe"]["steps"] == 8
    assert " && python " in about["command"]


def test_velo_resumes_too(tmp_path):
    new_run(tmp_path / "whole", "muvelo_m").train(minutes=0)
    shutil.copy(tmp_path / "whole" / "checkpoint_000005_rank0.pt", tmp_path)
    Run.resume(tmp_path, "cpu").train(minutes=0)
    assert finished_run(tmp_path) == finished_run(tmp_path / "whole")


def test_the_end_of_a_run(whole):
    """The device and backend, what it will take; a picture, and a comparison with tuned Adam."""
    output = (whole / "output.txt").read_text()
    assert re.search(r"Device: \w+.*\. Backend: \w+\.\n", output)
    assert re.search(r"[\d.e-]+ s per outer step, [\d.e-]+ h for 5 more\.", output)
    for width in (16, 128):
        losses = r"mulo_m [\d.]+, tuned AdamW [\d.]+, tuned μAdam [\d.]+\."
        assert re.search(rf"Final loss at width {width}: {losses}", output), output
    assert f"The optimizer is {whole / 'lo.pt'}" in output
    assert (whole / "picture.png").read_bytes().startswith(b"\x89PNG")
    about = mulo.load(whole / "lo.pt").about
    assert about["recipe"]["widths"] == (8, 16)


def test_two_processes(whole, tmp_path, complaint):
    """They give the same log as one; cut short, they resume bit for bit; one is refused."""
    both, cut = tmp_path / "both", tmp_path / "cut"
    cut.mkdir()
    five, six = "checkpoint_000005_rank{}.pt", "checkpoint_000006_rank1.pt"
    copies = [(both / five.format(k), cut) for k in range(2)]
    copies += [(both / five.format(1), cut / six)]  # rank 0 has no checkpoint of step 6
    with socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        ports = [str(x.getsockname()[1]) for x in (a, b)]
    resume = ["--resume", cut, "--no-picture", "--checkpoint-every", 0]
    processes = []
    for rank in range(2):
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "RANK": str(rank)}
        first, second = (env | {"MASTER_PORT": port} for port in ports)
        args = (command(both, "--no-picture"), first, [])
        processes.append(start(args, (resume, second, copies if rank == 0 else [])))
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    logs = (np.genfromtxt(x / "log.csv", delimiter=",") for x in (both, whole))
    np.testing.assert_allclose(*logs, rtol=1e-3)  # sums in another order
    assert finished_run(cut) == finished_run(both)
    assert "under torchrun --nproc-per-node 2" in complaint(metatrain, "--resume", cut)


def test_messages(whole, tmp_path, complaint, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run is
    other = tmp_path / "other"
    other.mkdir()
    state = torch.load(max(whole.glob("checkpoint_*.pt")))
    torch.save(
        state | {"recipe": state["recipe"] | {"late": 0.5}}, other / "checkpoint_000006_rank0.pt"
    )
    for flags, reason in (
        (["--resume", other], "was made by other code"),
        (["--pairs", 0], "pairs must be above 0, not 0"),
        (["--out", whole], f"has a run already: add --resume {whole}"),
        (["--resume", whole, "--pairs", 9], "a resumed run keeps its pairs: only --steps can chan"),
        (["--resume", whole, "--steps", 6], "is at step 6: give a larger --steps"),
        (["--resume", tmp_path / "none"], "has no checkpoint: start a new run"),
    ):
        assert reason in complaint(metatrain, *flags)


def test_the_tutorials_hack(tmp_path):
    """Its diff, one added line, meta-trains a network of 40 inputs; old checkpoints are refused."""
    tutorial = (ROOT / "examples" / "tutorial.py").read_text()
    lines = tutorial[tutorial.index("# ```diff") :].split("# ```")[1].splitlines()
    added = [line[3:] for line in lines if line.startswith("# +    ")]
    before = next(line[3:] for line in lines if line.startswith("#      x ="))
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)
    for folder in ("kernels", "optimizees", "data", "weights"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    text = (tmp_path / "features.py").read_text()
    assert text.count(before + "\n") == 1
    assert len(added) == 1
    (tmp_path / "features.py").write_text(text.replace(before, "\n".join([before, *added])))
    small = "--steps 3 --widths 8 --pairs 2 --truncation 5 --unroll 20 --shortest 20 --warmup 2"
    code = "import mulo; from mulo import metatrain; metatrain.main(); mulo.load('mulo_m')"
    command = [sys.executable, "-c", code, *small.split(), "--batch-size", "16", "--no-picture"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "it supports 39 features, not 40" in done.stderr
    path = tmp_path / "runs" / "mulo_m_desk_seed0" / "lo.pt"
    w0 = torch.load(path, weights_only=True)["weights"]["w0"]
    assert w0.shape == (40, 8)
    assert w0[1].abs().max() > 0  # the row of sign(g)
    assert "meta-trained with 39 features, this code has 40" in done.stderr
