"""Compile the kernels of gpu.py for GPUs that are not here, and read what came out.

Triton brings the assembler and disassembler along: no GPU and no CUDA toolkit is needed.
"""

import collections
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mulo.kernels import gpu

ARCHITECTURES = ("sm_80", "sm_86", "sm_90")
COLUMNS = ["registers", "spills", "shared bytes", "instructions/entry"]  # spills: stores and loads
BANDWIDTH, FLOPS = 768e9, 38.7e12  # of an A6000, per second; one instruction of a lane is two FLOPs
BYTES = {"means": 4, "accumulate": 40, "update": 28}  # per parameter, all of it float32
POINTERS = {"rows": "*i64", "plan": "*i64", "index": "*i32", "work": "*fp32", "bad_ptr": "*i64"}


def compiled(config, architecture: str) -> dict[str, list[float]]:
    """COLUMNS of each kernel, for float32. An entry is a parameter, or one of r or c in factor,
    sides and fold; instructions in a loop count once."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("Triton's interpreter cannot compile: unset TRITON_INTERPRET.")
    matrix = np.array([1, 64, 1, 64, 1, 1])  # A, X, B, Y, C and kind
    *_, launches = gpu.planned(matrix.tobytes(), config, torch.device("cpu"))
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    measured = {}
    for kernel, _, case in launches:
        signature = {name: POINTERS.get(name, "constexpr") for name in kernel.arg_names}
        where = {name: (k,) for k, name in enumerate(kernel.arg_names)}
        aligned = {where[name]: [["tt.divisibility", 16]] for name in POINTERS if name in where}
        source = ASTSource(kernel, signature, {where["CASE"]: case}, aligned)
        code = triton.compile(source, target=target, options={"num_warps": case.warps})
        usage = read(code.asm["cubin"], "cuobjdump", "-res-usage")
        assembly = read(code.asm["cubin"], "nvdisasm", "-c")
        line = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)"
        names = collections.Counter(re.findall(line, assembly, re.M))
        entries = case.R * case.W if kernel.__name__ in BYTES else gpu.N.value
        each = (names.total() - names["NOP"]) * 32 * case.warps / entries
        registers, spills = int(re.search(r"REG:(\d+)", usage)[1]), names["STL"] + names["LDL"]
        measured[kernel.__name__] = [registers, spills, code.metadata.shared, each]
    return measured


def read(cubin: bytes, tool: str, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def estimate(measured: dict[str, list[float]]) -> float:
    """Seconds per parameter of a large matrix on an A6000, as a roofline: a real step takes longer.

    A pass takes as long as its bytes or its instructions, whichever takes longer. Latency,
    occupancy and launches are left out.
    """
    return sum(max(n / BANDWIDTH, 2 * measured[name][-1] / FLOPS) for name, n in BYTES.items())
