"""One thread: the tests' tensors are small, and threads that wait for busy cores cost minutes."""

import os
import sys

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and in the processes that tests start


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
