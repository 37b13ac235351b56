"""The Triton kernels, compiled for GPUs that are not here: no register may spill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which has the compiler")

SCRIPT = Path(__file__).with_name("compile_kernels.py")
ARCHITECTURES = "sm_80", "sm_86", "sm_90"


@pytest.fixture(scope="module")
def usage(tmp_path_factory):
    """Registers and stack by architecture, optimizer and kernel; "few" may use 64 registers."""
    commands = {k: (k, "mulo_m", "muvelo_m", "default") for k in ARCHITECTURES}
    commands["few"] = "sm_86", "mulo_m", "64"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))  # not in the home
    started = {
        k: subprocess.Popen([sys.executable, SCRIPT, *x], stdout=subprocess.PIPE, env=environment)
        for k, x in commands.items()
    }
    return {k: json.loads(process.communicate()[0]) for k, process in started.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(usage, architecture):
    for name in ("mulo_m", "muvelo_m", "default"):  # "default" has 32 units, the others 8 and 4
        by_kernel = usage[architecture][name]
        assert len(by_kernel) == (8 if "velo" in name else 6)
        for kernel, used in by_kernel.items():
            assert used["stack"] == 0, (name, kernel)
            assert used["registers"] <= 255


def test_numbers_of_a_config_are_not_compiled_in(usage):
    """The self-check, and another t_max, compile nothing more: one compilation per kernel."""
    assert usage["few"]["compilations"] == [6]


def test_spills_are_seen(usage):
    """A negative control: 64 registers are too few."""
    assert usage["few"]["mulo_m"]["update"]["stack"] > 0
