"""Graphs as ONNX: `to_onnx(graphs.make(lo, "matrix"))` is an onnx.ModelProto of opset 20.

onnxruntime runs one node at a time over whole tensors, and adds numbers one after another. Hence:

  - The dense features of a large matrix would go through memory some twenty times. As in
    `rule.step_`, they are formed in blocks that fit the cache, in two ONNX Loops: one for their
    mean squares, one for the network. `Builder` puts the pieces of `graphs.Step` together in that
    order. The size of a block is the initializer `block`, which `serving.Session` may replace.
  - Sums are taken in three levels; a plain mean over a million entries is off by 2e-4.
  - torch's own ONNX optimizer is not used: it deletes additions of 1e-8 and less, which are our
    epsilons. They, lambdas and betas are initializers of one entry, which others leave alone too.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import onnx
import onnx_ir
import onnxscript.optimizer
import torch
from onnx import TensorProto, helper
from onnx_ir.passes import common
from onnxscript import opset20 as op
from torch import Tensor, nn

from graphs import Graph, Piece, quiet, symbols, to_program

OPSET, IR_VERSION = 20, 10
BLOCK = 262_144  # floats of a hidden layer per block: 32 rows of 1024 at hidden size 8
SHORT = 2048  # entries that onnxruntime may add up in a row without losing digits


def _lerp(self, end, weight):
    """M + w (g - M), without torch's case for w >= 1/2, which would double the work."""
    return op.Add(self, op.Mul(weight, op.Sub(end, self)))


def _nan_to_num(self, nan=0.0, posinf=0.0, neginf=0.0):
    """0 for what is not finite."""
    largest = op.Constant(value_float=3.4028234663852886e38)
    return op.Where(op.LessOrEqual(op.Abs(self), largest), self, op.Constant(value_floats=[0.0]))


def _square(self, exponent):
    return op.Mul(self, self) if exponent == 2 else op.Pow(self, op.CastLike(exponent, self))


def _by_64(x, axis: int, rank: int):
    """Sums of 64 neighbours along an axis."""
    pad = op.Mod(op.Neg(op.Shape(x, start=axis, end=axis + 1)), op.Constant(value_ints=[64]))
    none = [op.Constant(value_ints=[0] * k) for k in (rank + axis, rank - axis - 1) if k]
    pads = op.Concat(none[0], pad, *none[1:], axis=0)
    after = [op.Shape(x, start=axis + 1)] if axis < rank - 1 else []
    shape = op.Concat(op.Constant(value_ints=[0] * axis + [-1, 64]), *after, axis=0)
    y = op.Reshape(op.Pad(x, pads), shape)
    return op.ReduceSum(y, op.Constant(value_ints=[axis + 1]), keepdims=0)


def _total(x, axis: int, rank: int, keepdim: bool = False):
    """A sum in three levels, of 64, 64 and the rest: onnxruntime adds one after another."""
    x = _by_64(_by_64(x, axis, rank), axis, rank)
    return op.ReduceSum(x, op.Constant(value_ints=[axis]), keepdims=int(keepdim))


def _average(x, axis: int, rank: int, keepdim: bool = False):
    n = op.Cast(op.Shape(x, start=axis, end=axis + 1), to=TensorProto.FLOAT)
    return op.Div(_total(x, axis, rank, keepdim), n)


def _sum(self, dim, keepdim=False, dtype=None):
    rank = len(self.shape)
    return _total(self, dim[0] % rank, rank, keepdim)


def _mean(self, dim, keepdim=False, dtype=None):
    rank = len(self.shape)
    return _average(self, dim[0] % rank, rank, keepdim)


aten = torch.ops.aten
FAST = {aten.lerp.Tensor: _lerp, aten.nan_to_num.default: _nan_to_num}
FAST |= {aten.pow.Tensor_Scalar: _square}
EXACT = {aten.sum.dim_IntList: _sum, aten.mean.dim: _mean}


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
        exact = method == "squares" and self.graph.kind == "tensor"  # its axis e may be long
        [result] = self.piece(method, names, FAST | EXACT if exact else FAST, blocks)
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
        names = {k: k for k in ("", "block", *self.graph.inputs)}
        ends = zip(model.graph.output, self.graph.outputs, strict=True)
        names |= {value.name: k for value, k in ends}
        fresh = ("".join(k) for n in (1, 2, 3) for k in product(string.ascii_letters, repeat=n))
        shorten(model.graph, names, (k for k in fresh if k not in {*names.values()}))
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
    dense = (*whole, "over_m", "over_n")
    dense += tuple(k for k in ("unit_V", "eps_M", "eps_V") if k in build.env)

    def blocks(total: str, size: str) -> str:  # how many
        return node("Div", node("Sub", node("Add", total, size), ints(1)), size)

    n, m = (node("Shape", "param", start=k, end=end) for k, end in ((-1, None), (-2, -1)))
    area = node("Div", node("Size", "param"), m)  # of one row, of all b tensors
    entries = [BLOCK // graph.config.hidden_size]
    build.initializers.append(helper.make_tensor("block", TensorProto.INT64, [1], entries))
    rows = node("Div", "block", area)
    rows = node("Min", node("Max", rows, ints(1)), m)  # of a block

    # Mean squares of the dense features, in blocks with no more rows or columns than may be summed.
    high, wide = node("Min", rows, ints(SHORT)), node("Min", n, ints(SHORT))
    across = blocks(n, wide)

    def tile(i: str) -> dict[str, tuple]:
        top, left = node("Div", i, across), node("Mod", i, across)
        top, left = node("Mul", top, high), node("Mul", left, wide)
        bottom, right = node("Add", top, high), node("Add", left, wide)
        both = node("Concat", top, left, axis=0), node("Concat", bottom, right, axis=0)
        cuts = dict.fromkeys(whole, (*both, ints(-2, -1)))
        return cuts | {"over_m": (top, bottom, ints(-2)), "over_n": (left, right, ints(-1))}

    build.loop("squares", dense, node("Mul", blocks(m, high), across), tile)
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


def shorten(graph: onnx.GraphProto, names: dict[str, str], fresh: Iterator[str]) -> None:
    """Inner values get names of a letter or two and nodes none, here and in subgraphs."""

    def short(old: str) -> str:
        if old not in names:
            names[old] = next(fresh)
        return names[old]

    for value in (*graph.initializer, *graph.input, *graph.output):
        value.name = short(value.name)
    for node in graph.node:
        node.ClearField("name")
        usual = onnx.defs.get_schema(node.op_type, OPSET).attributes
        for attribute in list(node.attribute):
            if attribute.HasField("g"):
                shorten(attribute.g, names, fresh)
            elif attribute == usual[attribute.name].default_value:
                node.attribute.remove(attribute)
        for field in (node.input, node.output):
            field[:] = [short(k) for k in field]
