"""Export the whole optimizer step, features included, as files that run without this repository.

    python export.py mulo_m                    # writes exported/mulo_m.* and checks every file
    python export.py runs/mine/lo.pt --out DIR # any learned optimizer
    python export.py exported/mulo_m.json      # checks existing files

A learned optimizer becomes one graph per kind of tensor, state in and state out:

    tensor   b tensors of rank 2 or more, as (b, e, m, n): n is the largest axis, m the second
    vector   b tensors of rank 0 or 1, as (b, n)
    hyper    VeLO only, called before the steps: the LSTM, which generates every tensor's network

Each graph is an .onnx file (opset 20) and a .pt2 file (torch.export); one .ts file (TorchScript,
for libtorch of the same version) has all graphs as methods. <name>.pt is the learned optimizer.
<name>.json has the rules for calling the graphs, which examples/README.md explains, and a
description of the graphs, which every file carries.
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
from functools import partialmethod
from itertools import pairwise, product
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import mulo
from mulo import LO, LOConfig, checkpoints, features, nets, roles
from mulo.features import Accumulators, LossBuffer, Rates
from mulo.kernels import folded

try:
    import onnx_ir
    import onnxruntime
    import onnxscript.optimizer
    from onnx_ir.passes import common
    from onnxscript import opset20 as op
except ImportError as error:
    fix = f'{error.name} is missing: pip install "mulo[export]", or -r requirements.txt.'
    raise (SystemExit if __name__ == "__main__" else ImportError)(fix) from None

FORMAT, VERSION = "mulo-export", 3
TOLERANCE = 3e-6  # relative to the largest update, or to the largest entry of a state
SIZES = {"b": 2, "e": 3, "m": 5, "n": 7, "T": 11}  # to trace with; torch.export specializes on 1
Shapes = dict[str, tuple[int | str, ...]]  # by name; letters are dynamic sizes

# torch.onnx warns that torchvision is missing.
logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)


# ---------------------------------------------------------------- the graphs


def kinds(config: LOConfig) -> tuple[str, ...]:
    return ("tensor", "vector", "hyper") if config.net == "velo" else ("tensor", "vector")


def shapes(config: LOConfig, kind: str) -> tuple[Shapes, Shapes]:
    """Inputs and outputs of a graph, in order; output new_x is the input x of the next step."""
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

    def __init__(self, lo: LO, kind: str | None = None):  # None: all kinds
        super().__init__()
        self.config, velo = lo.config, lo.config.net == "velo"
        times = features.FRACTIONS if velo else features.TIMESCALES
        buffers = {"times": torch.tensor(times), "one": torch.ones(1)}
        rates = features.rates_of({"w0": torch.zeros(1, 1, 1)} if velo else mulo.stacked(lo))
        buffers |= {f"rate_{k}": x for k, x in rates._asdict().items()}  # exp differs by runtime
        if not velo or kind in ("hyper", None):  # VeLO's weights are inputs of a step
            buffers |= nets.fused(lo.config, mulo.stacked(lo)) if velo else mulo.stacked(lo)
        for k, x in buffers.items():
            self.register_buffer(k, x.detach().float().clone())

    def step(self, kind: str, *inputs: Tensor) -> tuple[Tensor, ...]:
        x = dict(zip(shapes(self.config, kind)[0], inputs, strict=True))
        p, scale, dims = x["p"], x["scale"], None
        if kind == "tensor":  # if m > n, scale is NaN, so that a wrong layout is noticed
            dims, n_minus_m = (-2, -1), torch.ones_like(scale) * (p.shape[-1] - p.shape[-2])
            scale = torch.where(n_minus_m < 0, torch.full_like(scale, math.nan), scale)
        if self.config.param_scale_mult:
            scale = scale * features.param_scale(features.mean_square(p))
        phi = dict(self.named_buffers()) | x  # VeLO's weights are in x
        acc = Accumulators(*(x[k] for k in Accumulators._fields))
        eps_scale = x.get("eps_scale", self.one)  # ONNX optimizers delete epsilons that are scalars
        numbers = x["t"], scale, dims, x["decay"], eps_scale, self.times
        rates = Rates(self.rate_M, self.rate_V, self.rate_rc)
        acc, new_p = folded.step(self.config, phi, acc, p, x["g"], *numbers, rates)
        if "features" not in x:
            return new_p, *acc
        statistics = features.tensor_statistics(new_p, acc.M, acc.V)
        return new_p, *acc, features.tensor_features(statistics, x["features"][:, 1:6])

    tensor, vector = partialmethod(step, "tensor"), partialmethod(step, "vector")

    def hyper(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x = dict(zip(shapes(self.config, "hyper")[0], inputs, strict=True))
        net = {k: v[None] for k, v in x.items()}  # one net
        memory = LossBuffer(*(net[f"loss_{k}"] for k in LossBuffer._fields))
        t, config, phi = net["t"], self.config, dict(self.named_buffers())
        x_time = features.fraction_features(t, x["num_steps"], config.spec, self.times)
        arguments = memory, net["loss"], x["loss_decay"], x_time, net["features"]
        memory, h, cell, packed, alpha = mulo.generate(phi, *arguments, net["h"], net["cell"])
        alpha = alpha * features.annealing(t, config.t_max, config.anneal)
        weights = nets.unpack(config, packed).values()
        return tuple(y[0] for y in (*memory, h, cell, alpha, *weights))


# ---------------------------------------------------------------- the formats


def random_inputs(config: LOConfig, kind: str, t: float = 7.0, **sizes: int) -> dict[str, Tensor]:
    """Inputs of a graph for which updates are of size 1."""
    generator, x = torch.Generator().manual_seed(0), {}
    fixed = {"loss": 3.0, "num_steps": 1e3, "loss_decay": features.loss_decays(1000, bugged=False)}
    fixed |= {"eps_scale": 1 / 64, "scale": 1 / (config.lam1 or 1), "decay": 0.01}
    fixed |= {"t": t, "loss_count": t}
    factors = {"p": 0.1, "g": 0.01, "M": 0.01, "V": 1e-4, "r": 1e-4, "c": 1e-4}
    for name, shape in shapes(config, kind)[0].items():
        v = torch.randn([sizes.get(d, d) for d in shape], generator=generator)
        v = v.square() if name in ("V", "r", "c", "loss_means", "loss_low") else v
        x[name] = fixed[name] + 0 * v if name in fixed else factors.get(name, 0.5) * v
    return x


def to_program(lo: LO, kind: str) -> torch.export.ExportedProgram:
    """torch.export of a graph; dynamic sizes may be 1 or more."""
    graphs, free = Graphs(lo, kind), {d: torch.export.Dim(d, min=1) for d in SIZES}
    inputs = shapes(lo.config, kind)[0].values()
    dims = [{k: free[d] for k, d in enumerate(s) if d in free} for s in inputs]
    example = tuple(random_inputs(lo.config, kind, **SIZES).values())
    graphs.forward = lambda *x: getattr(graphs, kind)(*x)  # torch.export traces forward
    program = torch.export.export(graphs, example, dynamic_shapes=(tuple(dims),))
    debug = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")
    for node in program.graph.nodes:  # these contain local paths
        node.meta = {k: v for k, v in node.meta.items() if k not in debug}
    return program


def to_pt2(program: torch.export.ExportedProgram, text: str) -> bytes:
    torch.export.save(program, buffer := io.BytesIO(), extra_files={"mulo.json": text})
    return buffer.getvalue()


def to_torchscript(lo: LO, text: str) -> bytes:
    """All graphs as methods of one traced module, without debug information."""
    examples = {k: (*random_inputs(lo.config, k, **SIZES).values(),) for k in kinds(lo.config)}
    traced = torch.jit.trace_module(Graphs(lo), examples, check_trace=False)
    torch.jit.save(traced, buffer := io.BytesIO(), _extra_files={"mulo.json": text})
    slim = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(slim, "w") as new:
        for name in old.namelist():
            if not name.endswith(".debug_pkl") and "traced_inputs" not in name:
                new.writestr(zipfile.ZipInfo(name), old.read(name), zipfile.ZIP_DEFLATED)
    return slim.getvalue()


# ---------------------------------------------------------------- ONNX

FLOAT, DOUBLE = onnx_ir.DataType.FLOAT.value, onnx_ir.DataType.DOUBLE.value


def _ints(*values: int):
    return op.Constant(value_ints=list(values))


def _lerp(self, end, weight):
    """self + weight (end - self); torch also computes another formula, for weight >= 1/2."""
    return op.Add(self, op.Mul(weight, op.Sub(end, self)))


def _nan_to_num(self, nan=0.0, posinf=0.0, neginf=0.0):
    finite = op.LessOrEqual(op.Abs(self), op.Constant(value_float=3.4028234663852886e38))
    return op.Where(finite, self, op.Constant(value_floats=[0.0]))


def _power(self, exponent):
    return op.Mul(self, self) if exponent == 2 else op.Pow(self, op.CastLike(exponent, self))


def _mean(self, dim, keepdim=False, dtype=None):
    """The mean over one axis: sum pieces of it in float32, and these sums in float64.

    onnxruntime adds floats one after another: ReduceMean over a million entries is off by 2e-4. A
    piece has as many entries as the largest power of two that divides the axis, at most 1024.
    """
    rank = len(self.shape)
    axis = dim[0] % rank
    size = op.Shape(self, start=axis, end=axis + 1)
    piece = op.Min(op.BitwiseAnd(size, op.Neg(size)), _ints(1024))
    shape = [op.Shape(self, end=axis)] if axis else []
    shape += [_ints(-1), piece]
    shape += [op.Shape(self, start=axis + 1)] if axis < rank - 1 else []
    sums = op.ReduceSum(op.Reshape(self, op.Concat(*shape, axis=0)), _ints(axis + 1), keepdims=0)
    total = op.ReduceSum(op.Cast(sums, to=DOUBLE), _ints(axis), keepdims=int(keepdim))
    return op.Cast(op.Div(total, op.Cast(size, to=DOUBLE)), to=FLOAT)


aten = torch.ops.aten
TRANSLATIONS = {aten.lerp.Tensor: _lerp, aten.nan_to_num.default: _nan_to_num}
TRANSLATIONS |= {aten.pow.Tensor_Scalar: _power, aten.mean.dim: _mean}


def to_onnx(program: torch.export.ExportedProgram, lo: LO, kind: str, text: str) -> bytes:
    """A graph as an ONNX file: constants folded, unused and repeated nodes removed.

    torch's ONNX optimizer is not used: it deletes additions of 1e-8 and less, such as our epsilons.
    There is no Loop. Running the network on blocks of rows that fit the cache is up to 1.4 times
    faster on a CPU (at 1024x1024; slower at 64x64), but on CUDA the host waits for its bounds.
    """
    options = {"dynamo": True, "optimize": False, "verbose": False, "opset_version": 20}
    model = torch.onnx.export(program, custom_translation_table=TRANSLATIONS, **options).model
    common.InlinePass()(model)
    onnxscript.optimizer.fold_constants(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    graph = model.graph
    for values, named in zip((graph.inputs, graph.outputs), shapes(lo.config, kind), strict=True):
        for value, (k, shape) in zip(values, named.items(), strict=True):
            value.name, value.shape = k, onnx_ir.Shape(shape)
    for node in graph:
        node.name = None
    graph.name, model.ir_version = kind, 10
    model.metadata_props["mulo"] = text
    proto = onnx_ir.to_proto(model)
    proto.graph.ClearField("value_info")  # types of inner values, half of the file
    return proto.SerializeToString()


# ---------------------------------------------------------------- the contract

CONTRACT = {  # how to call the graphs; examples/README.md has the same sentences, with examples
    "μP": [
        "Every weight has a role and a fan_in, the number of inputs that one output sums.",
        "mup has, for each role, the powers of fan_in of the init variance, of the output "
        "multiplier and of the factor on updates.",
        "If lo.input_base is set, the factor of an input layer's weight is multiplied by "
        "min(input_base/fan_in, 4).",
        "If lo.by_channels is true, the factor of a hidden convolution is multiplied by kh·kw.",
    ],
    "layout": [
        "A tensor of rank 0 or 1 goes to the graph vector as (1, n).",
        "Any other tensor goes to the graph tensor as (1, e, m, n): n is its largest axis, m the "
        "second largest, e all others in their order, flattened.",
        "Among equal axes, out counts as the largest, then in, then the others from last to first.",
        "b tensors of one shape may go together, as (b, n) or (b, e, m, n).",
        "If m > n, new_p is all NaN.",
    ],
    "state": ["Before the first step, a state has the value first; output new_x is the next x."],
    "step": [
        "t is 0 at the first step; scale is the learning rate (1 by default) times the factor of "
        "μP; decay is the learning rate times weight decay; eps_scale is 1/fan_in.",
        "NaN and infinite entries of g count as 0, others are clipped to ±clip.",
        "One NaN or infinite entry of p makes all of new_p NaN.",
    ],
    "CUDA": [
        "Open one session per shape with its sizes fixed, and keep the state on the device.",
        "A call needs 512 to 1,024 bytes of memory per parameter of its tensors.",
    ],
    "VeLO": [
        "Before the steps, call hyper once for all T tensors; multiply each tensor's scale by its "
        "alpha, and pass its graph its weights.",
        "loss_decay is exp(-1/x) for ten x from 10 to num_steps, evenly spaced in log x (all 10 if "
        "lo.use_bugged_loss_features is true).",
        "The first features of a tensor have 1 added at index 1 + k, k the number of axes longer "
        "than 1, if k < 5.",
    ],
}


def signature(lo: LO, kind: str) -> dict[str, list[dict]]:
    """A graph's inputs and outputs; states have a first value, a number or a list per tensor."""
    first = {"loss_low": 999999999999.0, "features": [-2.5, *[0.0] * 5, *[-2.5] * 6]}
    if kind == "hyper":
        first |= {"h": lo.hidden0[0].tolist(), "cell": lo.cell0[0].tolist()}
    result = {}
    inputs, outputs = shapes(lo.config, kind)
    for side, named in (("inputs", inputs), ("outputs", outputs)):
        result[side] = [{"name": k, "shape": x, "dtype": "float32"} for k, x in named.items()]
    for x in result["inputs"]:
        if x["name"] != "p" and f"new_{x['name']}" in outputs:
            x["first"] = first.get(x["name"], 0.0)
    return result


def describe(lo: LO, name: str) -> dict:
    """The description that every exported file carries."""
    powers = ("init variance", "output multiplier", "update")
    rules = roles.RULES if lo.mup is not False else dict.fromkeys(roles.RULES, roles.SP)
    mup = {role: dict(zip(powers, rule, strict=True)) for role, rule in rules.items()}
    config = {"format": FORMAT, "version": VERSION, "name": name, "torch": torch.__version__}
    config |= {"lo": vars(lo.config), "mup": mup}
    config["graphs"] = {kind: signature(lo, kind) for kind in kinds(lo.config)}
    config["clip"] = features.CLIP[lo.config.net]
    return config | {"features": features.feature_names(lo.config.feature_set)}


def write(
    lo: LO, out: str | Path, name: str, suffixes: Iterable[str] = ("onnx", "pt2", "ts")
) -> Path:
    """Write the files of a learned optimizer to a folder; returns its .json, written last."""
    out, config = Path(out), describe(lo, name)
    text = json.dumps(config, separators=(",", ":"))
    out.mkdir(parents=True, exist_ok=True)
    checkpoints.save(lo, out / f"{name}.pt")
    files = {f"{name}.pt": (out / f"{name}.pt").read_bytes()}
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        for kind in tqdm(kinds(lo.config), f"exporting {name}", unit="graph"):
            program = to_program(lo, kind)
            if "onnx" in suffixes:
                files[f"{name}.{kind}.onnx"] = to_onnx(program, lo, kind, text)
            if "pt2" in suffixes:
                files[f"{name}.{kind}.pt2"] = to_pt2(program, text)
        if "ts" in suffixes:
            files[f"{name}.ts"] = to_torchscript(lo, text)
    for file, content in files.items():
        checkpoints.write_atomically(out / file, content)
    config["sha256"] = {k: hashlib.sha256(content).hexdigest() for k, content in files.items()}
    content = json.dumps(config | {"contract": CONTRACT}, indent=1, ensure_ascii=False)
    checkpoints.write_atomically(out / f"{name}.json", content)
    return out / f"{name}.json"


# ---------------------------------------------------------------- reading


def read(path: str | Path) -> tuple[dict, dict[str, bytes]]:
    """An exported .json, and the content of the files that it lists."""
    path = Path(path)
    try:
        config = json.loads(path.read_bytes())
        version = config.get("format"), config.get("version")
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is damaged: export it again.") from None
    if version != (FORMAT, VERSION):
        raise ValueError(f"{path} is not of {FORMAT} version {VERSION}: export it again.")
    files = {}
    for name, sha256 in config["sha256"].items():
        if not (path.parent / name).is_file():
            raise ValueError(f"{name} is missing beside {path}: export it again.")
        files[name] = (path.parent / name).read_bytes()
        if hashlib.sha256(files[name]).hexdigest() != sha256:
            raise ValueError(f"{name} is damaged or does not belong to {path}: export it again.")
    return config, files


def open_graph(file: str, content: bytes, kind: str) -> Callable[..., Iterable[Tensor]]:
    """A graph of an exported file, as a function from tensors to tensors."""
    if file.endswith(".ts"):
        return getattr(torch.jit.load(io.BytesIO(content)), kind)
    if file.endswith(".pt2"):
        return torch.export.load(io.BytesIO(content)).module()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        arrays = dict(zip(names, (x.numpy() for x in inputs), strict=True))
        return [torch.from_numpy(y) for y in session.run(None, arrays)]

    return run


# ---------------------------------------------------------------- checking

CHECKED = {  # sizes, in the order of SIZES
    "tensor": ("1x1x1x1000", "8x1x1x1", "2x3x5x7", "1x9x64x64", "1x1x3x65537", "1x1x333x1024"),
    "vector": ("8x1x1x1", "3x1x1x5", "1x1x1x100001"),
    "hyper": ("1x1x1x1x4", "1x1x1x1x11"),
}
CASES = {"first step": 0.0, "step 1e5": 1e5, "zero gradients": 7.0, "dead column": 7.0}  # name: t


def cases(config: LOConfig, kind: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Named inputs to check a graph on."""
    for size, (case, t) in product(CHECKED[kind], CASES.items()):
        sizes = dict(zip(SIZES, map(int, size.split("x")), strict=False))
        x = random_inputs(config, kind, t, **sizes)
        for v in (x[name] for name in ("M", "V", "r", "c", "g") if name in x):
            if case == "dead column":
                v[..., 0] = 0
            elif case == "zero gradients" or (case == "first step" and v is not x["g"]):
                v.zero_()
        yield f"{size}, {case}", x


def compare(lo: LO, kind: str, runs: dict[str, Callable]) -> dict[str, tuple[float, str]]:
    """The largest error of each file's graph against the float64 graph, and the case that has it.

    Errors are relative to the largest entry of an output, that of new_p to the largest update.
    """
    exact, worst = getattr(Graphs(lo, kind).double(), kind), dict.fromkeys(runs, (0.0, "none"))
    for case, x in cases(lo.config, kind):
        right = exact(*(v.double() for v in x.values()))
        for file, run in runs.items():
            for k, (a, b) in enumerate(zip(run(*x.values()), right, strict=True)):
                size = (b - x["p"] if "p" in x and k == 0 else b).abs().max().clamp_min(1e-30)
                error = ((a.view_as(b) - b).abs().max() / size).nan_to_num(math.inf)
                worst[file] = max(worst[file], (float(error), case))
    return worst


@torch.no_grad()
def verify(path: Path) -> None:
    """Compare every file that a .json lists with the float64 graph; raise if one differs."""
    config, files = read(path)
    name, ignored = config["name"], {"torch": "", "contract": {}, "sha256": {}}
    lo, wrong = checkpoints.load(path.parent / f"{name}.pt"), []
    if config | ignored != json.loads(json.dumps(describe(lo, name))) | ignored:
        raise ValueError(f"{path} does not describe {name}.pt: export it again.")
    print(f"{'file':24}{'graph':10}{'bytes':>8}{'max error':>12}  worst case")
    for kind in kinds(lo.config):
        names = f"{name}.{kind}.onnx", f"{name}.{kind}.pt2", f"{name}.ts"
        with warnings.catch_warnings(action="ignore"):
            runs = {file: open_graph(file, files[file], kind) for file in names if file in files}
        for file, (error, case) in compare(lo, kind, runs).items():
            print(f"{file:24}{kind:10}{len(files[file]):8}{error:12.1e}  {case}")
            if error > TOLERANCE:
                wrong.append(f"{file}: {kind} is off by {error:.1e} at {case}: export it again.")
    if wrong:
        raise ValueError("\n".join(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a learned optimizer; check the files.")
    source = "a shipped name, such as mulo_m, or a file's path; an exported .json is only checked"
    parser.add_argument("lo", help=source)
    parser.add_argument("--out", default="exported", help="folder to write to (default: exported)")
    args = parser.parse_args()
    try:
        path = Path(args.lo)
        if path.suffix != ".json":
            source = checkpoints.find(args.lo)  # in a run it is lo.pt: use the folder's name
            name = source.parent.resolve().name if source.stem == "lo" else source.stem
            path = write(checkpoints.load(source), args.out, name)
        verify(path)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"export.py: {error}")
    print(f"{path}: every file agrees with the float64 step within {TOLERANCE:g}.")


if __name__ == "__main__":
    main()
