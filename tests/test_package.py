"""One package: what `pip install .` puts into site-packages, and how it is imported and run."""

import ast
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import mulo

ROOT = Path(__file__).parents[1]
NAMES = ("features", "roles", "kernels", "checkpoints", "weights", "tasks")


def python(*args, cwd, path=""):
    env = os.environ | {"PYTHONPATH": str(path)}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel in it, and stand-ins for packages that have names of our files."""
    folder = tmp_path_factory.mktemp("site packages")
    source = tmp_path_factory.mktemp("source")
    others = shutil.ignore_patterns(".*", "__pycache__", "tests", "examples", "runs", "build")
    shutil.copytree(ROOT, source, ignore=others, dirs_exist_ok=True)
    flags = "--no-deps", "--no-build-isolation", "--no-index", "--quiet"
    python("-m", "pip", "wheel", *flags, ".", "-w", folder, cwd=source)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    wheel.unlink()
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("OTHER = 'a package of this name'\n")
    return folder


def test_one_name_at_the_top(installed):
    names = {p.name for p in installed.iterdir()} - {"kernels"}
    assert names == {"mulo", f"mulo-{mulo.__version__}.dist-info"}
    files = {str(p.relative_to(installed / "mulo")) for p in (installed / "mulo").rglob("*.*")}
    assert {"__init__.py", "py.typed", "features.py", "kernels/cpu.cpp"} <= files
    assert {"weights/mulo_m.pt", "metatrain.py", "export.py"} <= files
    assert not {"mulo.py", "setup.py"} & files


def test_among_files_of_the_same_names(installed, tmp_path):
    """In a folder with its own features.py and so on, the README's example runs."""
    for name in NAMES[:2] + NAMES[3:]:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('this is the user's {name}')")
    readme = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "train.py").write_text(readme + "\nimport kernels; print(kernels.OTHER)\n")
    *_, loss, other = python("train.py", cwd=tmp_path, path=installed).splitlines()
    assert float(loss.split()[-1]) < 0.1
    assert other == "a package of this name"


def test_installed_commands(installed, tmp_path):
    small = "--steps 1 --widths 4 --pairs 1 --unroll 4 --shortest 4 --truncation 2 --no-picture"
    python("-m", "mulo.metatrain", *small.split(), cwd=tmp_path, path=installed)
    assert (tmp_path / "runs" / "mulo_m_desk_seed0" / "lo.pt").exists()


FILES = [file for file in sorted(ROOT.glob("*.py")) if "__main__" in file.read_text()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_a_command_or_says_that_it_is_none(file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [file.name, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(file), run_name="__main__")
    assert "is a module, not a command" in str(stop.value) or "usage:" in capsys.readouterr().out


def allowed_imports():
    """From CONTRIBUTING.md: for each module, those to its left, which it may import."""
    page, allowed = (ROOT / "CONTRIBUTING.md").read_text(), {}
    for chain in re.search(r"Imports go one way: ([^.]*)\.", page)[1].split(";"):
        for left, right in pairwise(name.strip() for name in chain.split("→")):
            allowed[right] = allowed.get(left, set()) | {left, right}
            allowed.setdefault(left, {left})
    return allowed


def imports_of(file):
    """(module, statement is at the top) for each of our modules that a file imports."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for package, module, *_ in (f"{name}.".split(".") for name in names):
            if package == "mulo":  # `from mulo import LO` imports mulo, not a module LO
                ours = module and ((ROOT / f"{module}.py").exists() or (ROOT / module).is_dir())
                yield (module if ours else "mulo"), node in tree.body


@pytest.mark.parametrize("module", sorted(allowed_imports()))
def test_imports_go_one_way(module):
    allowed = allowed_imports()
    for file in filter(Path.exists, [ROOT / f"{module}.py", *(ROOT / module).glob("*.py")]):
        for imported, at_top in imports_of(file):
            assert imported in allowed[module], f"{file.name} imports {imported}"
            assert imported != module or file.parent != ROOT, f"{file.name} imports itself"
            assert at_top or imported == "kernels", f"{file.name}: {imported} is not at its top"


def test_import_brings_only_torch_numpy_and_itself():
    code = "import sys, torch, numpy; before = set(sys.modules); import mulo; new = "
    code += "{m.split('.')[0] for m in set(sys.modules) - before} - {'mulo'}; "
    code += "print(sorted(new - set(sys.stdlib_module_names)))"
    assert python("-c", code, cwd=ROOT).strip() == "[]"


def test_pickled_optimizers_name_only_mulo():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = mulo.MuLO([p], mulo.SmallFC())
    opt.step()
    text = pickle.dumps(opt, protocol=0)  # names a class as "c<module>\n<class>\n"
    assert b"cmulo\nMuLO" in text
    assert not [name for name in NAMES if f"c{name}\n".encode() in text]
    older = text.replace(b"cmulo.nets\n", b"cmulo\n")  # SmallFC and LOConfig were in mulo.py
    assert older != text
    assert all(pickle.loads(x).lo.config == opt.lo.config for x in (text, older))
