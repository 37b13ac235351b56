"""Export: the whole optimizer step, features and all, as files that run without this repository.

    python export.py mulo_m                    # writes exported/mulo_m.* and checks every file
    python export.py runs/mine/lo.pt --out DIR # any learned optimizer
    python export.py --verify exported         # checks files that are there

A learned optimizer is one graph per kind of tensor, state in and state out; examples/README.md is
the contract:

    tensor   b tensors of rank 2 and more, as (b, e, m, n): n is the largest axis, m the next
    vector   b tensors of rank 0 and 1, as (b, n)
    hyper    VeLO only, before the steps: the LSTM, which generates the network of every tensor

Each graph is an .onnx file (opset 20) and a .pt2 file (torch.export); one .ts file (TorchScript,
for libtorch of the same version) has them all as methods. <name>.pt is the learned optimizer,
<name>.json the contract in words and as data; every file carries the data.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import math
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial, partialmethod
from itertools import pairwise, product
from pathlib import Path

import onnxruntime
import torch
from onnx import GraphProto, TensorProto, helper
from torch import Tensor, nn
from tqdm import tqdm

import mulo
from mulo import LO, LOConfig, checkpoints, features, kernels, roles
from mulo.features import Accumulators, LossBuffer, Rates
from mulo.kernels import folded, onnxgraphs

FORMAT, VERSION = "mulo-export", 2
TOLERANCE = 3e-6  # of the largest update, or entry of the state
BLOCK = 262_144  # floats of a hidden layer that onnxruntime works on at a time
SIZES = {"b": 2, "e": 3, "m": 5, "n": 7, "T": 11}  # to trace with: none is 1
Shapes = dict[str, tuple[int | str, ...]]  # by name; letters are free sizes

# It warns that there is no torchvision.
logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)


# ---------------------------------------------------------------- the graphs


def kinds(config: LOConfig) -> tuple[str, ...]:
    return ("tensor", "vector", "hyper") if config.net == "velo" else ("tensor", "vector")


def shapes(config: LOConfig, kind: str) -> tuple[Shapes, Shapes]:
    """Inputs and outputs of a graph, in order; an output new_x is the input x of the next step."""
    velo, weights = config.net == "velo", {}
    for k, (n, m) in enumerate(pairwise(config.layer_sizes())):
        axis = "T" if kind == "hyper" else "b"
        weights |= {f"w{k}": (axis, n, m), f"b{k}": (axis, m)}
    if kind == "hyper":
        lstm = ("T", config.lstm_hidden)
        state = {"loss_means": (10,), "loss_low": (10,), "loss_count": (), "h": lstm, "cell": lstm}
        inputs = {"features": ("T", 12), "loss": (), "t": ("T",), "num_steps": ()}
        inputs |= {"loss_decay": (10,)} | state
        return inputs, {f"new_{k}": s for k, s in state.items()} | {"alpha": ("T",)} | weights
    axes = ("e", "m", "n") if kind == "tensor" else ("n",)
    r, c = (("e", "m", 1), ("e", 1, "n")) if kind == "tensor" else (axes, axes)
    state = {"M": ("b", 3, *axes), "V": ("b", *axes), "r": ("b", 3, *r), "c": ("b", 3, *c)}
    state |= {"features": ("b", 12)} if velo else {}
    inputs = {"p": ("b", *axes), "g": ("b", *axes)} | state
    inputs |= dict.fromkeys(("t", "scale", "decay"), ("b",))
    inputs |= {"eps_scale": ("b",)} if config.eps == "fan_in" else {}
    outputs = {f"new_{k}": s for k, s in ({"p": inputs["p"]} | state).items()}
    return inputs | (weights if velo else {}), outputs


class Graphs(nn.Module):
    """The graphs of a learned optimizer, as methods that take and return tensors in order."""

    def __init__(self, lo: LO, *only: str):
        super().__init__()
        self.config, velo = lo.config, lo.config.net == "velo"
        times = features.FRACTIONS if velo else features.TIMESCALES
        buffers = {"times": torch.tensor(times), "one": torch.ones(1)}
        rates = features.rates_of({"w0": torch.zeros(1, 1, 1)} if velo else mulo.stacked(lo))
        buffers |= {f"rate_{k}": x for k, x in rates._asdict().items()}  # exp differs by runtime
        if not velo or "hyper" in (only or kinds(lo.config)):  # VeLO's steps are given theirs
            buffers |= {k: w for k, w in mulo.stacked(lo).items()}
        for k, x in buffers.items():
            self.register_buffer(k, x.detach().float().clone())

    def step(self, kind: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        x = dict(zip(shapes(self.config, kind)[0], inputs, strict=True))
        phi = dict(self.named_buffers()) | x  # VeLO's weights are among its inputs
        acc, *layer, scale = self.prepare(kind, x, phi)
        p = folded.update(self.config, phi, x["p"], *layer, scale, x["decay"])
        if "features" not in x:
            return p, *acc
        seen = features.tensor_features(p, acc.M, acc.V, torch.zeros((), device=p.device))
        rank = x["features"][:, 1:6]  # stays as it was given
        return p, *acc, torch.cat([seen[:, :1], rank, seen[:, 6:]], 1)

    tensor, vector = partialmethod(step, "tensor"), partialmethod(step, "vector")

    def prepare(self, kind: str, x: dict[str, Tensor], phi: features.Phi) -> tuple:
        """The step up to the network's first layer: `folded.prepare`; if m > n, scale is NaN."""
        p, scale, dims = x["p"], x["scale"], None
        if kind == "tensor":
            dims, spare = (-2, -1), torch.ones_like(scale) * (p.shape[-1] - p.shape[-2])  # n - m
            scale = torch.where(spare < 0, torch.full_like(scale, math.nan), scale)
        if self.config.param_scale_mult:
            scale = scale * features.param_scale(p)
        acc = Accumulators(*(x[k] for k in Accumulators._fields))
        one = x.get("eps_scale", self.one)  # ONNX optimizers delete epsilons that are scalars
        rates = Rates(*(getattr(self, f"rate_{k}") for k in Rates._fields))
        given = p, x["g"], x["t"], scale, dims, one, self.times, rates
        return folded.prepare(self.config, phi, acc, *given)

    def hyper(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x = dict(zip(shapes(self.config, "hyper")[0], inputs, strict=True))
        net = {k: v[None] for k, v in x.items()}  # one net
        memory = LossBuffer(*(net[f"loss_{k}"] for k in LossBuffer._fields))
        given = memory, net["loss"], x["loss_decay"], net["t"], x["num_steps"]
        given += net["features"], net["h"], net["cell"], self.times
        phi = dict(self.named_buffers())
        memory, h, cell, weights, alpha = mulo.generate(self.config, phi, *given)
        return tuple(y[0] for y in (*memory, h, cell, alpha, *weights.values()))


# ---------------------------------------------------------------- the formats


def example(inputs: Shapes) -> tuple[Tensor, ...]:
    return tuple(torch.rand([SIZES.get(d, d) for d in s]) for s in inputs.values())


def to_program(graphs: Graphs, function: Callable, inputs: Shapes) -> torch.export.ExportedProgram:
    """torch.export of a function of these inputs; free sizes may be 1 and more."""
    free = {d: torch.export.Dim(d, min=1) for d in SIZES}
    dims = [{k: free[d] for k, d in enumerate(s) if d in free} for s in inputs.values()]
    graphs.forward = lambda *x: function(*x)  # which is what torch.export traces
    program = torch.export.export(graphs, example(inputs), dynamic_shapes=(tuple(dims),))
    debug = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")
    for node in program.graph.nodes:  # these have paths on the machine that exported
        node.meta = {k: v for k, v in node.meta.items() if k not in debug}
    return program


def to_pt2(lo: LO, kind: str, text: str) -> bytes:
    graphs = Graphs(lo, kind)
    program = to_program(graphs, getattr(graphs, kind), shapes(lo.config, kind)[0])
    torch.export.save(program, buffer := io.BytesIO(), extra_files={"mulo.json": text})
    return buffer.getvalue()


def to_torchscript(lo: LO, text: str) -> bytes:
    """All graphs as methods of one traced module, without debug information."""
    examples = {kind: example(shapes(lo.config, kind)[0]) for kind in kinds(lo.config)}
    traced = torch.jit.trace_module(Graphs(lo), examples, check_trace=False)
    torch.jit.save(traced, buffer := io.BytesIO(), _extra_files={"mulo.json": text})
    slim = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(slim, "w") as new:
        for name in old.namelist():
            if not name.endswith(".debug_pkl") and "traced_inputs" not in name:
                new.writestr(zipfile.ZipInfo(name), old.read(name), zipfile.ZIP_DEFLATED)
    return slim.getvalue()


def to_onnx(lo: LO, kind: str, text: str) -> bytes:
    graphs, (inputs, outputs) = Graphs(lo, kind), shapes(lo.config, kind)
    if kind == "tensor" and lo.config.net == "small_fc":  # VeLO's hidden layers are small
        graph = in_blocks(graphs, inputs)
    else:
        program = to_program(graphs, getattr(graphs, kind), inputs)
        graph = onnxgraphs.convert(program, inputs, outputs)
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    ends = ([value(name=k, shape=s) for k, s in x.items()] for x in (inputs, outputs))
    graph = helper.make_graph(graph.node, kind, *ends, graph.initializer)
    model = helper.make_model(graph, **onnxgraphs.VERSIONS)
    model.metadata_props.add(key="mulo", value=text)
    return model.SerializeToString()


def in_blocks(graphs: Graphs, inputs: Shapes) -> GraphProto:
    """The `tensor` graph in ONNX: the network loops over blocks of rows."""
    config, phi = graphs.config, dict(graphs.named_buffers())

    def front(*given: Tensor) -> tuple[Tensor, ...]:
        x = dict(zip(inputs, given, strict=True))
        acc, w, X, ys, scale = graphs.prepare("tensor", x, phi)
        return *acc, w, X, *ys, scale

    def network(p, w, X, y_row, y_col, rate, decay) -> Tensor:
        return folded.update(config, phi, p, w, X, [y_row, y_col], rate, decay)

    h, k = front(*example(inputs))[4].shape[1:]
    made = {"w": ("b", h, k), "X": ("b", k, "e", "m", "n"), "y_row": ("b", h, "e", "m", 1)}
    made |= {"y_col": ("b", h, "e", 1, "n"), "rate": ("b",)}
    given = {"p": inputs["p"]} | made | {"decay": ("b",)}
    names = [f"{k}_block" if k in ("p", "X", "y_row") else k for k in given]
    outputs = [*(f"new_{k}" for k in Accumulators._fields), *made]
    graph = onnxgraphs.convert(to_program(graphs, front, inputs), inputs, outputs, "front_")
    body = onnxgraphs.convert(to_program(graphs, network, given), names, ["new_p_block"], "net_")
    [cat] = [node for node in graph.node if node.output[0] == "X"]  # concatenate in the Loop
    blocks = [f"{k}_block" for k in cat.input]
    body.node.insert(0, helper.make_node("Concat", blocks, ["X_block"], axis=1))
    graph.node.remove(cat)
    nodes, constants = onnxgraphs.loop(body, ["p", "y_row", *cat.input], BLOCK // h, "new_p")
    graph.node.extend(nodes)
    graph.initializer.extend([*constants, *body.initializer])
    return graph


# ---------------------------------------------------------------- the contract

README = Path(__file__).parent / "examples" / "README.md"  # the contract in words


def signature(lo: LO, kind: str) -> dict:
    """A graph's inputs and outputs; state has a first value, one number or a list per tensor."""
    first = {"loss_low": 999999999999.0, "features": [-2.5, *[0.0] * 5, *[-2.5] * 6]}
    if kind == "hyper":
        first |= {"h": lo.hidden0[0].tolist(), "cell": lo.cell0[0].tolist()}
    inputs, outputs = (
        {k: {"name": k, "shape": shape, "dtype": "float32"} for k, shape in side.items()}
        for side in shapes(lo.config, kind)
    )
    for k in inputs.keys() - {"p"}:
        if f"new_{k}" in outputs:
            inputs[k]["first"] = first.get(k, 0.0)
    return {"inputs": [*inputs.values()], "outputs": [*outputs.values()]}


def describe(lo: LO, name: str) -> dict:
    """The contract as data: what every exported file carries."""
    names = {"init": "init variance", "multiplier": "output multiplier", "update": "update"}
    kinds_of_tensors = ("input", "hidden", "conv", "output", "table", "norm", "bias")
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "torch": torch.__version__,
        "lo": vars(lo.config),
        "mup": {
            k: {names[x]: n for x, n in rule._asdict().items()} for k, rule in roles.RULES.items()
        },
        "multipliers": dict.fromkeys(kinds_of_tensors, 1.0),
        "graphs": {kind: signature(lo, kind) for kind in kinds(lo.config)},
        "clip": features.CLIP[lo.config.net],
        "features": features.feature_names(lo.config.feature_set),
    }


def write(
    lo: LO,
    out: str | Path,
    name: str,
    suffixes: Iterable[str] = ("onnx", "pt2", "ts"),
    about: dict | None = None,  # saved along with the optimizer
) -> Path:
    """Write the files of a learned optimizer to a folder; the path of its .json, written last."""
    out, config = Path(out), describe(lo, name)
    text, makers = json.dumps(config, separators=(",", ":")), {}
    for kind in kinds(lo.config):
        makers[f"{name}.{kind}.onnx"] = partial(to_onnx, lo, kind, text)
        makers[f"{name}.{kind}.pt2"] = partial(to_pt2, lo, kind, text)
    makers[f"{name}.ts"] = partial(to_torchscript, lo, text)
    makers = {k: make for k, make in makers.items() if k.rpartition(".")[2] in suffixes}
    out.mkdir(parents=True, exist_ok=True)
    checkpoints.save(lo, out / f"{name}.pt", **(about or {}))
    for file, make in tqdm(makers.items(), f"exporting {name}", unit="file"):
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            content = make()
        checkpoints.write_atomically(out / file, content)
    config["contract"] = README.read_text("utf-8").partition("## The contract\n")[2].splitlines()
    files = f"{name}.pt", *makers
    config["sha256"] = {k: hashlib.sha256((out / k).read_bytes()).hexdigest() for k in files}
    checkpoints.write_atomically(out / f"{name}.json", json.dumps(config, indent=1))
    return out / f"{name}.json"


# ---------------------------------------------------------------- reading


def read_config(text: str | bytes, path: str | Path) -> dict:
    """The config that every exported file carries, if it is one that this code reads."""
    try:
        config = json.loads(text)
    except ValueError:
        config = {}
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by export.py: export it anew.")
    if config.get("version") != VERSION:
        version = f"format version {config.get('version')}, this code reads {VERSION}"
        raise ValueError(f"{path} has {version}: export the optimizer anew.")
    return config


def sidecars(path: str | Path) -> list[tuple[Path, dict]]:
    """The .json files of exported optimizers in a folder, or one by its path, and their configs."""
    path = Path(path)
    files = [f for f in sorted(path.glob("*.json")) if FORMAT in f.read_text(errors="ignore")]
    files = [path] if path.is_file() else files
    if not files:
        raise FileNotFoundError(f"{path} has no exported optimizer: run export.py first.")
    return [(f.resolve(), read_config(f.read_bytes(), f)) for f in files]


def checked(folder: Path, name: str, config: dict) -> Path:
    """The path of an exported file whose SHA-256 is the one in the .json."""
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: export the optimizer anew.")
    if hashlib.sha256(path.read_bytes()).hexdigest() != config["sha256"].get(name):
        raise ValueError(f"{path} is damaged, or not the file its .json is of: export it anew.")
    return path


PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def why_no_cuda() -> str:
    """onnxruntime's own words, which it only logs; it raises them if told to load its library."""
    for file in Path(onnxruntime.__file__).parent.glob("capi/*onnxruntime_providers_cuda.*"):
        try:
            onnxruntime.register_execution_provider_library("CUDA", str(file))
        except Exception as error:  # onnxruntime raises many types, none of them public
            return str(error)
    return f"its providers are {', '.join(onnxruntime.get_available_providers())}"


def open_onnx(
    path: str | Path, options: onnxruntime.SessionOptions, provider: str, settings: dict[str, str]
) -> onnxruntime.InferenceSession:
    """Open a graph with this provider, or quote why onnxruntime cannot."""
    try:
        given = path, options, [(provider, settings)]
        session = onnxruntime.InferenceSession(*given, enable_fallback=False)
        if session.get_providers()[0] == provider:
            return session
        reason = why_no_cuda()
    except RuntimeError as error:  # CUDA has no driver or no GPU
        reason = str(error)
    cannot = f"onnxruntime {onnxruntime.__version__} cannot run on CUDA here ({reason})"
    fix = "install onnxruntime-gpu with its CUDA 13 and cuDNN 9, or pass device='cpu'"
    raise RuntimeError(f"{cannot}: {fix}.")


def open_graphs(path: str | Path, device: str = "cpu") -> dict[str, Callable]:
    """The graphs in a file of any format, by name; `device` is where ONNX graphs run."""
    path, extra = Path(path), {"mulo.json": ""}
    with warnings.catch_warnings(action="ignore"):
        if path.suffix == ".onnx":
            kind, settings = device.partition(":")[0], {}
            if kind == "cuda":
                settings = {"use_tf32": "0", "device_id": device.partition(":")[2] or "0"}
            options = onnxruntime.SessionOptions()
            session = open_onnx(path, options, PROVIDERS[kind], settings)
            extra["mulo.json"] = session.get_modelmeta().custom_metadata_map.get("mulo", "")
            run = partial(run_onnx, session)
        elif path.suffix == ".pt2":
            run = torch.export.load(path, extra_files=extra).module()
        else:
            run = torch.jit.load(path, _extra_files=extra)
    config = read_config(extra["mulo.json"], path)
    if path.suffix == ".ts":
        return {kind: getattr(run, kind) for kind in config["graphs"]}
    return {path.stem.rpartition(".")[2]: run}


def run_onnx(session: onnxruntime.InferenceSession, *inputs: Tensor) -> list[Tensor]:
    names = [x.name for x in session.get_inputs()]
    given = {k: x.numpy() for k, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, given)]


# ---------------------------------------------------------------- checking

CHECKED = {  # sizes, in the order of SIZES
    "tensor": ("1 1 1 1000", "8 1 1 1", "2 3 5 7", "1 9 64 64", "1 1 3 65537", "1 1 333 1024"),
    "vector": ("8 1 1 1", "3 1 1 5", "1 1 1 100001"),
    "hyper": ("1 1 1 1 4", "1 1 1 1 11"),
}
CASES = {"first step": 0.0, "step 1e5": 1e5, "zero gradients": 7.0, "dead column": 7.0}  # and t


def cases(config: LOConfig, kind: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Inputs that a graph is checked on, each with its name; updates are of size 1."""
    generator = torch.Generator().manual_seed(0)
    fixed = {"loss": 3.0, "num_steps": 1e3, "loss_decay": features.loss_decays(1000, bugged=False)}
    fixed |= {"eps_scale": 1 / 64, "scale": 1 / (config.lam1 or 1), "decay": 0.01}
    factors = {"p": 0.1, "g": 0.01, "M": 0.01, "V": 1e-4, "r": 1e-4, "c": 1e-4}
    for size, (what, t) in product(CHECKED[kind], CASES.items()):
        sizes, x = dict(zip(SIZES, map(int, size.split()), strict=False)), {}
        fixed |= {"t": t, "loss_count": t}
        for name, shape in shapes(config, kind)[0].items():
            v = torch.randn([sizes.get(d, d) for d in shape], generator=generator)
            v = v.square() if name in ("V", "r", "c", "loss_means", "loss_low") else v
            v = x[name] = fixed[name] + 0 * v if name in fixed else factors.get(name, 0.5) * v
            if name in ("M", "V", "r", "c", "g"):
                zero = what == "zero gradients" or (what == "first step" and name != "g")
                (v if zero else v[..., 0] if what == "dead column" else v[:0]).zero_()
        yield f"{size.replace(' ', 'x')}, {what}", x


def compare(lo: LO, kind: str, runs: dict[str, Callable]) -> dict[str, tuple[float, str]]:
    """The largest error of each file's graph, and where, against the graph in float64.

    Errors are relative to the largest entry of an output, that of new_p to the largest update.
    """
    exact, worst = getattr(Graphs(lo, kind).double(), kind), dict.fromkeys(runs, (0.0, "none"))
    for what, x in cases(lo.config, kind):
        right = exact(*(v.double() for v in x.values()))
        for file, run in runs.items():
            for k, (a, b) in enumerate(zip(run(*x.values()), right, strict=True)):
                size = (b - x["p"] if "p" in x and k == 0 else b).abs().max().clamp_min(1e-30)
                error = ((a.view_as(b) - b).abs().max() / size).nan_to_num(math.inf)
                worst[file] = max(worst[file], (float(error), what))
    return worst


@torch.no_grad()
def verify(path: Path, config: dict, device: str = "cpu") -> None:
    """Compare every file that a .json lists with its graph in float64; raise if one is off."""
    name, ignored = config["name"], {"torch": "", "contract": [], "sha256": {}}
    lo, wrong = checkpoints.load(checked(path.parent, f"{name}.pt", config)), []
    if config | ignored != json.loads(json.dumps(describe(lo, name))) | ignored:
        raise ValueError(f"{path} does not describe {name}.pt: export it anew.")
    runs = {kind: {} for kind in kinds(lo.config)}
    for file in list(config["sha256"])[1:]:  # the first is the .pt
        for kind, run in open_graphs(checked(path.parent, file, config), device).items():
            runs[kind][file] = run
    print(f"{'file':24}{'graph':10}{'bytes':>8}{'max error':>12}  worst case")
    for kind, files in runs.items():
        if not files:
            wrong.append(f"{path} lists no file of the {kind} graph: export it anew.")
        for file, (error, what) in compare(lo, kind, files).items():
            print(f"{file:24}{kind:10}{(path.parent / file).stat().st_size:8}{error:12.1e}  {what}")
            if error > TOLERANCE:
                wrong.append(f"{file}: {kind} is off by {error:.1e} at {what}: export it anew.")
    if wrong:
        raise ValueError("\n".join(wrong))


def main() -> None:
    about = "Write a learned optimizer for other runtimes, and check what was written."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("lo", nargs="?", help="a shipped name, such as mulo_m, or a file's path")
    parser.add_argument("--out", default="exported", help="folder to write to (default: exported)")
    parser.add_argument("--verify", metavar="DIR", help="only check what is in this folder")
    where = f"where ONNX files are checked: {kernels.DEVICE_HELP}"
    parser.add_argument("--device", default="auto", help=where)
    args = parser.parse_args()
    if bool(args.lo) == bool(args.verify):
        parser.error("give a learned optimizer to export, or --verify DIR")
    try:
        device, sentence = kernels.pick_device(args.device)
        print(sentence)
        if args.lo:
            source = checkpoints.find(args.lo)  # a run's is called lo.pt: name it by its folder
            name = source.parent.resolve().name if source.stem == "lo" else source.stem
            lo, about = checkpoints.load(source), checkpoints.about(source)
        written = sidecars(args.verify or write(lo, args.out, name, about=about))
        for file, config in written:
            verify(file, config, device)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"export.py: {error}")
    print(f"{written[-1][0]}: every file agrees with the float64 step within {TOLERANCE:g}.")


if __name__ == "__main__":
    main()
