"""One thread: the tests' tensors are small, and threads that wait for busy cores cost minutes."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: GPU kernels run on the CPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in the processes that tests start


def amx_is_broken() -> bool:
    """Some virtual machines announce AMX and die of it, in torch's own bf16 `Linear`."""
    try:
        announced = "amx" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    code = "import torch; x = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(x, x)"
    return announced and subprocess.run([sys.executable, "-c", code]).returncode < 0


if "ONEDNN_MAX_CPU_ISA" not in os.environ and amx_is_broken():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # before torch is imported

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import desk  # noqa: E402

import mulo  # noqa: E402
from mulo import export  # noqa: E402

torch.set_num_threads(1)

# The same examples in every run, however long they take.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=40,
    suppress_health_check=list(HealthCheck),  # they fail on a busy machine
)  # fmt: skip
settings.load_profile("fixed")


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
    """A small VeLO that multiplies its updates by RMS(W), as ONNX and TorchScript."""
    folder, sizes = tmp_path_factory.mktemp("velo"), {"lstm_hidden": 12, "param_inits": 6}
    sizes |= {"hidden_size": 4, "hidden_layers": 1}
    config = mulo.LOConfig(net="velo", param_scale_mult=True, **sizes)
    lo = mulo.VeLO(config, torch.Generator().manual_seed(0))
    export.write(lo, folder, "velo", ["onnx", "ts"])
    return folder


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
    for file in ("json", "pt", "vector.onnx", "ts", "vector.pt2"):
        shutil.copy(exported / f"mulo_m.{file}", tmp_path)
    config = json.loads((tmp_path / "mulo_m.json").read_text())
    config["sha256"] = {k: v for k, v in config["sha256"].items() if (tmp_path / k).exists()}
    (tmp_path / "mulo_m.json").write_text(json.dumps(config))
    return tmp_path
