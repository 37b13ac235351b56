"""Compile the Triton kernels for a GPU architecture and print what each needs, as JSON.

    python tests/compile_kernels.py sm_86 mulo_m muvelo_m

Triton brings the assembler along: no GPU and no CUDA toolkit is needed. test_triton.py runs this in
another process, as the interpreter of the other tests cannot compile.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1]))
import mulo
from mulo.kernels import gpu

POINTERS = {"rows": "*i64", "plan": "*i64", "index": "*i32", "work": "*fp32", "bad_ptr": "*i64"}
POINTERS |= {"out": "*fp32"}
NUMBERS = dict.fromkeys(("t_max", "lam1", "lam2", "anneal"), "fp32")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def sources(config) -> dict[str, tuple[ASTSource, int]]:
    """What is compiled for a config, and the warps of each kernel."""
    matrix = np.array([1, 64, 1, 64, 1, 1])  # A, X, B, Y, C and kind
    *_, launches = gpu.planned(matrix.tobytes(), config, torch.device("cpu"))
    launches = launches if config.net == "velo" else launches[:6]  # two are VeLO's
    result = {}
    for kernel, _, case in launches:
        types = {"CASE": "constexpr"} | POINTERS | NUMBERS
        signature = {name: types[name] for name in kernel.arg_names}
        place = {name: (k,) for k, name in enumerate(kernel.arg_names)}
        aligned = {place[name]: [["tt.divisibility", 16]] for name in POINTERS if name in place}
        constants = {place["CASE"]: case} if case else {}
        source = ASTSource(kernel, signature, constants, aligned)
        result[kernel.__name__] = source, case.warps if case else 4
    return result


def compiled(config, architecture: str, **options) -> dict[str, dict[str, int]]:
    """Registers, and bytes of stack (where registers are spilled to), of each kernel."""
    target, usage = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32), {}
    for name, (source, warps) in sources(config).items():
        code = triton.compile(source, target=target, options={"num_warps": warps} | options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code.asm["cubin"])
            file.flush()
            command = [CUOBJDUMP, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
        usage[name] = {"registers": int(registers), "stack": int(stack)}
    return usage


def compilations(config) -> int:
    """How many kernels are compiled for a config, its self-check and other numbers in it."""
    checked = dataclasses.replace(config, lam1=1.0, lam2=0.1)  # as in kernels.self_check
    other = dataclasses.replace(config, t_max=77.0, anneal=0.3)
    return len({x.hash() for y in (config, checked, other) for x, _ in sources(y).values()})


if __name__ == "__main__":
    architecture, *names = sys.argv[1:]
    options = {"maxnreg": int(names.pop())} if names[-1].isdigit() else {}
    configs = {x: mulo.LOConfig() if x == "default" else mulo.load(x).config for x in names}
    usage = {k: compiled(x, architecture, **options) for k, x in configs.items()}
    print(json.dumps(usage | {"compilations": [*map(compilations, configs.values())]}))
