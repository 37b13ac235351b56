"""What some tests need and takes minutes to make, made in a process of its own beside the others.

    python tests/ahead.py FOLDER cpp exported    # makes FOLDER/cpp, then FOLDER/exported

`conftest.py` starts it for the tests that were selected, and runs those last. A folder appears when
it is complete; what went wrong is in FOLDER/log.
"""

import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from subprocess import STDOUT, check_call
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import desk  # noqa: E402

import export  # noqa: E402
import graphs  # noqa: E402
import mulo  # noqa: E402

VELO = ("tall", "vector", "net", "stats", "hyper")  # the graphs that an MLP needs


def exported(folder: Path) -> None:
    """mulo_m, written and checked by the README's command, and the examples' task."""
    sys.argv = ["export.py", "mulo_m", "--out", str(folder)]
    with open(folder / "said.txt", "w") as file, redirect_stdout(file):
        export.main()
    desk.write(folder)


def write(lo: mulo.LO, folder: Path, name: str, kinds: tuple[str, ...]) -> None:
    """Only these graphs, as ONNX."""
    with patch.object(graphs, "kinds", lambda config: kinds):
        export.write(lo, folder, name, ["onnx"])


def velo(folder: Path) -> None:
    """A VeLO whose generated weights are of size 1."""
    config = mulo.LOConfig(
        hidden_size=4, lam1=0.01, lstm_hidden=6, param_inits=5, param_scale_mult=True
    )
    lo = mulo.VeLO(config, torch.Generator().manual_seed(0))
    lo.controls_w.mul_(0.1)
    write(lo, folder, "velo", VELO)


def epsilons(folder: Path) -> None:
    """A graph for each of the other epsilons."""
    for name, kind, options in (("relative", "tall", {}), ("fan_in", "vector", {"eps_rms": 0.0})):
        options |= {"eps": name, "spec": "paper", "hidden_layers": 1}
        lo = mulo.SmallFC(
            mulo.LOConfig(hidden_size=5, lam1=0.01, **options), torch.Generator().manual_seed(0)
        )
        write(lo, folder, name, (kind,))


def cpp(folder: Path) -> None:
    """The C++ example, built as its first lines say but for the optimizer of the compiler."""
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["-S", ROOT / "examples/cpp", "-B", folder, prefix], ["--build", folder]):
        check_call(["cmake", *command], stderr=STDOUT)


def kernels(folder: Path) -> None:
    """The compiler's cache, filled by what takes longest in test_fused.py; nobody waits for it."""
    import test_fused as slow

    for shape in slow.SHAPES:
        slow.worst(slow.SMALL, slow.network(), [shape], steps=1)
    slow.test_stacks(own=True)
    slow.test_low_precision()
    for other in slow.OTHERS:
        slow.test_other_networks_and_epsilons(*other)
    slow.test_particles()
    for config in (slow.SMALL, slow.VELO):
        slow.test_a_step_of_training_in_one_graph(config, folder)
    slow.test_sums_in_groups()


MAKERS = {"exported": exported, "velo": velo, "epsilons": epsilons, "cpp": cpp, "kernels": kernels}


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, folder, *names = sys.argv  # before `exported` gives the program another command
    for name in names:
        final = Path(folder, name)
        new = final.with_suffix(".new")
        new.mkdir()
        try:
            MAKERS[name](new)
            new.rename(final)
        except (Exception, SystemExit):
            traceback.print_exc()
