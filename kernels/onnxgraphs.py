"""Torch programs as ONNX: how operators are translated, and the Loop over blocks of rows.

onnxruntime adds floats one after another: a plain ReduceMean over a million entries is off by 2e-4,
so `_mean` sums short pieces in float32, and these sums in float64. It runs one node at a time over
whole tensors, so `loop` runs the network on blocks of rows that fit the cache. torch's own ONNX
optimizer is not used: it deletes additions of 1e-8 and less, our epsilons.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir
import onnxscript.optimizer
import torch
from onnx import TensorProto, helper
from onnx_ir.passes import common
from onnxscript import opset20 as op

VERSIONS = {"opset_imports": [helper.make_opsetid("", 20)], "ir_version": 10}
FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE
SHORT = 2048  # entries that onnxruntime may add up in a row without losing digits


def _ints(*values: int):
    return op.Constant(value_ints=list(values))


def _lerp(self, end, weight):
    """M + w (g - M), without torch's case for w >= 1/2, which would double the work."""
    return op.Add(self, op.Mul(weight, op.Sub(end, self)))


def _nan_to_num(self, nan=0.0, posinf=0.0, neginf=0.0):
    finite = op.LessOrEqual(op.Abs(self), op.Constant(value_float=3.4028234663852886e38))
    return op.Where(finite, self, op.Constant(value_floats=[0.0]))


def _power(self, exponent):
    return op.Mul(self, self) if exponent == 2 else op.Pow(self, op.CastLike(exponent, self))


def _concatenated(squares) -> list:
    """Many features, if these are the flattened squares of their concatenation X."""
    for kind in ("Reshape", "Mul", "Concat"):
        node = squares.producer()
        if node is None or node.op_type != kind:
            return []
        squares = node.inputs[0]
    return node.inputs if len(node.inputs) > 2 else []


def _mean(self, dim, keepdim=False, dtype=None):
    """Sum pieces of one axis in float32, and the sums in float64; X^2 feature by feature.

    A piece is the whole axis (or the last of the axes flattened into it) if that is short, else as
    many entries as the largest power of two that divides the axis, at most 1024: no padding.
    """
    rank = len(self.shape)
    axis, last = dim[0] % rank, dim[0] % rank == rank - 1
    parts = [op.Reshape(op.Mul(x, x), _ints(0, 0, -1)) for x in _concatenated(self)] or [self]
    n = row = op.Shape(parts[0], start=axis, end=axis + 1)
    flat = parts[0].producer()
    if last and flat is not None and flat.op_type == "Reshape":
        row = op.Shape(flat.inputs[0], start=-1)
    power = op.Min(op.BitwiseAnd(n, op.Neg(n)), _ints(1024))
    piece = op.Where(op.LessOrEqual(row, _ints(SHORT)), row, power)
    for k, x in enumerate(parts):
        shape = [op.Shape(x, end=axis)] if axis else []
        shape += [_ints(-1), piece] if last else [_ints(-1), piece, op.Shape(x, start=axis + 1)]
        y = op.Reshape(x, op.Concat(*shape, axis=0))
        if axis == rank - 2:  # ReduceSum takes ten times longer here
            ones = op.Expand(op.Constant(value_floats=[1.0]), op.Concat(_ints(1), piece, axis=0))
            parts[k] = op.Squeeze(op.MatMul(ones, y), _ints(axis + 1))
        else:
            parts[k] = op.ReduceSum(y, _ints(axis + 1), keepdims=0)
    y = op.Concat(*parts, axis=1) if len(parts) > 1 else parts[0]
    y = op.ReduceSum(op.Cast(y, to=DOUBLE), _ints(axis), keepdims=int(keepdim))
    return op.Cast(op.Div(y, op.Cast(n, to=DOUBLE)), to=FLOAT)


aten = torch.ops.aten
TABLE = {aten.lerp.Tensor: _lerp, aten.nan_to_num.default: _nan_to_num}
TABLE |= {aten.pow.Tensor_Scalar: _power, aten.mean.dim: _mean}


def convert(
    program: torch.export.ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    prefix: str = "",  # of the other names
) -> onnx.GraphProto:
    """A program as ONNX nodes: constants folded, what is unused or computed twice removed."""
    options = {"dynamo": True, "optimize": False, "verbose": False, "opset_version": 20}
    exported = torch.onnx.export(program, custom_translation_table=TABLE, **options)
    model = onnx_ir.from_proto(onnx_ir.to_proto(exported.model))
    common.InlinePass()(model)
    onnxscript.optimizer.fold_constants(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    graph = onnx_ir.to_proto(model).graph
    names = {"": ""}
    for values, given in ((graph.input, inputs), (graph.output, outputs)):
        names |= {v.name: k for v, k in zip(values, given, strict=True)}
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.setdefault(value.name, prefix + value.name)
    for node in graph.node:
        node.ClearField("name")
        for field in (node.input, node.output):
            field[:] = [names.setdefault(k, prefix + k) for k in field]
    return graph


def loop(
    body: onnx.GraphProto,  # from values `<name>_block` and others to those rows of the output
    cut: Sequence[str],  # the values that are cut into blocks of rows, along axis -2
    block: int,  # entries of p in a block
    output: str,
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes and initializers that run `body` on blocks of rows, and concatenate its outputs."""
    node, value = helper.make_node, helper.make_tensor_value_info
    inside = [node("Mul", ["i", "rows"], ["top"]), node("Add", ["top", "rows"], ["bottom"])]
    inside += [node("Slice", [k, "top", "bottom", "axis"], [f"{k}_block"]) for k in cut]
    inside += [*body.node, node("SequenceInsert", ["done", body.output[0].name], ["more"])]
    inside += [node("Identity", ["go"], ["on"])]
    done, more = (helper.make_tensor_sequence_value_info(k, FLOAT, None) for k in ("done", "more"))
    trip = [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), done]
    inner = helper.make_graph(inside, "rows", trip, [value("on", TensorProto.BOOL, []), more])
    nodes = [node("Shape", ["p"], ["m"], start=-2, end=-1), node("Size", ["p"], ["size"])]
    steps = "Div size m row_size,Div block row_size fit,Max fit one rows"  # a row of all b tensors
    steps += ",Add m rows beyond,Sub beyond one end,Div end rows trips"
    nodes += [node(kind, x, [y]) for kind, *x, y in map(str.split, steps.split(","))]
    nodes += [node("SequenceEmpty", [], ["none"])]
    nodes += [node("Loop", ["trips", "true", "none"], ["blocks"], body=inner)]
    nodes += [node("ConcatFromSequence", ["blocks"], [output], axis=-2)]
    numbers = {"block": block, "one": 1, "axis": -2}
    constants = [helper.make_tensor(k, TensorProto.INT64, [1], [v]) for k, v in numbers.items()]
    return nodes, [*constants, helper.make_tensor("true", TensorProto.BOOL, [], [True])]
