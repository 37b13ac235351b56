"""Experiments and their command line."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_messages(tmp_path):
    def run(*args):
        done = subprocess.run(
            [sys.executable, ROOT / "evaluate.py", *args], capture_output=True, text=True, cwd=ROOT
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == 1
        return done.stderr

    assert "unknown task" in run("tune", "fashion9_mlp")
    assert "no learned optimizer" in run("validate", str(tmp_path / "none.pt"))
