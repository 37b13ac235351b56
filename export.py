"""Export: the whole optimizer step, features and all, as files that run anywhere.

    python export.py mulo_m                    # writes exported/mulo_m.* and checks every file
    python export.py runs/mine/lo.pt --out DIR # any learned optimizer
    python export.py --verify exported         # checks files that are there

For every graph (see `graphs.py`: matrix, tall, tensor, vector, net; for VeLO also stats and hyper)
there is a file in each of three formats,

    .onnx   opset 20, for onnxruntime (`serving.OrtMuLO`, Node.js, browsers) and other ONNX runtimes
    .pt2    torch.export, for Python
    .ts     TorchScript, for libtorch C++; deprecated by torch, so for the pinned version of torch

beside <name>.pt, the learned optimizer itself, and <name>.json, the config: the network, the order
of its features, lambdas, betas, epsilons, the μP rule, what every graph is for, and the
SHA-256 of every file. The same config, without the digests, is inside every file (ONNX metadata
"mulo", extra file "mulo.json" of the others). Checking is against the eager step in float64, on
updates with lr_scale = 1/lam1, so that they are of size 1: parameters would hide any error.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import io
import json
import math
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import checkpoints
import features
import graphs
import onnxgraphs
import rule
from graphs import Graph, Step
from lo import LO, LOConfig
from roles import RULES
from serving import (
    FORMAT,
    VERSION,
    OrtMuLO,
    Session,
    checked,
    read_config,
    sidecar,
    sidecars,
)

__all__ = ["OrtMuLO", "Session", "describe", "open_graph", "verify", "write"]

TIME = {("small_fc", "reference"): "tanh(t/x-1)", ("small_fc", "paper"): "tanh(t/x)"}
TIME |= {("velo", "reference"): "tanh(10(t/T-x))", ("velo", "paper"): "tanh(t/T-10x)"}
TOLERANCE = 3e-6  # of the largest update, or entry of the state


# ---------------------------------------------------------------- writing


def feature_names(config: LOConfig) -> str:
    """The inputs of the network in their order; F is 1 / sqrt(r c / mean(r))."""
    velo = config.net == "velo"
    names = ["g", *(["clip(g)"] if velo else []), "p", "M#", "V", "M#/sqrt(V)", "1/sqrt(V)", "g*F#"]
    names += ["g/sqrt(V)"] if config.feature_set == "velo" else []
    names += ["r#", "c#", "1/sqrt(r#)", "1/sqrt(c#)", "M#*F#"]
    if not velo:
        names += [f"t/{x}" for x in features.TIMESCALES]
    return " ".join(x.replace("#", k) for x in names for k in ("123" if "#" in x else "1"))


def epsilons(config: LOConfig) -> dict:
    """Those of features.py, with what they are multiplied by."""
    if config.eps == "relative":
        return {"times": "mean(V), mean(r)", "1/sqrt(V)": 1e-2, "M/sqrt(V)": 1e-8, "r,c": 1e-2,
                "F": 1e-8}  # fmt: skip
    found = {"times": "1/fan_in" if config.eps == "fan_in" else "1"}
    found |= {"V": 1e-6, "r,c": 1e-8, "g^2": 1e-30, "F": 1e-9, "RMS": config.eps_rms}
    return found | ({} if config.net == "velo" else {"vector F_mom": 1e-6})


def describe(lo: LO, name: str) -> dict:
    """The config that goes with every file."""
    step = Step(lo, "vector")
    of_velo = {"lstm_hidden", "param_inits", "param_scale_mult", "use_bugged_loss_features"}
    settings = dataclasses.asdict(lo.config)
    velo = lo.config.net == "velo"
    config = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "torch": torch.__version__,
        "lo": settings if velo else {k: x for k, x in settings.items() if k not in of_velo},
        "graphs": {k: graphs.USES[k] for k in graphs.kinds(lo.config)},
        "features": feature_names(lo.config),
        "time": TIME[lo.config.net, lo.config.spec],
        "1-beta": {k: getattr(step, f"rate_{k}").flatten().tolist() for k in ("M", "V", "rc")},
        "epsilons": epsilons(lo.config),
        "mup": {"lr_scale/lr": {k: f"fan_in^{rule.update:g}" for k, rule in RULES.items()}},
    }
    if velo:
        config["first"] = {k: getattr(lo, f"{k}0")[0].tolist() for k in ("hidden", "cell")}
    return config


def to_torchscript(graph: Graph, text: str) -> bytes:
    """Traced; the archive without what is only for debugging."""
    with graphs.quiet(), torch.no_grad():
        traced = torch.jit.trace(graph, graph.example(), check_trace=False)
        torch.jit.save(traced, buffer := io.BytesIO(), _extra_files={"mulo.json": text})
    slim = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if not name.endswith(".debug_pkl") and "traced_inputs" not in name:
                new.writestr(zipfile.ZipInfo(name), old.read(name), zipfile.ZIP_DEFLATED)
    return slim.getvalue()


def to_pt2(graph: Graph, text: str) -> bytes:
    with graphs.quiet():
        program = graphs.to_program(graph, graph.example(), graph.sizes())
        torch.export.save(program, buffer := io.BytesIO(), extra_files={"mulo.json": text})
    return buffer.getvalue()


def to_onnx(graph: Graph, text: str) -> bytes:
    model = onnxgraphs.to_onnx(graph)
    model.producer_name = "mulo"
    model.metadata_props.add(key="mulo", value=text)
    return model.SerializeToString()


WRITERS = {"onnx": to_onnx, "pt2": to_pt2, "ts": to_torchscript}


def write(
    lo: LO,
    out: str | Path,
    name: str,
    suffixes: Iterable[str] = tuple(WRITERS),
    about: dict | None = None,  # to be kept with the optimizer
) -> Path:
    """Write the files of a learned optimizer to a folder; the path of its .json, written last."""
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write to {out} ({error.strerror}): choose another --out.") from None
    config = describe(lo, name)
    text = json.dumps(config, separators=(",", ":"))
    files = [out / f"{name}.pt"]
    checkpoints.save(lo, files[0], **(about or {}))
    made = [(kind, suffix) for kind in graphs.kinds(lo.config) for suffix in suffixes]
    for kind, suffix in tqdm(made, f"exporting {name}", unit="file"):
        files.append(out / f"{name}.{kind}.{suffix}")
        content = WRITERS[suffix](graphs.make(lo, kind), text)
        checkpoints.write_atomically(files[-1], content)
    config["sha256"] = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    text, path = json.dumps(config, indent=1), out / f"{name}.json"
    checkpoints.write_atomically(path, text)
    return path


# ---------------------------------------------------------------- reading and checking


def open_graph(path: str | Path, config: dict | None = None) -> Callable[..., tuple[Tensor, ...]]:
    """An exported file of any format as a function of its inputs; it must carry `config`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: export the optimizer anew.")
    if path.suffix == ".onnx":
        session = Session(path)
        _same(session.config, config, path)
        return lambda *x: tuple(session.run(dict(zip(session.inputs, x, strict=True))).values())
    extra = {"mulo.json": ""}
    try:
        if path.suffix == ".ts":
            with graphs.quiet():
                run = torch.jit.load(path, _extra_files=extra)
        else:
            run = torch.export.load(path, extra_files=extra).module()
    except Exception as error:  # of many kinds
        raise ValueError(f"{path} is damaged or of another format: export it anew.") from error
    found = read_config(extra["mulo.json"], path)
    _same(found, config, path)
    written = found.get("torch", "an unknown version").split("+")[0]
    if path.suffix == ".ts" and written != torch.__version__.split("+")[0]:
        raise ValueError(
            f"{path} is TorchScript of torch {written}, this is {torch.__version__}: "
            "export it anew, or use the .pt2 file."
        )
    return run


def _same(found: dict, config: dict | None, path: Path) -> None:
    if config is not None and found != config:
        raise ValueError(f"{path} carries another config than its .json: export it anew.")


AXES = {"matrix": "bmn", "tall": "bmn", "tensor": "bemn", "vector": "bn"}
SIZES = {  # that graphs are checked on
    "matrix": ("1 1 1000", "8 1 1", "2 3 5", "1 1024 1024", "1 1024 4096"),
    "tall": ("1 1000 1", "8 1 1", "2 5 3", "1 1024 1024", "1 4096 1024"),
    "tensor": ("8 1 1 1", "2 3 5 7", "1 9 64 64"),
    "vector": ("8 1", "3 5", "1 100000"),
}
TIMES = {"first step": 0.0, "step 1e5": 1e5, "zero gradients": 7.0, "dead row": 7.0}


def cases(graph: Graph) -> Iterator[tuple[str, list[Tensor]]]:
    """Inputs that a graph is checked on, each with what it is."""
    generator = torch.Generator().manual_seed(0)
    for size in SIZES.get(graph.kind, ("1 1 1 9 1", "3 5 7 11 4")):
        sizes = dict(zip(AXES.get(graph.kind, "bemnT"), map(int, size.split()), strict=True))
        large = math.prod(sizes.values()) > 10**6  # seconds each
        for what, t in TIMES.items():
            usual = what in ("first step", "step 1e5")
            if usual or (graph.kind in graphs.STEPS and not (large and what == "zero gradients")):
                x = inputs_for(graph, sizes, what, t, generator)
                yield f"{size.replace(' ', 'x')}, {what}", list(x.values())


def inputs_for(
    graph: Graph, sizes: dict[str, int], what: str, t: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Random inputs of plausible size; the state is zero at the first step."""
    x = {}
    size_g = 1.0 if graph.kind == "stats" else 0.01  # stats are clipped logarithms
    fixed = {"rank": 3.0, "loss": 3.0, "num_steps": 1e3, "step": t, "loss_count": t, "fan_in": 64.0}
    fixed["lr_scale"] = 1 / (graph.config.lam1 or 1)
    for name, shape in graph.inputs.items():
        v = torch.randn([sizes.get(d, d) for d in shape], generator=generator)
        if name in fixed:
            v = torch.full_like(v, fixed[name])
        elif name == "param":
            v = 0.1 * v
        elif name in ("grad", "momentum"):
            v = size_g * v
        elif name in ("second_moment", "row", "col"):
            v = (size_g * v).square()
        elif name == "loss_decay":
            v = features.loss_decays(1000, bugged=False)
        elif name in ("loss_means", "loss_low"):
            v = 3 + 0.1 * v
        elif name[0] == "w":  # weights that VeLO generated
            v = v / v.shape[-2] ** 0.5
        state = name in ("second_moment", "momentum", "row", "col")
        if graph.kind in graphs.STEPS and (state or name == "grad"):
            if what == "zero gradients" or (what == "first step" and state):
                v = torch.zeros_like(v)
            if what == "dead row":
                axis = -1 if name in ("row", "col") or graph.kind == "vector" else -2
                v.narrow(axis, 0, 1).zero_()
        x[name] = v
    return x


def difference(
    graph: Graph, given: tuple[Tensor, ...], right: tuple[Tensor, ...], param: Tensor
) -> float:
    """The largest error of any output relative to its size; of parameters, of the update."""
    worst = 0.0
    if len(given) != len(right):
        return float("inf")
    for name, a, b in zip(graph.outputs, given, right, strict=True):
        a = a.double()
        if a.shape != b.shape:
            return float("inf")
        if name == "new_param":
            a, b = a - param.double(), b - param.double()
        size = b.abs().max() if name == "new_param" else graph.size(name, right)
        error = float((a - b).abs().max() / size.clamp_min(1e-30))
        worst = max(worst, error) if error == error else float("inf")
    return worst


def verify(path: str | Path, say: Callable[[str], None] = print) -> list[str]:
    """Check every file that a .json lists against the eager float64 step; what is wrong."""
    path, config = sidecar(path)
    folder, name, wrong = path.parent, config["name"], []
    lo = checkpoints.load(checked(folder, f"{name}.pt", config))
    inside = {k: x for k, x in config.items() if k != "sha256"}
    other = {"torch": "", "graphs": ""}  # may differ between releases
    if inside | other != json.loads(json.dumps(describe(lo, name))) | other:
        wrong.append(f"{path} does not describe {name}.pt: export it anew.")
    say(f"{'file':28}{'bytes':>9}{'max error':>12}  {'worst case':28}{'µs per step':>12}")
    for kind in graphs.kinds(lo.config):
        runs = {}
        for file in (k for k in config["sha256"] if k.startswith(f"{name}.{kind}.")):
            try:
                file = checked(folder, file, config)
                runs[file] = open_graph(file, inside), []
            except (ValueError, OSError) as error:
                wrong.append(str(error))
        if not any(k.startswith(f"{name}.{kind}.") for k in config["sha256"]):
            wrong.append(f"{path} lists no file of the {kind} graph: export it anew.")
        wrong += compare(graphs.make(lo, kind), runs, say) if runs else []
    return wrong


def compare(graph: Graph, runs: dict[Path, tuple[Callable, list]], say: Callable) -> list[str]:
    """Run all files of one graph beside the eager float64 step; what is wrong."""
    wrong, eager = [], copy.deepcopy(graph).double()
    with torch.no_grad():
        for what, x in cases(graph):
            right = eager(*(v.double() for v in x))
            for run, errors in runs.values():
                try:
                    errors.append((difference(graph, run(*x), right, x[0]), what))
                except (RuntimeError, ValueError, TypeError):  # it is another graph's file
                    errors.append((float("inf"), what))
        for file, (run, errors) in runs.items():
            error, what = max(errors)
            us = 1e6 * clock(run, graph.example()) if error < float("inf") else float("nan")
            say(f"{file.name:28}{file.stat().st_size:9}{error:12.1e}  {what:28}{us:12.0f}")
            if not error <= TOLERANCE:
                wrong.append(f"{file} is off by {error:.1e} at {what}: export it anew.")
    return wrong


def clock(run: Callable, inputs: tuple[Tensor, ...], repeats: int = 20) -> float:
    """Seconds of a call, the least of a few."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(*inputs)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a learned optimizer for other runtimes, and check what was written.",
        epilog="example: python export.py mulo_m --out exported",
    )
    parser.add_argument("lo", nargs="?", help="a shipped name, such as mulo_m, or a file's path")
    parser.add_argument("--out", default="exported", help="folder to write to (default: exported)")
    parser.add_argument("--verify", metavar="DIR", help="only check what is in this folder")
    args = parser.parse_args()
    if (args.lo is None) == (args.verify is None):
        parser.error("give a learned optimizer to export, or --verify DIR")
    torch.set_num_threads(1)  # so that times compare
    rule.keep_freed_memory()
    try:
        if args.verify:
            paths = sidecars(args.verify) or [sidecar(args.verify)[0]]
        else:
            source = checkpoints.find(args.lo)  # a run's is called lo.pt: name it by its folder
            name = source.parent.resolve().name if source.stem == "lo" else source.stem
            about = checkpoints.about(source)
            paths = [write(checkpoints.load(source), args.out, name, about=about)]
        wrong = [x for path in paths for x in verify(path)]
    except (ValueError, OSError) as error:
        sys.exit(f"export.py: {error}")
    if wrong:
        sys.exit("export.py: " + "\n".join(wrong))
    for path in paths:
        print(f"{path}: every file agrees with the eager float64 step within {TOLERANCE:g}.")


if __name__ == "__main__":
    main()
