"""The examples run: one net trained to one loss in every runtime, and loops to copy."""

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import export
import mulo
from serving import OrtMuLO

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import desk  # noqa: E402


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)


# The same training in every runtime


@functools.cache
def eager_loss():
    return desk.train(lambda groups: mulo.MuLO(groups, mulo.load("mulo_m")))


def said(output):
    return float(re.findall(r"^loss (\S+)$", output, re.M)[0])


class Calls(torch.optim.Optimizer):
    """A step by calls of exported graphs, one for each tensor."""

    def __init__(self, groups, folder, suffix):
        kinds = ("matrix", "tall", "vector")
        self.graphs = {k: export.open_graph(folder / f"mulo_m.{k}.{suffix}") for k in kinds}
        self.t = 0
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            [p] = group["params"]
            kind = "vector" if p.ndim == 1 else "tall" if p.shape[0] >= p.shape[1] else "matrix"
            if p not in self.state:
                shapes = [p.shape, (3, *p.shape), (3, p.shape[0]), (3, p.shape[-1])]
                self.state[p] = [torch.zeros(1, *s) for s in shapes]
            t, rate = torch.tensor(float(self.t)), torch.tensor([group["scale"]])
            new = self.graphs[kind](p[None], p.grad[None], *self.state[p], t, rate)
            p.copy_(new[0][0])
            self.state[p] = list(new[1:])
        self.t += 1


@pytest.mark.parametrize("runtime", ["onnx", "pt2", "ts", "OrtMuLO"])
def test_same_training_in_python(exported, runtime):
    make = functools.partial(Calls, folder=exported, suffix=runtime)
    if runtime == "OrtMuLO":
        make = functools.partial(OrtMuLO, exported=exported)
    loss = desk.train(make)
    assert eager_loss() < 0.7
    assert loss == pytest.approx(eager_loss(), rel=1e-4)
    assert f"the same loss, {loss:.4f}," in (ROOT / "examples" / "README.md").read_text()


def test_same_training_without_torch(exported):
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv.pop(0); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run(sys.executable, "-c", code, "examples/train.py", exported)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == pytest.approx(eager_loss(), rel=1e-4)


JS = ROOT / "examples" / "js"


@pytest.mark.skipif(
    not shutil.which("node") or not (JS / "node_modules" / "onnxruntime-node").exists(),
    reason="needs Node.js and `npm ci` in examples/js",
)
def test_same_training_in_node(exported):
    done = run("node", JS / "train.mjs", exported)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == pytest.approx(eager_loss(), rel=1e-4)


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
def test_same_training_in_cpp(exported, cpp):
    done = run(cpp / "train", exported)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == pytest.approx(eager_loss(), rel=1e-4)
