"""One thread: the tests' tensors are small, and threads that wait for busy cores cost minutes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and in the processes that tests start

# The same examples in every run, however long they take.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None, max_examples=40)
settings.load_profile("fixed")


@pytest.fixture
def complaint(monkeypatch, capsys):
    """What a program says as it gives up: complaint(metatrain, "--pairs", 0). Run in this process:
    another one would spend seconds on imports."""

    def run(program, *args):
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            program.main()
        assert stop.value.code not in (0, None)
        return f"{capsys.readouterr().err}{stop.value.code}"

    return run


# Exporting and compiling take minutes: `ahead.py` does it on the other core, while other tests run.

AHEAD = ("cpp", "epsilons", "exported", "velo", "kernels")
STARTED = pytest.StashKey[tuple[subprocess.Popen, Path]]()


def needs(item) -> set[str]:
    return {name for name in AHEAD if name in item.fixturenames}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: bool(needs(item)))  # last; the sort is stable


def pytest_collection_finish(session):
    names = set().union(*map(needs, session.items))
    if names and not session.config.option.collectonly:
        folder = Path(tempfile.mkdtemp(prefix="ahead-"))
        names = [name for name in AHEAD if name in names]
        command = [sys.executable, Path(__file__).with_name("ahead.py"), folder, *names]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        session.config.stash[STARTED] = process, folder


def pytest_sessionfinish(session):
    if STARTED in session.config.stash:
        process, folder = session.config.stash[STARTED]
        if process.poll() is None:  # the session ended before all was asked for
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def made(name: str):
    @pytest.fixture(scope="session")
    def wait(request):
        """The folder of this name, once it is complete."""
        process, folder = request.config.stash[STARTED]
        while process.poll() is None and not (folder / name).exists():
            time.sleep(0.05)
        assert (folder / name).exists(), (folder / "log").read_text()
        return folder / name

    return wait


cpp, epsilons, exported, velo = map(made, AHEAD[:-1])


@pytest.fixture(scope="session")
def kernels():
    """For tests that compile: they come last, and find what was compiled until then."""


@pytest.fixture
def copied(exported, tmp_path):
    """Some of the exported files, to be damaged."""
    for file in ("json", "pt", "vector.onnx", "vector.ts", "vector.pt2"):
        shutil.copy(exported / f"mulo_m.{file}", tmp_path)
    config = json.loads((tmp_path / "mulo_m.json").read_text())
    config["sha256"] = {k: v for k, v in config["sha256"].items() if (tmp_path / k).exists()}
    (tmp_path / "mulo_m.json").write_text(json.dumps(config))
    return tmp_path
