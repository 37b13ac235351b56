"""Settings of all tests, and what several files share.

Two to four processes run the tests, a file of tests in one of them. Each has one thread: the tests'
tensors are small, and threads that wait for busy cores cost minutes.
"""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock  # torch brings it along
from hypothesis import HealthCheck, settings

IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: GPU kernels run on the CPU
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; also in processes that tests start


def amx_is_broken() -> bool:
    """Some virtual machines announce AMX and die of it, in torch's own bf16 `Linear`."""
    try:
        announced = "amx" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    code = "import torch; x = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(x, x)"
    return announced and subprocess.run([sys.executable, "-c", code]).returncode < 0


if not IN_WORKER and "ONEDNN_MAX_CPU_ISA" not in os.environ and amx_is_broken():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # workers inherit it

# The same examples in every run, however long they take.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=40,
    suppress_health_check=list(HealthCheck),  # they fail on a busy machine
)  # fmt: skip
settings.load_profile("fixed")


# The files that take longest, first, so that all processes end at about the same time. Files that
# need the same exported files are apart: they would wait for each other.
LONGEST = "examples distributed metatrain triton kernels serving tasks paper package export".split()


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_xdist_auto_num_workers(config):
    """For `-n auto`: at most 4, as each needs 1 GB; none for one file of tests."""
    names = [arg.partition("::")[0] for arg in config.args]
    if len(set(names)) == 1 and names[0].endswith(".py"):
        return 0
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, 4)


@pytest.fixture
def complaint(monkeypatch, capsys):
    """The error message of a command that must fail: complaint(metatrain, "--pairs", 0)."""

    def run(program, *args):
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            program.main()
        assert stop.value.code not in (0, None)
        return f"{capsys.readouterr().err}{stop.value.code}"

    return run


# Exported files: written once, by the process that first needs them.


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """once("name", write): a folder that write(folder) has filled, in one process for all."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if IN_WORKER else base

    def folder_of(name, write):
        folder, done = base / name, base / f"{name}.done"
        with FileLock(base / f"{name}.lock"):
            if not done.exists():
                folder.mkdir(exist_ok=True)
                write(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def exported(once):
    """mulo_m, written and checked by the README's command, and the examples' task."""
    return once("exported", write_exported)


def write_exported(folder):
    import desk  # here, as the process that only distributes tests needs no torch

    from mulo import export

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["export.py", "mulo_m", "--out", str(folder)])
        export.main()
    (folder / "said.txt").write_text(printed.getvalue())
    desk.write(folder)


@pytest.fixture(scope="session")
def velo(once):
    """A small VeLO that multiplies its updates by RMS(W), as ONNX and TorchScript."""
    return once("velo", write_velo)


def write_velo(folder):
    import torch

    import mulo
    from mulo import export

    sizes = {"lstm_hidden": 12, "param_inits": 6, "hidden_size": 4, "hidden_layers": 1}
    config = mulo.LOConfig(net="velo", param_scale_mult=True, **sizes)
    lo = mulo.VeLO(config, torch.Generator().manual_seed(0))
    export.write(lo, folder, "velo", ["onnx", "ts"])


@pytest.fixture(scope="session")
def velo_4000():
    """Random arrays of VeLO-4000's shapes, by our names and by those of the released tree."""
    H, K, h, draw = 512, 256, 4, np.random.default_rng(0)
    shapes = {"lstm_init_hidden": (1, H), "lstm_init_cell": (1, H)}
    for name, n, m in (
        ("linear", 30, H), ("linear_1", 30, H), ("linear_2", 30, H), ("rnn.linear", 2 * H, 4 * H),
        ("rnn_to_controls", H, K), ("step_size", H, 1),
    ):  # fmt: skip
        shapes |= {f"rnn/{name}/w": (n, m), f"rnn/{name}/b": (m,)}
    for k, (n, m) in enumerate(((30, h), (h, h), (h, 3))):
        shapes |= {f"ff/w{k}": (K, n, m), f"ff/b{k}": (K, m)}
    plain = {k: 0.01 * draw.standard_normal(s, np.float32) for k, s in shapes.items()}
    released = {}
    for name, x in plain.items():
        for ours, theirs in (("rnn/", "rnn_params/"), ("ff/", "ff_mod_stack/~/")):
            name = name.replace(ours, theirs, 1)
        name = name.replace("rnn.linear", "rnn/linear").replace("init_", "init_state/")
        released[name] = x
    groups = np.split(released.pop("ff_mod_stack/~/w0"), [1, 2, 3, 6, 7, 10, 11, 14, 15, 18], 1)
    released |= {f"ff_mod_stack/~/w0__{k}": x for k, x in enumerate(groups)}
    return {"plain": plain, "released": released}


@pytest.fixture
def copied(exported, tmp_path):
    """Some of the exported files, to be damaged."""
    for file in ("json", "pt", "vector.onnx", "tensor.onnx", "ts", "vector.pt2"):
        shutil.copy(exported / f"mulo_m.{file}", tmp_path)
    config = json.loads((tmp_path / "mulo_m.json").read_text())
    config["sha256"] = {k: v for k, v in config["sha256"].items() if (tmp_path / k).exists()}
    (tmp_path / "mulo_m.json").write_text(json.dumps(config))
    return tmp_path
