"""How `pip install .` makes one package of the flat files: mulo.py becomes mulo/__init__.py, and
features.py beside it mulo/features.py. An editable install uses mulo.py where it is."""

from pathlib import Path

from setuptools.command.build_py import build_py

FILES = ["*.py", "kernels/*", "optimizees/*", "results/*.py", "weights/*.pt"]
FILES += ["results/tuned/*", "data/fashion10k/*"]


class BuildPackage(build_py):
    def run(self):
        if self.editable_mode:
            return super().run()
        files = {file for pattern in FILES for file in Path().glob(pattern) if file.is_file()}
        for file in files:
            name = "__init__.py" if file == Path("mulo.py") else file
            target = Path(self.build_lib, "mulo", name)
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))
        Path(self.build_lib, "mulo", "py.typed").touch()
