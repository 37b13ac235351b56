"""The examples run: one net trained to one loss in every runtime, and loops to copy."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import mulo
from mulo import evaluate, tasks, training
from mulo.serving import OrtMuLO

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import charlm  # noqa: E402
import desk  # noqa: E402
import learned_rates  # noqa: E402
import loop  # noqa: E402
import muon  # noqa: E402
import resnet  # noqa: E402


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)


# The tutorial, top to bottom

LESS = {  # of its budgets, so that it takes seconds
    "(1, 4, 16, 48)": "(1, 16)",
    "T=20": "T=4",
    "(8, 64, 512)": "(4, 128)",
    '"steps": 60': '"steps": 16',
    "(64, 256, 1024)": "(512,)",
}


def test_tutorial(tmp_path, monkeypatch, capsys):
    """Every cell runs, and what the cells claim holds at the smaller budgets too."""
    monkeypatch.chdir(tmp_path)
    path = ROOT / "examples" / "tutorial.py"
    source = path.read_text()
    for old, new in LESS.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    x = {"__file__": str(path), "__name__": "__main__"}
    exec(compile(source, path, "exec"), x)
    printed = capsys.readouterr().out
    assert all(loss[-1] < 1.5 < loss[0] for loss in x["curves"].values())
    assert x["trained"].mean() < 0.8 * x["start"].mean()
    assert x["sizes"][1].mean() > 10 * x["sizes"][0].mean()  # of gradients through longer unrolls
    few, many = map(float, re.findall(r"agree to cos = (\S+)", printed))
    assert many > few
    assert x["end"] < x["meta_losses"][0]
    assert x["ends"]["lo_m"][-1] > x["ends"]["mulo_m"][-1]  # on the wide net
    ends = [float(loss) for loss in re.findall(r"^10\..* -> (\S+)$", printed, re.M)]
    assert len(ends) == 2
    assert max(ends) < 1.386  # log 4
    assert {f.name for f in Path("runs/tutorial").iterdir()} == {
        "1_rules.png", "5_unroll.png", "8_meta.png", "9_width.png"
    }  # fmt: skip


# Loops to copy

SMALL = {
    charlm: ["--width", 32, "--depth", 1, "--length", 8, "--batch", 4],
    resnet: ["--width", 32, "--batch", 32],
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run an example, small, with these flags."""
    (tmp_path / "text").write_text("one after the other, " * 9)
    monkeypatch.delenv("MULO_DATA", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(example, *flags):
        text = ["--text", "text"] if example is charlm else []
        flags = [example.__name__, *SMALL[example], *text, *flags]
        monkeypatch.setattr(sys, "argv", list(map(str, flags)))
        return example.main()

    return run


@pytest.mark.parametrize("example", SMALL, ids=lambda example: example.__name__)
@pytest.mark.parametrize("optimizer", ["adamw", "mulo"])
def test_resume_bit_for_bit(start, example, optimizer, monkeypatch, capsys):
    """A run that is cut after its first checkpoint ends as one that was not; both learn."""
    flags = ["--optimizer", optimizer, "--steps", 16, "--every", 5]
    end = start(example, *flags, "--out", "whole")
    save = loop.save

    def save_and_die(*args):
        save(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        start(example, *flags, "--out", "cut")
    monkeypatch.setattr(loop, "save", save)
    assert start(example, *flags, "--out", "cut") == end
    assert "continuing at step 5" in capsys.readouterr().out
    whole, cut = (torch.load(f"{out}/checkpoint.pt") for out in ("whole", "cut"))
    assert whole["losses"] == cut["losses"]
    assert sum(whole["losses"][-3:]) / 3 < whole["losses"][0]
    assert all(torch.equal(x, cut["model"][k]) for k, x in whole["model"].items())


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_velo_plans_the_run_and_sees_the_loss(start, schedule):
    start(charlm, "--lo", "muvelo_m", "--schedule", schedule, "--steps", 8, "--out", "run")
    saved = torch.load("run/checkpoint.pt")
    assert saved["losses"][-1] < saved["losses"][0]
    assert saved["optimizer"]["state"][0]["loss"][-1] == 8  # the losses that VeLO has seen
    scheduled = "initial_lr" in saved["optimizer"]["param_groups"][0]  # disables annealing
    assert scheduled == (schedule == "cosine")


def test_wrong_flags_are_errors(start):
    for example in SMALL:
        with pytest.raises(ValueError, match=r"--width must be a multiple of 32, not 33\."):
            start(example, "--width", 33)
    start(charlm, "--steps", 1, "--out", "run")
    for example, flags, message in (
        (charlm, ["--out", "run", "--width", 64], "size mismatch"),
        (charlm, ["--out", "run", "--optimizer", "adamw"], "param"),
        (charlm, ["--length", 500], "the text has 189 characters: use a --length below that."),
        (resnet, ["--data-dir", "nowhere"], "nowhere/cifar10 lacks cifar-10-batches-bin"),
    ):
        with pytest.raises((OSError, RuntimeError, ValueError), match=re.escape(message)):
            start(example, *flags)


# The same training in every runtime


@functools.cache
def eager_loss():
    return desk.train(lambda groups: mulo.MuLO(groups, mulo.load("mulo_m"), backend="folded"))


def printed_loss(output):
    return float(re.findall(r"^loss (\S+)$", output, re.M)[0])


def test_same_training_in_onnxruntime(exported):
    loss = desk.train(functools.partial(OrtMuLO, exported=exported / "mulo_m.json"))
    assert eager_loss() < 0.7
    assert loss == pytest.approx(eager_loss(), rel=1e-4)
    assert f"the same loss, {loss:.4f}," in (ROOT / "examples" / "README.md").read_text()


NO_TORCH = "import sys, runpy; sys.modules['torch'] = None; sys.argv.pop(0); "
NO_TORCH += "runpy.run_path(sys.argv[0], run_name='__main__')"
JS = ROOT / "examples" / "js"
needs_node = pytest.mark.skipif(
    not shutil.which("node") or not (JS / "node_modules" / "onnxruntime-node").exists(),
    reason="needs Node.js and `npm ci` in examples/js",
)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-c", NO_TORCH, "examples/embed.py"], id="without torch"),
        pytest.param(["node", JS / "train.mjs"], id="Node.js", marks=needs_node),
    ],
)
def test_same_training_elsewhere(exported, command):
    done = run(*command, exported)
    assert done.returncode == 0, done.stderr
    assert printed_loss(done.stdout) == pytest.approx(eager_loss(), rel=1e-4)


class Site(http.server.SimpleHTTPRequestHandler):
    """The repository, with an exported folder in it."""

    folder: Path

    def translate_path(self, path):
        name = path.split("?")[0].lstrip("/")
        if name.startswith("exported/"):
            return str(self.folder / name.removeprefix("exported/"))
        return str(ROOT / name) if name != "examples/js/" else str(JS / "index.html")

    def log_message(self, *args):
        pass


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(
    not CHROMIUM or not (JS / "node_modules" / "onnxruntime-web").exists(),
    reason="needs Chromium and `npm ci` in examples/js",
)
def test_same_training_in_a_browser(exported, tmp_path):
    site = type("Here", (Site,), {"folder": exported})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=600000"]
        flags += ["--window-size=820,760", f"--screenshot={tmp_path / 'page.png'}", "--dump-dom"]
        url = f"http://127.0.0.1:{server.server_port}/examples/js/?folder=/exported"
        done = run(CHROMIUM, *flags, url, timeout=300)
        server.shutdown()
    [mu, adam] = re.findall(r"done: μLO loss ([\d.]+), Adam loss ([\d.]+)", done.stdout)[0]
    assert float(mu) == pytest.approx(eager_loss(), rel=1e-4)
    assert 0.1 < float(adam) < 2
    assert (tmp_path / "page.png").stat().st_size > 20_000  # both curves are in it


@pytest.mark.skipif(
    not shutil.which("cmake") or not shutil.which("g++"), reason="needs cmake and g++"
)
def test_same_training_in_cpp(exported, tmp_path):
    """Built as its first lines say, but without optimization."""
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["-S", ROOT / "examples/cpp", "-B", tmp_path, prefix], ["--build", tmp_path]):
        done = run("cmake", *command)
        if "uses CUDA but I cannot find the CUDA" in done.stderr:
            pytest.skip("needs the CUDA toolkit, to compile against torch's CUDA build")
        assert done.returncode == 0, done.stderr
    done = run(tmp_path / "train", exported)
    assert done.returncode == 0, done.stderr
    assert printed_loss(done.stdout) == pytest.approx(eager_loss(), rel=1e-4)


@pytest.mark.parametrize("task", ["fashion_conv_w4_d2_b4", "pixels_lm_w8_d1_b2"])
def test_muon(task):
    """The Optimizer to copy takes the same steps as the baseline that the README recommends."""
    task, generator = tasks.get(task, rules=()), torch.Generator().manual_seed(0)
    model, data = task.model(generator), task.data()
    opt = muon.Muon(mulo.param_groups(model, task.roles(), ()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: training.warmup_cosine(t, 20))
    theta = {k: p.detach().clone()[None] for k, p in model.named_parameters()}
    baseline = evaluate.adam([evaluate.MUON], "muon")(task)
    state = baseline.init(theta)
    for t in range(20):
        batch = data.batch([generator], task.batch_size)
        task.loss(model, [x[0] for x in batch]).backward()
        grads = {k: p.grad[None] for k, p in model.named_parameters()}  # the same for both
        baseline.step(state, theta, grads, t, training.warmup_cosine(t, 20))
        opt.step()
        opt.zero_grad()
        scheduler.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, theta[name][0], rtol=1e-4, atol=1e-5)
    assert muon.warmup_cosine(40, 20) == training.warmup_cosine(20, 20) == pytest.approx(0.01)
    task = tasks.get(task.name)
    for optimizer in (muon.Muon, functools.partial(learned_rates.LearnedMuon, steps=9)):
        with pytest.raises(ValueError, match=r"in μP: pass rules=\(\) to init_ and param_groups"):
            optimizer(mulo.param_groups(task.model(generator), task.roles()))


def test_learned_rates():
    """The Optimizer trains one model as the rule trains stacked nets."""
    name, steps = "fashion_conv_w4_d2_b4", 20
    w = torch.tensor(json.loads(learned_rates.RATES_FILE.read_text())[learned_rates.CHOSEN]["w"])
    expected = learned_rates.log_final_loss(name, steps, [7, 8], w.expand(2, -1))
    for seed in (7, 8):
        task = tasks.get(name, rules=())
        model, data = task.model(torch.Generator().manual_seed(seed)), task.data()
        groups = mulo.param_groups(model, task.roles(), ())
        opt, losses = learned_rates.LearnedMuon(groups, steps), []
        generator = torch.Generator().manual_seed(evaluate.DATA_SEED + seed)
        for t in range(steps):
            if t == steps // 2:  # resume
                state, opt = opt.state_dict(), learned_rates.LearnedMuon(groups, steps)
                opt.load_state_dict(state)
            loss = task.loss(model, [x[0] for x in data.batch([generator], task.batch_size)])
            opt.zero_grad()
            loss.backward()
            opt.step(loss)
            losses.append(loss.detach())
        final = training.final_loss(torch.stack(losses)[:, None]).log()
        torch.testing.assert_close(final[0], expected[seed - 7], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(
        expected, learned_rates.log_final_loss(name, steps, [7, 8], 0 * w.expand(2, -1))
    )


def test_learned_rates_on_transfer_tasks(tmp_path, monkeypatch, capsys):
    """README's figure follows from the saved losses; other weights are trained, once."""
    args = learned_rates.RATES_FILE, learned_rates.CHOSEN, ROOT / "results"
    with monkeypatch.context() as m:
        m.setattr(learned_rates, "log_final_loss", lambda *a: pytest.fail("a net is missing"))
        learned_rates.transfer(*args)
    assert "\nmuon: -0.1860 ± 0.0744, ahead on 14 of 20\n" in capsys.readouterr().out
    monkeypatch.setattr(learned_rates, "LOSSES_FILE", tmp_path / "losses.csv")
    monkeypatch.setattr(learned_rates, "log_final_loss", lambda *a: torch.tensor([0.25, 0.5]))
    for seeds in ([3, 4], [4]):
        losses = learned_rates.saved_losses("fashion8_mlp_w64_d3", seeds, torch.zeros(27))
        assert losses.tolist() == [0.25, 0.5][-len(seeds) :]
    assert len((tmp_path / "losses.csv").read_text().splitlines()) == 3
