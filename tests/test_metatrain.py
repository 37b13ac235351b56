"""Recipes, and runs that stop and go on without a trace."""

import io
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

import mulo
from mulo import checkpoints, metatrain
from mulo.paper import choose, claims

ROOT = Path(__file__).parents[1]

TINY = {
    "widths": (8, 16), "pairs": 2, "unroll": 6, "shortest": 3, "truncation": 4, "steps": 6,
    "batch_size": 8, "hidden_size": 4, "warmup": 2,
}  # fmt: skip


PAPER = {  # name: mup, lam1, widths, net, hidden size, truncation, steps
    "mulo_s": (True, 0.01, (128,), "small_fc", 32, 50, 5000),
    "mulo_m": (True, 0.01, (128, 512, 1024), "small_fc", 32, 50, 5000),
    "muvelo_m": (True, 0.001, (128, 512, 1024), "velo", 4, 20, 45_000),
    "lo_s": (False, 0.001, (128,), "small_fc", 32, 50, 5000),
    "lo_m": (False, 0.001, (128, 512, 1024), "small_fc", 32, 50, 5000),
    "velo_m": (False, 0.001, (128, 512, 1024), "velo", 4, 20, 45_000),
}


@pytest.mark.parametrize("name", PAPER)
def test_recipes(name):
    r, desk = metatrain.recipe(name, "paper"), metatrain.recipe(name)
    own = (r.mup, r.lam1, r.widths, r.net, r.hidden_size, r.truncation, r.steps)
    assert own == PAPER[name]
    assert (r.kind, r.depth, r.batch_size, r.unroll, r.pairs) == ("in32_mlp", 3, 4096, 1000, 8)
    assert (r.sigma, r.warmup, r.lr, r.lr_end) == (0.01, 100, 3e-3, 1e-3)
    assert (desk.scale, desk.mup, desk.net) == ("desk", r.mup, r.net)
    assert desk.lam1 == (1e-4 if name == "velo_m" else r.lam1)
    assert len(desk.widths) == len(r.widths)
    config = metatrain.new_lo(r).config
    assert not config.param_scale_mult
    assert config.t_max == (1000 if r.net == "small_fc" else None)
    assert config.input_base == (3072 if r.mup else None)


def test_the_general_recipe():
    """A mixture without CIFAR-10 and text, which are kept for evaluation; at desk scale only."""
    r = metatrain.recipe("mulo_x")
    sets = {task.dataset for task in r.tasks()}
    assert {task.family for task in r.tasks()} == {"mlp", "conv", "vit", "lm"}
    assert not [name for name in sets if name.startswith(("cifar", "text"))]
    used = {name.format(w) for name, widths in claims.TRANSFER.items() for w in widths}
    used |= {name for name, _, _ in choose.VALIDATION + choose.OTHER_FAMILIES}
    assert not used & set(r.mixture)
    with pytest.raises(ValueError, match="not in the paper"):
        metatrain.recipe("mulo_x", "paper")


def command(out, *flags, minutes=0, **changes):
    numbers = {k.replace("_", "-"): v for k, v in (TINY | changes).items() if k != "widths"}
    numbers |= {"out": out, "checkpoint-every": minutes}
    given = [str(x) for k, v in numbers.items() for x in (f"--{k}", v)]
    return ["mulo_m", *given, "--widths", "8", "16", *flags]


def resume(out):
    return ["--resume", str(out), "--no-picture", "--checkpoint-every", "0"]


def finished_run(out):
    log = (out / "log.csv").read_text()
    weights = mulo.load(out / "lo.pt")
    return log, torch.cat([w.flatten() for w in weights.parameters()])


def copy_checkpoints(source, target):
    for file in source.glob("checkpoint_*.pt"):
        shutil.copy(file, target)


def new_run(out, name="mulo_m", **changes):
    r = metatrain.recipe(name, **(TINY | changes))
    return metatrain.Run(metatrain.Trainer(r, metatrain.new_lo(r)), out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A short run that nobody disturbed, by the README's command, and what it said."""
    out = tmp_path_factory.mktemp("whole")
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        patch.setattr(sys, "argv", ["metatrain.py", *command(out)])
        metatrain.main()
    (out / "said.txt").write_text(said.getvalue())
    return out


def program(args, env):
    os.environ.update(env)
    sys.argv = ["metatrain.py", *args]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    metatrain.main()
    os._exit(0)  # gloo's threads can abort the shutdown of the interpreter


def start(args, env=None):
    """The program in a process of its own. Not forked: the threads of other tests could hang it."""
    given = [*map(str, args)], dict(os.environ) | (env or {})
    process = multiprocessing.get_context("spawn").Process(target=program, args=given)
    process.start()
    return process


def test_resume_after_3_kills(tmp_path):
    """kill -9 at three random moments, resumed each time: the log and weights of a whole run."""
    rng = np.random.default_rng(0)
    expected, out, kills = tmp_path / "whole", tmp_path / "run", 0
    long = {"steps": 20, "truncation": 8}
    new_run(expected, **long).train(minutes=0)
    args = command(out, "--no-picture", **long)
    while not (out / "lo.pt").exists():
        process = start(args)
        if kills < 3:
            before = set(out.glob("checkpoint_*.pt"))
            while process.is_alive() and set(out.glob("checkpoint_*.pt")) == before:
                time.sleep(0.002)  # until it has begun, and moved on
            time.sleep(rng.uniform(0, 0.08))
            process.kill()
            kills += 1
        process.join()
        args = resume(out)
    assert kills == 3
    assert finished_run(out)[0] == finished_run(expected)[0]
    assert torch.equal(finished_run(out)[1], finished_run(expected)[1])


def test_ctrl_c_stops_between_steps(whole, tmp_path, complaint, monkeypatch):
    """It saves, says how to go on, and going on gives the log of the undisturbed run."""
    out, advance = tmp_path / "run", metatrain.Trainer.advance

    def interrupted(trainer):
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        return advance(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(metatrain.Trainer, "advance", interrupted)
        said = complaint(metatrain, *command(out, minutes=100))
    assert f"stopped at step 3: python metatrain.py --resume {out}" in said
    assert [f.name for f in out.glob("checkpoint_*.pt")] == ["checkpoint_000003.pt"]
    metatrain.Run.resume(out, "cpu").train(minutes=0)
    assert finished_run(out)[0] == finished_run(whole)[0]
    assert torch.equal(finished_run(out)[1], finished_run(whole)[1])


def test_a_corrupt_checkpoint_falls_back_to_the_one_before(whole, tmp_path):
    copy_checkpoints(whole, tmp_path)
    newest = max(tmp_path.glob("checkpoint_*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    run = metatrain.Run.resume(tmp_path, "cpu")
    assert run.trainer.step == 5
    run.train(minutes=0)
    assert finished_run(tmp_path)[0] == finished_run(whole)[0]
    assert len(list(tmp_path.glob("checkpoint_*.pt"))) == metatrain.Run.KEEP
    for file in tmp_path.glob("checkpoint_*.pt"):
        os.truncate(file, 10)
    with pytest.raises(FileNotFoundError, match="no checkpoint that can be read"):
        metatrain.Run.resume(tmp_path, "cpu")


def test_a_run_is_extended(whole, tmp_path, capsys):
    """From its end, and from before it: the rate follows the cosine of the new length."""
    copy_checkpoints(whole, tmp_path)
    run = metatrain.Run.resume(tmp_path, "cpu")
    run.extend(8)
    assert (run.trainer.step, run.trainer.recipe.steps) == (6, 8)
    said, r = capsys.readouterr().out, metatrain.recipe("mulo_m", **(TINY | {"steps": 8}))
    assert said.startswith("8 steps in place of 6: the cosine of the outer rate is stretched to th")
    rates = [r.lr_end + (r.lr - r.lr_end) * (1 + np.cos(np.pi * k / 6)) / 2 for k in (4, 5)]
    assert f"at step 6 it is {rates[0]:.2g} in place of {r.lr_end:.2g}, and" in said
    run.train(minutes=0)
    assert [row["lr"] for row in run.rows[6:]] == pytest.approx(rates)
    before, after = finished_run(whole)[0], finished_run(tmp_path)[0]
    assert after.startswith(before)
    assert len(after.splitlines()) == 9
    about = checkpoints.about(tmp_path / "lo.pt")
    assert about["recipe"]["steps"] == 8
    assert about["command"].endswith(f"&& python metatrain.py --resume {tmp_path} --steps 8")
    assert metatrain.Run.resume(tmp_path, "cpu").trainer.recipe.steps == 8  # its own from now on


def test_velo_resumes_too(tmp_path):
    new_run(tmp_path / "whole", "muvelo_m", lstm_hidden=6, param_inits=5).train(minutes=0)
    shutil.copy(tmp_path / "whole" / "checkpoint_000005.pt", tmp_path)
    run = metatrain.Run.resume(tmp_path, "cpu")
    assert run.trainer.step == 5
    run.train(minutes=0)
    assert finished_run(tmp_path)[0] == finished_run(tmp_path / "whole")[0]


def test_a_full_disk_costs_one_checkpoint(tmp_path, monkeypatch, capfd):
    """Writes that fail (here beyond a limit on file size) are told, and the run goes on."""
    run, normal = new_run(tmp_path), []
    advance = run.trainer.advance

    def limited() -> dict:
        row = advance()
        if row["step"] == 3:
            normal.append(resource.getrlimit(resource.RLIMIT_FSIZE))
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, normal[0][1]))
        elif row["step"] == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, normal[0])
        return row

    monkeypatch.setattr(run.trainer, "advance", limited)
    run.train(minutes=0)
    said = capfd.readouterr()
    assert "checkpoint not saved" in said.out + said.err
    assert "make room" in said.out + said.err
    assert len(run.rows) == 6
    assert not list(tmp_path.glob(".*")), "half-written files stay behind"
    assert mulo.load(tmp_path / "lo.pt")


def test_a_run_that_breaks_down_keeps_good_checkpoints(tmp_path, monkeypatch):
    run = new_run(tmp_path)
    estimate = run.trainer.estimate
    monkeypatch.setattr(
        run.trainer,
        "estimate",
        lambda groups: estimate(groups) * (float("nan") if run.trainer.step == 3 else 1),
    )
    with pytest.raises(FloatingPointError, match=r"is nan at step 4, .*smaller --lr or --sigma"):
        run.train(minutes=0)
    monkeypatch.undo()
    again = metatrain.Run.resume(tmp_path, "cpu")
    assert again.trainer.phi.isfinite().all()
    again.train(minutes=0)


def test_the_end_of_a_run(whole):
    """A picture, and a sentence that compares the result with tuned Adam."""
    said = (whole / "said.txt").read_text()
    for width in (16, 128):
        sentence = rf"at width {width}, \w+ nets?: mulo_m [\d.]+; untrained [\d.]+, tuned AdamW"
        assert re.search(sentence, said), said
        assert f"comparison at width {width}: 100%" in said
    assert f"The optimizer is {whole / 'lo.pt'}" in said
    assert (whole / "picture.png").read_bytes().startswith(b"\x89PNG")
    about = checkpoints.about(whole / "lo.pt")
    assert about["command"].startswith("python ")
    assert about["recipe"]["widths"] == (8, 16)
    assert about["minutes"] > 0


def test_two_processes(whole, tmp_path, complaint):
    """They give what one does; cut short, they resume bit for bit; one may not take over."""

    def run(args):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [start(args, env | {"RANK": str(k)}) for k in range(2)]
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]

    both, cut = tmp_path / "both", tmp_path / "cut"
    run(command(both, "--no-picture"))
    for mine, expected in zip(*(np.genfromtxt(x / "log.csv", delimiter=",") for x in (both, whole)),
                              strict=True):  # fmt: skip
        np.testing.assert_allclose(mine, expected, rtol=1e-4)
    cut.mkdir()
    copy_checkpoints(both, cut)
    (cut / "checkpoint_000006.pt").unlink()  # so the last one is incomplete
    said = complaint(metatrain, "--resume", cut)
    assert "resume it with torchrun --nproc-per-node 2" in said
    run(resume(cut))
    assert finished_run(cut)[0] == finished_run(both)[0]


def test_messages(whole, tmp_path, complaint, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run is
    other = tmp_path / "other"
    other.mkdir()
    state = torch.load(max(whole.glob("checkpoint_*.pt")))
    torch.save(state | {"recipe": state["recipe"] | {"colour": 1}}, other / "checkpoint_000006.pt")
    for flags, reason in (
        (["--widths", 0], "widths must be 1 or more, warmup 0 or more"),
        (["--resume", other], "was made by other code"),
        (["--pairs", 0], "pairs must be 1 or more"),
        (["--sigma", 0], "sigma must be a number above 0"),
        (["--clip", -1], "clip must be a number above 0"),
        (["--seed", 10**12], "seed must be between 0 and 999,999,999"),
        (["--device", "foo"], "unknown device 'foo'"),
        (["--unroll", 50], "shortest=500 exceeds unroll=50"),
        (["--kind", "fashion9_mlp"], "unknown kind 'fashion9_mlp': use one of in32_mlp, in64_mlp,"),
        (["--kind", "none.py"], f"no file {tmp_path / 'none.py'}: give the path of one that regi"),
        (["--eps", "none"], "eps='none' is unknown: use one of"),
        (["adam"], "unknown recipe 'adam': use one of mulo_s"),
        (["--out", whole], f"has a run already: add --resume {whole}"),
        (["--out", whole / "log.csv"], "File exists"),
        (["--resume", whole, "--pairs", 9], "a resumed run keeps its numbers, but for --steps"),
        (["--resume", whole, "--steps", 6], "is at step 6: give --steps more than that"),
        (["lo_m", "--resume", whole], "a resumed run keeps its numbers"),
        (["--resume", tmp_path], "no checkpoint that can be read"),
        (["--resume", tmp_path / "none"], "give the folder of a run, or start anew"),
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
    assert "it knows 39 features, not 40" in done.stderr
    path = tmp_path / "runs" / "mulo_m_desk_seed0" / "lo.pt"
    w0 = torch.load(path, weights_only=True)["weights"]["w0"]
    assert w0.shape == (40, 8)
    assert w0[1].abs().max() > 0  # the row of sign(g)
    advice = "meta-train anew, or use the release that made it."
    refused = f"mulo_m.pt was meta-trained with 39 features, this code has 40: {advice}"
    assert done.stderr.strip().endswith(refused)
