"""Compile the kernels of gpu.py for GPUs that are not here, and read what came out.

    for line in compiled(config, "sm_86"): ...    # registers, spills, shared memory, instructions
    estimate(compiled(config, "sm_86"))           # seconds per parameter of a large matrix

Triton brings the assembler and disassembler along, so no GPU and no CUDA toolkit is needed. An
estimate is a roofline: each pass takes as long as its bytes take at the bandwidth, or as its
instructions take at the peak rate, whichever is longer. It knows nothing of latency, occupancy and
launches: a real step takes longer.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import tempfile
from typing import NamedTuple

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import gpu

ARCHITECTURES = ("sm_80", "sm_86", "sm_90")
BANDWIDTH, FLOPS = 768e9, 38.7e12  # of an A6000, per second; one instruction of a lane is two FLOPs
BYTES = {"means": 4, "accumulate": 40, "update": 28}  # per parameter, all of it float32
POINTERS = {"rows": "*i64", "plan": "*i64", "index": "*i32", "work": "*fp32", "bad_ptr": "*i64"}


class Compiled(NamedTuple):
    """A kernel as compiled."""

    kernel: str
    registers: int
    spills: int  # instructions that spill registers or load them back
    stack: int  # bytes
    shared: int  # bytes
    instructions: float  # of a thread per parameter (in factor, sides, fold: per entry of r or c),
    # loops counted once: for `accumulate`, which reduces its sums once in up to 8 tiles, a bound


def compiled(config, architecture: str) -> list[Compiled]:
    """All kernels of a configuration, for float32, compiled for an architecture such as "sm_86"."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("Triton's interpreter cannot compile: unset TRITON_INTERPRET.")
    matrix = np.array([(1, 64, 1, 64, 1, 1, 0, 0)], gpu.SHAPE)
    *_, launches = gpu.planned(matrix.tobytes(), config, torch.device("cpu"))
    return [_compile(kernel, case, warps, architecture) for kernel, _, case, warps in launches]


def _compile(kernel, case: gpu.Case, warps: int, architecture: str) -> Compiled:
    signature = {name: POINTERS.get(name, "constexpr") for name in kernel.arg_names}
    where = {name: (k,) for k, name in enumerate(kernel.arg_names)}
    aligned = {where[name]: [["tt.divisibility", 16]] for name in POINTERS if name in where}
    source = ASTSource(kernel, signature, {where["CASE"]: case}, aligned)
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    code = triton.compile(source, target=target, options={"num_warps": warps})
    cubin = code.asm["cubin"]
    usage, assembly = _read(cubin, "cuobjdump", "-res-usage"), _read(cubin, "nvdisasm", "-c")
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    found = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", assembly, re.M)
    names = collections.Counter(found)
    entries = gpu.N.value
    if kernel.__name__ in BYTES:
        means = kernel is gpu.means
        entries = gpu.MEANS_R.value * gpu.MEANS_W.value if means else case.R * case.W
    each = (names.total() - names["NOP"]) * 32 * warps / entries
    spills = names["STL"] + names["LDL"]
    return Compiled(kernel.__name__, registers, spills, stack, code.metadata.shared, each)


def _read(cubin: bytes, tool: str, option: str) -> str:
    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", tool)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def estimate(lines: list[Compiled], bandwidth: float = BANDWIDTH, flops: float = FLOPS) -> float:
    """Seconds per parameter of a large float32 matrix: an estimate, not a measurement."""
    dense = [(BYTES[line.kernel], line.instructions) for line in lines if line.kernel in BYTES]
    return sum(max(size / bandwidth, 2 * count / flops) for size, count in dense)
