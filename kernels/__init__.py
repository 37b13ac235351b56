"""The fast step: choose a backend; build, check and call the kernels.

    kernels.choose("auto", config, device)      # "kernel", or "folded" with a warning that says why
    kernels.step_(config, rows, params, grads, packed, numbers, index)

`folded.py` is the step for any device. `cpu.cpp` and `gpu.py` are kernels that never store the
features. They take a table with one `ROW` per tensor: one call steps all tensors of a model. At
first use a kernel is compared with `folded`, which runs instead if the kernel cannot be built or
differs (because you changed a feature). The C++ is compiled once per network shape, in seconds. The
name of the cached file has a hash of source and command, and one of the file, to detect damage.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mulo import features, roles
from mulo.features import Accumulators, Dims, Numbers, Phi, Rates
from mulo.kernels import folded

BACKENDS, CHOICES = ("auto", "kernel", "folded", "literal"), "auto, kernel, folded or literal"
TOLERANCE = 1e-5  # of the self-check, relative to the largest update
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of parameters; kernels get float32
ROW = np.dtype(  # `struct Row` of cpu.cpp
    [(name, "i8") for name in ("p", "g", "M", "V", "r", "c", "net", *"AXBYC", "kind")]
    + [(name, "f4") for name in ("t", "scale", "decay", "eps")]
)


# ---------------------------------------------------------------- which device and backend

DEVICE_HELP = "cpu, cuda, cuda:1, ...; auto (the default) is cuda if there is a GPU, else cpu"


def pick_device(name: str = "auto") -> tuple[str, str]:
    """The device for a command's --device, and a sentence that says which and why."""
    if not name.startswith(("auto", "cpu", "cuda")):
        raise ValueError(f"unknown device {name!r}: use auto, cpu or cuda.")
    if name.startswith("cpu"):
        return name, f"Device: {name}, as asked."
    wanted = "cuda" if name == "auto" else name
    try:
        torch.zeros(1, device=wanted)
    except (RuntimeError, AssertionError) as error:  # torch's own reason: no driver, a CPU build
        reason = str(error).strip().splitlines()[0].rstrip(".")
        if name == "auto":
            return "cpu", f"Device: cpu, as CUDA cannot be used ({reason})."
        raise ValueError(f"device {name!r} cannot be used ({reason}): use --device cpu.") from None
    return wanted, f"Device: {wanted}, {torch.cuda.get_device_name(wanted)}."


@functools.cache
def choose(backend: str, config, device: torch.device) -> str:
    """Resolve a backend: "auto" is "kernel" if it works here, else "folded" with a warning."""
    if backend in ("folded", "literal"):
        return backend
    reason = refusal(config, device)
    if reason is None:
        return "kernel"
    if backend == "kernel":
        raise ValueError(f"no kernel for this learned optimizer on {device}: {reason}.")
    roles.warn(
        f"MuLO runs without a kernel on {device}, several times slower: {reason}. "
        'Pass backend="folded" to silence this warning.'
    )
    return "folded"


def refusal(config, device: torch.device) -> str | None:
    """Why the kernel cannot run, or None."""
    expected = {"small_fc": 39, "velo": 30, "velo_paper": 29}[config.feature_set]
    max_layers, max_size = 3, 64 if device.type == "cuda" else 128  # units per layer
    if config.num_features != expected:
        return f"it supports {expected} features, not {config.num_features}"
    if config.hidden_layers > max_layers or config.hidden_size > max_size:
        return f"it supports up to {max_layers} hidden layers of up to {max_size} units"
    if device.type not in LAUNCH:
        return "there are kernels for CPUs and CUDA only"
    if device.type == "meta":
        return None
    try:
        error = self_check(config, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever is wrong with the kernel, "auto" must work
        if isinstance(problem, subprocess.CalledProcessError):  # gcc, most often without Python.h
            return "Triton cannot compile its C module: install gcc and python3-dev"
        return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
    if error <= TOLERANCE:
        return None
    return f"it differs from the folded step by {error:.1e} of the update"


def random_weights(config, gen: torch.Generator, *lead: int) -> Phi:
    """Nonzero weights, biases and decays, (*lead, ...), such that most units are active."""
    phi = {}
    for k, (n, m) in enumerate(pairwise(config.layer_sizes())):
        phi[f"w{k}"] = n**-0.5 * torch.randn(*lead, n, m, generator=gen)
        phi[f"b{k}"] = 1 + 0.1 * torch.randn(*lead, m, generator=gen)
    if config.net == "small_fc":
        decays = {"momentum_decays": 3, "rms_decays": 1, "adafactor_decays": 3}
        phi |= {k: 0.05 * torch.randn(*lead, n, generator=gen) for k, n in decays.items()}
    return phi


@torch.no_grad()
@features.float32_products()
def self_check(config, device: torch.device) -> float:
    """The largest difference from `folded` after two steps, relative to the largest update."""
    config = dataclasses.replace(config, lam1=1.0, lam2=0.1)
    gen, errors = torch.Generator().manual_seed(0), []

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=gen)).to(device)

    phi = {k: w.to(device) for k, w in random_weights(config, gen, 1).items()}
    numbers = Numbers(*torch.tensor([700.0, 0.5, 0.01, 0.1]).reshape(4, 1, 1))
    t, scale, decay, eps_scale = (x[0].to(device) for x in numbers)
    packed = pack(config, phi, features.rates_of(phi))
    for shape in ((37,), (21, 13), (6, 5, 3, 3)):
        dims = features.factored_dims(shape)
        p = start = random(1, *shape)
        acc = features.init_accumulators(p, dims)
        mine, mine_acc = p.clone(), Accumulators(*(x.clone() for x in acc))
        for _ in range(2):
            g = random(1, *shape, scale=0.1)
            table = rows(mine, mine_acc, dims)
            step_(config, [table], [mine], [g], packed, numbers, [0])
            acc, p = folded.step(config, phi, acc, p, g, t, scale, dims, decay, eps_scale)
        errors.append(float((mine - p).abs().max() / (p - start).abs().max()))
        if config.net == "velo":
            expected = features.tensor_statistics(mine, mine_acc.M, mine_acc.V)
            got = statistics(config, [rows(mine, mine_acc, dims)], [mine])[:, 0]
            errors.append(float((got - expected).abs().max()))
    return float(np.max(errors))  # NaN if one is NaN


# ---------------------------------------------------------------- the table


def rows(p: Tensor, acc: Accumulators, dims: Dims) -> np.ndarray | None:
    """A stack's rows, constant columns only, as int64, or None if kernels do not support the stack.

    `step_` completes two columns: here g is an offset from the gradient's start, net an index.
    A matrix is (A, X, B, Y, C): X and Y are the factored axes in storage order; A, B and C are the
    batch axes before, between and after them. kind is 0 for vectors, 1 if d0 is Y, 2 if it is X.
    """
    fits = all(
        x.shape == shape and x.dtype == torch.float32 and x.device == p.device
        for x, shape in zip(acc, features.accumulator_shapes(p.shape, dims), strict=True)
    )
    if p.dtype not in DTYPES or not fits or not all(x.is_contiguous() for x in (p, *acc)):
        return None
    if p.device.type != "meta" and not all(x.data_ptr() for x in (p, *acc)):
        return None  # a subclass without memory of its own, such as DTensor
    largest = max(p.numel(), 64 * max(x.numel() for x in acc[2:]) // 3) / len(p)
    if p.device.type != "cpu" and largest > 2**31 - 2**16:
        return None  # offsets in kernels/gpu.py are 32-bit
    table = np.zeros(len(p), ROW)
    table["net"] = np.arange(len(p))
    for name, x in (("p", p), *acc._asdict().items()):
        table[name] = x.data_ptr() + 4 * x.stride(0) * table["net"]
    table["g"] = table["p"] - table["p"][0]
    sizes = (), (), (), (shape := p.shape[1:]), ()
    if dims is not None:
        x, y = sorted(d + len(shape) for d in dims)
        sizes = shape[:x], shape[x : x + 1], shape[x + 1 : y], shape[y : y + 1], shape[y + 1 :]
        table["kind"] = 1 if dims[1] > dims[0] else 2
        if math.prod(shape[y:]) == 1:  # treat (n, 1) as (1, n): long rows are faster
            sizes = shape[:x], (), (), shape[x : x + 1], shape[x + 1 : y]
            table["kind"] = 3 - table["kind"]
    for name, part in zip("AXBYC", sizes, strict=True):
        table[name] = math.prod(part)
    return table.view(np.int64)


def pack(config, phi: Phi, rates: Rates) -> Tensor:
    """Weights as kernels read them: rates, then layers; (P | 1, K), or VeLO: (P | 1, T, K)."""
    lead, layers = phi["b0"].shape[:-1], range(config.hidden_layers + 1)
    parts = [phi[f"{n}{k}"].flatten(len(lead)) for k in layers for n in "wb"]
    return torch.cat([*(x.expand(*lead, -1) for x in rates), *parts], -1)


def _table(rows: list[np.ndarray], params: list[Tensor]) -> tuple[np.ndarray, dict[int, Tensor]]:
    """The rows of T stacks, (T, P), and float32 copies of the parameters of other dtypes, which
    these rows then point to."""
    table = np.concatenate(rows).view(ROW).reshape(len(rows), -1)
    copies = {n: p.float() for n, p in enumerate(params) if p.dtype != torch.float32}
    for n, p in copies.items():
        table["p"][n] += p.data_ptr() - table["p"][n, 0]
    return table, copies


def statistics(config, rows: list[np.ndarray], params: list[Tensor]) -> Tensor:
    """features.tensor_statistics of T stacks of P tensors, (P, T, 8)."""
    table, _copies = _table(rows, params)
    out = torch.empty(*table.shape, 8, device=params[0].device)
    STATISTICS[out.device.type](config, table.reshape(-1), out)
    return out.transpose(0, 1)


def step_(
    config,
    rows: list[np.ndarray],  # of T stacks, from `rows`: P rows each
    params: list[Tensor],  # (P, *shape) each
    grads: list[Tensor],  # (P, *shape) each
    packed: Tensor,  # from `pack`
    numbers: Numbers,  # (P, all tensors) each
    index: list[int],  # positions of the T tensors in `packed`, `numbers` and `alpha`
    alpha: Tensor | None = None,  # (P, all tensors), VeLO's factor on numbers.scale
    bad: Tensor | None = None,  # (): the number of gradient entries not finite is added to it
) -> None:
    """Step these tensors in place."""
    table, wide = _table(rows, params)
    grads = [g.float().contiguous() for g in grads]
    table["g"] += np.array([[g.data_ptr()] for g in grads])
    net = table["net"]
    net *= 4 * packed.stride(0) if len(packed) > 1 else 0
    net += packed.data_ptr()
    if packed.ndim == 3:
        net += 4 * packed.stride(1) * np.array(index)[:, None]
    for name, x in zip(ROW.names[-4:], numbers, strict=True):
        table[name] = x.T[index]  # (T, P)
    if alpha is not None and len(index) < alpha.shape[1]:  # a list index would sync
        alpha = torch.stack([alpha[:, k] for k in index], 1)
    LAUNCH[packed.device.type](config, table, packed.device, alpha, bad)
    for n, p in wide.items():
        params[n].copy_(p)
    torch.autograd.graph.increment_version(params)  # autograd cannot see writes by address


def launch_cpu(config, table: np.ndarray, _, alpha: Tensor | None, bad: Tensor | None) -> None:
    if alpha is not None:
        table["scale"] *= alpha.numpy().T
    fields = config.lam1, config.lam2, config.eps_rms, config.t_max or math.inf, config.anneal
    flags = config.eps == "relative", config.spec != "paper"
    settings = (ctypes.c_float * 7)(*fields, *flags)  # `struct Settings` of cpu.cpp
    step = library(config.hidden_size, config.hidden_layers, config.num_features).step
    count = step(table.ctypes, table.size, settings, torch.get_num_threads())
    if bad is not None and count:
        bad += count


def statistics_cpu(config, table: np.ndarray, out: Tensor) -> None:
    run = library(config.hidden_size, config.hidden_layers, config.num_features).statistics
    run(table.ctypes, table.size, out.numpy().ctypes, torch.get_num_threads())


def triton_kernels():
    from mulo.kernels import gpu  # imports triton, which is optional

    return gpu


LAUNCH = {"cpu": launch_cpu, "cuda": lambda *args: triton_kernels().step_(*args)}
STATISTICS = {"cpu": statistics_cpu, "cuda": lambda *args: triton_kernels().statistics_(*args)}
LAUNCH["meta"] = STATISTICS["meta"] = lambda *args: None  # stands for a GPU in tests


# ---------------------------------------------------------------- building the C++

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = """-O3 -std=c++17 -shared -fPIC -pthread -fno-math-errno -fno-trapping-math
-ffp-contract=fast""".split()
# Not -march=native: machines with different CPUs may share a home folder and the cache in it.
MARCH = {"AVX512": ("-march=skylake-avx512", "-DWIDTH=16"), "AVX2": ("-march=haswell", "-DWIDTH=8")}


@functools.cache
def library(hidden: int, layers: int, inputs: int) -> ctypes.CDLL:
    """Load cpu.cpp compiled for one network shape, from the cache if it is there."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if not shutil.which(compiler[0]):
        raise OSError(f"there is no C++ compiler {compiler[0]}: install g++")
    march = MARCH.get(torch.backends.cpu.get_cpu_capability(), ["-DWIDTH=4"])
    shape = f"-DHIDDEN={hidden}", f"-DLAYERS={layers}", f"-DFEATURES={inputs}"
    command = [*compiler, *FLAGS, *march, *shape]
    name = f"cpu-{_sha256(' '.join(command).encode() + SOURCE.read_bytes())}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(cache if os.path.isabs(cache) else os.devnull, "mulo")  # devnull: there is no home
    for path in cache.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):
            if path.stem == f"{name}-{_sha256(path.read_bytes())}":  # a truncated file may crash
                return ctypes.CDLL(str(path))
    return build(cache, name, command)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def build(cache: Path, name: str, command: list[str]) -> ctypes.CDLL:
    """Compile in a temporary folder, load, then rename: two processes may build at once."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=cache)
    except OSError:  # the cache cannot be written: build for this process only
        folder = tempfile.TemporaryDirectory(prefix="mulo-")
    with folder:
        part = Path(folder.name, f"{name}.so")
        result = subprocess.run([*command, SOURCE, "-o", part], capture_output=True, text=True)
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["no message"]
            error = next((line for line in lines if "error" in line), lines[0])
            raise RuntimeError(f"{command[0]} cannot compile {SOURCE.name} ({error})")
        loaded = ctypes.CDLL(str(part))
        with contextlib.suppress(OSError):
            part.replace(cache / f"{name}-{_sha256(part.read_bytes())}.so")
    return loaded
