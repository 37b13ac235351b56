"""One thread: the tests' tensors are small, and threads that wait for busy cores cost minutes."""

import os
import subprocess
import sys
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

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)

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
