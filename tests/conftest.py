"""One thread: the tests' tensors are small, and threads that wait for busy cores cost minutes."""

import io
import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from golden_files import Golden
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import desk

import export

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


# Exported files: written once, by the tests that first need them.


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """mulo_m, written and checked by the README's command, and the examples' task."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "argv", ["export.py", "mulo_m", "--out", str(folder)])
        export.main()
    (folder / "said.txt").write_text(said.getvalue())
    desk.write(folder)
    return folder


@pytest.fixture(scope="session")
def velo(tmp_path_factory):
    """A golden VeLO that multiplies its updates by RMS(W), as ONNX and TorchScript."""
    folder = tmp_path_factory.mktemp("velo")
    export.write(Golden("velo_psm1_bug0").lo(), folder, "velo", ["onnx", "ts"])
    return folder


@pytest.fixture
def copied(exported, tmp_path):
    """Some of the exported files, to be damaged."""
    for file in ("json", "pt", "vector.onnx", "ts", "vector.pt2"):
        shutil.copy(exported / f"mulo_m.{file}", tmp_path)
    config = json.loads((tmp_path / "mulo_m.json").read_text())
    config["sha256"] = {k: v for k, v in config["sha256"].items() if (tmp_path / k).exists()}
    (tmp_path / "mulo_m.json").write_text(json.dumps(config))
    return tmp_path
