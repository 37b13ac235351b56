"""The optimizer step as graphs: the modules that `export.py` writes, and their ONNX form.

    step = Step(mulo.load("mulo_m"), "matrix")     # an nn.Module: state in, state out
    model = to_onnx(step)                          # an onnx.ModelProto, opset 20

Every graph takes a batch of b equal-shaped tensors; b, m, n and e are free. Kinds of step:

    matrix   param (b, m, n): axis n is d0, the larger one ("out" if they tie; see features.py)
    tall     param (b, m, n): axis m is d0, so a torch weight (out, in) with out >= in fits as it is
    tensor   param (b, e, m, n): n is d0, m is d1, and e all other axes of a tensor of rank 3 or more
    vector   param (b, n): rank 0 and 1

`row` goes with axis m and `col` with axis n: r and c of features.py, or c and r in a tall graph.
Beside the steps there are `net`, the bare network, and for VeLO, whose step takes its network as
inputs, `stats` (what the LSTM sees of a tensor) and `hyper` (the LSTM, which makes the networks).

TorchScript and torch.export take `Step`, which is `lo.step`. ONNX runtimes get the same functions in
another order: onnxruntime runs one node at a time over whole tensors, so the dense features of a
large matrix would go through memory some twenty times. As in `lo.step_`, they are therefore formed
in blocks that fit the cache, inside two ONNX Loops: one for their mean squares, one for the network.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import string
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stdout

import onnx
import onnx_ir
import onnxscript.optimizer
import torch
from onnx import TensorProto, helper
from onnx_ir.passes import common
from onnxscript import opset20 as op
from torch import Tensor, nn
from torch.export import Dim

import features
import lo as lo_module
from features import Accumulators, LossBuffer, Rates, Scales
from lo import LO, Folded, LOConfig, Net

OPSET, IR_VERSION = 20, 10
STEPS = ("matrix", "tall", "tensor", "vector")
DIMS = {"matrix": (-2, -1), "tall": (-1, -2), "tensor": (-2, -1), "vector": None}
BLOCK = 262_144  # floats of a hidden layer per block: 32 rows of 1024 at hidden size 8
ALPHABET = string.ascii_letters
CHATTER = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")
SHORT = 2048  # entries that onnxruntime may sum in a row without losing digits


def kinds(config: LOConfig) -> tuple[str, ...]:
    """The graphs that make up one learned optimizer."""
    return (*STEPS, "net") + (("stats", "hyper") if config.net == "velo" else ())


def make(lo: LO, kind: str) -> Graph:
    return {"net": Bare, "stats": Stats, "hyper": Hyper}.get(kind, Step)(lo, kind)


class Graph(nn.Module):
    """A module with named inputs (with the sizes of their axes: a number or a free symbol)."""

    inputs: dict[str, tuple]
    outputs: tuple[str, ...]

    def __init__(self, lo: LO, kind: str, **buffers: Tensor):
        super().__init__()
        self.config, self.kind = lo.config, kind
        for name, x in buffers.items():
            self.register_buffer(name, x.detach().clone().contiguous())

    def sizes(self) -> dict[str, int]:
        """Example sizes, all different and none of them a size that is fixed."""
        fixed = {d for shape in self.inputs.values() for d in shape} | {self.config.hidden_size}
        return dict(
            zip("bemnT", [k for k in (3, 5, 7, 11, 13, 17) if k not in fixed], strict=False)
        )

    def example(self) -> tuple[Tensor, ...]:
        sizes = self.sizes()
        return tuple(torch.rand([sizes.get(d, d) for d in s]) for s in self.inputs.values())


def generated(config: LOConfig, symbol: str) -> dict[str, tuple]:
    """The weights that VeLO's hypernetwork makes for each of the tensors along axis `symbol`."""
    shapes, sizes = {}, config.layer_sizes()
    for k in range(config.hidden_layers + 1):
        shapes |= {f"w{k}": (symbol, sizes[k], sizes[k + 1]), f"b{k}": (symbol, sizes[k + 1])}
    return shapes


class Step(Graph):
    """The whole step, by lo.step: features, network, update; state in and state out."""

    outputs = tuple(f"new_{x}" for x in ("param", "second_moment", "momentum", "row", "col"))

    def __init__(self, lo: LO, kind: str):
        velo = lo.config.net == "velo"
        if velo:
            rates, weights = lo_module.rates_of(lo.config, {"w0": torch.zeros(1)}), {}
        else:  # decays are settled here: exp in another runtime would cost 1 - beta its digits
            net = lo_module.prepare(lo.config, lo_module.stacked(lo))
            rates, names = net.rates, ("dense", "row", "col", "time", "bias")
            weights = {f"phi_{k}": getattr(net, k) for k in names}
            for k, pair in enumerate(net.layers):
                weights |= dict(zip((f"phi_w{k}", f"phi_b{k}"), pair, strict=True))
            weights["timescales"] = torch.tensor(features.TIMESCALES, dtype=torch.float32)
        rates = {f"rate_{k}": x for k, x in rates._asdict().items()}
        super().__init__(lo, kind, one=torch.ones(1), **rates, **weights)
        self.dims = DIMS[kind]
        lead = {"tensor": ("e",)}.get(kind, ())
        m, n = (lead + ("m",), lead + ("n",)) if self.dims else (("n",), ("n",))
        shape = lead + (("m", "n") if self.dims else ("n",))
        self.inputs = dict.fromkeys(("param", "grad", "second_moment"), ("b", *shape))
        self.inputs |= {"momentum": ("b", 3, *shape), "row": ("b", 3, *m), "col": ("b", 3, *n)}
        self.inputs |= {"step": (), "lr_scale": ("b",)}
        if lo.config.eps == "fan_in":
            self.inputs["fan_in"] = ("b",)
        if velo:
            self.inputs |= generated(lo.config, "b")

    def net(self, step: Tensor, more: dict[str, Tensor]) -> Net:
        """The network at this time; VeLO's comes in as inputs."""
        rates = Rates(self.rate_M, self.rate_V, self.rate_rc)
        if self.config.net == "velo":
            phi = {k: w for k, w in more.items() if k[0] in "wb"}
            return dataclasses.replace(lo_module.prepare(self.config, phi), rates=rates)
        layers = range(self.config.hidden_layers)
        return Net(
            self.config,
            rates,
            *(getattr(self, f"phi_{k}") for k in ("dense", "row", "col", "time", "bias")),
            [(getattr(self, f"phi_w{k}"), getattr(self, f"phi_b{k}")) for k in layers],
        ).at(step, self.timescales)

    def turn(self, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
        """(row, col) to (r, c) with the averaged axis kept; also the way back, without the axes."""
        if self.dims is None:
            return row, col
        row, col = row.unsqueeze(-1), col.unsqueeze(-2)
        return (col, row) if self.kind == "tall" else (row, col)

    def turn_back(self, r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        if self.dims is None:
            return r, c
        row, col = (c, r) if self.kind == "tall" else (r, c)
        return row.squeeze(-1), col.squeeze(-2)

    def eps_scale(self, more: dict[str, Tensor]) -> Tensor:
        return 1 / more["fan_in"] if "fan_in" in more else self.one

    def rate(self, lr_scale: Tensor, param: Tensor) -> Tensor:
        if not self.config.param_scale_mult:
            return lr_scale
        return lr_scale * (features.mean_squared(param) + 1e-9).sqrt()

    def forward(
        self,
        param: Tensor,
        grad: Tensor,
        second_moment: Tensor,
        momentum: Tensor,
        row: Tensor,
        col: Tensor,
        step: Tensor,
        lr_scale: Tensor,
        *more: Tensor,
    ) -> tuple[Tensor, ...]:
        more = dict(zip(list(self.inputs)[8:], more, strict=True))
        acc, new_param = lo_module.step(
            self.net(step, more),
            Accumulators(momentum, second_moment, *self.turn(row, col)),
            param,
            grad,
            self.rate(lr_scale, param),
            self.dims,
            eps_scale=self.eps_scale(more),
        )
        return new_param, acc.V, acc.M, *self.turn_back(acc.r, acc.c)

    # The same in four pieces, for ONNX: tensors by name in, tensors by name out.

    def accumulate(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Everything but the dense features: new accumulators, and what those features need."""
        acc = Accumulators(x["momentum"], x["second_moment"], *self.turn(x["row"], x["col"]))
        _, acc, _, g, s = lo_module.accumulate(
            self.net(x["step"], x), acc, x["param"], x["grad"], self.dims, self.eps_scale(x)
        )
        row, col = self.turn_back(acc.r, acc.c)
        new = {"new_second_moment": acc.V, "new_momentum": acc.M, "new_row": row, "new_col": col}
        over = s.grad[::-1] if self.kind == "tall" else s.grad
        new |= {"g": g, "over_m": over[0], "over_n": over[1], "eps_V": s.eps_V}
        if self.config.eps == "relative":
            new |= {"unit_V": s.unit_V, "eps_M": s.eps_M}
        return new

    def dense(self, x: dict[str, Tensor]) -> list[Tensor]:
        """The dense features of a block, (b, 1 or 3, [e,] rows, n) each."""
        pair = (x["over_m"], x["over_n"])  # in either order: they are multiplied
        s = Scales(x.get("unit_V", 1.0), x.get("eps_M", x["eps_V"]), x["eps_V"], pair, pair)
        M, V = x["new_momentum"], x["new_second_moment"]
        kind = self.config.feature_set
        return features.dense_features(x["param"], x["g"], M, V, s, kind)

    def squares(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums of squares of the dense features of a block, (b, D)."""
        sums = torch.cat([part.square().sum(-1) for part in self.dense(x)], 1)
        return {"squares": sums.flatten(2).sum(-1)}

    def fold(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """The network for this tensor, from the sums of squares of all blocks, (blocks, b, D)."""
        ms = x["squares"].permute(1, 2, 0).sum(-1) / x["param"][0].numel()
        eps, _ = lo_module._setting(self.config, self.eps_scale(x))
        r, c = self.turn(x["new_row"], x["new_col"])
        rate = self.rate(x["lr_scale"], x["param"])
        folded = lo_module.fold(self.net(x["step"], x), ms, r, c, rate, eps)
        first = (folded.col, folded.row) if self.kind == "tall" else (folded.row, folded.col)
        new = {"first_m": first[0], "first_n": first[1], "fold_w0": folded.w0}
        for k, pair in enumerate(folded.layers, 1):
            new |= dict(zip((f"fold_w{k}", f"fold_b{k}"), pair, strict=True))
        return new

    def advance(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Network and update of a block."""
        layers = range(1, self.config.hidden_layers + 1)
        layers = [(x[f"fold_w{k}"], x[f"fold_b{k}"]) for k in layers]
        net = Folded(x["fold_w0"], x["first_m"], x["first_n"], layers)
        d, e_m = net.rest(net.first(torch.cat(self.dense(x), 1), net.row, net.col))
        return {"new_param": x["param"] - d * e_m}


class Bare(Graph):
    """The bare network: features -> d, m."""

    outputs = ("d", "m")

    def __init__(self, lo: LO, kind: str):
        velo = lo.config.net == "velo"
        super().__init__(lo, kind, **({} if velo else lo_module.stacked(lo)))
        self.inputs = {"features": (*(("b",) if velo else ()), "n", lo.config.num_features)}
        if velo:
            self.inputs |= generated(lo.config, "b")

    def forward(self, features: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        velo = self.config.net == "velo"
        phi = (
            dict(zip(list(self.inputs)[1:], more, strict=True))
            if velo
            else dict(self.named_buffers())
        )
        A = features if velo else features.unsqueeze(0)
        y = lo_module.mlp(phi, A, self.config.hidden_layers)
        return (y if velo else y[0]).unbind(-1)


class Stats(Graph):
    """What VeLO's LSTM sees of each tensor, flattened: (b, 12)."""

    inputs = {  # noqa: RUF012
        "param": ("b", "n"),
        "second_moment": ("b", "n"),
        "momentum": ("b", 3, "n"),
        "rank": (),
    }
    outputs = ("features",)

    def forward(
        self, param: Tensor, second_moment: Tensor, momentum: Tensor, rank: Tensor
    ) -> tuple[Tensor]:
        return (features.tensor_features(param, momentum, second_moment, rank),)


class Hyper(Graph):
    """VeLO's LSTM over the T tensors of a net, and what it generates for each of them."""

    def __init__(self, lo: LO, kind: str):
        buffers = {f"phi_{k}": w for k, w in lo_module.stacked(lo).items() if k[-1] != "0"}
        buffers |= {f"phi_{k}": w for k, w in lo_module.stacked(lo).items() if "bank" in k}
        fractions = torch.tensor(features.FRACTIONS, dtype=torch.float32)
        super().__init__(lo, kind, fractions=fractions, **buffers)
        H = lo.config.lstm_hidden
        state = {"loss_means": (10,), "loss_low": (10,), "loss_count": ()}
        state |= {"hidden": ("T", H), "cell": ("T", H)}
        self.inputs = {"features": ("T", 12), "loss": (), "step": ("T",), "num_steps": ()}
        self.inputs |= {"loss_decay": (10,)} | state
        self.weights = tuple(generated(lo.config, "T"))
        self.outputs = (*(f"new_{k}" for k in state), "alpha", *self.weights)

    def forward(
        self,
        features_: Tensor,
        loss: Tensor,
        step: Tensor,
        num_steps: Tensor,
        loss_decay: Tensor,
        loss_means: Tensor,
        loss_low: Tensor,
        loss_count: Tensor,
        hidden: Tensor,
        cell: Tensor,
    ) -> tuple[Tensor, ...]:
        memory = LossBuffer(loss_means, loss_low, loss_count)
        memory, x_loss = features.loss_features(memory, loss, loss_decay)
        x_time = features.fraction_features(step, num_steps, self.config.spec, self.fractions)
        x = torch.cat([x_time, x_loss.expand(step.shape[0], -1), features_], -1)  # (T, 30)
        phi = {k.removeprefix("phi_"): w for k, w in self.named_buffers()}
        h, cell = lo_module.lstm_step(phi, x[None], hidden[None], cell[None])
        weights, alpha = lo_module.hypernetwork(self.config, phi, h)
        return (*memory, h[0], cell[0], alpha[0], *(weights[k][0] for k in self.weights))


# ---------------------------------------------------------------- torch.export


def symbols(x: Tensor, sizes: dict[str, int]) -> tuple:
    """The axes of an example tensor: a symbol where its size is one of `sizes`."""
    names = {size: name for name, size in sizes.items()}
    return tuple(names.get(size, size) for size in x.shape)


def to_program(
    module: nn.Module, example: Sequence[Tensor], sizes: dict
) -> torch.export.ExportedProgram:
    """torch.export with all axes free whose example size is in `sizes`; each may also be 1."""
    free = {name: Dim(name, min=1) for name in sizes}
    dims = [{k: free[d] for k, d in enumerate(symbols(x, sizes)) if d in free} for x in example]
    named = 8 if isinstance(module, Step) else 1 if isinstance(module, Bare) else len(dims)
    named = 0 if isinstance(module, Piece) else named
    shapes = (*dims[:named], *((tuple(dims[named:]),) if named < len(dims) else ()))
    program = torch.export.export(module, tuple(example), dynamic_shapes=shapes)
    for node in program.graph.nodes:  # where the code stood on the machine that exported it
        node.meta = {k: v for k, v in node.meta.items() if k not in CHATTER}
    return program


# ---------------------------------------------------------------- ONNX


def _lerp(self, end, weight):
    """M + w (g - M), without torch's case for w >= 1/2, which would double the work."""
    return op.Add(self, op.Mul(weight, op.Sub(end, self)))


def _nan_to_num(self, nan=0.0, posinf=0.0, neginf=0.0):
    """0 for what is not finite."""
    largest = op.Constant(value_float=3.4028234663852886e38)
    return op.Where(op.LessOrEqual(op.Abs(self), largest), self, op.Constant(value_floats=[0.0]))


def _square(self, exponent):
    return op.Mul(self, self) if exponent == 2 else op.Pow(self, op.CastLike(exponent, self))


def _total(x, axis: int, rank: int, keepdim: bool = False):
    """A sum in two levels, of 64 and then of the rest: onnxruntime adds one after another."""
    pad = op.Mod(op.Neg(op.Shape(x, start=axis, end=axis + 1)), op.Constant(value_ints=[64]))
    none = [op.Constant(value_ints=[0] * k) for k in (rank + axis, rank - axis - 1) if k]
    pads = op.Concat(none[0], pad, *none[1:], axis=0)
    after = [op.Shape(x, start=axis + 1)] if axis < rank - 1 else []
    shape = op.Concat(op.Constant(value_ints=[0] * axis + [-1, 64]), *after, axis=0)
    y = op.Reshape(op.Pad(x, pads), shape)
    y = op.ReduceSum(y, op.Constant(value_ints=[axis + 1]), keepdims=0)
    return op.ReduceSum(y, op.Constant(value_ints=[axis]), keepdims=int(keepdim))


def _average(x, axis: int, rank: int, keepdim: bool = False):
    n = op.Cast(op.Shape(x, start=axis, end=axis + 1), to=TensorProto.FLOAT)
    return op.Div(_total(x, axis, rank, keepdim), n)


def _sum(self, dim, keepdim=False, dtype=None):
    rank = len(self.shape)
    return _total(self, dim[0] % rank, rank, keepdim)


def _mean(self, dim, keepdim=False, dtype=None):
    rank = len(self.shape)
    return _average(self, dim[0] % rank, rank, keepdim)


def _var_mean(self, dim=None, correction=None, keepdim=False):
    rank = len(self.shape)
    mean = _average(self, dim[0] % rank, rank, True)
    off = op.Sub(self, mean)
    var = _average(op.Mul(off, off), dim[0] % rank, rank)
    return var, op.Squeeze(mean, op.Constant(value_ints=dim))


aten = torch.ops.aten
FAST = {aten.lerp.Tensor: _lerp, aten.nan_to_num.default: _nan_to_num}
FAST |= {aten.pow.Tensor_Scalar: _square}
EXACT = {aten.sum.dim_IntList: _sum, aten.mean.dim: _mean, aten.var_mean.correction: _var_mean}


@contextmanager
def quiet():
    """Without the exporter's chatter."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def convert(
    module: nn.Module, example: Sequence[Tensor], sizes: dict, table: dict
) -> onnx.GraphProto:
    """The ONNX nodes of a module. No optimizer: torch's drops epsilons and factors close to 1."""
    with quiet():
        program = torch.onnx.export(
            to_program(module, example, sizes),
            dynamo=True,
            optimize=False,
            opset_version=OPSET,
            custom_translation_table=table,
        )
    return compact(onnx_ir.to_proto(program.model))


class Piece(nn.Module):
    """A method that takes and gives tensors by name, as a module that takes and gives tuples."""

    def __init__(self, owner: Step, method: str, names: Sequence[str]):
        super().__init__()
        self.owner, self.method, self.names = owner, method, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            getattr(self.owner, self.method)(dict(zip(self.names, inputs, strict=True))).values()
        )


class Builder:
    """An ONNX graph put together from pieces; `env` has an example of every value so far."""

    def __init__(self, graph: Graph):
        self.graph, self.sizes = graph, graph.sizes()
        self.env = dict(zip(graph.inputs, graph.example(), strict=True))
        self.nodes, self.initializers, self.count = [], [], 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def node(self, kind: str, *inputs: str, output: str | None = None, **attributes) -> str:
        """Append a node; the name of its output."""
        output = output or self.fresh()
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def ints(self, *values: int) -> str:
        name = self.fresh()
        self.initializers.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def adopt(self, model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Append a model's nodes, under our names; its initializers become ours."""
        known = {v.name: k for v, k in zip(model.graph.input, inputs, strict=True)}
        known |= {v.name: k for v, k in zip(model.graph.output, outputs, strict=True)} | {"": ""}
        for x in model.graph.initializer:
            x.name = known.setdefault(x.name, self.fresh())
            self.initializers.append(x)
        for node in model.graph.node:
            for field in (node.input, node.output):
                field[:] = [known.setdefault(k, self.fresh()) for k in field]
        self.nodes += model.graph.node

    def piece(
        self,
        method: str,
        names: Sequence[str],
        table: dict,
        called: dict[str, str] | None = None,
    ) -> list[str]:
        """Append the nodes of a method of the graph, which sees these values; what it gives."""
        example = [self.env[k] for k in names]
        given = getattr(self.graph, method)(dict(zip(names, example, strict=True)))
        model = convert(Piece(self.graph, method, names), example, self.sizes, table)
        self.adopt(model, [(called or {}).get(k, k) for k in names], list(given))
        self.env |= {k: x.clone() for k, x in given.items()}
        return list(given)

    def loop(self, method: str, names: Sequence[str], trips: str, cut: Callable) -> None:
        """Append a Loop over a method, block by block; its stacked results are called all_<name>.

        cut(i) has, by name, (start, end, axes) of what the i-th block sees of a value.
        """
        outer, self.nodes = self.nodes, []
        blocks = {k: self.node("Slice", k, *part) for k, part in cut("i").items()}
        [result] = self.piece(method, names, FAST, blocks)
        self.node("Identity", "go", output="on")
        value = helper.make_tensor_value_info
        body = helper.make_graph(
            self.nodes,
            method,
            [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, [])],
            [value("on", TensorProto.BOOL, []), value(result, TensorProto.FLOAT, None)],
        )
        go = helper.make_tensor(self.fresh(), TensorProto.BOOL, [], [True])
        self.initializers.append(go)
        self.nodes = outer
        self.env[result] = torch.stack([self.env[result]] * self.sizes["T"])
        self.node("Loop", trips, go.name, output=f"all_{result}", body=body)

    def finish(self) -> onnx.ModelProto:
        def values(shapes: dict) -> list:
            return [helper.make_tensor_value_info(k, 1, s) for k, s in shapes.items()]

        example = self.graph(*self.graph.example())
        outputs = [symbols(x, self.sizes) for x in example]
        outputs = dict(zip(self.graph.outputs, outputs, strict=True))
        graph = helper.make_graph(
            self.nodes,
            self.graph.kind,
            values(self.graph.inputs),
            values(outputs),
            self.initializers,
        )
        opset = [helper.make_opsetid("", OPSET)]
        model = compact(helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION))
        shorten(model.graph, {k: k for k in ("", *self.graph.inputs, *self.graph.outputs)})
        return model


def to_onnx(graph: Graph) -> onnx.ModelProto:
    """The graph as ONNX; large matrices go through it in blocks."""
    build = Builder(graph)
    if graph.kind not in ("matrix", "tall", "tensor"):
        model = convert(graph, graph.example(), build.sizes, FAST | EXACT)
        build.adopt(model, list(graph.inputs), graph.outputs)
        return build.finish()

    node, ints = build.node, build.ints
    build.piece("accumulate", list(graph.inputs), FAST | EXACT)
    whole = ("param", "g", "new_second_moment", "new_momentum")  # have both axes, m and n
    dense = (
        *whole,
        "over_m",
        "over_n",
        *(k for k in ("unit_V", "eps_M", "eps_V") if k in build.env),
    )

    def blocks(total: str, size: str) -> str:  # how many
        return node("Div", node("Sub", node("Add", total, size), ints(1)), size)

    n, m = (node("Shape", "param", start=k, end=end) for k, end in ((-1, None), (-2, -1)))
    area = node("Div", node("Size", "param"), m)  # of one row, of all b tensors
    rows = node("Div", ints(BLOCK // graph.config.hidden_size), area)
    rows = node("Min", node("Max", rows, ints(1)), m)  # of a block

    # Mean squares of the dense features: rows are cut where they are longer than may be summed.
    cols = node("Min", n, ints(SHORT))
    across = blocks(n, cols)

    def tile(i: str) -> dict[str, tuple]:
        top, left = node("Div", i, across), node("Mod", i, across)
        top, left = node("Mul", top, rows), node("Mul", left, cols)
        bottom, right = node("Add", top, rows), node("Add", left, cols)
        both = node("Concat", top, left, axis=0), node("Concat", bottom, right, axis=0)
        cuts = dict.fromkeys(whole, (*both, ints(-2, -1)))
        return cuts | {"over_m": (top, bottom, ints(-2)), "over_n": (left, right, ints(-1))}

    build.loop("squares", dense, node("Mul", blocks(m, rows), across), tile)
    names = ("squares", "param", "new_row", "new_col", *list(graph.inputs)[6:])
    given = build.piece("fold", names, FAST | EXACT, {"squares": "all_squares"})

    # The update: blocks of rows, all of one size, so that the last one begins early.
    trips, last = blocks(m, rows), node("Sub", m, rows)

    def band(i: str) -> dict[str, tuple]:
        top = node("Min", node("Mul", i, rows), last)
        return dict.fromkeys((*whole, "over_m", "first_m"), (top, node("Add", top, rows), ints(-2)))

    build.loop("advance", (*dense, *given), trips, band)  # (trips, b, [e,] rows, n)
    rank = len(graph.inputs["param"])
    x = node("Transpose", "all_new_param", perm=[*range(1, rank - 1), 0, rank - 1, rank])
    lead = node("Shape", "param", end=rank - 2)
    x = node("Reshape", x, node("Concat", lead, ints(-1), n, axis=0))
    full = node("Mul", node("Sub", trips, ints(1)), rows)  # rows above the last block
    rest = node("Add", full, node("Sub", node("Mul", trips, rows), m))
    above = node("Slice", x, ints(0), full, ints(-2))
    below = node("Slice", x, rest, ints(2**62), ints(-2))
    node("Concat", above, below, output="new_param", axis=-2)
    return build.finish()


def once(model: onnx_ir.Model) -> None:
    """A reshape of a reshape is one reshape; the exporter makes chains of them of in-place code."""
    for node in model.graph:
        before = node.inputs[0].producer() if node.op_type == "Reshape" else None
        if before is not None and before.op_type == "Reshape":
            node.replace_input_with(0, before.inputs[0])


def compact(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fold constants, drop what is unused or said twice, and names, comments, inferred shapes."""
    with quiet():
        model = onnx_ir.from_proto(model)
        common.InlinePass()(model)
        onnxscript.optimizer.fold_constants(model)
        for run in (
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.LiftSubgraphInitializersToMainGraphPass(),
            common.IdentityEliminationPass(),
            common.DeduplicateInitializersPass(),
            common.CommonSubexpressionEliminationPass(),
            once,
            common.OutputFixPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedOpsetsPass(),
            common.ClearMetadataAndDocStringPass(),
            common.TopologicalSortPass(),
        ):
            run(model)
    model = onnx_ir.to_proto(model)
    del model.graph.value_info[:]
    return model


def shorten(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Inner values get names of two letters and nodes none, here and in subgraphs."""

    def short(old: str) -> str:
        k = len(names)
        return names.setdefault(old, ALPHABET[k // len(ALPHABET)] + ALPHABET[k % len(ALPHABET)])

    for value in (*graph.initializer, *graph.input, *graph.output):
        value.name = short(value.name)
    for node in graph.node:
        node.ClearField("name")
        usual = onnx.defs.get_schema(node.op_type, OPSET).attributes
        for attribute in list(node.attribute):
            if attribute.HasField("g"):
                shorten(attribute.g, names)
            elif attribute == usual[attribute.name].default_value:
                node.attribute.remove(attribute)
        for field in (node.input, node.output):
            field[:] = [short(k) for k in field]
