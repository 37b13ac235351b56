"""Compile the Triton kernels for a GPU architecture and print what each needs, as JSON.

    python tests/compile_kernels.py sm_86 mulo_m muvelo_m

Triton brings the assembler along: no GPU and no CUDA toolkit is needed. test_triton.py runs this in
another process, as the interpreter of the other tests cannot compile.
"""

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
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(config, architecture: str, **options) -> dict[str, dict[str, int]]:
    """Registers, and bytes of stack (where registers are spilled to), of each kernel."""
    matrix = np.array([1, 64, 1, 64, 1, 1])  # A, X, B, Y, C and kind
    *_, launches = gpu.planned(matrix.tobytes(), config, torch.device("cpu"))
    target, usage = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32), {}
    for kernel, _, case in launches:
        signature = {name: POINTERS.get(name, "constexpr") for name in kernel.arg_names}
        place = {name: (k,) for k, name in enumerate(kernel.arg_names)}
        aligned = {place[name]: [["tt.divisibility", 16]] for name in POINTERS if name in place}
        source = ASTSource(kernel, signature, {place["CASE"]: case}, aligned)
        code = triton.compile(source, target=target, options={"num_warps": case.warps} | options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code.asm["cubin"])
            file.flush()
            command = [CUOBJDUMP, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
        usage[kernel.__name__] = {"registers": int(registers), "stack": int(stack)}
    return usage


if __name__ == "__main__":
    architecture, *names = sys.argv[1:]
    options = {"maxnreg": int(names.pop())} if names[-1].isdigit() else {}
    configs = {x: mulo.LOConfig() if x == "default" else mulo.load(x).config for x in names}
    print(json.dumps({k: compiled(x, architecture, **options) for k, x in configs.items()}))
